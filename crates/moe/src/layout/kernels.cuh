// The layout of a dispatch, in two kernels that no other rank has a part in. Behind slots.cuh.

constexpr u32 MAX_EXPERTS = WORLD * 1024;
constexpr u32 AT_ONCE = 8; // choices of a token that a thread looks at

// The expert at a place, or `experts` if it names none.
DEVICE u32 expert_at(const layout_call& k, u64 index) {
    const i64 id = k.id_bytes == 8 ? __ldg((const i64*)k.ids + index) : (i64)__ldg((const i32*)k.ids + index);
    return 0 <= id && id < k.experts ? (u32)id : k.experts;
}

// Zeros, which `layout` adds to.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
clear(const __grid_constant__ arguments a, const __grid_constant__ layout_call k) {
    begin_kernel(a);
    for (u32 i = threadIdx.x; i < k.experts + WORLD; i += blockDim.x)
        if (i < k.experts) k.per_expert[i] = 0;
        else k.per_rank[i - k.experts] = 0;
}

// Every block counts the choices of some tokens, and adds its counts to those of the others.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
layout(const __grid_constant__ arguments a, const __grid_constant__ layout_call k) {
    __shared__ u32 counts[MAX_EXPERTS + WORLD];
    const u32 local = k.experts / WORLD, all = k.experts + WORLD;
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) counts[i] = 0;
    begin_kernel(a);
    __syncthreads();
    // A warp has neighbouring tokens; blocks take turns by warps, so that all have some of a few tokens.
    const u32 warps = gridDim.x * blockDim.x / 32;
    for (u32 first = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32; first < k.tokens; first += warps * 32) {
        const u32 token = first + lane_id();
        u32 ranks = 0;
        for (u32 i = 0; token < k.tokens && i < k.top_k; i += AT_ONCE) {
            u32 experts[AT_ONCE];
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n) experts[n] = i + n < k.top_k ? expert_at(k, (u64)token * k.top_k + i + n) : k.experts;
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n) {
                if (experts[n] == k.experts) continue;
                atomicAdd(&counts[experts[n]], 1u);
                ranks |= 1u << experts[n] / local;
            }
        }
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 tokens = __ballot_sync(WHOLE_WARP, ranks >> rank & 1);
            if (lane_id() == 0 && tokens != 0) atomicAdd(&counts[k.experts + rank], (u32)__popc(tokens));
            if (token < k.tokens) k.in_rank[(u64)token * WORLD + rank] = ranks >> rank & 1;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < all; i += blockDim.x)
        if (counts[i] != 0) atomicAdd(i < k.experts ? k.per_expert + i : k.per_rank + i - k.experts, (i32)counts[i]);
}
