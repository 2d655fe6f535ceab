// What the operations of a plan do with data. Behind slots.cuh, for a program that has ELEMENT, PAYLOAD and the operators.
//
// A step has sources and destinations, each of them plain or packets. It moves bytes if it has one source, or reduces elements: in
// the order of the sources, each result rounded once, as on the host.
//
// Every access is strong, and never through the cache of constants: peers write what is read here. A packet is one or two words of
// eight bytes, each with four bytes of data and the flag of the launch. A vector is one access, but only its elements are certain to
// be whole; so the elements are these words.

typedef ELEMENT T;

// The type in which elements accumulate: small integers wrap, and so may do it in 32 bits.
template <class T> struct accumulator { typedef typename wide<T>::type type; };
template <> struct accumulator<i32> { typedef i32 type; };
template <> struct accumulator<i8> { typedef i32 type; };
template <> struct accumulator<u8> { typedef i32 type; };
typedef accumulator<T>::type A;

[[maybe_unused]] DEVICE i32 plus(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
[[maybe_unused]] DEVICE i32 minimum(i32 a, i32 b) { return a < b ? a : b; }
[[maybe_unused]] DEVICE i32 maximum(i32 a, i32 b) { return a > b ? a : b; }

// An operand of a step, or the counter of a channel. Rust's `Item` has the same layout.
struct alignas(16) plan_item {
    u64 at;   // an address; or of a tensor, bytes from its start
    u32 base; // ABSOLUTE, OF_INPUT or OF_OUTPUT
    u32 rank; // the rank that sends these packets, or through this channel
};

// A step of a thread block. Rust's `RawStep` has the same layout.
struct alignas(16) plan_step {
    u32 kind;
    u32 detail;   // the operator; or whether a signal is relaxed, how many blocks meet, how many steps a loop has
    u32 first;    // of the step's items: plain sources, packets, plain destinations, packets
    u32 by_turn;  // whether each turn of a loop does a part of the share
    u32 counts[4];
    u64 share[2]; // the block's bytes of the operation; of a loop, the number of turns and the bytes of each
    u64 span[2];  // the step's bytes of the operation
};

// Signals of a channel, releases of a semaphore or arrivals at a barrier since the plan was loaded, and how many of them were taken.
struct alignas(16) plan_counter {
    u64 count, taken;
};

// What steps share. Rust's `PlanCall` has the same layout.
struct plan_call {
    const u32* starts;      // the first step of each block, and behind the last
    const plan_step* steps;
    const plan_item* items;
    u32* flags;             // of the last launch: a copy for each block
    plan_counter* cleared;  // of the blocks that have cleared packets
    u8* packets;            // all packets that come to this rank
    u64 packet_bytes;
    u64 chunk;              // bytes of a chunk
};

// A thread's view of a launch.
struct launch {
    const arguments& a;
    const plan_call& p;
    reader& r;
    u32 flag;
    u32 step;

    DEVICE u64 place(const plan_item& item) const {
        return item.at + (item.base == ABSOLUTE ? 0 : item.base == OF_INPUT ? (u64)a.input : (u64)a.output);
    }

    // Waits, for all threads of the warp; `seen` tells the operation.
    template <class Ready> DEVICE bool wait(u64 expected, Ready ready) {
        return r.wait_for<true>(expected, [&](u32& missing, tag& seen) {
            seen.high = step + 1;
            return ready(missing, seen.low);
        });
    }
};

// ---------------------------------------------------------------------------------------------------------- bytes

// Some bytes, at a multiple of as many.
template <u32 BYTES> struct bytes {
    u32 word[BYTES < 4 ? 1 : BYTES / 4];
};

template <u32 BYTES> DEVICE bytes<BYTES> load(u64 from) {
    bytes<BYTES> v;
    if constexpr (BYTES == 1) asm volatile("ld.volatile.global.u8 %0, [%1];" : "=r"(v.word[0]) : "l"(from) : "memory");
    if constexpr (BYTES == 2) {
        u16 half;
        asm volatile("ld.volatile.global.u16 %0, [%1];" : "=h"(half) : "l"(from) : "memory");
        v.word[0] = half;
    }
    if constexpr (BYTES == 4) asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(from) : "memory");
    if constexpr (BYTES == 8)
        asm volatile("ld.volatile.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "l"(from) : "memory");
    if constexpr (BYTES == 16) {
        const uint4 all = load16_volatile((const void*)from);
        v.word[0] = all.x, v.word[1] = all.y, v.word[2] = all.z, v.word[3] = all.w;
    }
    return v;
}

template <u32 BYTES> DEVICE void store(u64 to, const bytes<BYTES>& v) {
    if constexpr (BYTES == 1) asm volatile("st.volatile.global.u8 [%0], %1;" :: "l"(to), "r"(v.word[0]) : "memory");
    if constexpr (BYTES == 2) asm volatile("st.volatile.global.u16 [%0], %1;" :: "l"(to), "h"((u16)v.word[0]) : "memory");
    if constexpr (BYTES == 4) asm volatile("st.volatile.global.u32 [%0], %1;" :: "l"(to), "r"(v.word[0]) : "memory");
    if constexpr (BYTES == 8)
        asm volatile("st.volatile.global.v2.u32 [%0], {%1,%2};" :: "l"(to), "r"(v.word[0]), "r"(v.word[1]) : "memory");
    if constexpr (BYTES == 16) store16_volatile((void*)to, make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}

// The first `count` bytes, at any address; the others are zero.
template <u32 BYTES> DEVICE bytes<BYTES> load_some(u64 from, u32 count) {
    if (count == BYTES && from % BYTES == 0) return load<BYTES>(from);
    bytes<BYTES> v = {};
    if ((from | count) % 4 == 0) {
#pragma unroll
        for (u32 at = 0; at < BYTES; at += 4)
            if (at < count) v.word[at / 4] = load<4>(from + at).word[0];
        return v;
    }
#pragma unroll
    for (u32 at = 0; at < BYTES; ++at)
        if (at < count) v.word[at / 4] |= load<1>(from + at).word[0] << at % 4 * 8;
    return v;
}

template <u32 BYTES> DEVICE void store_some(u64 to, const bytes<BYTES>& v, u32 count) {
    if (count == BYTES && to % BYTES == 0) return store<BYTES>(to, v);
    if ((to | count) % 4 == 0) {
#pragma unroll
        for (u32 at = 0; at < BYTES; at += 4)
            if (at < count) store<4>(to + at, bytes<4>{{v.word[at / 4]}});
        return;
    }
#pragma unroll
    for (u32 at = 0; at < BYTES; ++at)
        if (at < count) store<1>(to + at, bytes<1>{{v.word[at / 4] >> at % 4 * 8 & 0xFF}});
}

// -------------------------------------------------------------------------------------------------------- packets

// Loads the packets of some bytes: whether all of their words have the flag. `seen` is the flag of one that has another.
template <u32 BYTES> DEVICE bool load_packets(u64 from, u32 flag, bytes<BYTES>& v, u64& seen) {
    static_assert(BYTES == 4 || BYTES == 8, "one word of eight bytes, or two");
    u64 words[BYTES / 4];
    if constexpr (BYTES == 4) asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(words[0]) : "l"(from) : "memory");
    if constexpr (BYTES == 8)
        asm volatile("ld.volatile.global.v2.u64 {%0,%1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
    bool complete = true;
#pragma unroll
    for (u32 k = 0; k < BYTES / 4; ++k) {
        v.word[k] = (u32)words[k];
        if ((u32)(words[k] >> 32) != flag) complete = false, seen = words[k] >> 32;
    }
    return complete;
}

template <u32 BYTES> DEVICE void store_packets(u64 to, u32 flag, const bytes<BYTES>& v) {
    const u64 first = v.word[0] | (u64)flag << 32;
    if constexpr (BYTES == 4) asm volatile("st.volatile.global.u64 [%0], %1;" :: "l"(to), "l"(first) : "memory");
    if constexpr (BYTES == 8)
        asm volatile("st.volatile.global.v2.u64 [%0], {%1,%2};"
                     :: "l"(to), "l"(first), "l"(v.word[1] | (u64)flag << 32) : "memory");
}

// --------------------------------------------------------------------------------------------------------- values

// Bytes that come from one source.
template <u32 BYTES> struct moved {
    bytes<BYTES> all;

    DEVICE void begin(const bytes<BYTES>& v) { all = v; }
    DEVICE void add(u32, const bytes<BYTES>&) {}
    DEVICE bytes<BYTES> end() const { return all; }
};

// Elements that are reduced.
template <u32 BYTES> struct reduced {
    static constexpr u32 LANES = BYTES / sizeof(T);
    static constexpr bool IN_PAIRS = BYTES == 16 && pairs<T>::OF_WORDS;
    struct lanes {
        A of[LANES];
    } sum;

    static DEVICE lanes widened(const bytes<BYTES>& v) {
        lanes wide;
        if constexpr (IN_PAIRS) {
            vec16<T> vector;
            vector.words = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
            const wide_vec<T> all = widen_vec(vector);
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) wide.of[k] = all.lane[k];
        } else {
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) {
                union {
                    u64 bits;
                    T element;
                } both;
                const u32 at = k * sizeof(T);
                both.bits = v.word[at / 4] >> at % 4 * 8;
                if constexpr (sizeof(T) == 8) both.bits |= (u64)v.word[at / 4 + 1] << 32;
                wide.of[k] = (A)widen(both.element);
            }
        }
        return wide;
    }
    DEVICE void begin(const bytes<BYTES>& v) { sum = widened(v); }
    DEVICE void add(u32 op, const bytes<BYTES>& v) {
        const lanes more = widened(v);
        if (op == OPERATOR_SUM)
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) sum.of[k] = plus(sum.of[k], more.of[k]);
        else if (op == OPERATOR_MIN)
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) sum.of[k] = minimum(sum.of[k], more.of[k]);
        else
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) sum.of[k] = maximum(sum.of[k], more.of[k]);
    }
    DEVICE bytes<BYTES> end() const {
        bytes<BYTES> v = {};
        if constexpr (IN_PAIRS) {
            wide_vec<T> all;
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) all.lane[k] = sum.of[k];
            const uint4 words = narrow_vec<T>(all).words;
            v.word[0] = words.x, v.word[1] = words.y, v.word[2] = words.z, v.word[3] = words.w;
        } else {
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) {
                union {
                    u64 bits;
                    T element;
                } both;
                both.bits = 0;
                both.element = narrow<T>((typename wide<T>::type)sum.of[k]);
                const u32 at = k * sizeof(T);
                v.word[at / 4] |= (u32)both.bits << at % 4 * 8;
                if constexpr (sizeof(T) == 8) v.word[at / 4 + 1] = both.bits >> 32;
            }
        }
        return v;
    }
};

