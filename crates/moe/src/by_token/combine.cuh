// Combine: rows back to their tokens, and their sums. Behind sums.cuh.
//
// A record is a row with its weights. Those that a rank has for a source go to the source's lane of it in order, so that the
// source knows where each of its tokens' is.

// Rust's `SumsCall` has the same layout.
struct sums_call {
    const u32* counts;  // as in notify.cuh, and so below
    const u32* starts;
    const i32* heads;
    const u32* order;
    const u32* sources; // [N]: the token of each row
    const u8* rows;     // [N, row_bytes]
    const u32* weights; // [N, top_k]
    const u8* bias[2];  // [tokens, row_bytes]; null if there is none
    u8* output;         // [tokens, row_bytes]
    u32* to_weights;    // [tokens, top_k]
    region_call region;
    u32 tokens, row_bytes, top_k;
};

// Sends this rank's rows of peers' tokens, with their weights.
DEVICE bool send_rows(reader& r, pipeline& copies, const sums_call& k, const counts& n, const turn& t) {
    const arguments& a = r.a;
    const u32 padded = (k.top_k + 3) / 4 * 4;
    const parts from{{k.rows, nullptr}, {k.row_bytes, 0}};
    const auto weight = [&](u32, u32 row, u32 index) { return __ldg(k.weights + (u64)row * k.top_k + index); };
    u32 used = 0; // of the words that fit where weights are gathered
    return send_as_places_are_free(r, copies, k.region, t, [&](u32 to) { return n.rows[to][a.rank]; }, [&](u32 ready, u32 number) {
        const bool is_mine = ready >> lane_id() & 1;
        const u32 row = is_mine ? n.starts[rank_of(a, lane_id())] + number : ~0u;
        if (padded != 0) {
            if (used + PEERS * padded > BESIDE_BYTES / 4) {
                copies.before_gathering();
                used = 0;
            }
            gather(copies, (u32*)copies.gathered + used, PEERS, k.top_k, 0, row, weight);
        }
        for (u32 left = ready; left != 0; left &= left - 1) {
            const u32 next = __ffs(left) - 1, its_row = __shfl_sync(WHOLE_WARP, row, next), its_number = __shfl_sync(WHOLE_WARP, number, next);
            send_record(a, copies, k.region, t, next, its_number, from.row(its_row), (used + next * padded) * 4, padded * 4);
        }
        used += PEERS * padded;
    });
}

// Where a rank's row of a token of this rank is; null if it has none.
DEVICE const u8* row_at(const arguments& a, const sums_call& k, const counts& n, const turn& t, u32 token, u32 rank) {
    const u32 head = (u32)k.heads[(u64)token * WORLD + rank];
    if (head >= n.rows[a.rank][rank]) return nullptr; // -1 too
    if (rank == a.rank) return k.rows + (u64)(n.starts[rank] + head) * k.row_bytes;
    return a.own + record_at(k.region, t, rank, a.rank, head);
}

// A vector of the sum of a token, of which `got` has those of the ranks.
DEVICE void store_sum(const sums_call& k, u32 token, u32 held, u32 at, const uint4 (&got)[WORLD]) {
    const u64 place = (u64)token * k.row_bytes + at * 16;
    growing sum;
#pragma unroll
    for (u32 bias = 0; bias < 2; ++bias)
        if (k.bias[bias] != nullptr) sum.add(load16(k.bias[bias] + place));
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank)
        if (held >> rank & 1) sum.add(got[rank]);
    store16(k.output + place, narrow_vec<T>(sum.elements).words);
}

// The sums of a token's weights, which lie behind the rows of peers.
DEVICE void store_weights(const arguments& a, const sums_call& k, const counts& n, const turn& t, u32 token) {
    for (u32 i = lane_id(); i < k.top_k; i += 32) {
        float sum = 0;
        bool is_begun = false;
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u8* row = row_at(a, k, n, t, token, rank);
            if (row == nullptr) continue;
            const u32* weights = rank == a.rank ? k.weights + (u64)(row - k.rows) / k.row_bytes * k.top_k : (const u32*)(row + k.row_bytes);
            const float weight = __uint_as_float(ld_relaxed_sys(weights + i));
            sum = is_begun ? sum + weight : weight;
            is_begun = true;
        }
        k.to_weights[(u64)token * k.top_k + i] = __float_as_uint(canonical(sum));
    }
}

// Writes NaN as the sums of every `step`-th token from `first` on.
DEVICE void leave_nan(const sums_call& k, u32 first, u32 step) {
    leave_nan(k.output, k.row_bytes, k.to_weights, k.top_k, first, step, k.tokens);
}

// The warp's share of this rank's tokens.
DEVICE bool sum_tokens(reader& r, const sums_call& k, const counts& n, const turn& t, u32 warp, u32 warps) {
    const arguments& a = r.a;
    for (u32 token = blockIdx.x * warps + warp; token < k.tokens; token += gridDim.x * warps) {
        if (!wait_for_rows(r, k.heads, k.region, n, t, token)) {
            leave_nan(k, token, gridDim.x * warps);
            return false;
        }
        const u32 held = held_of(a, k.heads, n, token);
        const u8* rows[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) rows[rank] = row_at(a, k, n, t, token, rank);
        const u32 vectors = k.row_bytes / 16;
        for (u32 first = lane_id(); first < vectors; first += 32 * AT_ONCE) {
            uint4 got[AT_ONCE][WORLD];
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m)
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank)
                    if (rows[rank] != nullptr && first + m * 32 < vectors) got[m][rank] = load16_volatile(rows[rank] + (first + m * 32) * 16);
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m)
                if (first + m * 32 < vectors) store_sum(k, token, held, first + m * 32, got[m]);
        }
        store_weights(a, k, n, t, token);
        count_read(a, k.heads, k.region, n, t, token);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
combine(const __grid_constant__ arguments a, const __grid_constant__ sums_call k) {
    extern __shared__ uint4 memory[];
    pdl_wait();
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    pipeline::prepare();
    const counts n(k.counts, k.starts);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[a.rank][from]);
    if (!advance(a, t, flag_vectors(k.region, most), UPPER_VECTORS | OWN_TOO)) return leave_nan(k, grid_thread() / 32, grid_threads() / 32);

    // Warps of a block: some send, the others sum.
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    if (raises_flags(warp)) return pipeline::raise_flags();
    bool came;
    if (warp < SENDING) {
        pipeline copies(memory);
        came = send_rows(r, copies, k, n, t);
        copies.finish();
    } else {
        constexpr u32 OTHERS = RINGS + FLAG_WARPS;
        came = sum_tokens(r, k, n, t, warp - OTHERS, THREADS / 32 - OTHERS);
    }
    if (came && !__all_sync(WHOLE_WARP, r.finish())) leave_nan(k, 0, 1);
}
