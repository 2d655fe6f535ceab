// Combine by a routing map: a rank sums the rows of each token, and its source sums what the ranks send. Behind sums.cuh and
// choices.cuh.
//
// A record is a rounded sum with the probs of the token's choices at the sender, in the order of experts. Rows that are dropped are
// those of the last experts, so the probs of the others come first.

// Rust's `HybridSumsCall` has the same layout.
struct hybrid_sums_call {
    const u32* counts;  // as in notify.cuh, and so below
    const u32* starts;
    const i32* heads;
    const u32* most;
    const u32* all;     // as in choices.cuh
    const u8* number;
    const i32* places;  // as in dispatch.cuh
    const u8* rows;     // [rows, row_bytes]
    const u32* probs;   // [rows]; by token [rows, local]; null if there are none
    u8* output;         // [tokens, row_bytes]
    u32* to_probs;      // [tokens, WORLD, local]
    region_call region; // without what lies beside a row
    u32 tokens, row_bytes, local, is_by_token;
};

constexpr u32 MAX_LOCAL = 191;
constexpr u32 FENCED = 4; // records that a warp sends behind one fence

// What this rank has of a token: of each choice that was not dropped, in the order of experts, the place of its prob, which by
// expert is its row, too. Each warp has one.
struct terms {
    u32 (&places)[MAX_LOCAL];
    u32 count, token;

    static DEVICE u32 (&of_warp())[MAX_LOCAL] {
        __shared__ u32 all[THREADS / 32][MAX_LOCAL];
        return all[threadIdx.x / 32];
    }
    // Of a received token, if there is one.
    DEVICE terms(const hybrid_sums_call& k, bool is_one, u32 token) : places(of_warp()), count(0), token(token) {
        __syncwarp();
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
    DEVICE u32 rows(const hybrid_sums_call& k) const { return k.is_by_token ? min(count, 1) : count; }
    DEVICE u32 row(const hybrid_sums_call& k, u32 index) const { return k.is_by_token ? token : places[index]; }
    DEVICE u32 prob(const hybrid_sums_call& k, u32 index) const { return index < count ? __ldg(k.probs + places[index]) : 0; }

    // Some vectors, from `first` on by 32, of the rounded sum.
    template <u32 COUNT> DEVICE void sum(const hybrid_sums_call& k, u32 first, u32 vectors, uint4 (&result)[COUNT]) const {
        growing sums[COUNT];
#pragma unroll 2
        for (u32 index = 0; index < rows(k); ++index) {
            const u8* at = k.rows + (u64)row(k, index) * k.row_bytes;
#pragma unroll
            for (u32 m = 0; m < COUNT; ++m)
                if (first + m * 32 < vectors) sums[m].add(load16(at + (first + m * 32) * 16));
        }
#pragma unroll
        for (u32 m = 0; m < COUNT; ++m) result[m] = narrow_vec<T>(sums[m].elements).words;
    }
};

// Flags of records that a warp has sent, and which it raises behind a fence.
struct unraised {
    struct shared {
        u32* flags[FENCED];
        u32 values[FENCED];
    };
    u32 count;

