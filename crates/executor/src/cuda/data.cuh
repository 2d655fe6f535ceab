// The steps that move data, in a compiled kernel. Behind compiled.cuh.

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

// Some steps that follow each other and have ITEMS items each, of which the first is a source: the sources of all, as if they were those of one.
template <u32 ITEMS> struct sources_of_steps {
    const step_of& l; // the first
    const arguments& a;

    DEVICE explicit sources_of_steps(const step_of& l) : l(l), a(l.a) {}
    DEVICE const plan_item& item(u32 index) const { return l.item(index * ITEMS); }
    DEVICE u64 place(u32 index) const { return l.place(index * ITEMS); }
    DEVICE u64 number() const { return l.number(); }
};

// Takes up the packets of PACKETS sources behind the first PLAIN ones, for DEPTH units of which the first is at `at`, and which have `counts`
// bytes: calls take(source, n, v) for each. The warp waits for the packets of several sources together. False if it gave up.
template <u32 PLAIN, u32 PACKETS, u32 DEPTH, u32 UNIT, class Step, class Take>
DEVICE bool load_packets(const Step& l, u64 at, const u32 (&counts)[DEPTH], Take take) {
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
                if (source + k < PACKETS) take(source + k, n, v[k][n]);
    }
    return true;
}

// The bytes that a thread does at once in a step with packets: whole packets and whole elements.
[[maybe_unused]] constexpr u32 UNIT = sizeof(T) > PAYLOAD ? sizeof(T) : PAYLOAD;

// Whether some bytes of a step, and what is not packets of its operands, are whole units.
template <u32 PLAIN, u32 PACKETS, u32 TO> DEVICE bool is_whole(const step_of& l, work_range part) {
    u32 places = (u32)part.begin | (u32)part.end;
#pragma unroll 8
    for (u32 k = 0; k < PLAIN + PACKETS + TO; ++k) places |= k + 1 > PLAIN && k < PLAIN + PACKETS ? 0 : (u32)l.place(k);
    return places % UNIT == 0;
}

// Does some bytes of a step with packets, DEPTH units of a thread at once. WHOLE: they are whole units.
template <u32 OP, u32 PLAIN, u32 PACKETS, u32 TO, u32 PACKED, u32 DEPTH, bool WHOLE>
DEVICE void move_packets(block_steps& b, const step_of& l, work_range part) {
    constexpr u32 FIRST_TO = PLAIN + PACKETS;
#pragma unroll 1
    for (u64 at = part.begin + thread() * UNIT; at - thread() % 32 * UNIT < part.end; at += THREADS * DEPTH * UNIT) {
        result_of<OP, UNIT> result[DEPTH];
        u32 counts[DEPTH]; // bytes
        const auto offset = [&](u32 n) { return at + n * THREADS * UNIT; };
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n) {
            const bool is_there = offset(n) < part.end;
            counts[n] = !is_there ? 0 : WHOLE ? UNIT : (u32)min((u64)UNIT, part.end - offset(n));
        }
        if constexpr (PLAIN != 0)
            load_sources<PLAIN, DEPTH, UNIT>(l, result, [&](u64 from, u32 n) {
                bytes<UNIT> v = {};
                if (!WHOLE) v = load_part<UNIT>(from + offset(n), 0, counts[n]);
                else if (counts[n] != 0) v = load<UNIT>(from + offset(n));
                return v;
            }, [](u32) {});
        if constexpr (PACKETS != 0) {
            const auto take = [&](u32 source, u32 n, const bytes<UNIT>& v) { result[n].add(PLAIN + source == 0, v); };
            if (!load_packets<PLAIN, PACKETS, DEPTH, UNIT>(l, at, counts, take)) {
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
                if (WHOLE) store<UNIT>(l.place(to) + offset(n), v);
                else store_part<UNIT>(l.place(to) + offset(n), v, 0, counts[n]);
            }
        }
    }
}

// Does a step with packets. Every turn of a loop does all, as packets carry no turn.
template <u32 OP, u32 PLAIN, u32 PACKETS, u32 TO, u32 PACKED>
DEVICE void packets(block_steps& b, const step_of& l, work_range part) {
    if (b.has_failed) return;
    if (is_whole<PLAIN, PACKETS, TO>(l, part)) move_packets<OP, PLAIN, PACKETS, TO, PACKED, depth(PLAIN + PACKETS, 2), true>(b, l, part);
    else move_packets<OP, PLAIN, PACKETS, TO, PACKED, 1, false>(b, l, part);
}
