// Combine from slots: moves the experts' rows back to the tokens' ranks, and computes the weighted sums. Included behind logfmt.cuh.
//
// Each choice of a token has a place for a row at the token's rank, from the first lower lane on: choice token · K + k. The rank that
// has received a row empties its place.
//
// FORMAT: rows travel as bf16 (0) or in LogFMT (1). All rows of a sum are of the format, also those of the rank itself, so that sums do not
// depend on where experts are.

constexpr u32 AT_ONCE = 4;               // vectors of a row that a lane sends at once
constexpr u32 GROUP = IS_LOGFMT ? 4 : 8; // rows that are waited for together

DEVICE u32 row_at(const arguments& a, const slot_call& k, u32 slot, u32 choice) {
    return lane_at(a, slot, 0) + choice * k.hidden * 2;
}

// Whether a row comes to the place of choice k: from another rank, or in a split call from this one.
DEVICE bool has_own_place(i32 place, u32 k) {
    return place <= ELSEWHERE ? (u32)(ELSEWHERE - place) % 32 == k : IS_SPLIT && place >= 0;
}

// Where a kernel does both, some warps of a block send and the others receive, so that a token is summed while later ones travel.
constexpr u32 WARPS = THREADS / 32, SENDERS = !SENDS ? 0 : RECEIVES ? WARPS / 3 : WARPS, RECEIVERS = WARPS - SENDERS;

DEVICE void send_rows(const arguments& a, const turn& t, const slot_call& k, u32 warp, u32 step) {
    u32 most = 0;
#pragma unroll
    for (u32 to = 0; to < TARGETS; ++to) most = max(most, k.held_tokens[rank_of(a, to)]);
    const u32 of_row = k.hidden / 8, parts = (of_row + 32 * AT_ONCE - 1) / (32 * AT_ONCE);
    const u32 to_send = most * k.top_k * TARGETS * parts;
    const auto place_of = [&](u32 item) {
        const u32 choice = item / parts / at_least_one(TARGETS), to = rank_of(a, item / parts % at_least_one(TARGETS));
        const bool is_one = item < to_send && choice < k.held_tokens[to] * k.top_k;
        return is_one ? k.places[(u64)to * k.most_tokens * k.top_k + choice] : NOWHERE;
    };
    i32 next = place_of(warp);
    for (u32 item = warp; item < to_send; item += step) {
        const u32 part = item % parts, target = item / parts % at_least_one(TARGETS), choice = item / parts / at_least_one(TARGETS);
        const i32 row = next;
        next = place_of(item + step);
        if (row < 0) continue;
        const u8* rows = k.x + (u64)row * of_row * 16;
        u8* place = arena_of(a, target) + row_at(a, k, t.slot, choice);
        uint4 v[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; ++n) {
            const u32 at = (part * AT_ONCE + n) * 32 + lane_id();
            if (IS_LOGFMT) v[n] = make_uint4(0, 0, 0, 0);
            if (at < of_row) v[n] = load16(rows + at * 16);
        }
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; ++n) {
            const u32 at = (part * AT_ONCE + n) * 32 + lane_id();
            bool sends = true;
            const uint4 sent = IS_LOGFMT ? coded(v[n], sends) : without_empty(v[n]);
            if (at < of_row && sends) store16_volatile(place + at * 16, sent);
        }
    }
}

// Sums that a call cannot make are NaN, so that their users notice: the warp's share, or ALL. Of the whole warp. Not inlined, and given
// what is in memory anyway, so that it costs no registers.
template <bool ALL> static __device__ __noinline__ void leave_nan(u8* sums, u32 tokens, u32 hidden) {
    if (sums == nullptr) return;
    const u32 of_row = hidden / 8, pieces = (of_row + 31) / 32, nan = 0x7FC07FC0u;
    const u32 first = ALL ? 0 : threadIdx.x / 32 * gridDim.x + blockIdx.x, step = ALL ? 1 : RECEIVERS * gridDim.x;
    for (u32 item = first; item < tokens * pieces; item += step) {
        const u32 at = item % pieces * 32 + lane_id();
        if (at < of_row) store16(sums + ((u64)(item / pieces) * of_row + at) * 16, make_uint4(nan, nan, nan, nan));
    }
}

