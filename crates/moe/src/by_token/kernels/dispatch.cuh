// Dispatch: the tokens of every rank to where the routes say. Behind region.cuh.
//
// A record is a token's row with its scales and, beside them, some words: the token's number, its experts as the receiving rank numbers
// them, their weights, scales that are no whole vectors. Records go in order to the receiver's lane of this rank, so that a receiver knows
// of each where it belongs.

// The scales of a row that are whole vectors lie behind the row; else they are words beside it.
DEVICE bool has_scale_rows(const rows_call& k) { return k.scales_of_row != 0 && k.scales_of_row % 4 == 0; }
DEVICE u32 words_of(const rows_call& k) { return 1 + 2 * k.top_k + (has_scale_rows(k) ? 0 : k.scales_of_row); }
DEVICE parts rows_of(const rows_call& k) {
    return parts{{(u8*)k.x, (u8*)k.scales}, {k.row_bytes, has_scale_rows(k) ? k.scales_of_row * 4 : 0}};
}
DEVICE parts to_rows_of(const rows_call& k) { return parts{{k.to_x, (u8*)k.to_scales}, {k.row_bytes, rows_of(k).bytes[1]}}; }

// A word that lies beside a row, before it is known which rank it is for.
struct word_beside {
    u32 value;
    u32 expert; // the expert of an id or a weight, among all; no expert of any rank if the choice names none

    DEVICE word_beside(const rows_call& k, u32 token, u32 word) : value(token), expert(~0u) {
        if (word == 0) return;
        word -= 1;
        if (word < 2 * k.top_k) {
            const u64 index = (u64)token * k.top_k + (word < k.top_k ? word : word - k.top_k);
            const i64 id = k.id_bytes == 8 ? __ldg((const i64*)k.ids + index) : (i64)__ldg((const i32*)k.ids + index);
            if (0 <= id && id < (i64)k.local * WORLD) expert = (u32)id;
            value = word < k.top_k ? 0 : __ldg(k.weights + index);
        } else {
            word -= 2 * k.top_k;
            value = word < k.scales_of_row ? __ldg(k.scales + (u64)token * k.scales_of_row + word) : 0;
        }
    }
    // As a rank gets it: an id as the rank numbers its experts, -1 where it is another's, whose weight is 0.
    DEVICE u32 of(const rows_call& k, u32 rank, u32 word) const {
        if (word == 0 || word > 2 * k.top_k) return value;
        const u32 here = expert - rank * k.local;
        if (word <= k.top_k) return here < k.local ? here : ~0u;
        return here < k.local ? value : 0;
    }
};

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

// What `sending` sends.
struct token_rows {
    const arguments& a;
    const rows_call& k;
    const counts& n;
    word_beside word, word_after; // the lane's; only further ones are loaded when they are needed

    DEVICE token_rows(const arguments& a, const rows_call& k, const counts& n) : a(a), k(k), n(n), word(k, 0, 0), word_after(word) {}

    DEVICE void look_up(u32 token) { word_after = word_beside(k, token, lane_id() < words_of(k) ? lane_id() : 0); }
    DEVICE void next() { word = word_after; }
    DEVICE extent row(u32 token) const { return rows_of(k).rows(token); }
    DEVICE u32 bytes() const { return rows_of(k).all(); }
    DEVICE extent own(u32 number) const { return to_rows_of(k).rows(n.starts[a.rank] + number, PEERS); }
    template <class Store> DEVICE void words_for(u32 token, u32 rank, Store store) const {
        const u32 words = words_of(k);
        if (lane_id() < words) store(lane_id(), word.of(k, rank, lane_id()));
        for (u32 index = lane_id() + 32; index < words; index += 32) store(index, word_beside(k, token, index).of(k, rank, index));
    }
    DEVICE void store_words(u32 token, u32 receivers, u8* place) const {
        for (u32 left = receivers; left != 0; left &= left - 1) {
            const u32 peer = __ffs(left) - 1;
            u32* const to = (u32*)__shfl_sync(WHOLE_WARP, (u64)place, peer);
            words_for(token, rank_of(a, peer), [&](u32 index, u32 value) { to[index] = value; });
            // A part of a sector of 32 bytes takes longer than all of it.
            const u32 words = words_of(k), rest = words + lane_id();
            if (rest < (words + 7) / 8 * 8) to[rest] = 0;
        }
    }
    DEVICE void keep(u32 token, u32 number) const {
        words_for(token, a.rank, [&](u32 index, u32 value) { store_beside(k, n.starts[a.rank] + number, index, value); });
    }
};

