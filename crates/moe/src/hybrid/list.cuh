// Lists of choices from a routing map, in two kernels that no other rank has a part in. Behind choices.cuh.

constexpr u32 CHUNK = 128;     // tokens that a block has at a time
constexpr u32 MAX_LOCAL = 191; // experts of a rank
constexpr u32 MAX_WORDS = (MAX_LOCAL + 31) / 32 * WORLD;

// Rust's `ListCall` has the same layout.
struct list_call {
    const u8* map;   // [tokens, experts]
    u32* of_chunk;   // [chunks, experts]: how many of a chunk's tokens choose each expert
    u32* all;        // as in choices.cuh
    u8* number;
    u32* per_expert; // [experts]: how many tokens choose each
    u32* most;       // the most choices of a token at one rank
    u32 tokens, experts;
};

// One at least.
DEVICE u32 chunks_of(const list_call& k) { return max(1, (k.tokens + CHUNK - 1) / CHUNK); }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
count_choices(const __grid_constant__ arguments a, const __grid_constant__ list_call k) {
    pdl_wait();
    if (a.dependents == AT_START) pdl_launch_dependents();
    if (grid_thread() == 0) *k.most = 0;
    const u64 pairs = (u64)chunks_of(k) * k.experts;
    for (u64 i = grid_thread(); i < pairs; i += grid_threads()) {
        const u32 first = (u32)(i / k.experts) * CHUNK, expert = (u32)(i % k.experts), end = min(k.tokens, first + CHUNK);
        u32 count = 0;
#pragma unroll 16
        for (u32 token = first; token < end; ++token) count += k.map[(u64)token * k.experts + expert] != 0;
        k.of_chunk[i] = count;
    }
}

// A block has all experts of a chunk: first a bit for each choice, then a thread for each expert.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
list_choices(const __grid_constant__ arguments a, const __grid_constant__ list_call k) {
    __shared__ u32 bits[CHUNK][MAX_WORDS];
    pdl_wait();
    if (a.dependents == AT_START) pdl_launch_dependents();
    const u32 local = k.experts / WORLD, words = (local + 31) / 32, chunks = chunks_of(k);
    for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const u32 first = chunk * CHUNK, here = min(CHUNK, k.tokens - first);
        __syncthreads(); // the bits of the chunk before have been read
#pragma unroll 8
        for (u32 i = threadIdx.x / 32; i < here * words * WORLD; i += THREADS / 32) {
            const u32 token = i / (words * WORLD), word = i % (words * WORLD), rank = word / words;
            const u32 expert = word % words * 32 + lane_id();
            const bool is_chosen = expert < local && k.map[(u64)(first + token) * k.experts + rank * local + expert] != 0;
            const u32 mask = __ballot_sync(WHOLE_WARP, is_chosen);
            if (lane_id() == 0) bits[token][word] = mask;
        }
        __syncthreads();
        for (u32 expert = threadIdx.x; expert < k.experts; expert += THREADS) {
            u32 position = 0;
#pragma unroll 8
            for (u32 before = 0; before < chunk; ++before) position += k.of_chunk[(u64)before * k.experts + expert];
            const u32 rank = expert / local, its = expert % local, word = rank * words + its / 32, bit = its % 32;
            for (u32 token = 0; token < here; ++token) {
                const u32 mask = bits[token][word];
                if (!(mask >> bit & 1)) continue;
                u32 index = __popc(mask & ((1u << bit) - 1));
                for (u32 w = rank * words; w < word; ++w) index += __popc(bits[token][w]);
                k.all[((u64)(first + token) * WORLD + rank) * local + index] = choice_of(its, position);
                ++position;
            }
            if (chunk == chunks - 1) k.per_expert[expert] = position;
        }
        u32 most = 0;
        for (u32 i = threadIdx.x; i < here * WORLD; i += THREADS) {
            u32 number = 0;
            for (u32 w = 0; w < words; ++w) number += __popc(bits[i / WORLD][i % WORLD * words + w]);
            k.number[(u64)first * WORLD + i] = (u8)number;
            most = max(most, number);
        }
        if (most != 0) atomicMax(k.most, most);
    }
}
