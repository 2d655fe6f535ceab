// Combine: rows back to their tokens, and their sums. Behind rows.cuh and reduce.cuh.
//
// A record is a row with its weights. Those that a rank has for a source go to the source's lane of it in order, so that the
// source knows where each of its tokens' is. `a.root` is the first token of this launch, on every rank, `a.count` how many
// there may be.

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
    u32 tokens, row_bytes, top_k;
    u32 most_tokens;    // of any rank
};

// How many of an ascending list are before `token`.
DEVICE u32 before(const u32* list, u32 count, u32 token, u32 tokens) {
    if (token == 0) return 0;
    if (token >= tokens) return count;
    u32 first = 0;
    while (count > 0) {
        const u32 half = count / 2;
        if (list[first + half] < token) first += half + 1, count -= half + 1;
        else count = half;
    }
    return first;
}

DEVICE uint4 sum_words(uint4 a, uint4 b) {
    const auto sum = [](u32 x, u32 y) { return __float_as_uint(__uint_as_float(x) + __uint_as_float(y)); };
    return make_uint4(sum(a.x, b.x), sum(a.y, b.y), sum(a.z, b.z), sum(a.w, b.w));
}
DEVICE uint4 canonical_words(uint4 v) {
    const auto one = [](u32 x) { return __float_as_uint(canonical(__uint_as_float(x))); };
    return make_uint4(one(v.x), one(v.y), one(v.z), one(v.w));
}

// A sum that begins with the first that is added to it, so that a zero keeps its sign. Of elements, or of weights.
struct growing {
    wide_vec<T> elements;
    uint4 weights;
    bool is_begun;

    DEVICE growing() : weights(make_uint4(0, 0, 0, 0)), is_begun(false) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane) elements.lane[lane] = 0;
    }
    DEVICE void add(uint4 words, bool of_weights) {
        if (of_weights) {
            weights = is_begun ? sum_words(weights, words) : words;
        } else {
            vec16<T> v;
            v.words = words;
            const wide_vec<T> x = widen_vec(v);
#pragma unroll
            for (u32 lane = 0; lane < LANES; ++lane)
                elements.lane[lane] = is_begun ? plus(elements.lane[lane], x.lane[lane]) : x.lane[lane];
        }
        is_begun = true;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
combine(const __grid_constant__ arguments a, const __grid_constant__ sums_call k) {
    // Of this launch's tokens: how many of this rank's rows for each source come before and with them, and how many of this
    // rank's tokens on each rank.
    __shared__ u32 of_rows[2][WORLD], of_tokens[2][WORLD];
    pdl_wait();
    const u32 end = a.root + a.count;
    if (threadIdx.x < 2 * WORLD) {
        const u32 edge = threadIdx.x / WORLD, other = threadIdx.x % WORLD, token = edge == 0 ? a.root : end;
        of_rows[edge][other] =
            before(k.sources + k.starts[other], k.counts[other * WORLD + a.rank], token, k.most_tokens);
        of_tokens[edge][other] =
            before(k.order + (u64)other * k.tokens, k.counts[a.rank * WORLD + other], token, k.tokens);
    }
    __syncthreads();
    const u32 of_row = k.row_bytes / 16, vectors = of_row + (k.top_k + 3) / 4, chunks = (vectors + ROW - 1) / ROW;
    // This lane's vector of a chunk, or `vectors`.
    const auto place = [&](u32 chunk) {
        const u32 index = chunk * ROW + lane_id();
        return lane_id() < ROW && index < vectors ? index : vectors;
    };
    const auto load_row = [&](u32 row, u32 at) {
        if (at < of_row) return load16(k.rows + (u64)row * k.row_bytes + at * 16);
        const u32 word = (at - of_row) * 4;
        const auto weight = [&](u32 index) { return at < vectors && index < k.top_k ? k.weights[(u64)row * k.top_k + index] : 0; };
        return make_uint4(weight(word), weight(word + 1), weight(word + 2), weight(word + 3));
    };

    const u32 next = blockIdx.x % PEERS, peer = rank_of(a, next);
    const rows mine = rows_of_warp(blockIdx.x / PEERS, gridDim.x / PEERS);
    const u32 first = k.starts[peer] + of_rows[0][peer];
    const auto load = [&](u32 i) { return load_row(first + i / chunks, place(i % chunks)); };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(a.peer[next] + lane_at(a, t.slot, a.rank) + (i * 32 + lane_id()) * 16, masked(v));
    };
    turn t;
    const u32 sent = (of_rows[1][peer] - of_rows[0][peer]) * chunks;
    if (!begin_and_send<DEPTH, DEPTH, true>(a, t, mine.first, mine.step, sent, load, send)) return;
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, of_tokens[1][from] - of_tokens[0][from]);
    advance(a, t, most * chunks * 32, 0);

    reader r(a, t);
    const rows all = rows_of_warp(blockIdx.x, gridDim.x);
    const u32 tokens = min(end, k.tokens) > a.root ? min(end, k.tokens) - a.root : 0;
    const u8* slot = a.own + lane_at(a, t.slot, 0) + lane_id() * 16;
    for (u32 i = all.first; i < tokens * chunks; i += all.step) {
        const u32 token = a.root + i / chunks, chunk = i % chunks, at = place(chunk);
        u32 held = 0, row[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const i32 head = k.heads[(u64)token * WORLD + rank];
            if (0 <= head && (u32)head < k.counts[a.rank * WORLD + rank]) held |= 1u << rank;
            row[rank] = (u32)head - of_tokens[0][rank];
        }
        uint4 got[WORLD];
        const u32 sent_here = held & ~(1u << a.rank);
        const bool came = r.wait<true>([&](u32& missing) {
            bool complete = true;
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank)
                if (sent_here >> rank & 1)
                    got[rank] = load16_volatile(slot + rank * a.lane_stride + (row[rank] * chunks + chunk) * 512);
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank)
                if ((sent_here >> rank & 1) && has_empty(got[rank])) {
                    complete = false;
                    missing = rank;
                }
            return complete;
        });
        if (!came) return;
        const bool of_weights = at >= of_row;
        growing sum;
        for (u32 n = 0; n < 2; ++n)
            if (k.bias[n] != nullptr && !of_weights) sum.add(load16(k.bias[n] + (u64)token * k.row_bytes + at * 16), false);
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            if (rank == a.rank && (held >> rank & 1))
                sum.add(load_row(k.starts[rank] + (u32)k.heads[(u64)token * WORLD + rank], at), of_weights);
            if (sent_here >> rank & 1) sum.add(unmasked(got[rank]), of_weights);
        }
        if (!of_weights) {
            store16(k.output + (u64)token * k.row_bytes + at * 16, narrow_vec<T>(sum.elements).words);
        } else if (at < vectors) {
            const uint4 words = canonical_words(sum.weights);
            const u32 word = (at - of_row) * 4, values[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (u32 n = 0; n < 4; ++n)
                if (word + n < k.top_k) k.to_weights[(u64)token * k.top_k + word + n] = values[n];
        }
    }
    r.finish();
}