// What `taking` does with a record. The words beside a row are stored when the next record is taken, as their load takes as long as that.
template <class Copies> struct arrived_rows {
    const arguments& a;
    Copies& copies;
    const rows_call& k;
    const counts& n;
    const turn& t;
    u32 row, word; // of the record before: the lane's word

    DEVICE arrived_rows(const arguments& a, Copies& copies, const rows_call& k, const counts& n, const turn& t)
        : a(a), copies(copies), k(k), n(n), t(t), row(~0u), word(0) {}

    DEVICE void operator()(u32 peer, u32 source, u32 number) {
        finish();
        const parts p = rows_of(k);
        const u8* record = a.own + record_at(k.region, t, source, a.rank, spot(k.region, number));
        const u32* beside = (const u32*)(record + p.all());
        const u32 words = words_of(k);
        row = n.starts[source] + number;
        if (lane_id() < words) word = ld_relaxed_sys(beside + lane_id());
        copies.copy(p.record(record), p.all(), [&] { return to_rows_of(k).rows(row); });
        for (u32 index = lane_id() + 32; index < words; index += 32) store_beside(k, row, index, ld_relaxed_sys(beside + index));
        copies.count_when_read(readings::code(k.region, peer, number, n.rows[source][a.rank]));
    }
    DEVICE void finish() {
        if (row != ~0u && lane_id() < words_of(k)) store_beside(k, row, lane_id(), word);
        row = ~0u;
    }
};

// Rows of a capacity to which no token comes name no experts.
DEVICE void name_no_experts(const arguments& a, const rows_call& k, const counts& n) {
    const u32 arriving = n.starts[WORLD - 1] + n.rows[WORLD - 1][a.rank], words = 1 + k.top_k;
    for (u64 i = grid_thread(); i < (u64)(k.rows - arriving) * words; i += grid_threads())
        store_beside(k, arriving + (u32)(i / words), (u32)(i % words), ~0u);
}

extern "C" __global__ void __launch_bounds__(BOUND, RESIDENT)
dispatch(const __grid_constant__ arguments a, const __grid_constant__ rows_call k) {
    extern __shared__ uint4 memory[];
    begin_kernel<AT_END>(a);
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    stores::prepare();
    arrivals::prepare();
    readings::prepare();
    const counts n(k.counts, k.starts);
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[from][a.rank]);
    if (!advance(a, t, flag_vectors(k.region, most), 1 | OWN_TOO)) return;

    // Warps of a block: most take, of which some send, too; one raises flags, one polls those of the peers.
    name_no_experts(a, k, n);
    reader r(a, t);
    typedef pipeline<readings> copying;
    const u32 warp = threadIdx.x / 32;
    const auto arriving = [&](u32 from) { return n.rows[from][a.rank]; };
    if (raises_flags(warp)) return stores::raise_flags();
    bool came;
    if (warp < RINGS) {
        copying copies(memory, readings{a, k.region, t});
        token_rows tokens(a, k, n);
        came = exchange(r, copies, sending(a, copies, k.region, t, tokens, k.heads, k.tokens, k.senders, [&](u32 to) { return n.rows[a.rank][to]; }),
                        taking(a, arriving, arrived_rows<copying>(a, copies, k, n, t)));
        copies.finish();
    } else {
        came = arrivals::poll(r, k.region, t, arriving);
    }
    if (came) r.finish();
}
