// What the cases of a compiled kernel call, each with what is known of its steps: the kind, the operator, the numbers of sources and
// destinations. Behind steps.cuh, and ahead of the cases, which end with `run`. The page of the Rust module compiled.rs says more.

// A block's part of the table; its warps have copied it into shared memory if it fits there (IS_COPIED). A warp that has given up does
// nothing until the block's threads meet, and then the block ends.
struct block_steps {
    const arguments& a;
    const plan_call& p;
    const plan_step* steps;
    const plan_item* items;
    const plan_block& block;
    bool has_failed;
};

// The part of a block that is copied, as it lies in the table: in one piece, so that nothing is loaded to find the rest.
struct alignas(16) block_table {
    plan_block block;
    plan_step steps[MOST_STEPS];
    plan_item items[MOST_ITEMS];
};
DEVICE block_table& copied() {
    __shared__ block_table copy;
    return copy;
}

// Copies the part of a block, with addresses that hold for the launch: all warps but the first, which sends the tags meanwhile.
[[maybe_unused]] DEVICE void copy_table(const plan_call& p, u32 number) {
    constexpr u32 VECTORS = sizeof(block_table) / 16, ITEMS_AT = VECTORS - MOST_ITEMS;
    const uint4* from = (const uint4*)((const block_table*)p.blocks + number);
    if (thread() < 32) return;
    for (u32 i = thread() - 32; i < VECTORS; i += THREADS - 32) {
        uint4 v = from[i];
        if (i >= ITEMS_AT) {
            const u64 at = (v.x | (u64)v.y << 32) + p.bases[v.z];
            v.x = (u32)at, v.y = (u32)(at >> 32);
        }
        ((uint4*)&copied())[i] = v;
    }
}

// A step of a block.
struct step_of {
    const arguments& a;
    const plan_call& p;
    const plan_step* step;
    const plan_item* items;
    const plan_block& block;
    u32 at; // among those of the block

    DEVICE step_of(const block_steps& b, u32 step, u32 item)
        : a(b.a), p(b.p), step(b.steps + step), items(b.items + item), block(b.block), at(step) {}

    DEVICE const plan_item& item(u32 index) const { return items[index]; }
    DEVICE u64 place(u32 index) const { return IS_COPIED ? items[index].at : address_of(p, items[index]); }
    DEVICE u64 number() const { return block.first_step + at + 1; }
};

// The step's bytes, in a turn of a loop of which each does as many: all of them but for a step that turns share.
[[maybe_unused]] DEVICE work_range part_of(const step_of& l) {
    const plan_step& s = *l.step;
    return work_range{max(s.share[0], s.span[0]), min(s.share[1], s.span[1])};
}
[[maybe_unused]] DEVICE work_range part_of(const step_of& l, u32 turn, u64 unit) {
    const plan_step& s = *l.step;
    const u64 begin = min(s.share[0] + turn * unit, s.share[1]), end = min(begin + unit, s.share[1]);
    return work_range{max(begin, s.span[0]), min(end, s.span[1])};
}

// ---------------------------------------------------------------------------------------------- steps that synchronise

// False if the block has to end.
[[maybe_unused]] DEVICE bool meet(const block_steps& b) { return !__syncthreads_or(b.has_failed); }

[[maybe_unused]] DEVICE void add(const block_steps& b, const step_of& l, u32 kind, bool relaxed, u32 counts) {
    if (!b.has_failed) add(l, kind, relaxed, counts);
}
// A step that has to wait until it comes again: step(round, w) is false then.
template <class Step> DEVICE void in_rounds(block_steps& b, const step_of& l, Step step) {
    u32 round = 0;
    awaited w;
    while (!b.has_failed && !step(round, w)) b.has_failed = !wait(l, w);
}
[[maybe_unused]] DEVICE void take(block_steps& b, const step_of& l, u32 kind, u32 counts) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return take(l, kind, counts, round, w); });
}
[[maybe_unused]] DEVICE void arrive(block_steps& b, const step_of& l) {
    u32 round = 0;
    awaited w;
    if (!b.has_failed && !arrive(l, round, w)) b.has_failed = !wait(l, w);
}
[[maybe_unused]] DEVICE void copy(block_steps& b, const step_of& l, work_range part) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return post_copy(l, part, round, w); });
}
[[maybe_unused]] DEVICE void raise(block_steps& b, const step_of& l, u32 counts) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return post_signals(l, counts, round, w); });
}
[[maybe_unused]] DEVICE void flush(block_steps& b, const step_of& l) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return flush(l, round, w); });
}

