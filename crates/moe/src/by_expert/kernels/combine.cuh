// Combine by a routing map: a rank sums the rows of each token, and its source sums what the ranks send. Behind sums.cuh and
// choices.cuh.
//
// A record is a rounded sum with the probs of the token's choices at the sender, in the order of experts. Rows that are dropped are
// those of the last experts, so the probs of the others come first.

// Rust's `ByExpertSumsCall` has the same layout.
struct by_expert_sums_call {
    const u32* counts;  // as in notify.cuh, and so below
    const u32* starts;
    const i32* heads;
    const u32* most;
    const u32* all;     // as in choices.cuh
    const u16* number;
    const i32* places;  // as in dispatch.cuh
    const u8* rows;     // [rows, row_bytes]
    const u32* probs;   // [rows]; by token [rows, local]; null if there are none
    u8* output;         // [tokens, row_bytes]
    u32* to_probs;      // [tokens, WORLD, local]
    region_call region; // without what lies beside a row
    u32 tokens, row_bytes, local, is_by_token;
};

constexpr u32 VECTORS = 2; // that a lane has under way of each row
constexpr u32 SUMMED = WORLD <= 2 ? 2 : 1; // of each row and record, where it sums what ranks send
constexpr u32 TERMS = 4;   // rows that are under way

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

    // Some vectors, from `first` on by 32, of the rounded sum; vectors from `end` on are undefined. -0 is the start that keeps the
    // sign of any first term.
    template <u32 COUNT> DEVICE void sum(const by_expert_sums_call& k, u32 first, u32 end, uint4 (&result)[COUNT]) const {
        wide_vec<T> sums[COUNT];
        const u32 terms = rows(k);
#pragma unroll
        for (u32 m = 0; m < COUNT; ++m)
#pragma unroll
            for (u32 lane = 0; lane < LANES; ++lane) sums[m].lane[lane] = terms == 0 ? 0.0f : -0.0f;
#pragma unroll 1
        for (u32 index = 0; index < terms; index += TERMS) {
            vec16<T> got[TERMS][COUNT];
#pragma unroll
            for (u32 d = 0; d < TERMS; ++d) {
                if (index + d >= terms) continue;
                const u8* at = k.rows + (u64)row(k, index + d) * k.row_bytes;
#pragma unroll
                for (u32 m = 0; m < COUNT; ++m)
                    if (first + m * 32 < end) got[d][m].words = load16(at + (first + m * 32) * 16);
            }
#pragma unroll
            for (u32 d = 0; d < TERMS; ++d) {
                if (index + d >= terms) continue;
#pragma unroll
                for (u32 m = 0; m < COUNT; ++m) {
                    const wide_vec<T> x = widen_vec(got[d][m]);
#pragma unroll
                    for (u32 lane = 0; lane < LANES; ++lane) sums[m].lane[lane] = plus(sums[m].lane[lane], x.lane[lane]);
                }
            }
        }
#pragma unroll
        for (u32 m = 0; m < COUNT; ++m) result[m] = narrow_vec<T>(sums[m]).words;
    }
};

DEVICE u32 padded_words(u32 words) { return (words + 3) / 4 * 4; }

// Sends what this rank has of peers' tokens.
DEVICE bool send_sums(reader& r, pipeline& copies, const by_expert_sums_call& k, const region_call& g, const counts& n, const turn& t) {
    const arguments& a = r.a;
    const u32 probs = k.probs == nullptr ? 0 : *k.most;
    u32 piece = 0;
    const auto send = [&](u32 next, u32 number) {
        const terms its(k, true, n.starts[rank_of(a, next)] + number);
        u8* place = a.peer[next] + record_at(g, t, a.rank, rank_of(a, next), number);
        const signals after{(u32*)(a.peer[next] + flag_at(a, g, t, a.rank, number)), nullptr, round_of(g, number)};
        for (u32 at = 0; at < k.row_bytes; at += STAGE_BYTES, ++piece) {
            const u32 size = min(STAGE_BYTES, k.row_bytes - at), end = (at + size) / 16;
            u8* written = copies.piece_for(place + at, piece);
            for (u32 first = at / 16 + lane_id(); first < end; first += 32 * VECTORS) {
                uint4 sum[VECTORS];
                its.sum(k, first, end, sum);
#pragma unroll
                for (u32 m = 0; m < VECTORS; ++m)
                    if (first + m * 32 < end) *(uint4*)(written + (first + m * 32) * 16 - at) = sum[m];
            }
            copies.copy_piece(place + at, piece, size, probs == 0 && at + size == k.row_bytes ? after : NO_SIGNALS);
        }
        if (probs == 0) return;
        copies.before_gathering();
        for (u32 index = lane_id(); index < padded_words(probs); index += 32) ((u32*)copies.gathered)[index] = its.prob(k, index);
        copies.after_gathering();
        copies.copy_gathered(place + k.row_bytes, 0, padded_words(probs) * 4, after);
    };
    return send_as_places_are_free(r, copies, g, t, [&](u32 to) { return n.rows[to][a.rank]; }, [&](u32 ready, u32 number) {
        for (u32 left = ready; left != 0; left &= left - 1) {
            const u32 next = __ffs(left) - 1;
            send(next, __shfl_sync(WHOLE_WARP, number, next));
        }
    });
}