// ---------------------------------------------------------------------------------------------------------- steps

// Does the bytes `begin` to `end`, a multiple of BYTES, of a step without packets, whose operands are there at a multiple of BYTES.
template <template <u32> class Value, u32 BYTES, u32 BATCH>
DEVICE void do_bytes(const launch& l, const plan_step& s, u64 begin, u64 end) {
    const plan_item* items = l.p.items + s.first;
    const u32 sources = s.counts[0], destinations = s.counts[2];
    constexpr u64 STEP = THREADS * BYTES;
    for (u64 at = begin + threadIdx.x * BYTES; at < end; at += BATCH * STEP) {
        Value<BYTES> value[BATCH];
        for (u32 source = 0; source < sources; ++source) {
            const u64 from = l.place(items[source]) + at;
            bytes<BYTES> v[BATCH] = {};
#pragma unroll
            for (u32 n = 0; n < BATCH; ++n)
                if (at + n * STEP < end) v[n] = load<BYTES>(from + n * STEP);
#pragma unroll
            for (u32 n = 0; n < BATCH; ++n) {
                if (source == 0) value[n].begin(v[n]);
                else value[n].add(s.detail, v[n]);
            }
        }
        bytes<BYTES> result[BATCH];
#pragma unroll
        for (u32 n = 0; n < BATCH; ++n) result[n] = value[n].end();
        for (u32 destination = 0; destination < destinations; ++destination) {
            const u64 to = l.place(items[sources + destination]) + at;
#pragma unroll
            for (u32 n = 0; n < BATCH; ++n)
                if (at + n * STEP < end) store<BYTES>(to + n * STEP, result[n]);
        }
    }
}