// ------------------------------------------------------------------------------------------------- steps that move data

// The most sources whose values a thread has at once, and the most vectors of them.
constexpr u32 MOST_SOURCES = 8, MOST_VECTORS = sizeof(T) == 1 || sizeof(T) == 8 ? 4 : 8; // these take more registers to add
DEVICE constexpr u32 at_once(u32 sources) { return sources < MOST_SOURCES ? sources : MOST_SOURCES; }
DEVICE constexpr u32 depth(u32 sources, u32 most) {
    const u32 vectors = sources < MOST_VECTORS ? MOST_VECTORS / at_least_one(sources) : 1;
    return vectors < most ? vectors : most;
}

// The result of a step for some bytes: the only source, or the sources reduced in their order and rounded once.
template <u32 OP, u32 BYTES> struct result_of {
    reduced<BYTES> value;

    DEVICE void add(bool is_first, const bytes<BYTES>& v) {
        if (is_first) value.begin(v);
        else value.add(OP, v);
    }
    DEVICE bytes<BYTES> end() const { return value.end(); }
};
template <u32 BYTES> struct result_of<OPERATOR_NONE, BYTES> {
    bytes<BYTES> only;

    DEVICE void add(bool, const bytes<BYTES>& v) { only = v; }
    DEVICE bytes<BYTES> end() const { return only; }
};

// Takes up the plain sources of DEPTH units: load(from, n) loads the n-th, whose result is `ready` as soon as it has all sources. All loads
// of several sources are issued before the first is used.
template <u32 SOURCES, u32 DEPTH, u32 BYTES, class Result, class Load, class Ready>
DEVICE void load_sources(const step_of& l, Result (&result)[DEPTH], Load load, Ready ready) {
    constexpr u32 TOGETHER = at_once(SOURCES);
#pragma unroll 1
    for (u32 source = 0; source < SOURCES; source += TOGETHER) {
        u64 from[TOGETHER];
        bytes<BYTES> v[TOGETHER][DEPTH];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) from[k] = l.place(min(source + k, SOURCES - 1));
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n)
#pragma unroll
            for (u32 k = 0; k < TOGETHER; ++k) v[k][n] = load(from[k], n);
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n) {
#pragma unroll
            for (u32 k = 0; k < TOGETHER; ++k)
                if (source + k < SOURCES) result[n].add(source + k == 0, v[k][n]);
            if (source + TOGETHER >= SOURCES) ready(n);
        }
    }
}

// Does some bytes in units of BYTES bytes, DEPTH of a thread at once.
template <u32 OP, u32 SOURCES, u32 TO, u32 BYTES, u32 DEPTH> DEVICE void do_units(const step_of& l, u64 begin, u64 end) {
    constexpr u32 STRIDE = THREADS * BYTES;
#pragma unroll 1
    for (u64 at = begin + thread() * BYTES; at < end; at += DEPTH * STRIDE) {
        result_of<OP, BYTES> result[DEPTH];
        const auto is_there = [&](u32 n) { return n == 0 || at + n * STRIDE < end; };
        const auto load_unit = [&](u64 from, u32 n) {
            bytes<BYTES> v = {};
            if (is_there(n)) v = load<BYTES>(from + at + n * STRIDE);
            return v;
        };
        load_sources<SOURCES, DEPTH, BYTES>(l, result, load_unit, [&](u32 n) {
            if (!is_there(n)) return;
            const bytes<BYTES> v = result[n].end();
#pragma unroll 8
            for (u32 to = SOURCES; to < SOURCES + TO; ++to) store<BYTES>(l.place(to) + at + n * STRIDE, v);
        });
    }
}

