// What the measuring itself needs on the GPU.

// Costs nothing but its launch.
extern "C" __global__ void empty() {}

// Keeps the stream busy, so that what is submitted behind it is all there when it starts.
extern "C" __global__ void delay(u64 ns) {
    const u64 start = global_ns();
    while (global_ns() - start < ns) {
    }
}

// c = a · b, for matrices of so many rows and columns: a product that keeps the GPU busy beside what is measured. A block has a
// tile of 64 × 64, a thread 4 × 4 of it.
constexpr u32 SIDE = 2048, DEPTH = 256, TILE = 64, STEP = 16;
extern "C" __global__ void __launch_bounds__(256) gemm(const float* a, const float* b, float* c) {
    __shared__ float left[STEP][TILE], right[STEP][TILE];
    const u32 row = blockIdx.y * TILE, column = blockIdx.x * TILE, x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
    float sums[4][4] = {};
    for (u32 k = 0; k < DEPTH; k += STEP) {
        for (u32 i = threadIdx.x; i < STEP * TILE; i += blockDim.x) {
            left[i % STEP][i / STEP] = a[(row + i / STEP) * DEPTH + k + i % STEP];
            right[i / TILE][i % TILE] = b[(k + i / TILE) * SIDE + column + i % TILE];
        }
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < STEP; ++step)
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) sums[i][j] += left[step][y + i] * right[step][x + j];
        __syncthreads();
    }
    for (u32 i = 0; i < 4; ++i)
        for (u32 j = 0; j < 4; ++j) c[(row + y + i) * SIDE + column + x + j] = sums[i][j];
}
