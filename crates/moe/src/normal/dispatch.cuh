// Dispatch: the tokens of every rank to where a handle says. Behind region.cuh.
//
// A record is a token's row with what travels beside it: the token's number, its experts as the receiving rank numbers them, their
// weights, its scales. Records go in order to the receiver's lane of this rank, so that a receiver knows of each where it belongs.

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
    region_call region;
    u32 tokens, rows, row_bytes, scales_of_row, top_k, id_bytes, local;
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

// How many words travel beside a row.
DEVICE u32 words_of(const rows_call& k) { return 1 + 2 * k.top_k + k.scales_of_row; }

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

// Warps of a block: some send, some copy this rank's own rows, the others take what arrives.
constexpr u32 SENDING = RINGS * 2 / 5, KEEPING = RINGS / 5, TAKING = RINGS - SENDING - KEEPING;

// The warp's share of the records that stay on this rank.
DEVICE void keep_own(const arguments& a, const rows_call& k, pipeline& copies, rows mine) {
    const u32 words = words_of(k), count = k.counts[a.rank * WORLD + a.rank], start = k.starts[a.rank];
    const auto none = [](u32) { return 0u; };
    for (u32 i = mine.first; i < count; i += mine.step) {
        const u32 token = k.order[(u64)a.rank * k.tokens + i];
        copies.copy(k.to_x + (u64)(start + i) * k.row_bytes, k.x + (u64)token * k.row_bytes, k.row_bytes, signals{nullptr, nullptr, 0},
                    words_beside<decltype(none)>{0, none});
        for (u32 word = lane_id(); word < words; word += 32) store_beside(k, start + i, word, word_beside(k, a.rank, token, word));
    }
}

// The warp's share of the records that come from peers.
DEVICE bool take(reader& r, pipeline& copies, const rows_call& k, const turn& t, rows mine) {
    const arguments& a = r.a;
    const u32 words = words_of(k);
    const auto none = [](u32) { return 0u; };
    u32 most = 0;
    for (u32 next = 0; next < PEERS; ++next) most = max(most, k.counts[rank_of(a, next) * WORLD + a.rank]);
    for (u32 i = mine.first; i < most * PEERS; i += mine.step) {
        const u32 next = i % PEERS, from = rank_of(a, next), number = i / PEERS, count = k.counts[from * WORLD + a.rank];
        if (number >= count) continue;
        if (!wait_for_record(r, copies, k.region, t, from, number)) return false;
        const u8* record = a.own + record_at(k.region, t, from, a.rank, number);
        const u32 row = k.starts[from] + number;
        for (u32 word = lane_id(); word < words; word += 32)
            store_beside(k, row, word, ld_relaxed_sys((const u32*)(record + k.row_bytes) + word));
        u32* counted = is_waited_for(k.region, number, count) ? (u32*)(a.peer[next] + count_at(a, k.region, t, a.rank, number)) : nullptr;
        copies.copy(k.to_x + (u64)row * k.row_bytes, record, k.row_bytes, signals{nullptr, counted, 0}, words_beside<decltype(none)>{0, none});
    }
    return true;
}

// Rows for which there is room, and which do not arrive, name no experts.
DEVICE void name_no_experts(const arguments& a, const rows_call& k, rows mine) {
    const u32 arriving = k.starts[WORLD - 1] + k.counts[(WORLD - 1) * WORLD + a.rank];
    for (u32 row = arriving + mine.first; row < k.rows; row += mine.step)
        for (u32 choice = lane_id(); choice < k.top_k; choice += 32) store_beside(k, row, 1 + choice, ~0u);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dispatch(const __grid_constant__ arguments a, const __grid_constant__ rows_call k) {
    extern __shared__ uint4 memory[];
    pdl_wait();
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, k.counts[from * WORLD + a.rank]);
    advance(a, t, flag_vectors(k.region, most), 1);

    reader r(a, t);
    pipeline copies(memory);
    const u32 warp = threadIdx.x / 32;
    bool came = true;
    if (warp < SENDING) {
        const auto count = [&](u32 to) { return k.counts[a.rank * WORLD + to]; };
        const auto token = [&](u32 to, u32 number) { return k.order[(u64)to * k.tokens + number]; };
        const auto beside = [&](u32 to, u32 token, u32 index) { return word_beside(k, to, token, index); };
        came = send_records(r, copies, k.region, t, share_of_warp(0, SENDING), k.x, k.row_bytes, words_of(k), count, token, beside);
    } else if (warp < SENDING + KEEPING) {
        keep_own(a, k, copies, share_of_warp(SENDING, KEEPING));
        name_no_experts(a, k, share_of_warp(SENDING, KEEPING));
    } else {
        came = take(r, copies, k, t, share_of_warp(SENDING + KEEPING, TAKING));
    }
    copies.drain();
    if (came) r.finish();
}