// Profilers show the kernel by this name, and tools that were made for DeepEP look for "::combine" there.
namespace slots {
__global__ void __launch_bounds__(BOUND, RESIDENT)
combine(const __grid_constant__ arguments a, const __grid_constant__ slot_call k) {
    begin_kernel<AT_END>(a);
    const block_end end(a, SENDS);
    const u32 lane = lane_id(), of_row = k.hidden / 8, mine = threadIdx.x / 32;
    const turn t = begin_phase(a, load_control(a));
    if (!begins(a, t, 0, 0)) {
        if (RECEIVES) leave_nan<false>(k.to_x, k.tokens, k.hidden);
        return;
    }
    // Neighbours are on different multiprocessors.
    if (mine + SENDERS >= WARPS) return send_rows(a, t, k, (mine - RECEIVERS) * gridDim.x + blockIdx.x, SENDERS * gridDim.x);

    const u32 warp = mine * gridDim.x + blockIdx.x, step = RECEIVERS * gridDim.x;
    reader r(a, t);
    time_waits(a, r, k);
    const u32 pieces = (of_row + 31) / 32;
    for (u32 item = warp; item < k.tokens * pieces; item += step) {
        const u32 token = item / pieces, at = item % pieces * 32 + lane;
        // A lane has a choice.
        i32 my_place = NOWHERE;
        float my_weight = 0;
        bool counts = false;
        if (lane < k.top_k) {
            const u32 choice = token * k.top_k + lane;
            my_place = k.places[((u64)a.rank * k.most_tokens) * k.top_k + choice];
            if (!discards(k)) {
                my_weight = k.weights[choice];
                counts = own_entry(k, choice) != 0;
            }
        }
        const u32 counting = __ballot_sync(WHOLE_WARP, counts);
        float sum[8];
#pragma unroll
        for (u32 n = 0; n < 8; ++n) sum[n] = 0;
        for (u32 first = 0; first < k.top_k; first += GROUP) {
            uint4 got[GROUP];
            u32 is_sent = 0, is_here = 0;
            u32 from[GROUP]; // bytes from the start of the arena, and in the lowest four bits the rank
#pragma unroll
            for (u32 n = 0; n < GROUP; ++n) {
                const i32 place = __shfl_sync(WHOLE_WARP, my_place, first + n);
                if (IS_LOGFMT) got[n] = make_uint4(0, 0, 0, 0);
                if (first + n >= k.top_k || at >= of_row) continue;
                if (place >= 0 && IS_SPLIT) {
                    is_sent |= 1u << n;
                    from[n] = row_at(a, k, t.slot, token * k.top_k + first + n) + at * 16 | a.rank;
                } else if (place >= 0) {
                    is_here |= 1u << n;
                    got[n] = load16(k.x + ((u64)place * of_row + at) * 16);
                } else if (place <= ELSEWHERE) {
                    is_sent |= 1u << n;
                    const u32 where = ELSEWHERE - place;
                    from[n] = row_at(a, k, t.slot, token * k.top_k + where % 32) + at * 16 | where / 32;
                }
            }
            const bool came = r.wait<true>([&](u32& missing) {
                bool complete = true;
#pragma unroll
                for (u32 n = 0; n < GROUP; ++n)
                    if (is_sent >> n & 1) got[n] = load16_volatile(a.own + (from[n] & ~15u));
#pragma unroll
                for (u32 n = 0; n < GROUP; ++n) {
                    const bool is_needed = !IS_LOGFMT || !is_block_coded(got[n]) || lane_of_half() <= SCALE_LANE;
                    if ((is_sent >> n & 1) && is_needed && has_empty(got[n])) {
                        complete = false;
                        missing = from[n] & 15;
                    }
                }
                return complete;
            });
            if (!came) return leave_nan<false>(k.to_x, k.tokens, k.hidden);
            u32 here = is_here, there = is_sent;
            if (IS_LOGFMT) { // a whole warp decodes, and its first lane is never beyond a row
                here = __shfl_sync(WHOLE_WARP, here, 0);
                there = __shfl_sync(WHOLE_WARP, there, 0);
            }
#pragma unroll
            for (u32 n = 0; n < GROUP; ++n) {
                const float weight = __shfl_sync(WHOLE_WARP, my_weight, first + n);
                if (!((there | here) >> n & counting >> (first + n) & 1)) continue;
                bool sends;
                if (IS_LOGFMT && (here >> n & 1)) got[n] = coded(got[n], sends);
                vec16<bf16> v;
                v.words = got[n];
                const wide_vec<bf16> x = IS_LOGFMT ? decoded(got[n]) : widen_vec(v);
#pragma unroll
                for (u32 of = 0; of < 8; ++of) sum[of] = plus(sum[of], times(weight, x.lane[of]));
            }
        }
        wide_vec<bf16> sums;
#pragma unroll
        for (u32 n = 0; n < 8; ++n) sums.lane[n] = sum[n];
        if (at < of_row && !discards(k)) store16(k.to_x + ((u64)token * of_row + at) * 16, narrow_vec<bf16>(sums).words);
        // When all is read: a row may be of two choices.
        for (u32 n = 0; n < k.top_k; ++n)
            if (has_own_place(__shfl_sync(WHOLE_WARP, my_place, n), n) && at < of_row)
                store16(a.own + row_at(a, k, t.slot, token * k.top_k + n) + at * 16,
                        make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    }
    if (!__all_sync(WHOLE_WARP, r.finish())) leave_nan<true>(k.to_x, k.tokens, k.hidden);
}
} // namespace slots
