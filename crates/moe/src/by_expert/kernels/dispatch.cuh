// Dispatch by a routing map: the tokens of every rank to a row for each of their experts. Behind region.cuh and choices.cuh.
//
// A record is a token's row with its choices at the receiver, their probs, and its scales. The receiver knows where the rows of each
// rank begin for each expert, so a choice's position says where its row belongs.

// Rust's `ByExpertRowsCall` has the same layout.
struct by_expert_rows_call {
    const u32* counts; // as in notify.cuh, and so below
    const u32* starts;
    const u32* order;
    const u32* most;
    const u32* all;    // as in choices.cuh
    const u16* number;
    const u32* first;  // as in place.cuh
    const u32* kept;
    i32* places;       // [N, local]: the row of a received token for each expert, or -1
    const u8* x;       // [tokens, row_bytes]
    const u32* scales; // [tokens, scales_of_row]
    const u32* probs;  // [tokens, WORLD, local]; null if there are none
    u8* to_x;          // [rows, row_bytes], and so on
    u32* to_scales;
    u32* to_probs;     // [rows]; by token [rows, local]
    region_call region; // without what lies beside a row
    u32 tokens, rows, row_bytes, scales_of_row, local, is_by_token;
};

// The words beside a row: choices, as many probs if there are any, scales that are no whole vectors.
struct beside {
    u32 choices, probs, scales;

    DEVICE beside(const by_expert_rows_call& k)
        : choices(*k.most), probs(k.probs == nullptr ? 0 : choices), scales(k.scales_of_row % 4 == 0 ? 0 : k.scales_of_row) {}
    DEVICE u32 words() const { return choices + probs + scales; }
};