// Does some bytes of a step without packets. Where all operands lie alike, these are whole vectors, and the ragged ends; else elements,
// or what the operands of a step that moves bytes have in common.
template <u32 OP, u32 SOURCES, u32 TO> DEVICE void plain(const block_steps& b, const step_of& l, work_range part) {
    if (b.has_failed || part.begin >= part.end) return;
    constexpr u32 UNIT = sizeof(T) > 4 ? 4 : sizeof(T); // of what moves
    u32 apart = 0;
#pragma unroll 8
    for (u32 k = 1; k < SOURCES + TO; ++k) apart |= (u32)(l.place(k) - l.place(0));
    const u32 skew = (u32)(l.place(0) + part.begin) % 16;
    const bool is_alike = apart % 16 == 0;
    const u64 from = is_alike ? min(part.begin + (16 - skew) % 16, part.end) : part.end;
    const u64 until = from + (part.end - from) / 16 * 16;
    do_units<OP, SOURCES, TO, 16, depth(SOURCES, 4)>(l, from, until);
    const bool is_even = (apart | skew | (u32)(part.end - part.begin)) % UNIT == 0;
#pragma unroll 1
    for (u32 side = 0; side < 2; ++side) {
        const u64 begin = side == 0 ? part.begin : until, end = side == 0 ? from : part.end;
        if constexpr (OP != OPERATOR_NONE) do_units<OP, SOURCES, TO, sizeof(T), 1>(l, begin, end);
        else if (is_even) do_units<OP, SOURCES, TO, UNIT, 1>(l, begin, end);
        else do_units<OP, SOURCES, TO, 1, 1>(l, begin, end);
    }
}

// Takes up the packets of PACKETS sources behind the PLAIN ones, for DEPTH units of which the first is at `at`, and which have `counts`
// bytes. The warp waits for the packets of several sources together. False if it gave up.
template <u32 PLAIN, u32 PACKETS, u32 DEPTH, u32 UNIT, class Result>
DEVICE bool load_packets(const step_of& l, u64 at, const u32 (&counts)[DEPTH], Result (&result)[DEPTH]) {
    constexpr u32 TOGETHER = at_once(PACKETS);
    turn t{};
    t.slot = of_launch().slot;
#pragma unroll 1
    for (u32 source = 0; source < PACKETS; source += TOGETHER) {
        bytes<UNIT> v[TOGETHER][DEPTH];
        const bool came = reader(l.a, t).wait_for<true>(of_launch().flag, [&](u32& missing, tag& seen) {
            const u32 flag = of_launch().flag;
            packet_words<UNIT> words[TOGETHER][DEPTH];
#pragma unroll
            for (u32 k = 0; k < TOGETHER; ++k) {
                const u64 from = l.place(PLAIN + min(source + k, PACKETS - 1)) + at * 2;
#pragma unroll
                for (u32 n = 0; n < DEPTH; ++n) words[k][n] = load_words<UNIT>(from + n * THREADS * UNIT * 2, flag, counts[n]);
            }
            u32 absent = ~0u, other = 0;
            seen.high = l.number();
#pragma unroll
            for (u32 n = 0; n < DEPTH; ++n)
#pragma unroll
                for (u32 k = 0; k < TOGETHER; ++k)
                    words[k][n].take(flag, v[k][n], [&](u32, u64 word) { absent = source + k, other = word >> 32; });
            if (absent == ~0u) return true;
            seen.low = other;
            missing = l.item(PLAIN + min(absent, PACKETS - 1)).rank;
            return false;
        }, [&] { look_around(l.a); }); // not at the tags alone: where ranks do not meet, a rank that is ahead has sent its next one
        if (!came) return false;
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n)
#pragma unroll
            for (u32 k = 0; k < TOGETHER; ++k)
                if (source + k < PACKETS) result[n].add(PLAIN + source + k == 0, v[k][n]);
    }
    return true;
}

