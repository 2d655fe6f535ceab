// The layout of a dispatch: one kernel, which no other rank has a part in. Behind slots.cuh.

constexpr u32 GROUP = 1024;  // experts that a block counts at a time
constexpr u32 AT_ONCE = 16;  // choices that a thread looks at

// Rust's `LayoutCall` has the same layout.
struct layout_call {
    const u8* ids;      // [tokens, top_k]
    i32* per_rank;      // [WORLD]
    i32* per_expert;    // [experts]
    u8* in_rank;        // [tokens, WORLD]
    u32 tokens, top_k, experts, id_bytes;
};

// The expert at a place, or `experts` if it names none.
DEVICE u32 expert_at(const u8* ids, u32 id_bytes, u32 experts, u64 index) {
    const i64 id = id_bytes == 8 ? __ldg((const i64*)ids + index) : (i64)__ldg((const i32*)ids + index);
    return 0 <= id && id < experts ? (u32)id : experts;
}

// Every block counts some experts, of all choices; of the ranks, some blocks count one each. So nothing is added up between
// blocks.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
layout(const __grid_constant__ arguments a, const __grid_constant__ layout_call k) {
    __shared__ u32 counts[GROUP];
    pdl_wait();
    if (a.dependents == AT_START) pdl_launch_dependents();
    const u32 local = k.experts / WORLD, per_block = (k.experts + gridDim.x - 1) / gridDim.x;
    const u64 choices = (u64)k.tokens * k.top_k;
    const u32 end = min(k.experts, (blockIdx.x + 1) * per_block);
    for (u32 first = blockIdx.x * per_block; first < end; first += GROUP) {
        const u32 here = min(GROUP, end - first);
        for (u32 i = threadIdx.x; i < here; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        // Loads of some at once, as they take as long as one.
        for (u64 from = threadIdx.x; from < choices; from += AT_ONCE * blockDim.x) {
            u32 experts[AT_ONCE];
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n) {
                const u64 i = from + n * blockDim.x;
                experts[n] = i < choices ? expert_at(k.ids, k.id_bytes, k.experts, i) : k.experts;
            }
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n)
                if (experts[n] - first < here) atomicAdd(&counts[experts[n] - first], 1u);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < here; i += blockDim.x) k.per_expert[first + i] = (i32)counts[i];
        __syncthreads();
    }
    const auto ranks_of = [&](u32 token) {
        u32 ranks = 0;
#pragma unroll 8
        for (u32 i = 0; i < k.top_k; ++i) {
            const u32 expert = expert_at(k.ids, k.id_bytes, k.experts, (u64)token * k.top_k + i);
            if (expert < k.experts) ranks |= 1u << expert / local;
        }
        return ranks;
    };
    for (u32 token = grid_thread(); token < k.tokens; token += grid_threads()) {
        const u32 ranks = ranks_of(token);
        for (u32 rank = 0; rank < WORLD; ++rank) k.in_rank[(u64)token * WORLD + rank] = ranks >> rank & 1;
    }
    for (u32 rank = gridDim.x - 1 - blockIdx.x; rank < WORLD; rank += gridDim.x) {
        u32 count = 0;
#pragma unroll 4
        for (u32 token = threadIdx.x; token < k.tokens; token += blockDim.x) count += ranks_of(token) >> rank & 1;
        __syncthreads(); // the counts of experts have been read
        if (threadIdx.x == 0) counts[0] = 0;
        __syncthreads();
        atomicAdd(&counts[0], count);
        __syncthreads();
        if (threadIdx.x == 0) k.per_rank[rank] = (i32)counts[0];
    }
}
