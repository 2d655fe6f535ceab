// The layout of a dispatch: one kernel, which no other rank has a part in. Behind slots.cuh.

constexpr u32 GROUP = 1024; // experts that a block counts at a time

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
    const i64 id = id_bytes == 8 ? ((const i64*)ids)[index] : (i64)((const i32*)ids)[index];
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
        for (u64 i = threadIdx.x; i < choices; i += blockDim.x) {
            const u32 expert = expert_at(k.ids, k.id_bytes, k.experts, i);
            if (expert - first < here) atomicAdd(&counts[expert - first], 1u);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < here; i += blockDim.x) k.per_expert[first + i] = (i32)counts[i];
        __syncthreads();
    }
    const auto ranks_of = [&](u32 token) {
        u32 ranks = 0;
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
    for (u32 rank = blockIdx.x; rank < WORLD; rank += gridDim.x) {
        i32 count = 0;
        for (u32 first = 0; first < k.tokens; first += blockDim.x) {
            const u32 token = first + threadIdx.x;
            count += __syncthreads_count(token < k.tokens && (ranks_of(token) >> rank & 1));
        }
        if (threadIdx.x == 0) k.per_rank[rank] = count;
    }
}