    static DEVICE shared& of_warp() {
        __shared__ shared all[THREADS / 32];
        return all[threadIdx.x / 32];
    }
    DEVICE unraised() : count(0) {}
    DEVICE void add(u32* flag, u32 value) {
        if (lane_id() == 0) of_warp().flags[count] = flag, of_warp().values[count] = value;
        if (++count == FENCED) drain();
    }
    DEVICE void drain() {
        __syncwarp();
        if (lane_id() == 0 && count != 0) {
            fence_sys(); // pairs with the receivers' acquires of the flags
            for (u32 i = 0; i < count; ++i) st_relaxed_sys(of_warp().flags[i], of_warp().values[i]);
        }
        count = 0;
        __syncwarp();
    }
    DEVICE void see() {}
};

// Sends the warp's share of what this rank has of peers' tokens.
DEVICE bool send_sums(reader& r, const hybrid_sums_call& k, const region_call& g, const counts& n, const turn& t, rows mine) {
    const arguments& a = r.a;
    const u32 vectors = k.row_bytes / 16, probs = k.probs == nullptr ? 0 : *k.most;
    u32 most = 0;
    for (u32 next = 0; next < PEERS; ++next) most = max(most, n.rows[rank_of(a, next)][a.rank]);
    unraised flags;
    for (u32 i = mine.first; i < most * PEERS; i += mine.step) {
        const u32 next = i % PEERS, to = rank_of(a, next), number = i / PEERS;
        if (number >= n.rows[to][a.rank]) continue;
        const terms its(k, true, n.starts[to] + number);
        if (!wait_for_place(r, flags, g, t, to, number)) return false;
        u8* place = a.peer[next] + record_at(g, t, a.rank, to, number);
        for (u32 first = lane_id(); first < vectors; first += 128) {
            uint4 sum[4];
            its.sum(k, first, vectors, sum);
#pragma unroll
            for (u32 m = 0; m < 4; ++m)
                if (first + m * 32 < vectors) store16(place + (first + m * 32) * 16, sum[m]);
        }
        for (u32 index = lane_id(); index < probs; index += 32) *((u32*)(place + k.row_bytes) + index) = its.prob(k, index);
        flags.add((u32*)(a.peer[next] + flag_at(a, g, t, a.rank, number)), round_of(g, number));
    }
    flags.drain();
    return true;
}

// Where the record of a rank's part of a token is; null for none, and for this rank's own.
DEVICE const u8* record_of(const arguments& a, const hybrid_sums_call& k, const region_call& g, const counts& n, const turn& t, u32 token, u32 rank) {
    const u32 head = (u32)k.heads[(u64)token * WORLD + rank];
    return rank == a.rank || head >= n.rows[a.rank][rank] ? nullptr : a.own + record_at(g, t, rank, a.rank, head); // -1 too
}

// The warp's share of this rank's tokens.
DEVICE bool sum_tokens(reader& r, const hybrid_sums_call& k, const region_call& g, const counts& n, const turn& t, rows mine) {
    const arguments& a = r.a;
    const choices c{k.all, k.number, k.local};
    const u32 vectors = k.row_bytes / 16, experts = WORLD * k.local;
    for (u32 token = mine.first; token < k.tokens; token += mine.step) {
        if (!r.wait<true>([&](u32& missing) { return are_there(a, k.heads, g, n, t, token, missing); })) return false;
        const u32 held = held_of(a, k.heads, n, token);
        const u8* records[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) records[rank] = record_of(a, k, g, n, t, token, rank);
        const terms own(k, held >> a.rank & 1, n.starts[a.rank] + (u32)k.heads[(u64)token * WORLD + a.rank]);
        for (u32 first = lane_id(); first < vectors; first += 32 * AT_ONCE) {
            uint4 mine_of[AT_ONCE], got[AT_ONCE][WORLD];
            own.sum(k, first, vectors, mine_of);
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m)
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank)
                    if (records[rank] != nullptr && first + m * 32 < vectors) got[m][rank] = load16_volatile(records[rank] + (first + m * 32) * 16);
#pragma unroll
            for (u32 m = 0; m < AT_ONCE; ++m) {
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
hybrid_combine(const __grid_constant__ arguments a, const __grid_constant__ hybrid_sums_call k) {
    pdl_wait();
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    const counts n(k.counts, k.starts);
    const region_call g = with_words(a, k.region, k.probs == nullptr ? 0 : *k.most);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[a.rank][from]);
    advance(a, t, flag_vectors(g, most), 1);

    // Warps of a block: some send, the others sum.
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    const bool came = warp < SENDING ? send_sums(r, k, g, n, t, share_of_warp(0, SENDING))
                                     : sum_tokens(r, k, g, n, t, share_of_warp(SENDING, THREADS / 32 - SENDING));
    if (came) r.finish();
}