// Where the record of a rank's part of a token is; null for none, and for this rank's own.
DEVICE const u8* record_of(const arguments& a, const by_expert_sums_call& k, const region_call& g, const counts& n, const turn& t, u32 token, u32 rank) {
    const u32 head = (u32)k.heads[(u64)token * WORLD + rank];
    return rank == a.rank || head >= n.rows[a.rank][rank] ? nullptr : a.own + record_at(g, t, rank, a.rank, head); // -1 too
}

// Writes NaN as the sums of every `step`-th token from `first` on.
DEVICE void leave_nan(const by_expert_sums_call& k, u32 first, u32 step) {
    leave_nan(k.output, k.row_bytes, k.probs == nullptr ? nullptr : k.to_probs, WORLD * k.local, first, step, k.tokens);
}

// The warp's share of this rank's tokens.
DEVICE bool sum_tokens(reader& r, const by_expert_sums_call& k, const region_call& g, const counts& n, const turn& t, rows mine) {
    const arguments& a = r.a;
    const choices c{k.all, k.number, k.local};
    const u32 vectors = k.row_bytes / 16, experts = WORLD * k.local;
    for (u32 token = mine.first; token < k.tokens; token += mine.step) {
        if (!wait_for_rows(r, k.heads, g, n, t, token)) {
            leave_nan(k, token, mine.step);
            return false;
        }
        const u32 held = held_of(a, k.heads, n, token);
        const u8* records[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) records[rank] = record_of(a, k, g, n, t, token, rank);
        const terms own(k, held >> a.rank & 1, n.starts[a.rank] + (u32)k.heads[(u64)token * WORLD + a.rank]);
        for (u32 first = lane_id(); first < vectors; first += 32 * SUMMED) {
            uint4 mine_of[SUMMED], got[SUMMED][WORLD];
            own.sum(k, first, vectors, mine_of);
#pragma unroll
            for (u32 m = 0; m < SUMMED; ++m)
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank)
                    if (records[rank] != nullptr && first + m * 32 < vectors) got[m][rank] = load16_volatile(records[rank] + (first + m * 32) * 16);
#pragma unroll
            for (u32 m = 0; m < SUMMED; ++m) {
                growing sum;
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank)
                    if (held >> rank & 1) sum.add(rank == a.rank ? mine_of[m] : got[m][rank]);
                if (first + m * 32 < vectors)
                    store16(k.output + (u64)token * k.row_bytes + (first + m * 32) * 16, narrow_vec<T>(sum.elements).words);
            }
        }
        if (k.probs != nullptr) {
            u32* to = k.to_probs + (u64)token * experts;
            for (u32 i = lane_id(); i < experts; i += 32) to[i] = 0;
            __syncwarp();
            for (u32 rank = 0; rank < WORLD; ++rank) {
                const u8* record = record_of(a, k, g, n, t, token, rank);
                const u32 number = held >> rank & 1 ? c.number[(u64)token * WORLD + rank] : 0;
                for (u32 i = lane_id(); i < number; i += 32)
                    to[rank * k.local + expert_of(c.at(token, rank, i))] =
                        record == nullptr ? own.prob(k, i) : ld_relaxed_sys((const u32*)(record + k.row_bytes) + i);
            }
        }
        count_read(a, k.heads, g, n, t, token);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
by_expert_combine_kernel(const __grid_constant__ arguments a, const __grid_constant__ by_expert_sums_call k) {
    extern __shared__ uint4 memory[];
    pdl_wait();
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    pipeline::prepare();
    const counts n(k.counts, k.starts);
    const region_call g = with_words(a, k.region, k.probs == nullptr ? 0 : *k.most);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[a.rank][from]);
    if (!advance(a, t, flag_vectors(g, most), UPPER_VECTORS | OWN_TOO)) return leave_nan(k, grid_thread() / 32, grid_threads() / 32);

    // Warps of a block: some send, one raises flags, the others sum.
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    if (raises_flags(warp)) return pipeline::raise_flags();
    bool came;
    if (warp < SENDING) {
        pipeline copies(memory);
        came = send_sums(r, copies, k, g, n, t);
        copies.finish();
    } else {
        constexpr u32 OTHERS = RINGS + FLAG_WARPS;
        came = sum_tokens(r, k, g, n, t, share_of_warp(OTHERS, THREADS / 32 - OTHERS));
    }
    if (came && !__all_sync(WHOLE_WARP, r.finish())) leave_nan(k, 0, 1);
}
