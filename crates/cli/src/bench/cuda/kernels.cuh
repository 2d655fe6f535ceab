// What the measuring itself needs on the GPU.

// Costs nothing but its launch.
extern "C" __global__ void empty() {}

// Keeps the stream busy, so that what is submitted behind it is all there when it starts.
extern "C" __global__ void delay(u64 ns) {
    const u64 start = global_ns();
    while (global_ns() - start < ns) {
    }
}
