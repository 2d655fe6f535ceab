// Teams: the threads that share a row, a block or a cluster of blocks. Every thread has each `threads`-th vector. Behind
// source.cuh.
//
// The sum of a row's squares does not depend on the team. The squares of a vector are added in their order. The sums of 32
// neighbouring vectors, a slice, are added as in a warp: those 16 apart, then those 8 apart and so on. The sums of 32
// neighbouring slices are added likewise, and the sums of such groups in their order.

struct row_team {
    static constexpr bool MOST = QUANTIZATION == FP8_TOKENS;
    static constexpr u32 WORDS = MOST ? 2 : 1; // of a slice: its squares and, where that is asked for, its largest magnitude

    u32 index, teams;    // this team's index, and the number of teams
    u32 rank, blocks;    // this block's index in the team, and the number of blocks
    u32 thread, threads; // in the team
    u32 exchanges;       // done so far

    // Called before the first wait. The threads of a block meet when the call advances, and then may exchange.
    DEVICE row_team(const fused& f)
        : index(cluster_index()), teams(cluster_count()), rank(cluster_rank()), blocks(cluster_size()),
          thread(rank * blockDim.x + threadIdx.x), threads(blocks * blockDim.x), exchanges(0) {
        for (u32 i = threadIdx.x; i < 2 * WORDS * f.slices; i += blockDim.x) shares()[i] = 0;
        if (blocks > 1) cluster_arrive();
    }

    // Called before the first exchange, and long after the start.
    DEVICE void meet() const {
        if (blocks > 1) cluster_wait();
    }

    // Shared memory has the slices' sums, for two exchanges in turn, because a block that has finished one exchange may begin the
    // next while others still read. A word holds a sum and, in its upper half, the number of its exchange, which shows whether the
    // word has arrived. Behind the sums is room for the epilogue.
    static DEVICE u64* shares() {
        extern __shared__ uint4 memory[];
        return (u64*)memory;
    }
    static DEVICE uint4* room(const fused& f) { return (uint4*)shares() + WORDS * f.slices; }

    // Whether this warp has any vector of a row. Only such warps take part in exchanges: others could fall behind.
    DEVICE bool takes_part(const fused& f) const { return thread - threadIdx.x % 32 < f.vectors; }

    // Stores a warp's sum of the slice of vector v, and of its next slices. Every warp stores its sums in every block.
    template <u32 COUNT>
    DEVICE void share(const fused& f, u32 v, float (&squares)[COUNT], float (&most)[COUNT]) const {
        combine(squares, most);
        const u32 lane = threadIdx.x % 32;
        const u64 tag = (u64)(exchanges + 1) << 32;
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n) {
            const u32 slice = (v + n * threads) / 32;
            if (lane >= blocks || slice >= f.slices) return;
            u64* place = shares() + (exchanges % 2 * f.slices + slice) * WORDS;
            if (blocks == 1) {
                *(volatile u64*)place = tag | __float_as_uint(squares[n]);
                if (MOST) *(volatile u64*)(place + 1) = tag | __float_as_uint(most[n]);
            } else {
                store_to_block(place, lane, tag | __float_as_uint(squares[n]));
                if (MOST) store_to_block(place + 1, lane, tag | __float_as_uint(most[n]));
            }
        }
    }

    // The sum over the row, and the largest value, once all words have arrived: all blocks of the team run, and wait for nothing else.
    DEVICE float end_exchange(const fused& f, float& most) {
        const u64* of_slices = shares() + exchanges % 2 * f.slices * WORDS;
        float sum = 0;
        most = 0;
        ++exchanges;
        for (u32 first = 0; first < f.slices; first += 32) {
            const u32 slice = first + threadIdx.x % 32;
            const u64* place = of_slices + slice * WORDS;
            float squares[1] = {__uint_as_float(wait_for(place, slice < f.slices))};
            float magnitude[1] = {MOST ? __uint_as_float(wait_for(place + 1, slice < f.slices)) : 0.0f};
            combine(squares, magnitude);
            sum = first == 0 ? squares[0] : sum + squares[0];
            most = fmaxf(most, magnitude[0]);
        }
        return sum;
    }

private:
    template <u32 COUNT> static DEVICE void combine(float (&squares)[COUNT], float (&most)[COUNT]) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2)
#pragma unroll
            for (u32 n = 0; n < COUNT; ++n) {
                squares[n] += __shfl_xor_sync(WHOLE_WARP, squares[n], distance);
                if (MOST) most[n] = fmaxf(most[n], __shfl_xor_sync(WHOLE_WARP, most[n], distance));
            }
    }

    // For a whole warp; 0 where no word is expected.
    DEVICE u32 wait_for(const u64* place, bool is_to_come) const {
        u64 word = 0;
        do if (is_to_come) word = load_from_blocks(place);
        while (!__all_sync(WHOLE_WARP, !is_to_come || (u32)(word >> 32) == exchanges));
        return (u32)word;
    }
};
