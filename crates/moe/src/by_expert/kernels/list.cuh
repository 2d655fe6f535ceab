// Lists of choices from a routing map, in two kernels that no other rank has a part in. Behind choices.cuh.
//
// A *unit* is 32 tokens: of each expert a word says which of them choose it. A *chunk* is the units that a block has at a time. It looks at
// AT_ONCE experts, of whole ranks, and has room for BITS words.

// One at least.
DEVICE u32 units_of(const list_call& k) { return max(1, (k.tokens + 31) / 32); }
DEVICE u32 chunks_of(const list_call& k) { return (units_of(k) + k.chunk - 1) / k.chunk; }

// The words, and their bits by chunk.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
count_choices(const __grid_constant__ arguments a, const __grid_constant__ list_call k) {
    __shared__ u32 counts[AT_ONCE];
    begin_kernel(a);
    if (grid_thread() == 0) *k.most = 0;
    const u32 chunks = chunks_of(k);
    for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const u32 units = min(k.chunk, units_of(k) - chunk * k.chunk);
        for (u32 begin = 0; begin < k.experts; begin += AT_ONCE) {
            const u32 experts = min(AT_ONCE, k.experts - begin);
            for (u32 i = threadIdx.x; i < experts; i += THREADS) counts[i] = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < units * experts; i += THREADS) {
                const u32 unit = chunk * k.chunk + i / experts, expert = begin + i % experts, first = unit * 32;
                u32 word = 0;
#pragma unroll
                for (u32 n = 0; n < 32; ++n)
                    if (first + n < k.tokens && __ldg(k.map + (u64)(first + n) * k.experts + expert) != 0) word |= 1u << n;
                k.bits[(u64)unit * k.experts + expert] = word;
                if (word != 0) atomicAdd(counts + expert - begin, __popc(word));
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < experts; i += THREADS) k.of_chunk[(u64)chunk * k.experts + begin + i] = counts[i]; // which this thread makes 0 again
        }
    }
}

// A warp has all experts of one rank for a token.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
list_choices(const __grid_constant__ arguments a, const __grid_constant__ list_call k) {
    __shared__ u32 bits[BITS];
    __shared__ u32 before[AT_ONCE]; // of each expert the tokens of chunks before
    __shared__ u32 most_of_block;
    begin_kernel(a);
    if (threadIdx.x == 0) most_of_block = 0;
    const u32 local = k.experts / WORLD, at_once = min(max(1, AT_ONCE / local), WORLD), chunks = chunks_of(k);
    u32 most = 0;
    for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const u32 first_unit = chunk * k.chunk, units = min(k.chunk, units_of(k) - first_unit);
        const u32 first = first_unit * 32, tokens = min(units * 32, k.tokens - min(first, k.tokens));
        for (u32 first_rank = 0; first_rank < WORLD; first_rank += at_once) {
            const u32 ranks = min(at_once, WORLD - first_rank), experts = ranks * local, begin = first_rank * local;
            __syncthreads(); // what was there before has been read
            for (u32 i = threadIdx.x; i < units * experts; i += THREADS)
                bits[i] = k.bits[(u64)(first_unit + i / experts) * k.experts + begin + i % experts];
            for (u32 i = threadIdx.x; i < experts; i += THREADS) {
                u32 sum = 0;
#pragma unroll 16
                for (u32 other = 0; other < chunk; ++other) sum += k.of_chunk[(u64)other * k.experts + begin + i];
                before[i] = sum;
                if (chunk == chunks - 1) k.per_expert[begin + i] = sum + k.of_chunk[(u64)chunk * k.experts + begin + i];
            }
            __syncthreads();
            for (u32 i = threadIdx.x / 32; i < tokens * ranks; i += THREADS / 32) {
                const u32 token = i / ranks, rank = i % ranks, unit = token / 32, bit = token % 32;
                const u64 place = (u64)(first + token) * WORLD + first_rank + rank;
                u32 number = 0;
                for (u32 some = 0; some < local; some += 32) {
                    const u32 its = some + lane_id(), expert = rank * local + its;
                    const u32 word = its < local ? bits[unit * experts + expert] : 0;
                    const bool is_chosen = word >> bit & 1;
                    const u32 mask = __ballot_sync(WHOLE_WARP, is_chosen);
                    if (is_chosen) {
                        u32 position = before[expert] + __popc(word & ((1u << bit) - 1));
                        for (u32 other = 0; other < unit; ++other) position += __popc(bits[other * experts + expert]);
                        k.all[place * local + number + __popc(mask & ((1u << lane_id()) - 1))] = choice_of(its, position);
                    }
                    number += __popc(mask);
                }
                if (lane_id() == 0) {
                    k.number[place] = (u16)number;
                    k.in_rank[place] = number != 0;
                }
                most = max(most, number);
            }
        }
    }
    if (lane_id() == 0 && most != 0) atomicMax(&most_of_block, most);
    __syncthreads();
    if (threadIdx.x == 0 && most_of_block != 0) atomicMax(k.most, most_of_block);
}
