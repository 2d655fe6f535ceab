// Dispatch by a routing map: the tokens of every rank to a row for each of their experts. Behind region.cuh and choices.cuh.
//
// A record is a token's row with its choices at the receiver, their probs, and its scales. The receiver knows where the rows of each
// rank begin for each expert, so a choice's position says where its row belongs.

// The words beside a row: choices, as many probs if there are any, scales that are no whole vectors.
struct beside {
    u32 choices, probs, scales;

    DEVICE beside(const by_expert_rows_call& k)
        : choices(*k.most), probs(k.probs == nullptr ? 0 : choices), scales(k.scales_of_row % 4 == 0 ? 0 : k.scales_of_row) {}
    DEVICE u32 words() const { return choices + probs + scales; }
};

DEVICE parts rows_of(const by_expert_rows_call& k) {
    return parts{{(u8*)k.x, (u8*)k.scales}, {k.row_bytes, k.scales_of_row % 4 == 0 ? k.scales_of_row * 4 : 0}};
}

// Rows that have no token, in all parts: padding, and the rest of a capacity. The warp's share of them.
DEVICE void empty_rows(const by_expert_rows_call& k, rows mine) {
    for (u32 some = 0; some < k.local; some += 32) {
        const u32 expert = some + lane_id();
        const u32 its_first = expert < k.local ? min(k.first[expert] + k.kept[expert], k.rows) : k.rows;
        const u32 its_end = expert + 1 < k.local ? min(k.first[expert + 1], k.rows) : k.rows;
        for (u32 left = __ballot_sync(WHOLE_WARP, its_first < its_end); left != 0; left &= left - 1) {
            const u32 lane = __ffs(left) - 1, end = __shfl_sync(WHOLE_WARP, its_end, lane);
            for (u32 row = __shfl_sync(WHOLE_WARP, its_first, lane) + mine.first; row < end; row += mine.step) {
                for (u32 at = lane_id() * 16; at < k.row_bytes; at += 512)
                    store16(k.to_x + (u64)row * k.row_bytes + at, make_uint4(0, 0, 0, 0));
                for (u32 i = lane_id(); i < k.scales_of_row; i += 32) k.to_scales[(u64)row * k.scales_of_row + i] = 0;
                if (k.probs != nullptr && lane_id() == 0) k.to_probs[row] = 0;
            }
        }
    }
}

// Copies a token, the number-th that `source` sends, from where `from` says to the rows of its experts; it is read once for some tens of
// them. word(i) is one of those beside its row. `Copies` counts what `counted` says.
template <class Copies, class Word>
DEVICE void copy_to_experts(Copies& copies, const by_expert_rows_call& k, const counts& n, const beside& b, u32 source, u32 number, extent from,
                            Word word, u32 counted) {
    const parts p = rows_of(k);
    const u32 token = n.starts[source] + number;
    for (u32 i = lane_id(); i < k.local; i += 32) {
        k.places[(u64)token * k.local + i] = -1;
        if (k.is_by_token && b.probs != 0) k.to_probs[(u64)token * k.local + i] = 0;
    }
    __syncwarp();
    // A lane has a choice. If rows have scales behind them, the upper lanes have the scales of the choices of the lower ones.
    const u32 each = p.bytes[1] != 0 ? 16 : 32, part = lane_id() / each;
    bool is_copied = false; // by token, where all choices of a token have one row
#pragma unroll 1
    for (u32 first = 0; first < b.choices || first == 0; first += each) {
        const u32 i = first + lane_id() % each;
        u32 row = NO_CHOICE;
        const auto to_rows = [&] {
            const u32 choice = i < b.choices ? word(i) : NO_CHOICE;
            if (choice != NO_CHOICE) {
                const u32 expert = expert_of(choice), at = k.is_by_token ? token : k.first[source * k.local + expert] + position_of(choice);
                const u64 place = (u64)token * k.local + expert;
                if (at < k.rows) {
                    row = at;
                    if (part == 0) {
                        k.places[place] = (i32)row;
                        if (b.probs != 0) k.to_probs[k.is_by_token ? place : (u64)row] = word(b.choices + i);
                    }
                }
            }
            if (k.is_by_token) {
                const u32 which = __ballot_sync(WHOLE_WARP, row != NO_CHOICE);
                if (is_copied || (which & ((1u << lane_id() % each) - 1)) != 0) row = NO_CHOICE;
                is_copied |= which != 0;
            }
            if (row == NO_CHOICE) return no_extent();
            return part == 0 ? extent{k.to_x + (u64)row * p.bytes[0], 0, p.bytes[0]}
                             : extent{(u8*)k.to_scales + (u64)row * p.bytes[1], p.bytes[0], p.all()};
        };
        copies.copy(from, p.all(), to_rows);
        if (b.scales == 0) continue;
        for (u32 left = __ballot_sync(WHOLE_WARP, row != NO_CHOICE); left != 0; left &= left - 1) {
            const u32 its_row = __shfl_sync(WHOLE_WARP, row, __ffs(left) - 1);
            for (u32 m = lane_id(); m < b.scales; m += 32) k.to_scales[(u64)its_row * b.scales + m] = word(b.choices + b.probs + m);
        }
    }
    copies.count_when_read(counted);
}