template <u32 WIDTH> struct of_width {
    static constexpr u32 BYTES = WIDTH;
};

// Does a step without packets: in vectors as far as its operands lie alike, and the rest in units of ONE byte or element.
template <template <u32> class Value, u32 ONE>
DEVICE void do_plain(const launch& l, const plan_step& s, u64 begin, u64 end) {
    const plan_item* items = l.p.items + s.first;
    const u64 first = l.place(items[0]);
    u64 differs = 0;
    for (u32 other = 1; other < s.counts[0] + s.counts[2]; ++other) differs |= l.place(items[other]) ^ first;
    const auto in_units_of = [&](auto width) {
        constexpr u32 BYTES = decltype(width)::BYTES;
        const u64 to_multiple = (0 - (first + begin)) % BYTES, head = begin + min(to_multiple, end - begin);
        const u64 tail = head + (end - head) / BYTES * BYTES;
        do_bytes<Value, ONE, 1>(l, s, begin, head);
        do_bytes<Value, BYTES, BYTES == 16 ? 2 : 1>(l, s, head, tail);
        do_bytes<Value, ONE, 1>(l, s, tail, end);
    };
    if (differs % 16 == 0) return in_units_of(of_width<16>());
    if constexpr (ONE < 4) {
        if (differs % 4 == 0) return in_units_of(of_width<4>());
    }
    do_bytes<Value, ONE, 1>(l, s, begin, end);
}