// Does a step with packets, DEPTH units of whole packets and whole elements of a thread at once. Every turn of a loop does all, as packets
// carry no turn.
template <u32 OP, u32 PLAIN, u32 PACKETS, u32 TO, u32 PACKED> DEVICE void packets(block_steps& b, const step_of& l) {
    if (b.has_failed) return;
    constexpr u32 UNIT = sizeof(T) > PAYLOAD ? sizeof(T) : PAYLOAD, DEPTH = depth(PLAIN + PACKETS, 2), FIRST_TO = PLAIN + PACKETS;
    const work_range part = part_of(l);
    const auto is_packets = [](u32 k) { return k + 1 > PLAIN && k < FIRST_TO; };
    u32 places = (u32)part.begin;
#pragma unroll 8
    for (u32 k = 0; k < PLAIN + PACKETS + TO; ++k) places |= is_packets(k) ? 0 : (u32)l.place(k);
    const bool is_even = places % UNIT == 0;
#pragma unroll 1
    for (u64 at = part.begin + thread() * UNIT; at - thread() % 32 * UNIT < part.end; at += THREADS * DEPTH * UNIT) {
        result_of<OP, UNIT> result[DEPTH];
        u32 counts[DEPTH]; // bytes
        bool is_whole = is_even;
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n) {
            const u64 here = at + n * THREADS * UNIT;
            counts[n] = here < part.end ? (u32)min((u64)UNIT, part.end - here) : 0;
            is_whole &= counts[n] == UNIT;
        }
        const auto offset = [&](u32 n) { return at + n * THREADS * UNIT; };
        if constexpr (PLAIN != 0) {
            const auto load_whole = [&](u64 from, u32 n) { return load<UNIT>(from + offset(n)); };
            const auto load_some = [&](u64 from, u32 n) { return load_part<UNIT>(from + offset(n), 0, counts[n]); };
            if (is_whole) load_sources<PLAIN, DEPTH, UNIT>(l, result, load_whole, [](u32) {});
            else load_sources<PLAIN, DEPTH, UNIT>(l, result, load_some, [](u32) {});
        }
        if constexpr (PACKETS != 0) {
            if (!load_packets<PLAIN, PACKETS, DEPTH, UNIT>(l, at, counts, result)) {
                b.has_failed = true;
                return;
            }
        }
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n) {
            if (counts[n] == 0) break;
            const bytes<UNIT> v = result[n].end();
#pragma unroll 8
            for (u32 to = FIRST_TO + TO; to < FIRST_TO + TO + PACKED; ++to)
                store_packets<UNIT>(l.place(to) + offset(n) * 2, of_launch().flag, v, counts[n]);
#pragma unroll 8
            for (u32 to = FIRST_TO; to < FIRST_TO + TO; ++to) {
                if (is_whole) store<UNIT>(l.place(to) + offset(n), v);
                else store_part<UNIT>(l.place(to) + offset(n), v, 0, counts[n]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ the kernel

// Does the steps of a shape. False if the block has ended before.
DEVICE bool run(block_steps& b, u32 shape);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
execute(const __grid_constant__ arguments a, const __grid_constant__ plan_call p) {
    // The launch before writes nothing of the table, but the flag that tells which half of the scratch is next.
    if constexpr (IS_COPIED)
        if (p.halves == 1) copy_table(p, blockIdx.x);
    begin_kernel<AT_END>(a);
    const block_end end(a);
    if constexpr (IS_COPIED)
        if (p.halves != 1) copy_table(p, number_of_block(p, next_flag(p)));
    if (!begin_launch(a, p)) return;
    const plan_block& block = IS_COPIED ? copied().block : p.blocks[number_of_block(p, of_launch().flag)];
    const plan_step* steps = IS_COPIED ? copied().steps : p.steps + block.first_step;
    const plan_item* items = IS_COPIED ? copied().items : p.items + block.first_item;
    block_steps b{a, p, steps, items, block, false};
    if (!run(b, block.shape) || !clears(of_launch().flag)) return;
    // The last steps: IF_CLEARING, MEET, ARRIVE, MEET, CLEAR, END.
    if (!meet(b)) return;
    arrive(b, step_of(b, block.steps - 4, block.items - 1));
    if (meet(b)) clear_packets(p);
}