// What `sending` sends.
template <class Copies> struct mapped_rows {
    const arguments& a;
    Copies& copies;
    const by_expert_rows_call& k;
    const counts& n;
    const beside& b;
    u32 choice[WORLD], choice_after[WORLD]; // the lane's of each peer, and of this rank; only further ones are loaded when they are needed

    DEVICE mapped_rows(const arguments& a, Copies& copies, const by_expert_rows_call& k, const counts& n, const beside& b)
        : a(a), copies(copies), k(k), n(n), b(b) {}

    DEVICE u32 load(u32 token, u32 rank, u32 index) const { return choices{k.all, k.number, k.local}.at(token, rank, index); }
    DEVICE u32 prob(u32 token, u32 rank, u32 choice) const {
        return choice == NO_CHOICE ? 0 : __ldg(k.probs + ((u64)token * WORLD + rank) * k.local + expert_of(choice));
    }
    DEVICE void look_up(u32 token) {
#pragma unroll
        for (u32 peer = 0; peer < WORLD; ++peer)
            choice_after[peer] = lane_id() < b.choices ? load(token, rank_of(a, peer), lane_id()) : NO_CHOICE;
    }
    DEVICE void next() {
#pragma unroll
        for (u32 peer = 0; peer < WORLD; ++peer) choice[peer] = choice_after[peer];
    }
    DEVICE extent row(u32 token) const { return rows_of(k).rows(token); }
    DEVICE u32 bytes() const { return rows_of(k).all(); }
    DEVICE extent own(u32) const { return no_extent(); }
    DEVICE void beside_of(u32 token, u32 rank, u32 its_choice, u32* to) const {
        for (u32 i = lane_id(); i < b.choices; i += 32) {
            const u32 choice = i < 32 ? its_choice : load(token, rank, i);
            to[i] = choice;
            if (b.probs != 0) to[b.choices + i] = prob(token, rank, choice);
        }
        for (u32 i = lane_id(); i < b.scales; i += 32) to[b.choices + b.probs + i] = __ldg(k.scales + (u64)token * b.scales + i);
    }
    DEVICE void store_words(u32 token, u32 receivers, u8* place) const {
#pragma unroll
        for (u32 peer = 0; peer < PEERS; ++peer)
            if (receivers >> peer & 1) beside_of(token, rank_of(a, peer), choice[peer], (u32*)__shfl_sync(WHOLE_WARP, (u64)place, peer));
    }
    DEVICE void keep(u32 token, u32 number) const {
        const auto choice_at = [&](u32 index) { return index == lane_id() ? choice[PEERS] : load(token, a.rank, index); };
        const auto word = [&](u32 index) {
            if (index < b.choices) return choice_at(index);
            index -= b.choices;
            return index < b.probs ? prob(token, a.rank, choice_at(index)) : __ldg(k.scales + (u64)token * b.scales + index - b.probs);
        };
        copy_to_experts(copies, k, n, b, a.rank, number, row(token), word, NOT_COUNTED);
    }
};

// What `taking` does with a record.
template <class Copies> struct arrived_rows {
    const arguments& a;
    Copies& copies;
    const by_expert_rows_call& k;
    const region_call& g;
    const counts& n;
    const beside& b;
    const turn& t;

    DEVICE void operator()(u32 peer, u32 source, u32 number) const {
        const u8* const record = a.own + record_at(g, t, source, a.rank, spot(g, number));
        const u32* const words = (const u32*)(record + rows_of(k).all());
        copy_to_experts(copies, k, n, b, source, number, rows_of(k).record(record), [&](u32 index) { return ld_relaxed_sys(words + index); },
                        readings::code(g, peer, number, n.rows[source][a.rank]));
    }
    DEVICE void finish() const {}
};

extern "C" __global__ void __launch_bounds__(BOUND, RESIDENT)
by_expert_dispatch_kernel(const __grid_constant__ arguments a, const __grid_constant__ by_expert_rows_call k) {
    extern __shared__ uint4 memory[];
    typedef pipeline<readings> copying;
    begin_kernel<AT_END>(a);
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    stores::prepare();
    arrivals::prepare();
    readings::prepare();
    const counts n(k.counts, k.starts);
    const beside b(k);
    const region_call g = with_words(a, k.region, b.words());
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[from][a.rank]);
    if (!advance(a, t, flag_vectors(g, most), 1 | OWN_TOO)) return;

    // Warps of a block: most take, of which some send, too; one raises flags, one polls those of the peers, one empties rows.
    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    const auto arriving = [&](u32 from) { return n.rows[from][a.rank]; };
    if (raises_flags(warp)) return stores::raise_flags();
    bool came = true;
    if (warp < RINGS) {
        copying copies(memory, readings{a, g, t});
        mapped_rows<copying> tokens(a, copies, k, n, b);
        came = exchange(r, copies, sending(a, copies, g, t, tokens, k.heads, k.tokens, k.senders, [&](u32 to) { return n.rows[a.rank][to]; }),
                        taking(a, arriving, arrived_rows<copying>{a, copies, k, g, n, b, t}));
        copies.finish();
    } else if (warp == RINGS + 1) {
        came = arrivals::poll(r, g, t, arriving);
    } else if (!k.is_by_token) {
        empty_rows(k, share_of_warp(RINGS + 2, THREADS / 32 - RINGS - 2));
    }
    if (came) r.finish();
}
