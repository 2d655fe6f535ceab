// Dispatch: the tokens of every rank to where the routes say. Behind region.cuh.
//
// A record is a token's row and, beside it, some words: the token's number, its experts as the receiving rank numbers them, their
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
    const i64 id = k.id_bytes == 8 ? __ldg((const i64*)k.ids + index) : (i64)__ldg((const i32*)k.ids + index);
    const i64 here = id - (i64)rank * k.local;
    return 0 <= here && here < k.local ? (i32)here : -1;
}

// A word that lies beside a row.
DEVICE u32 word_beside(const rows_call& k, u32 rank, u32 token, u32 word) {
    if (word == 0) return token;
    word -= 1;
    if (word < 2 * k.top_k) {
        const bool is_id = word < k.top_k;
        const u64 index = (u64)token * k.top_k + (is_id ? word : word - k.top_k);
        const i32 choice = choice_of(k, rank, index);
        return is_id ? (u32)choice : choice < 0 ? 0 : __ldg(k.weights + index);
    }
    word -= 2 * k.top_k;
    return word < k.scales_of_row ? __ldg(k.scales + (u64)token * k.scales_of_row + word) : 0;
}

// The scales of a row that are whole vectors are moved as a row of their own; else as words beside it.
DEVICE bool has_scale_rows(const rows_call& k) { return k.scales_of_row != 0 && k.scales_of_row % 4 == 0; }
DEVICE u32 words_of(const rows_call& k) { return 1 + 2 * k.top_k + (has_scale_rows(k) ? 0 : k.scales_of_row); }
DEVICE parts rows_of(const rows_call& k) {
    return parts{{k.x, (const u8*)k.scales}, {k.row_bytes, has_scale_rows(k) ? k.scales_of_row * 4 : 0}};
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

// Takes a record that has come.
DEVICE void take_record(const arguments& a, pipeline& copies, const rows_call& k, const counts& n, const turn& t, u32 source, u32 number) {
    const parts p = rows_of(k);
    const u32 words = words_of(k), row = n.starts[source] + number;
    const u8* record = a.own + record_at(k.region, t, source, a.rank, number);
    const u32* beside = (const u32*)(record + p.bytes[0] + p.bytes[1]);
    for (u32 word = lane_id() + 32; word < words; word += 32) store_beside(k, row, word, ld_relaxed_sys(beside + word));
    // These loads are under way while the row is copied.
    const u32 value = lane_id() < words ? ld_relaxed_sys(beside + lane_id()) : 0;
    u32* counted = counted_at(a, k.region, t, source, number, n.rows[source][a.rank]);
    copy_parts(copies, p.of_record(record), k.to_x + (u64)row * p.bytes[0], (u8*)k.to_scales + (u64)row * p.bytes[1], signals{nullptr, counted, 0});
    if (lane_id() < words) store_beside(k, row, lane_id(), value);
}

// Rows of a capacity to which no token comes name no experts.
DEVICE void name_no_experts(const arguments& a, const rows_call& k, const counts& n) {
    const u32 arriving = n.starts[WORLD - 1] + n.rows[WORLD - 1][a.rank], words = 1 + k.top_k;
    for (u64 i = grid_thread(); i < (u64)(k.rows - arriving) * words; i += grid_threads())
        store_beside(k, arriving + (u32)(i / words), (u32)(i % words), ~0u);
}

extern "C" __global__ void __launch_bounds__(BOUND, RESIDENT)
dispatch(const __grid_constant__ arguments a, const __grid_constant__ rows_call k) {
    extern __shared__ uint4 memory[];
    pdl_wait();
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    pipeline::prepare();
    arrivals::prepare();
    const counts n(k.counts, k.starts);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[from][a.rank]);
    if (!advance(a, t, flag_vectors(k.region, most), 1 | OWN_TOO)) return;

    // Warps of a block: most send and take, one raises flags, one polls those of the peers.
    name_no_experts(a, k, n);
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    const auto arriving = [&](u32 from) { return n.rows[from][a.rank]; };
    if (raises_flags(warp)) return pipeline::raise_flags();
    bool came;
    if (warp < RINGS) {
        pipeline copies(memory);
        const auto count = [&](u32 to) { return n.rows[a.rank][to]; };
        const auto token = [&](u32 to, u32 number) { return k.order[(u64)to * k.tokens + number]; };
        const auto word = [&](u32 to, u32 token, u32 index) { return word_beside(k, to, token, index); };
        const auto keep = [&](u32 number, u32 token, const u32* gathered) {
            const u32 row = n.starts[a.rank] + number;
            for (u32 index = lane_id(); index < words_of(k); index += 32) store_beside(k, row, index, gathered[index]);
            const parts p = rows_of(k);
            copy_parts(copies, p.row(token), k.to_x + (u64)row * p.bytes[0], (u8*)k.to_scales + (u64)row * p.bytes[1], NO_SIGNALS);
        };
        const auto take = [&](u32 source, u32 number) { take_record(a, copies, k, n, t, source, number); };
        came = exchange(r, copies,
                        to_be_sent<true>(a, copies, k.region, t, claims(a, t), rows_of(k), words_of(k), count, token, word, keep),
                        to_be_taken(a, copies, warp, RINGS, arriving, take));
        copies.finish();
    } else {
        came = arrivals::poll(r, k.region, t, arriving);
    }
    if (came) r.finish();
}