// Does a step with packets, each as soon as it is there, UNIT bytes of data at a time: whole packets, and whole elements. False for a
// warp that gave up.
template <template <u32> class Value, u32 UNIT>
DEVICE bool do_packets(launch& l, const plan_step& s, u64 begin, u64 end) {
    const plan_item* items = l.p.items + s.first;
    const u32 plain = s.counts[0], sources = plain + s.counts[1], stored = sources + s.counts[2], all = stored + s.counts[3];
    // The packets of each chunk begin at a multiple of 16 bytes, so a chunk may end with a part of a unit.
    const u64 chunk = l.p.chunk, units = (chunk + UNIT - 1) / UNIT, stride = (chunk + 7) / 8 * 16;
    const bool is_cut = chunk % 8 != 0;
    const auto unit_at = [&](u64 at) { return is_cut ? at / chunk * units + (at % chunk + UNIT - 1) / UNIT : (at + UNIT - 1) / UNIT; };
    const u64 last = unit_at(end);
    for (u64 unit = unit_at(begin) + threadIdx.x; unit - lane_id() < last; unit += THREADS) {
        const bool is_mine = unit < last;
        u64 at = unit * UNIT, packets = at * 2, until = end;
        if (is_cut) {
            const u64 which = unit / units, within = unit % units * UNIT;
            at = which * chunk + within, packets = which * stride + within * 2, until = min(end, (which + 1) * chunk);
        }
        const u32 count = is_mine ? (u32)min((u64)UNIT, until - at) : 0;
        Value<UNIT> value;
        for (u32 source = 0; source < sources; ++source) {
            const plan_item& item = items[source];
            bytes<UNIT> v = {};
            if (source < plain) {
                v = load_some<UNIT>(l.place(item) + at, count);
            } else {
                const u64 from = l.place(item) + packets;
                const bool came = l.wait(l.flag, [&](u32& missing, u64& seen) {
                    const bool is_there = !is_mine || load_packets<UNIT>(from, l.flag, v, seen);
                    if (!is_there) missing = item.rank;
                    return is_there;
                });
                if (!came) return false;
            }
            if (source == 0) value.begin(v);
            else value.add(s.detail, v);
        }
        if (is_mine) {
            const bytes<UNIT> result = value.end();
            for (u32 to = sources; to < stored; ++to) store_some<UNIT>(l.place(items[to]) + at, result, count);
            for (u32 to = stored; to < all; ++to) store_packets<UNIT>(l.place(items[to]) + packets, l.flag, result);
        }
    }
    return true;
}

// Does the bytes `begin` to `end` of a step. False for a warp that gave up.
DEVICE bool do_data(launch& l, const plan_step& s, u64 begin, u64 end) {
    constexpr u32 WHOLE = sizeof(T) > PAYLOAD ? sizeof(T) : PAYLOAD;
    if (begin >= end) return true;
    const bool has_packets = s.counts[1] + s.counts[3] != 0, moves = s.detail == OPERATOR_NONE;
    if (has_packets) return moves ? do_packets<moved, PAYLOAD>(l, s, begin, end) : do_packets<reduced, WHOLE>(l, s, begin, end);
    if (moves) do_plain<moved, 1>(l, s, begin, end);
    else do_plain<reduced, sizeof(T)>(l, s, begin, end);
    return true;
}
