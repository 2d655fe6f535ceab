// Combine by a routing map: a rank sums the rows of each token, and its source sums what the ranks send. Behind sums.cuh and
// choices.cuh.
//
// A record is a rounded sum with the probs of the token's choices at the sender, in the order of experts. Rows that are dropped are
// those of the last experts, so the probs of the others come first.

// What this rank has of a token: of each choice that was not dropped, in the order of experts, the place of its prob, which by
// expert is its row, too. Each warp has one.
struct terms {
    u32 (&places)[MAX_LOCAL];
    u32 count, token;

    static DEVICE u32 (&of_warp())[MAX_LOCAL] {
        __shared__ u32 all[THREADS / 32][MAX_LOCAL];
        return all[threadIdx.x / 32];
    }
    // The terms of a received token; none if `is_one` is false. The lanes have met since they used those of the token before.
    DEVICE terms(const by_expert_sums_call& k, bool is_one, u32 token) : places(of_warp()), count(0), token(token) {
        for (u32 first = 0; is_one && first < k.local; first += 32) {
            const u32 expert = first + lane_id();
            const u64 place = (u64)token * k.local + expert;
            const i32 row = expert < k.local ? k.places[place] : -1;
            const u32 mask = __ballot_sync(WHOLE_WARP, row >= 0);
            if (row >= 0) places[count + __popc(mask & ((1u << lane_id()) - 1))] = k.is_by_token ? (u32)place : (u32)row;
            count += __popc(mask);
        }
        __syncwarp();
    }
    DEVICE u32 rows(const by_expert_sums_call& k) const { return k.is_by_token ? min(count, 1) : count; }
    DEVICE u32 row(const by_expert_sums_call& k, u32 index) const { return k.is_by_token ? token : places[index]; }
    DEVICE u32 prob(const by_expert_sums_call& k, u32 index) const { return index < count ? __ldg(k.probs + places[index]) : 0; }

};

constexpr u32 AT_ONCE = 2; // vectors of a lane that are summed together
constexpr u32 STEPS = STREAM / AT_ONCE; // of a row each, that are under way

// Goes through the vectors of a token, AT_ONCE for each lane at a time: calls use(vector, own, got) with the first one's number, the rounded
// sums of this rank's terms, and what those peers have that are set in `others`, whose records lanes know by their rank. -0 is the start that
// keeps the sign of any first term. Beyond the last vector all are undefined.
template <class Use>
DEVICE void stream_sums(const by_expert_sums_call& k, const stream& s, const terms& its, u32 others, const u8* record, Use use) {
    const u32 vectors = k.row_bytes / 16, count = its.rows(k);
    u32 loaded = 0, arrived = 0; // steps
    u32 vector_ahead = lane_id(), term_ahead = 0, others_ahead = others;
    const auto load = [&] {
        const u8* from = nullptr;
        if (term_ahead < count) {
            from = k.rows + (u64)its.row(k, term_ahead) * k.row_bytes;
            ++term_ahead;
        } else if (others_ahead != 0) {
            from = (const u8*)__shfl_sync(WHOLE_WARP, (u64)record, __ffs(others_ahead) - 1);
            others_ahead &= others_ahead - 1;
        }
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m)
            if (from != nullptr && vector_ahead + m * 32 < vectors) copy_async16(s.place(loaded * AT_ONCE + m), from + (vector_ahead + m * 32) * 16);
        copies_end_group();
        ++loaded;
        if (term_ahead < count || others_ahead != 0) return;
        term_ahead = 0;
        others_ahead = others;
        vector_ahead += 32 * AT_ONCE;
    };
    const auto next = [&](uint4 (&v)[AT_ONCE]) {
        load();
        copies_wait<STEPS - 1>();
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m) v[m] = *(const uint4*)s.place(arrived * AT_ONCE + m);
        ++arrived;
    };
    if (count != 0 || others != 0)
#pragma unroll 1
        for (u32 step = 0; step < STEPS - 1; ++step) load();
#pragma unroll 1
    for (u32 vector = lane_id(); vector - lane_id() < vectors; vector += 32 * AT_ONCE) {
        wide_vec<T> sums[AT_ONCE];
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m)
#pragma unroll
            for (u32 lane = 0; lane < LANES; ++lane) sums[m].lane[lane] = count == 0 ? 0.0f : -0.0f;
#pragma unroll 1
        for (u32 index = 0; index < count; ++index) {
            uint4 got[AT_ONCE];
            next(got);
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m) {
                vec16<T> v;
                v.words = got[m];
                const wide_vec<T> x = widen_vec(v);
#pragma unroll
                for (u32 lane = 0; lane < LANES; ++lane) sums[m].lane[lane] = plus(sums[m].lane[lane], x.lane[lane]);
            }
        }
        uint4 own[AT_ONCE], got[WORLD][AT_ONCE];
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m) own[m] = narrow_vec<T>(sums[m]).words;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank)
            if (others >> rank & 1) next(got[rank]);
        use(vector, own, got);
    }
}

