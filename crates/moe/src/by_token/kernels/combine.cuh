// Combine: rows back to their tokens, and their sums. Behind sums.cuh.
//
// A record is a row with its weights. Those that a rank has for a source go to the source's lane of it in order, so that the
// source knows where each of its tokens' is.

// Sends this rank's rows of peers' tokens, with their weights.
DEVICE bool send_rows(reader& r, pipeline<>& copies, const sums_call& k, const counts& n, const turn& t) {
    const arguments& a = r.a;
    const parts from{{(u8*)k.rows, nullptr}, {k.row_bytes, 0}};
    return send_as_places_are_free(r, copies, k.region, t, [&](u32 to) { return n.rows[to][a.rank]; }, [&](u32 ready, u32 number) {
        for (u32 left = ready; left != 0; left &= left - 1) {
            const u32 next = __ffs(left) - 1, to = rank_of(a, next), its_number = __shfl_sync(WHOLE_WARP, number, next);
            const u32 row = n.starts[to] + its_number;
            u8* const peer = a.peer[next];
            const spot s(k.region, its_number);
            u8* const place = peer + record_at(k.region, t, a.rank, to, s);
            const auto weight = [&](u32 index) { return __ldg(k.weights + (u64)row * k.top_k + index); };
            const u32 first = lane_id() < k.top_k ? weight(lane_id()) : 0; // under way while the row is copied
            copies.copy(from.rows(row), k.row_bytes, [&] { return from.record(place); });
            u32* const beside = (u32*)(place + k.row_bytes);
            if (lane_id() < k.top_k) beside[lane_id()] = first;
            for (u32 index = lane_id() + 32; index < k.top_k; index += 32) beside[index] = weight(index);
            copies.signal(lane_id() == 0 ? (u32*)(peer + flag_at(a, t, a.rank, s)) : nullptr, s.round());
        }
    });
}

// The sums of a token's weights, which lie behind the rows of peers.
DEVICE void store_weights(const arguments& a, const sums_call& k, u32 token, u32 held, const u8* const (&rows)[WORLD]) {
    for (u32 i = lane_id(); i < k.top_k; i += 32) {
        float sum = 0;
        bool is_begun = false;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            if (!(held >> rank & 1)) continue;
            const u32* weights = rank == a.rank ? k.weights + (u64)(rows[rank] - k.rows) / k.row_bytes * k.top_k : (const u32*)(rows[rank] + k.row_bytes);
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

// Sums a token, of which each rank that is `held` has a row.
DEVICE void sum_token(const arguments& a, const sums_call& k, const stream& s, u32 token, u32 held, const u8* const (&rows)[WORLD]) {
    constexpr u32 AT_ONCE = STREAM / WORLD >= 6 ? 2 : 1; // vectors of a lane in a round
    constexpr u32 ROUNDS = STREAM / (WORLD * AT_ONCE);    // that are under way
    static_assert(ROUNDS >= 2, "a round is summed while another one comes");
    const u32 vectors = k.row_bytes / 16;
    const auto vector_of = [&](u32 round, u32 m) { return (round * AT_ONCE + m) * 32 + lane_id(); };
    const auto place_of = [&](u32 round, u32 m, u32 rank) { return s.place((round % ROUNDS * AT_ONCE + m) * WORLD + rank); };
    const auto load = [&](u32 round) {
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m)
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank)
                if (held >> rank & 1 && vector_of(round, m) < vectors) copy_async16(place_of(round, m, rank), rows[rank] + vector_of(round, m) * 16);
        copies_end_group();
    };
#pragma unroll
    for (u32 round = 0; round < ROUNDS - 1; ++round) load(round);
#pragma unroll 1
    for (u32 round = 0; round * AT_ONCE * 32 < vectors; ++round) {
        load(round + ROUNDS - 1);
        copies_wait<ROUNDS - 1>();
        growing sums[AT_ONCE];
#pragma unroll
        for (u32 bias = 0; bias < 2; ++bias)
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m)
                if (k.bias[bias] != nullptr && vector_of(round, m) < vectors)
                    sums[m].add(load16(k.bias[bias] + (u64)token * k.row_bytes + vector_of(round, m) * 16));
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank)
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m)
                if (held >> rank & 1) sums[m].add(*(const uint4*)place_of(round, m, rank));
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m)
            if (vector_of(round, m) < vectors)
                store16(k.output + (u64)token * k.row_bytes + vector_of(round, m) * 16, narrow_vec<T>(sums[m].elements).words);
    }
    store_weights(a, k, token, held, rows);
}

// The warp's share of this rank's tokens.
DEVICE bool sum_tokens(reader& r, const sums_call& k, const stream& s, const counts& n, const turn& t, rows mine) {
    const arguments& a = r.a;
    const auto sum = [&](u32 token, const batch& some, u32 index) {
        const u8* rows[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 number = some.number_of(index, rank);
            rows[rank] = rank == a.rank ? k.rows + (u64)(n.starts[rank] + number) * k.row_bytes
                                        : a.own + record_at(k.region, t, rank, a.rank, spot(k.region, number));
        }
        sum_token(a, k, s, token, some.held(index), rows);
    };
    return sum_tokens(r, k.region, n, t, k.heads, k.tokens, mine, sum, [&](u32 token) { leave_nan(k, token, mine.step); });
}

extern "C" __global__ void __launch_bounds__(BOUND, RESIDENT)
combine(const __grid_constant__ arguments a, const __grid_constant__ sums_call k) {
    extern __shared__ uint4 memory[];
    begin_kernel<AT_END>(a);
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    stores::prepare();
    const counts n(k.counts, k.starts);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[a.rank][from]);
    if (!advance(a, t, flag_vectors(k.region, most), UPPER_VECTORS | OWN_TOO)) return leave_nan(k, grid_thread() / 32, grid_threads() / 32);

    // Warps of a block: some send, one raises flags, the others sum.
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    if (raises_flags(warp)) return stores::raise_flags();
    bool came;
    if (warp < RINGS) {
        pipeline<> copies(memory);
        came = send_rows(r, copies, k, n, t);
        copies.finish();
    } else {
        constexpr u32 OTHERS = RINGS + 1;
        came = sum_tokens(r, k, stream(memory, warp - OTHERS), n, t, share_of_warp(OTHERS, THREADS / 32 - OTHERS));
    }
    if (came && !__all_sync(WHOLE_WARP, r.finish())) leave_nan(k, 0, 1);
}