DEVICE parts rows_of(const by_expert_rows_call& k) {
    return parts{{k.x, (const u8*)k.scales}, {k.row_bytes, k.scales_of_row % 4 == 0 ? k.scales_of_row * 4 : 0}};
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

// One of some values.
template <u32 COUNT> DEVICE u32 pick(const u32 (&of)[COUNT], u32 index) {
    u32 value = of[0];
#pragma unroll
    for (u32 m = 1; m < COUNT; ++m)
        if (index == m) value = of[m];
    return value;
}

// Copies some tokens, the numbers[m]-th that sources[m] sends, to the rows of their experts; a token is read once for up to 32 of them. Of the token of a source and number,
// word(source, number, i) is one of those beside its row, x and scales are where the row is, and counted(source, number) is where to
// count that it has been read, or null.
template <u32 COUNT, class Word, class Row, class Scales, class Counted>
DEVICE void copy_to_experts(pipeline& copies, const by_expert_rows_call& k, const counts& n, const beside& b, u32 some,
                            const u32 (&sources)[COUNT], const u32 (&numbers)[COUNT], Word word, Row x, Scales scales, Counted counted) {
    __shared__ u32 all_rows[RINGS][32];
    u32 (&its_rows)[32] = all_rows[threadIdx.x / 32];
    const parts p = rows_of(k);
    u32 choice[COUNT], prob[COUNT]; // of each token up to 32, whose loads take as long as those of one
#pragma unroll
    for (u32 m = 0; m < COUNT; ++m) {
        choice[m] = m < some && lane_id() < b.choices ? word(sources[m], numbers[m], lane_id()) : NO_CHOICE;
        prob[m] = m < some && lane_id() < b.probs ? word(sources[m], numbers[m], b.choices + lane_id()) : 0;
    }
#pragma unroll 1
    for (u32 m = 0; m < some; ++m) {
        const u32 source = pick(sources, m), number = pick(numbers, m), token = n.starts[source] + number;
        for (u32 i = lane_id(); i < k.local; i += 32) {
            k.places[(u64)token * k.local + i] = -1;
            if (k.is_by_token && b.probs != 0) k.to_probs[(u64)token * k.local + i] = 0;
        }
        __syncwarp();
        const auto copy = [&](u32 some_rows, u32* after) {
            const signals last{nullptr, after, 0};
            copies.copy_to_each(some_rows, [&](u32 index) { return k.to_x + (u64)its_rows[index] * p.bytes[0]; }, x(source, number),
                                p.bytes[0], p.bytes[1] != 0 ? NO_SIGNALS : last);
            if (p.bytes[1] != 0)
                copies.copy_to_each(some_rows, [&](u32 index) { return (u8*)k.to_scales + (u64)its_rows[index] * p.bytes[1]; },
                                    scales(source, number), p.bytes[1], last);
            for (u32 i = lane_id(); i < b.scales; i += 32) {
                const u32 scale = word(source, number, b.choices + b.probs + i);
                for (u32 index = 0; index < some_rows; ++index) k.to_scales[(u64)its_rows[index] * b.scales + i] = scale;
            }
        };
        u32 listed = 0; // rows to which the token is still to be copied
#pragma unroll 1
        for (u32 first = 0; first < b.choices; first += 32) {
            const u32 i = first + lane_id();
            const u32 its_choice = first == 0 ? pick(choice, m) : i < b.choices ? word(source, number, i) : NO_CHOICE;
            u32 row = NO_CHOICE;
            if (its_choice != NO_CHOICE) {
                const u32 expert = expert_of(its_choice);
                const u32 at = k.is_by_token ? token : k.first[source * k.local + expert] + position_of(its_choice);
                if (at < k.rows) {
                    const u64 place = (u64)token * k.local + expert;
                    k.places[place] = (i32)(row = at);
                    if (b.probs != 0)
                        k.to_probs[k.is_by_token ? place : (u64)at] = first == 0 ? pick(prob, m) : word(source, number, b.choices + i);
                }
            }
            u32 mask = __ballot_sync(WHOLE_WARP, row != NO_CHOICE);
            if (mask == 0 || (k.is_by_token && listed != 0)) continue; // all choices of a token have one row by token
            if (listed != 0) copy(listed, nullptr);
            if (k.is_by_token) mask &= ~mask + 1;
            __syncwarp(); // the list has been read
            if (mask >> lane_id() & 1) its_rows[__popc(mask & ((1u << lane_id()) - 1))] = row;
            listed = __popc(mask);
        }
        u32* after = counted(source, number);
        if (listed != 0) {
            copy(listed, after);
        } else if (after != nullptr) { // all its rows are dropped
            __syncwarp();
            if (lane_id() == 0) red_add_release_sys(after, 1u);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
by_expert_dispatch_kernel(const __grid_constant__ arguments a, const __grid_constant__ by_expert_rows_call k) {
    extern __shared__ uint4 memory[];
    pdl_wait();
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    pipeline::prepare();
    const counts n(k.counts, k.starts);
    const beside b(k);
    const region_call g = with_words(a, k.region, b.words());
    u32 most = 0;
    for (u32 from = 0; from < WORLD; ++from)
        if (from != a.rank) most = max(most, n.rows[from][a.rank]);
    if (!advance(a, t, flag_vectors(g, most), 1)) return;

    reader r(a, t);
    const u32 warp = threadIdx.x / 32;
    if (raises_flags(warp)) return pipeline::raise_flags();
    pipeline copies(memory);
    const parts p = rows_of(k);
    bool came = true;
    if (warp < SENDING) {
        const choices c{k.all, k.number, k.local};
        const auto count = [&](u32 to) { return n.rows[a.rank][to]; };
        const auto token = [&](u32 to, u32 number) { return k.order[(u64)to * k.tokens + number]; };
        const auto word = [&](u32 to, u32 token, u32 index) {
            if (index < b.choices) return c.at(token, to, index);
            if (index < b.choices + b.probs) {
                const u32 choice = c.at(token, to, index - b.choices);
                return choice == NO_CHOICE ? 0 : __ldg(k.probs + ((u64)token * WORLD + to) * k.local + expert_of(choice));
            }
            return __ldg(k.scales + (u64)token * b.scales + index - b.choices - b.probs);
        };
        const auto keep = [&](u32 number, u32 token, const u32* gathered) {
            const u32 source[1] = {a.rank}, numbers[1] = {number};
            copy_to_experts<1>(copies, k, n, b, 1, source, numbers, [&](u32, u32, u32 index) { return gathered[index]; },
                [&](u32, u32) { return k.x + (u64)token * p.bytes[0]; },
                [&](u32, u32) { return (const u8*)k.scales + (u64)token * p.bytes[1]; }, [](u32, u32) { return (u32*)nullptr; });
        };
        came = send_records<true>(r, copies, g, t, share_of_warp(0, SENDING), p, b.words(), count, token, word, keep);
    } else {
        const rows mine = share_of_warp(SENDING, RINGS - SENDING);
        if (!k.is_by_token) empty_rows(k, mine);
        const auto count = [&](u32 from) { return n.rows[from][a.rank]; };
        came = take_records(r, copies, g, t, mine, count, [&](u32 some, const u32 (&sources)[RECORDS], const u32 (&numbers)[RECORDS]) {
            const auto record = [&](u32 source, u32 number) { return a.own + record_at(g, t, source, a.rank, number); };
            const u32 words_at = p.bytes[0] + p.bytes[1];
            copy_to_experts<RECORDS>(copies, k, n, b, some, sources, numbers,
                [&](u32 source, u32 number, u32 index) { return ld_relaxed_sys((const u32*)(record(source, number) + words_at) + index); },
                record, [&](u32 source, u32 number) { return record(source, number) + p.bytes[0]; },
                [&](u32 source, u32 number) { return counted_at(a, g, t, source, number, count(source)); });
        });
    }
    copies.finish();
    if (came) r.finish();
}