// Sends what this rank has of peers' tokens.
DEVICE bool send_sums(reader& r, stores& copies, const stream& s, const by_expert_sums_call& k, const region_call& g, const counts& n, const turn& t) {
    const arguments& a = r.a;
    static_assert(STAGE_BYTES % (AT_ONCE * 512) == 0, "a stage ends where vectors of all lanes do");
    const u32 probs = k.probs == nullptr ? 0 : *k.most;
    const auto send = [&](u32 next, u32 number) {
        const terms its(k, true, n.starts[rank_of(a, next)] + number);
        const spot where(g, number);
        u8* place = a.peer[next] + record_at(g, t, a.rank, rank_of(a, next), where);
        u8* written = nullptr;
        stream_sums(k, s, its, 0, nullptr, [&](u32 vector, const uint4 (&sums)[AT_ONCE], const uint4 (&)[WORLD][AT_ONCE]) {
            const u32 first = (vector - lane_id()) * 16, in_stage = first % STAGE_BYTES;
            u8* const stage = place + (first - in_stage);
            if (in_stage == 0) written = copies.piece(stage);
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m)
                if ((vector + m * 32) * 16 < k.row_bytes) *(uint4*)(written + in_stage + (lane_id() + m * 32) * 16) = sums[m];
            const u32 end = min(first + AT_ONCE * 512, k.row_bytes);
            if (in_stage + AT_ONCE * 512 == STAGE_BYTES || end == k.row_bytes) copies.store_piece(stage, end - (first - in_stage));
        });
        for (u32 index = lane_id(); index < probs; index += 32) ((u32*)(place + k.row_bytes))[index] = its.prob(k, index);
        copies.signal(lane_id() == 0 ? (u32*)(a.peer[next] + flag_at(a, t, a.rank, where)) : nullptr, where.round());
    };
    return send_as_places_are_free(r, copies, g, t, [&](u32 to) { return n.rows[to][a.rank]; }, [&](u32 ready, u32 number) {
        for (u32 left = ready; left != 0; left &= left - 1) {
            const u32 next = __ffs(left) - 1;
            send(next, __shfl_sync(WHOLE_WARP, number, next));
        }
    });
}

// Writes NaN as the sums of every `step`-th token from `first` on.
DEVICE void leave_nan(const by_expert_sums_call& k, u32 first, u32 step) {
    leave_nan(k.output, k.row_bytes, k.probs == nullptr ? nullptr : k.to_probs, WORLD * k.local, first, step, k.tokens);
}

// Sums a token, of which each rank that is `held` has a part: peers a record, this rank the terms of its own rows.
DEVICE void sum_token(const arguments& a, const by_expert_sums_call& k, const stream& s, u32 token, u32 held, const terms& own, const u8* record) {
    stream_sums(k, s, own, held & ~(1u << a.rank), record, [&](u32 vector, const uint4 (&mine)[AT_ONCE], const uint4 (&got)[WORLD][AT_ONCE]) {
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; ++m) {
            growing sum;
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank)
                if (held >> rank & 1) sum.add(rank == a.rank ? mine[m] : got[rank][m]);
            const u32 at = (vector + m * 32) * 16;
            if (at < k.row_bytes) store16(k.output + (u64)token * k.row_bytes + at, narrow_vec<T>(sum.elements).words);
        }
    });
}

// Stores the probs of a token's choices, which lie behind the records of peers.
DEVICE void store_probs(const arguments& a, const by_expert_sums_call& k, u32 token, u32 held, const terms& own, const u8* its_record) {
    const choices c{k.all, k.number, k.local};
    const u32 experts = WORLD * k.local;
    u32* to = k.to_probs + (u64)token * experts;
    for (u32 i = lane_id(); i < experts; i += 32) to[i] = 0;
    __syncwarp();
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u8* record = (const u8*)__shfl_sync(WHOLE_WARP, (u64)its_record, rank);
        const u32 number = held >> rank & 1 ? c.number[(u64)token * WORLD + rank] : 0;
        for (u32 i = lane_id(); i < number; i += 32)
            to[rank * k.local + expert_of(c.at(token, rank, i))] =
                rank == a.rank ? own.prob(k, i) : ld_relaxed_sys((const u32*)(record + k.row_bytes) + i);
    }
}

// The warp's share of this rank's tokens.
DEVICE bool sum_tokens(reader& r, const by_expert_sums_call& k, const stream& s, const region_call& g, const counts& n, const turn& t, rows mine) {
    const arguments& a = r.a;
    const auto sum = [&](u32 token, const batch& some, u32 index) {
        const u32 held = some.held(index), rank = lane_id() % WORLD, number = some.number_of(index, rank);
        const u8* const record = a.own + record_at(g, t, rank, a.rank, spot(g, number));
        const terms own(k, held >> a.rank & 1, n.starts[a.rank] + some.number_of(index, a.rank));
        sum_token(a, k, s, token, held, own, record);
        if (k.probs != nullptr) store_probs(a, k, token, held, own, record);
    };
    return sum_tokens(r, g, n, t, k.heads, k.tokens, mine, sum, [&](u32 token) { leave_nan(k, token, mine.step); });
}

extern "C" __global__ void __launch_bounds__(BOUND, RESIDENT)
by_expert_combine_kernel(const __grid_constant__ arguments a, const __grid_constant__ by_expert_sums_call k) {
    extern __shared__ uint4 memory[];
    begin_kernel<AT_END>(a);
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    stores::prepare();
    const counts n(k.counts, k.starts);
    const region_call g = with_words(a, k.region, k.probs == nullptr ? 0 : *k.most);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[a.rank][from]);
    if (!advance(a, t, flag_vectors(g, most), UPPER_VECTORS | OWN_TOO)) return leave_nan(k, grid_thread() / 32, grid_threads() / 32);

    // Warps of a block: some send, one raises flags, the others sum.
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    if (raises_flags(warp)) return stores::raise_flags();
    bool came;
    if (warp < RINGS) {
        stores copies(memory);
        came = send_sums(r, copies, stream(memory, warp), k, g, n, t);
        copies.finish();
    } else {
        constexpr u32 OTHERS = RINGS + 1;
        came = sum_tokens(r, k, stream(memory, warp - 1), g, n, t, share_of_warp(OTHERS, THREADS / 32 - OTHERS));
    }
    if (came && !__all_sync(WHOLE_WARP, r.finish())) leave_nan(k, 0, 1);
}
