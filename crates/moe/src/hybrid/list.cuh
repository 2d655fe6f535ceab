// Lists of choices from a routing map, in two kernels that no other rank has a part in. Behind choices.cuh.

// Words of bits that a block has at a time, those of a chunk of tokens.
constexpr u32 BITS = 768 * WORLD;

// Rust's `ListCall` has the same layout.
struct list_call {
    const u8* map;   // [tokens, experts]
    u32* of_chunk;   // [chunks, experts]: how many of a chunk's tokens choose each expert
    u32* all;        // as in choices.cuh
    u16* number;
    u8* in_rank;     // [tokens, WORLD]: whether there are any
    u32* per_expert; // [experts]: how many tokens choose each
    u32* most;       // the most choices of a token at one rank
    u32 tokens, experts;
    u32 chunk;       // tokens of a chunk, whose bits fit BITS
};

// One at least.
DEVICE u32 chunks_of(const list_call& k) { return max(1, (k.tokens + k.chunk - 1) / k.chunk); }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
count_choices(const __grid_constant__ arguments a, const __grid_constant__ list_call k) {
    pdl_wait();
    if (a.dependents == AT_START) pdl_launch_dependents();
    if (grid_thread() == 0) *k.most = 0;
    const u64 pairs = (u64)chunks_of(k) * k.experts;
    for (u64 i = grid_thread(); i < pairs; i += grid_threads()) {
        const u32 first = (u32)(i / k.experts) * k.chunk, expert = (u32)(i % k.experts), end = min(k.tokens, first + k.chunk);
        u32 count = 0;
#pragma unroll 16
        for (u32 token = first; token < end; ++token) count += k.map[(u64)token * k.experts + expert] != 0;
        k.of_chunk[i] = count;
    }
}

// A block has all experts of a chunk: first a bit for each choice, then a thread for each expert.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
list_choices(const __grid_constant__ arguments a, const __grid_constant__ list_call k) {
    __shared__ u32 bits[BITS]; // [chunk, WORLD, words]
    pdl_wait();
    if (a.dependents == AT_START) pdl_launch_dependents();
    const u32 local = k.experts / WORLD, words = (local + 31) / 32, chunks = chunks_of(k);
    for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const u32 first = chunk * k.chunk, here = min(k.chunk, k.tokens - first);
        __syncthreads(); // the bits of the chunk before have been read
#pragma unroll 8
        for (u32 i = threadIdx.x / 32; i < here * words * WORLD; i += THREADS / 32) {
            const u32 token = i / (words * WORLD), rank = i / words % WORLD, expert = i % words * 32 + lane_id();
            const bool is_chosen = expert < local && k.map[(u64)(first + token) * k.experts + rank * local + expert] != 0;
            const u32 mask = __ballot_sync(WHOLE_WARP, is_chosen);
            if (lane_id() == 0) bits[i] = mask;
        }
        __syncthreads();
        for (u32 expert = threadIdx.x; expert < k.experts; expert += THREADS) {
            u32 position = 0;
#pragma unroll 8
            for (u32 before = 0; before < chunk; ++before) position += k.of_chunk[(u64)before * k.experts + expert];
            const u32 rank = expert / local, its = expert % local, word = its / 32, bit = its % 32;
            for (u32 token = 0; token < here; ++token) {
                const u32* its_bits = bits + (token * WORLD + rank) * words;
                const u32 mask = its_bits[word];
                if (!(mask >> bit & 1)) continue;
                u32 index = __popc(mask & ((1u << bit) - 1));
                for (u32 w = 0; w < word; ++w) index += __popc(its_bits[w]);
                k.all[((u64)(first + token) * WORLD + rank) * local + index] = choice_of(its, position);
                ++position;
            }
            if (chunk == chunks - 1) k.per_expert[expert] = position;
        }
        u32 most = 0;
        for (u32 i = threadIdx.x; i < here * WORLD; i += THREADS) {
            u32 number = 0;
            for (u32 w = 0; w < words; ++w) number += __popc(bits[i * words + w]);
            k.number[(u64)first * WORLD + i] = (u16)number;
            k.in_rank[(u64)first * WORLD + i] = number != 0;
            most = max(most, number);
        }
        if (most != 0) atomicMax(k.most, most);
    }
}
