// What the operations of a plan do with data. Behind table.cuh and `plan_call`, for a program that has ELEMENT, PAYLOAD and the operators.
//
// A step has sources and destinations, each of them plain or packets. It moves bytes if it has one source, or reduces elements: in
// the order of the sources, each result rounded once, as on the host.
//
// Every access is strong, and never through the cache of constants: peers write what is read here. A packet is one or two words of
// eight bytes, each with four bytes of data and the flag of the launch. A vector is one access, but only its elements are certain to
// be whole; so the elements are these words.

typedef ELEMENT T;

// The type in which two elements are combined. Integers wrap, so that small ones need no more than 32 bits, and are kept as they are.
template <class T> struct combined { typedef typename wide<T>::type type; };
template <> struct combined<i32> { typedef i32 type; };
template <> struct combined<i8> { typedef i32 type; };
template <> struct combined<u8> { typedef i32 type; };
typedef combined<T>::type A;

[[maybe_unused]] DEVICE i32 plus(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
[[maybe_unused]] DEVICE i32 minimum(i32 a, i32 b) { return a < b ? a : b; }
[[maybe_unused]] DEVICE i32 maximum(i32 a, i32 b) { return a > b ? a : b; }

DEVICE A combine(u32 op, A a, A b) {
    return op == OPERATOR_SUM ? plus(a, b) : op == OPERATOR_MIN ? minimum(a, b) : maximum(a, b);
}

// Where an operand is in this launch.
DEVICE u64 address_of(const plan_call& p, const plan_item& it) { return it.at + p.bases[it.base]; }

// Of the launch: where the tags are, or those of the next launch that meets; the flag; whether ranks have met; and the first control word.
struct numbers {
    u32 slot, flag, meets, words;
};
DEVICE numbers& of_launch() {
    __shared__ numbers all;
    return all;
}

// The thread of the block; read where it is used, and not held in a register.
DEVICE u32 thread() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// What a thread waits for: nothing, a count of this GPU's blocks or of all, or a word of a packet that has the flag. What waits is left
// and entered again, so that the kernel waits in one place, where it holds little else.
enum class until : u32 { NOW, COUNT_HERE, COUNT, PACKET };
struct awaited {
    until what;
    u32 peer; // that brings it
    u64 place, expected;

    DEVICE bool has_come(u64& seen) const {
        if (what == until::NOW) return true;
        if (what == until::PACKET) return (seen = ld_relaxed_sys((const u64*)place) >> 32) == expected;
        seen = what == until::COUNT ? ld_acquire_sys((const u64*)place) : ld_acquire_gpu((const u64*)place);
        return (i64)(seen - expected) >= 0;
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

template <u32 WIDTH> struct of_width {
    static constexpr u32 BYTES = WIDTH;
};

// Accesses those of the BYTES bytes at an address that a part has, from `begin` to `end`: in one access if they are all, and lie at a
// multiple of BYTES; else in the largest units that all have.
template <u32 BYTES, class Whole, class Unit>
DEVICE void in_units(u64 at, u32 begin, u32 end, Whole whole, Unit unit) {
    const u32 of_all = (u32)at | begin | end;
    if (begin == 0 && end == BYTES && at % BYTES == 0) return whole();
    if (of_all % 4 == 0) {
#pragma unroll
        for (u32 k = 0; k < BYTES; k += 4)
            if (begin <= k && k < end) unit(of_width<4>(), k);
    } else if (of_all % 2 == 0) {
#pragma unroll
        for (u32 k = 0; k < BYTES; k += 2)
            if (begin <= k && k < end) unit(of_width<2>(), k);
    } else {
#pragma unroll
        for (u32 k = 0; k < BYTES; ++k)
            if (begin <= k && k < end) unit(of_width<1>(), k);
    }
}

// The bytes from `begin` to `end` of those at an address; the others are zero.
template <u32 BYTES> DEVICE bytes<BYTES> load_part(u64 from, u32 begin, u32 end) {
    bytes<BYTES> v = {};
    in_units<BYTES>(
        from, begin, end, [&] { v = load<BYTES>(from); },
        [&](auto width, u32 k) { v.word[k / 4] |= load<decltype(width)::BYTES>(from + k).word[0] << k % 4 * 8; });
    return v;
}

template <u32 BYTES> DEVICE void store_part(u64 to, const bytes<BYTES>& v, u32 begin, u32 end) {
    in_units<BYTES>(
        to, begin, end, [&] { store<BYTES>(to, v); },
        [&](auto width, u32 k) {
            constexpr u32 UNIT = decltype(width)::BYTES;
            store<UNIT>(to + k, bytes<UNIT>{{v.word[k / 4] >> k % 4 * 8}});
        });
}

// -------------------------------------------------------------------------------------------------------- packets

// The words of the packets of some bytes.
template <u32 BYTES> struct packet_words {
    u64 word[BYTES / 4];

    // Takes the bytes. False if a word has another flag, and then calls `absent` with its index and the word.
    template <class Absent> DEVICE bool take(u32 flag, bytes<BYTES>& v, Absent absent) const {
        bool complete = true;
#pragma unroll
        for (u32 k = 0; k < BYTES / 4; ++k) {
            v.word[k] = (u32)word[k];
            if ((u32)(word[k] >> 32) != flag) complete = false, absent(k, word[k]);
        }
        return complete;
    }
};

// Loads the packets of the first `count` bytes; those of the others count as there.
template <u32 BYTES> DEVICE packet_words<BYTES> load_words(u64 from, u32 flag, u32 count) {
    packet_words<BYTES> w;
#pragma unroll
    for (u32 k = 0; k < BYTES / 4; ++k) w.word[k] = (u64)flag << 32;
    if constexpr (PAYLOAD == 8) {
        if (count != 0)
            asm volatile("ld.volatile.global.v2.u64 {%0,%1}, [%2];" : "=l"(w.word[0]), "=l"(w.word[1]) : "l"(from) : "memory");
    } else {
#pragma unroll
        for (u32 k = 0; k < BYTES / 4; ++k)
            if (k * 4 < count) asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(w.word[k]) : "l"(from + k * 8) : "memory");
    }
    return w;
}

template <u32 BYTES> DEVICE void store_packets(u64 to, u32 flag, const bytes<BYTES>& v, u32 count) {
    const u64 high = (u64)flag << 32;
    if constexpr (PAYLOAD == 8)
        asm volatile("st.volatile.global.v2.u64 [%0], {%1,%2};"
                     :: "l"(to), "l"(v.word[0] | high), "l"(v.word[1] | high) : "memory");
    else
#pragma unroll
        for (u32 k = 0; k < BYTES / 4; ++k)
            if (k * 4 < count) asm volatile("st.volatile.global.u64 [%0], %1;" :: "l"(to + k * 8), "l"(v.word[k] | high) : "memory");
}

// --------------------------------------------------------------------------------------------------------- values

template <u32 BYTES> DEVICE T element_of(const bytes<BYTES>& v, u32 k) {
    union {
        u64 bits;
        T element;
    } both;
    const u32 at = k * sizeof(T);
    both.bits = v.word[at / 4] >> at % 4 * 8;
    if constexpr (sizeof(T) == 8) both.bits |= (u64)v.word[at / 4 + 1] << 32;
    return both.element;
}

// Adds an element to bytes that are zero.
template <u32 BYTES> DEVICE void set_element(bytes<BYTES>& v, u32 k, T element) {
    union {
        u64 bits;
        T element;
    } both;
    both.bits = 0;
    both.element = element;
    const u32 at = k * sizeof(T);
    v.word[at / 4] |= (u32)both.bits << at % 4 * 8;
    if constexpr (sizeof(T) == 8) v.word[at / 4 + 1] = both.bits >> 32;
}

// Elements that are reduced: those of 16 bits wide, until they are rounded; others need no more than they have.
template <u32 BYTES, class E = T, bool WIDE = sizeof(E) == 2> struct reduced {
    bytes<BYTES> sum;

    DEVICE void begin(const bytes<BYTES>& v) { sum = v; }
    DEVICE void add(u32 op, const bytes<BYTES>& v) {
        bytes<BYTES> result = {};
#pragma unroll
        for (u32 k = 0; k < BYTES / sizeof(T); ++k)
            set_element(result, k, (T)combine(op, (A)element_of(sum, k), (A)element_of(v, k)));
        sum = result;
    }
    DEVICE bytes<BYTES> end() const {
        bytes<BYTES> result = {};
#pragma unroll
        for (u32 k = 0; k < BYTES / sizeof(T); ++k) set_element(result, k, narrow<T>(widen(element_of(sum, k))));
        return result;
    }
};
template <u32 BYTES, class E> struct reduced<BYTES, E, true> {
    static constexpr u32 WORDS = (BYTES + 3) / 4; // of a single element the upper half is zero
    float_pair sum[WORDS];

    DEVICE void begin(const bytes<BYTES>& v) {
#pragma unroll
        for (u32 k = 0; k < WORDS; ++k) sum[k] = pairs<E>::widen(v.word[k]);
    }
    DEVICE void add(u32 op, const bytes<BYTES>& v) {
#pragma unroll
        for (u32 k = 0; k < WORDS; ++k) {
            const float_pair more = pairs<E>::widen(v.word[k]);
            sum[k] = float_pair{combine(op, sum[k].first, more.first), combine(op, sum[k].second, more.second)};
        }
    }
    DEVICE bytes<BYTES> end() const {
        bytes<BYTES> result;
#pragma unroll
        for (u32 k = 0; k < WORDS; ++k) result.word[k] = pairs<E>::narrow(sum[k].first, sum[k].second);
        return result;
    }
};
