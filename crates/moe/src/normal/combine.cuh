// Combine: rows back to their tokens, and their sums. Behind region.cuh and reduce.cuh.
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

// A sum that begins with the first that is added to it, so that a zero keeps its sign.
struct growing {
    wide_vec<T> elements;
    bool is_begun;

    DEVICE growing() : is_begun(false) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane) elements.lane[lane] = 0;
    }
    DEVICE void add(uint4 words) {
        vec16<T> v;
        v.words = words;
        const wide_vec<T> x = widen_vec(v);
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane)
            elements.lane[lane] = is_begun ? plus(elements.lane[lane], x.lane[lane]) : x.lane[lane];
        is_begun = true;
    }
};

// Warps of a block: those with a ring send, the others sum.
constexpr u32 SENDING = RINGS, SUMMING = THREADS / 32 - SENDING;
constexpr u32 AT_ONCE = WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1; // vectors that a lane has under way of each rank

// One token of this rank: where its rows are, and their sums.
struct token_sum {
    const arguments& a;
    const sums_call& k;
    u32 token;
    u32 held;               // a bit for each rank that has a row of it
    const u8* rows[WORLD];  // those

    DEVICE bool is_held(u32 rank) const { return held >> rank & 1; }

    DEVICE void store_elements(u32 at, const growing& sum) const {
        store16(k.output + (u64)token * k.row_bytes + at * 16, narrow_vec<T>(sum.elements).words);
    }
    // All elements.
    DEVICE void add_elements() const {
        const u32 vectors = k.row_bytes / 16;
        for (u32 first = lane_id(); first < vectors; first += 32 * AT_ONCE) {
            uint4 got[AT_ONCE][WORLD];
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n)
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank)
                    if (is_held(rank) && first + n * 32 < vectors) got[n][rank] = load16_volatile(rows[rank] + (first + n * 32) * 16);
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n) {
                const u32 at = first + n * 32;
                if (at >= vectors) break;
                growing sum;
                for (u32 bias = 0; bias < 2; ++bias)
                    if (k.bias[bias] != nullptr) sum.add(load16(k.bias[bias] + (u64)token * k.row_bytes + at * 16));
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank)
                    if (is_held(rank)) sum.add(got[n][rank]);
                store_elements(at, sum);
            }
        }
    }
    // Its weights, which lie behind the rows of peers.
    DEVICE void add_weights(u32 own) const {
        for (u32 i = lane_id(); i < k.top_k; i += 32) {
            float sum = 0;
            bool is_begun = false;
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                if (!is_held(rank)) continue;
                const u32 word = rank == a.rank ? k.weights[(u64)own * k.top_k + i] : ld_relaxed_sys((const u32*)(rows[rank] + k.row_bytes) + i);
                sum = is_begun ? sum + __uint_as_float(word) : __uint_as_float(word);
                is_begun = true;
            }
            k.to_weights[(u64)token * k.top_k + i] = __float_as_uint(canonical(sum));
        }
    }
};

// The warp's share of this rank's tokens.
DEVICE bool sum_tokens(reader& r, pipeline& copies, const sums_call& k, const turn& t, rows mine) {
    const arguments& a = r.a;
    for (u32 token = mine.first; token < k.tokens; token += mine.step) {
        token_sum sum{a, k, token, 0, {}};
        u32 own = 0;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 head = (u32)k.heads[(u64)token * WORLD + rank];
            if (head >= k.counts[a.rank * WORLD + rank]) continue; // -1 too
            sum.held |= 1u << rank;
            if (rank == a.rank) {
                own = k.starts[rank] + head;
                sum.rows[rank] = k.rows + (u64)own * k.row_bytes;
            } else {
                if (!wait_for_record(r, copies, k.region, t, rank, head)) return false;
                sum.rows[rank] = a.own + record_at(k.region, t, rank, a.rank, head);
            }
        }
        sum.add_elements();
        sum.add_weights(own);
        __syncwarp();
        if (lane_id() < PEERS) {
            const u32 peer = rank_of(a, lane_id()), head = (u32)k.heads[(u64)token * WORLD + peer];
            const u32 count = k.counts[a.rank * WORLD + peer];
            if (head < count && is_waited_for(k.region, head, count))
                red_add_release_sys((u32*)(a.peer[lane_id()] + count_at(a, k.region, t, a.rank, head)), 1u);
        }
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
combine(const __grid_constant__ arguments a, const __grid_constant__ sums_call k) {
    extern __shared__ uint4 memory[];
    pdl_wait();
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, k.counts[a.rank * WORLD + from]);
    advance(a, t, flag_vectors(k.region, most), 1);

    reader r(a, t);
    pipeline copies(memory);
    const u32 warp = threadIdx.x / 32;
    bool came;
    if (warp < SENDING) {
        const auto count = [&](u32 to) { return k.counts[to * WORLD + a.rank]; };
        const auto row = [&](u32 to, u32 number) { return k.starts[to] + number; };
        const auto weight = [&](u32, u32 row, u32 index) { return k.weights[(u64)row * k.top_k + index]; };
        came = send_records(r, copies, k.region, t, share_of_warp(0, SENDING), k.rows, k.row_bytes, k.top_k, count, row, weight);
    } else {
        came = sum_tokens(r, copies, k, t, share_of_warp(SENDING, SUMMING));
    }
    copies.drain();
    if (came) r.finish();
}
