// Dispatch: the tokens of every rank to where a handle says. Behind rows.cuh.
//
// A record is a token's row with what travels beside it: the token's number, its experts as the receiving rank numbers them, their
// weights, its scales. Records go as rows of 31 vectors to the receiver's lane of this rank, in order, so that a receiver
// knows of every vector where it belongs. `a.root` is the first record of each pair of ranks in this launch, `a.count` how many
// there may be.

// Rust's `RowsCall` has the same layout.
struct rows_call {
    const u32* counts; // as in notify.cuh, and so below
    const u32* starts;
    const u32* order;
    u32* sources;      // [N]: the token of each received row
    const u8* x;       // [tokens, row_bytes]
    const u32* scales; // [tokens, scales_of_row]
    const u8* ids;     // [tokens, top_k]; null if there are none
    const u32* weights;
    u8* to_x;          // [N, row_bytes], and so on
    u32* to_scales;
    u8* to_ids;
    u32* to_weights;
    u32 tokens, row_bytes, scales_of_row, top_k, id_bytes, local;
};

// How a record is cut.
struct record {
    u32 of_row, vectors, chunks;

    DEVICE record(const rows_call& k) : of_row(k.row_bytes / 16) {
        vectors = of_row + (1 + 2 * k.top_k + k.scales_of_row + 3) / 4;
        chunks = (vectors + ROW - 1) / ROW;
    }
    // This lane's vector of a chunk, or `vectors`.
    DEVICE u32 mine(u32 chunk) const {
        const u32 index = chunk * ROW + lane_id();
        return lane_id() < ROW && index < vectors ? index : vectors;
    }
};

// A token's choice as `rank` numbers its experts; -1 where it is another's.
DEVICE i32 choice_of(const rows_call& k, u32 rank, u64 index) {
    const i64 id = k.id_bytes == 8 ? ((const i64*)k.ids)[index] : (i64)((const i32*)k.ids)[index];
    const i64 here = id - (i64)rank * k.local;
    return 0 <= here && here < k.local ? (i32)here : -1;
}

// A word of what travels beside a row.
DEVICE u32 word_beside(const rows_call& k, u32 rank, u32 token, u32 word) {
    if (word == 0) return token;
    word -= 1;
    if (word < 2 * k.top_k) {
        const bool is_id = word < k.top_k;
        const u64 index = (u64)token * k.top_k + (is_id ? word : word - k.top_k);
        const i32 choice = choice_of(k, rank, index);
        return is_id ? (u32)choice : choice < 0 ? 0 : k.weights[index];
    }
    word -= 2 * k.top_k;
    return word < k.scales_of_row ? k.scales[(u64)token * k.scales_of_row + word] : 0;
}

DEVICE void store_beside(const rows_call& k, u32 row, u32 word, u32 value) {
    if (word == 0) k.sources[row] = value;
    else if (word < 1 + k.top_k) {
        const u64 index = (u64)row * k.top_k + word - 1;
        if (k.id_bytes == 8) ((i64*)k.to_ids)[index] = (i32)value;
        else ((i32*)k.to_ids)[index] = (i32)value;
    } else if (word < 1 + 2 * k.top_k) k.to_weights[(u64)row * k.top_k + word - 1 - k.top_k] = value;
    else if (word < 1 + 2 * k.top_k + k.scales_of_row)
        k.to_scales[(u64)row * k.scales_of_row + word - 1 - 2 * k.top_k] = value;
}

DEVICE uint4 load_record(const rows_call& k, const record& shape, u32 rank, u32 token, u32 chunk) {
    const u32 at = shape.mine(chunk);
    if (at < shape.of_row) return load16(k.x + (u64)token * k.row_bytes + at * 16);
    if (at == shape.vectors) return make_uint4(0, 0, 0, 0);
    const u32 word = (at - shape.of_row) * 4;
    return make_uint4(word_beside(k, rank, token, word), word_beside(k, rank, token, word + 1),
                      word_beside(k, rank, token, word + 2), word_beside(k, rank, token, word + 3));
}

DEVICE void store_record(const rows_call& k, const record& shape, u32 row, u32 chunk, uint4 v) {
    const u32 at = shape.mine(chunk);
    if (at < shape.of_row) return store16(k.to_x + (u64)row * k.row_bytes + at * 16, v);
    if (at == shape.vectors) return;
    const u32 word = (at - shape.of_row) * 4;
    store_beside(k, row, word, v.x);
    store_beside(k, row, word + 1, v.y);
    store_beside(k, row, word + 2, v.z);
    store_beside(k, row, word + 3, v.w);
}

constexpr u32 AT_ONCE = 4; // chunks that a warp has under way

// Each block serves one peer: it sends to it, and stores what comes from it.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dispatch(const __grid_constant__ arguments a, const __grid_constant__ rows_call k) {
    pdl_wait();
    const u32 next = blockIdx.x % PEERS, peer = rank_of(a, next);
    const record shape(k);
    // Records from rank to rank in this launch.
    const auto records = [&](u32 from, u32 to) {
        const u32 all = k.counts[from * WORLD + to];
        return all > a.root ? min(all - a.root, a.count) : 0;
    };
    const rows mine = rows_of_warp(blockIdx.x / PEERS, gridDim.x / PEERS);
    const auto load = [&](u32 i) {
        const u32 token = k.order[(u64)peer * k.tokens + a.root + i / shape.chunks];
        return load_record(k, shape, peer, token, i % shape.chunks);
    };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(a.peer[next] + lane_at(a, t.slot, a.rank) + (i * 32 + lane_id()) * 16, masked(v));
    };
    turn t;
    const u32 sent = records(a.rank, peer) * shape.chunks;
    if (!begin_and_send<AT_ONCE, AT_ONCE, true>(a, t, mine.first, mine.step, sent, load, send)) return;
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, records(from, a.rank));
    advance(a, t, most * shape.chunks * 32, 0);

    const rows own = rows_of_warp(blockIdx.x, gridDim.x);
    for (u32 i = own.first; i < records(a.rank, a.rank) * shape.chunks; i += own.step) {
        const u32 number = a.root + i / shape.chunks, token = k.order[(u64)a.rank * k.tokens + number];
        const uint4 v = load_record(k, shape, a.rank, token, i % shape.chunks);
        store_record(k, shape, k.starts[a.rank] + number, i % shape.chunks, v);
    }

    reader r(a, t);
    const u32 lane = peer * a.lane_stride, start = k.starts[peer] + a.root, end = records(peer, a.rank) * shape.chunks;
    const auto store = [&](u32 i, uint4 v) { store_record(k, shape, start + i / shape.chunks, i % shape.chunks, unmasked(v)); };
    u32 i = mine.first;
    for (; i + (AT_ONCE - 1) * mine.step < end; i += AT_ONCE * mine.step) {
        u32 at[AT_ONCE], peers[AT_ONCE];
        uint4 got[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; ++n) at[n] = lane + (i + n * mine.step) * 512, peers[n] = peer;
        if (!collect_rows(r, at, peers, got)) return;
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; ++n) store(i + n * mine.step, got[n]);
    }
    for (; i < end; i += mine.step) {
        uint4 got[1];
        if (!collect_rows(r, {lane + i * 512}, {peer}, got)) return;
        store(i, got[0]);
    }
    r.finish();
}
