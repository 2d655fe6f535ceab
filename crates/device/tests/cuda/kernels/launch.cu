// What launches are tested with.

struct numbers { u64 wide; u32 narrow; };

// One word per thread: where it is, and what it was given.
extern "C" __global__ void arguments(u32* to, u8 byte, float real, numbers n, u32 last) {
    u32 i = (u32)grid_thread();
    to[i] = i + byte * 1000 + (u32)real * 10000 + (u32)n.wide * 100000 + n.narrow * 1000000 + last * 10000000;
}

extern "C" __global__ void increment(u32* to) { to[grid_thread()] += 1; }

// A barrier over all blocks, which is only reached by all if all run at once.
extern "C" __global__ void meet(u32* counter, u32* to) {
    __syncthreads();
    if (threadIdx.x == 0) {
        atom_add_acq_rel_gpu(counter, 1u);
        u64 start = global_ns();
        while (ld_acquire_gpu(counter) < gridDim.x)
            if (global_ns() - start > 1000000000ull) break;
        to[blockIdx.x] = ld_acquire_gpu(counter);
    }
}

// The number of blocks in the cluster.
extern "C" __global__ void cluster_size(u32* to) {
    u32 size = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
    if (threadIdx.x == 0) to[blockIdx.x] = size;
}

// Adds one to a word in a long chain of launches, each of which may start before the one ahead has ended.
extern "C" __global__ void chain(u32* to) {
    pdl_launch_dependents();
    pdl_wait();
    if (threadIdx.x == 0) *to += 1;
}

extern "C" __global__ void large_shared(u32* to, u32 words) {
    extern __shared__ u32 shared[];
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) shared[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) *to = shared[words - 1];
}
