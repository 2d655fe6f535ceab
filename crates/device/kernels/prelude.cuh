// The code that every kernel includes. It includes no header itself: NVRTC compiles it in a few tens of milliseconds.
//
//   types            u8 .. i64, f16, bf16, e4m3, e5m2, pairs of e2m1
//   conversions      widen, narrow: the bits of the host's crate antiphon-tensor, one NaN included
//   vectors          16 bytes at a time: vec16, load16, store16 and their volatile and streaming forms
//   memory order     acquire, release and relaxed accesses of one word, for the system (other GPUs, the host)
//   operators        sum, prod, min, max, and reductions over a warp and a block in one fixed order
//   work             this block's part of a range
//   clusters         blocks that write into each other's shared memory
//   shared memory    copies into it
//   PDL              starting before the kernel ahead has ended
//   waiting          until something is ready, or the deadline has passed, or the host ends the wait
//
// Kernels run on sm_80 and newer. Compiled with -fmad=false: a product and a sum round one by one, as on the host.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "Antiphon's kernels need compute capability 8.0 (Ampere) or newer"
#endif

#define DEVICE __device__ __forceinline__

// ---------------------------------------------------------------------------------------------------------- types

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Floats that are only stored: arithmetic is in float, after `widen`.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct e4m3 { u8 bits; };
struct e5m2 { u8 bits; };
// Two floats of four bits, the first in the low ones.
struct e2m1x2 { u8 bits; };

struct float_pair { float first, second; };

// ---------------------------------------------------------------------------------------------------- conversions
//
// Narrowing is to nearest, ties to even, and every NaN becomes the one NaN of the type (antiphon-tensor's `round`):
// f16 0x7E00, bf16 0x7FC0, f32 0x7FC00000, f64 0x7FF8000000000000, e4m3 and e5m2 0x7F. The narrow formats of eight and
// four bits saturate. Widening is exact; from f16 and bf16 a NaN stays some NaN.

DEVICE float canonical(float x) { return x == x ? x : __uint_as_float(0x7FC00000u); }
DEVICE double canonical(double x) { return x == x ? x : __longlong_as_double(0x7FF8000000000000ll); }

// cvt's NaN is 0x7FFF. Compared as signed numbers, the canonical NaN is the smaller of the two, and every other value is
// smaller than both: infinity is less than the canonical NaN, and negative values are negative.
DEVICE u16 one_nan(u16 bits, i16 nan) { i16 x = (i16)bits; return (u16)(x < nan ? x : nan); }
DEVICE u32 one_nan_x2(u32 bits, u32 nans) { return __vmins2(bits, nans); }

// Two at once, the first in the low half: half the instructions.
DEVICE u32 narrow_f16x2(float first, float second) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return one_nan_x2(bits, 0x7E007E00u);
}
DEVICE u32 narrow_bf16x2(float first, float second) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return one_nan_x2(bits, 0x7FC07FC0u);
}

// A float format of a sign, some exponent bits and some fraction bits, in integer arithmetic: antiphon-tensor's
// small_float.rs, for architectures without the instructions (and for tests: ANTIPHON_SOFTWARE_FLOATS).
template <u32 FRACTION, u32 BIAS, u32 SIGN, u32 MAX, bool INFINITE, u32 NAN_CODE>
struct small_float {
    static constexpr u32 DROPPED = 23 - FRACTION;
    static constexpr u32 SMALLEST_NORMAL = (127 + 1 - BIAS) << 23;
    static constexpr u32 REBIAS = (127 - BIAS) << 23;

    static DEVICE u32 encode(float value) {
        u32 bits = __float_as_uint(value);
        u32 sign = (bits >> 31) << SIGN;
        u32 magnitude = bits & 0x7FFFFFFFu;
        u32 odd = (magnitude >> DROPPED) & 1;
        u32 normal = (magnitude - REBIAS + (1u << (DROPPED - 1)) - 1 + odd) >> DROPPED;
        // Adding the number whose unit in the last place is the smallest subnormal rounds to a multiple of that.
        u32 anchor = SMALLEST_NORMAL + (DROPPED << 23);
        u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(anchor)) - anchor;
        u32 unbounded = magnitude < SMALLEST_NORMAL ? subnormal : normal;
        u32 bounded = unbounded < MAX ? unbounded : MAX;
        return magnitude > 0x7F800000u ? NAN_CODE : sign | bounded;
    }

    static DEVICE float decode(u32 code) {
        u32 sign = ((code >> SIGN) & 1) << 31;
        code &= (1u << SIGN) - 1;
        u32 magnitude = code << DROPPED;
        float subnormal = __uint_as_float(magnitude + SMALLEST_NORMAL) - __uint_as_float(SMALLEST_NORMAL);
        u32 finite = (code >> FRACTION) == 0 ? __float_as_uint(subnormal) : magnitude + REBIAS;
        u32 special = INFINITE && code == MAX + 1 ? sign | 0x7F800000u : 0x7FC00000u;
        return __uint_as_float(code <= MAX ? sign | finite : special);
    }
};
typedef small_float<3, 7, 7, 0x7E, false, 0x7F> e4m3_format;
typedef small_float<2, 15, 7, 0x7B, true, 0x7F> e5m2_format;
// Without a NaN: it becomes the largest value, 6.
typedef small_float<1, 1, 3, 0x7, false, 0x7> e2m1_format;

// What e2m1_format encodes, in fewer instructions, as there are many to encode: adding a number whose unit in the last place is
// the step between neighbours rounds to a multiple of that, which is half of the magnitude's power of two, and at least 1/2.
DEVICE u32 encode_e2m1(float value) {
    value = fminf(value, 6.0f); // and so is a NaN
    const float magnitude = fminf(fabsf(value), 6.0f);
    const u32 anchor = (__float_as_uint(fmaxf(magnitude, 1.0f)) & 0x7F800000u) + (22u << 23);
    const u32 steps = __float_as_uint(magnitude + __uint_as_float(anchor)) - anchor;
    return steps + (anchor >> 22) - 2 * (127 + 22) | __float_as_uint(value) >> 28 & 8;
}

// Two at once, the first in the low byte.
DEVICE u16 narrow_e4m3x2(float first, float second) {
#if __CUDA_ARCH__ >= 890 && !defined(ANTIPHON_SOFTWARE_FLOATS)
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return (u16)(e4m3_format::encode(first) | e4m3_format::encode(second) << 8);
#endif
}
DEVICE u16 narrow_e5m2x2(float first, float second) {
#if __CUDA_ARCH__ >= 890 && !defined(ANTIPHON_SOFTWARE_FLOATS)
    u16 bits;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return (u16)(e5m2_format::encode(first) | e5m2_format::encode(second) << 8);
#endif
}
DEVICE e2m1x2 narrow_e2m1x2(float first, float second) {
// Only architecture- and family-specific targets (sm_100a, sm_103a, sm_120a) have the instruction.
#if __CUDA_ARCH__ >= 1000 && defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && !defined(ANTIPHON_SOFTWARE_FLOATS)
    u16 bits;
    asm("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2; mov.b16 %0, {pair, 0}; }"
        : "=h"(bits) : "f"(second), "f"(first));
    return e2m1x2{(u8)bits};
#else
    return e2m1x2{(u8)(encode_e2m1(first) | encode_e2m1(second) << 4)};
#endif
}

DEVICE float_pair widen_f16x2(u32 bits) {
    float_pair pair;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(pair.first), "=f"(pair.second) : "r"(bits));
    return pair;
}
DEVICE float_pair widen_bf16x2(u32 bits) {
    return float_pair{__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
}
DEVICE float_pair widen_e4m3x2(u16 bits) {
#if __CUDA_ARCH__ >= 890 && !defined(ANTIPHON_SOFTWARE_FLOATS)
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
    float_pair pair = widen_f16x2(halves);
    return float_pair{canonical(pair.first), canonical(pair.second)};
#else
    return float_pair{e4m3_format::decode(bits & 0xFF), e4m3_format::decode(bits >> 8)};
#endif
}
DEVICE float_pair widen_e5m2x2(u16 bits) {
    // The upper halves of f16's.
    float_pair pair = widen_f16x2(((u32)bits & 0x00FFu) << 8 | ((u32)bits & 0xFF00u) << 16);
    return float_pair{canonical(pair.first), canonical(pair.second)};
}
DEVICE float_pair widen(e2m1x2 x) {
    return float_pair{e2m1_format::decode(x.bits & 0xF), e2m1_format::decode(x.bits >> 4)};
}

// The type that elements of T accumulate in: float, double for double, i64 for integers.
template <class T> struct wide { typedef i64 type; };
template <> struct wide<float> { typedef float type; };
template <> struct wide<double> { typedef double type; };
template <> struct wide<f16> { typedef float type; };
template <> struct wide<bf16> { typedef float type; };
template <> struct wide<e4m3> { typedef float type; };
template <> struct wide<e5m2> { typedef float type; };

template <class T> DEVICE i64 widen(T x) { return (i64)x; }
DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }
DEVICE float widen(f16 x) { return widen_f16x2(x.bits).first; }
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float widen(e4m3 x) { return widen_e4m3x2(x.bits).first; }
DEVICE float widen(e5m2 x) { return widen_e5m2x2(x.bits).first; }

template <class T> DEVICE T narrow(typename wide<T>::type x) { return (T)x; }
template <> DEVICE float narrow<float>(float x) { return canonical(x); }
template <> DEVICE double narrow<double>(double x) { return canonical(x); }
template <> DEVICE f16 narrow<f16>(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return f16{one_nan(bits, 0x7E00)};
}
template <> DEVICE bf16 narrow<bf16>(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bf16{one_nan(bits, 0x7FC0)};
}
template <> DEVICE e4m3 narrow<e4m3>(float x) { return e4m3{(u8)narrow_e4m3x2(x, 0.0f)}; }
template <> DEVICE e5m2 narrow<e5m2>(float x) { return e5m2{(u8)narrow_e5m2x2(x, 0.0f)}; }

// -------------------------------------------------------------------------------------------------------- vectors

// Sixteen bytes of elements: what one thread moves with one instruction. Addresses are multiples of 16, in global
// memory (this device's, a peer's, or pinned on the host).
template <class T> struct alignas(16) vec16 {
    static constexpr u32 LANES = 16 / sizeof(T);
    union {
        uint4 words;
        T lane[LANES];
    };
};

DEVICE uint4 load16(const void* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
// For data that no thread writes while the kernel runs, and that is read once: not kept in the L1 cache.
DEVICE uint4 load16_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
// Loads from memory every time: for polling words that a peer writes. The 16 bytes are one access, but only words of four
// bytes are guaranteed to be whole, so every word must show by itself whether it has arrived.
DEVICE uint4 load16_volatile(const void* from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
DEVICE void store16(void* to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store16_volatile(void* to, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// A tag as one indivisible access, for peers that poll it.
DEVICE void store_tag(void* to, u64 low, u64 high) {
    asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }"
                 :: "l"(to), "l"(low), "l"(high) : "memory");
}
DEVICE void load_tag(const void* from, u64& low, u64& high) {
    asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

// The elements of a vec16 in the type that they accumulate in, converted in pairs where that is cheaper.
template <class T> struct wide_vec { typename wide<T>::type lane[vec16<T>::LANES]; };

template <class T> struct pairs { static constexpr bool OF_WORDS = false, OF_HALVES = false; };
template <> struct pairs<f16> {
    static constexpr bool OF_WORDS = true, OF_HALVES = false;
    static DEVICE float_pair widen(u32 x) { return widen_f16x2(x); }
    static DEVICE u32 narrow(float a, float b) { return narrow_f16x2(a, b); }
};
template <> struct pairs<bf16> {
    static constexpr bool OF_WORDS = true, OF_HALVES = false;
    static DEVICE float_pair widen(u32 x) { return widen_bf16x2(x); }
    static DEVICE u32 narrow(float a, float b) { return narrow_bf16x2(a, b); }
};
template <> struct pairs<e4m3> {
    static constexpr bool OF_WORDS = false, OF_HALVES = true;
    static DEVICE float_pair widen(u32 x) { return widen_e4m3x2((u16)x); }
    static DEVICE u32 narrow(float a, float b) { return narrow_e4m3x2(a, b); }
};
template <> struct pairs<e5m2> {
    static constexpr bool OF_WORDS = false, OF_HALVES = true;
    static DEVICE float_pair widen(u32 x) { return widen_e5m2x2((u16)x); }
    static DEVICE u32 narrow(float a, float b) { return narrow_e5m2x2(a, b); }
};

template <class T> DEVICE wide_vec<T> widen_vec(const vec16<T>& v) {
    wide_vec<T> result;
    const u32 words[4] = {v.words.x, v.words.y, v.words.z, v.words.w};
#pragma unroll
    for (u32 k = 0; k < vec16<T>::LANES; ++k) {
        if constexpr (pairs<T>::OF_WORDS || pairs<T>::OF_HALVES) {
            if (k % 2) continue;
            u32 bits = pairs<T>::OF_WORDS ? words[k / 2] : words[k / 4] >> (k % 4 * 8);
            float_pair pair = pairs<T>::widen(bits);
            result.lane[k] = pair.first;
            result.lane[k + 1] = pair.second;
        } else {
            result.lane[k] = widen(v.lane[k]);
        }
    }
    return result;
}
template <class T> DEVICE vec16<T> narrow_vec(const wide_vec<T>& v) {
    vec16<T> result;
    if constexpr (pairs<T>::OF_WORDS || pairs<T>::OF_HALVES) {
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 k = 0; k < vec16<T>::LANES; k += 2) {
            u32 pair = pairs<T>::narrow(v.lane[k], v.lane[k + 1]);
            if (pairs<T>::OF_WORDS) words[k / 2] = pair;
            else words[k / 4] |= pair << (k % 4 * 8);
        }
        result.words = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (u32 k = 0; k < vec16<T>::LANES; ++k) result.lane[k] = narrow<T>(v.lane[k]);
    }
    return result;
}

template <class T> DEVICE vec16<T> load_vec(const T* from) { vec16<T> v; v.words = load16(from); return v; }
template <class T> DEVICE void store_vec(T* to, const vec16<T>& v) { store16(to, v.words); }

// --------------------------------------------------------------------------------------------------- memory order
//
// Accesses of one word that signals another GPU or the host. A release store makes everything that this thread wrote
// or saw before it visible to a thread that sees its value with an acquire load. For the writes of other threads of the
// block, __syncthreads() stands before the store. Relaxed accesses order nothing.

#define ANTIPHON_ORDERED(T, type, c)                                                                                 \
    DEVICE T ld_acquire_sys(const T* p) {                                                                            \
        T v; asm volatile("ld.acquire.sys.global." type " %0, [%1];" : "=" c(v) : "l"(p) : "memory"); return v;      \
    }                                                                                                                \
    DEVICE T ld_relaxed_sys(const T* p) {                                                                            \
        T v; asm volatile("ld.relaxed.sys.global." type " %0, [%1];" : "=" c(v) : "l"(p) : "memory"); return v;      \
    }                                                                                                                \
    DEVICE void st_release_sys(T* p, T v) {                                                                          \
        asm volatile("st.release.sys.global." type " [%0], %1;" :: "l"(p), c(v) : "memory");                         \
    }                                                                                                                \
    DEVICE void st_relaxed_sys(T* p, T v) {                                                                          \
        asm volatile("st.relaxed.sys.global." type " [%0], %1;" :: "l"(p), c(v) : "memory");                         \
    }                                                                                                                \
    DEVICE void red_add_release_sys(T* p, T v) {                                                                     \
        asm volatile("red.release.sys.global.add." type " [%0], %1;" :: "l"(p), c(v) : "memory");                    \
    }                                                                                                                \
    DEVICE void red_add_relaxed_sys(T* p, T v) {                                                                     \
        asm volatile("red.relaxed.sys.global.add." type " [%0], %1;" :: "l"(p), c(v) : "memory");                    \
    }                                                                                                                \
    /* Between the blocks of one kernel; the value before. */                                                        \
    DEVICE T atom_add_acq_rel_gpu(T* p, T v) {                                                                       \
        T old; asm volatile("atom.acq_rel.gpu.global.add." type " %0, [%1], %2;"                                     \
                            : "=" c(old) : "l"(p), c(v) : "memory"); return old;                                     \
    }                                                                                                                \
    /* CUDA's atomicAdd, which asks where the memory is unless the compiler knows. */                                \
    DEVICE T atom_add_relaxed_gpu(T* p, T v) {                                                                       \
        T old; asm volatile("atom.relaxed.gpu.global.add." type " %0, [%1], %2;"                                     \
                            : "=" c(old) : "l"(p), c(v) : "memory"); return old;                                     \
    }                                                                                                                \
    DEVICE T ld_acquire_gpu(const T* p) {                                                                            \
        T v; asm volatile("ld.acquire.gpu.global." type " %0, [%1];" : "=" c(v) : "l"(p) : "memory"); return v;      \
    }
ANTIPHON_ORDERED(u32, "u32", "r")
ANTIPHON_ORDERED(u64, "u64", "l")
#undef ANTIPHON_ORDERED

// Orders this thread's accesses before it with those after it, for the system. Name the load or store it pairs with.
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ------------------------------------------------------------------------------------------------------ operators
//
// As the host's reductions: min and max are IEEE 754-2019 minimum and maximum (a NaN wins, -0 < +0). `neutral` changes
// no value, not even a zero's sign.

DEVICE float minimum(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float maximum(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE double minimum(double a, double b) {
    // Equal values differ at most in the sign of zero, which the bits decide.
    if (a == b) return __longlong_as_double(__double_as_longlong(a) | __double_as_longlong(b));
    return a != a || (a < b) ? a : b;
}
DEVICE double maximum(double a, double b) {
    if (a == b) return __longlong_as_double(__double_as_longlong(a) & __double_as_longlong(b));
    return a != a || (a > b) ? a : b;
}
DEVICE i64 minimum(i64 a, i64 b) { return a < b ? a : b; }
DEVICE i64 maximum(i64 a, i64 b) { return a > b ? a : b; }

template <class A> struct limits;
template <> struct limits<float> {
    static DEVICE float highest() { return __uint_as_float(0x7F800000u); }
    static DEVICE float lowest() { return __uint_as_float(0xFF800000u); }
    static DEVICE float no_addend() { return -0.0f; }
};
template <> struct limits<double> {
    static DEVICE double highest() { return __longlong_as_double(0x7FF0000000000000ll); }
    static DEVICE double lowest() { return __longlong_as_double((i64)0xFFF0000000000000ull); }
    static DEVICE double no_addend() { return -0.0; }
};
template <> struct limits<i64> {
    static DEVICE i64 highest() { return 0x7FFFFFFFFFFFFFFFll; }
    static DEVICE i64 lowest() { return -0x7FFFFFFFFFFFFFFFll - 1; }
    static DEVICE i64 no_addend() { return 0; }
};

// Signed overflow is undefined in C++, and wraps in the host's reductions.
DEVICE float plus(float a, float b) { return a + b; }
DEVICE double plus(double a, double b) { return a + b; }
DEVICE i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE float times(float a, float b) { return a * b; }
DEVICE double times(double a, double b) { return a * b; }
DEVICE i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }

template <class A> struct sum_of {
    static DEVICE A neutral() { return limits<A>::no_addend(); }
    DEVICE A operator()(A a, A b) const { return plus(a, b); }
};
template <class A> struct prod_of {
    static DEVICE A neutral() { return (A)1; }
    DEVICE A operator()(A a, A b) const { return times(a, b); }
};
template <class A> struct min_of {
    static DEVICE A neutral() { return limits<A>::highest(); }
    DEVICE A operator()(A a, A b) const { return minimum(a, b); }
};
template <class A> struct max_of {
    static DEVICE A neutral() { return limits<A>::lowest(); }
    DEVICE A operator()(A a, A b) const { return maximum(a, b); }
};

// The mask of all lanes of a warp, for instructions that they execute together.
constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;
// This thread's, in a block of one dimension.
DEVICE u32 lane_id() { return threadIdx.x % 32; }

// Reduces the 32 values of a warp, in every lane: halves with halves, quarters with quarters and so on. The order is fixed,
// and the operators commute, so every lane has the same bits. All 32 lanes take part.
template <class A, class Op> DEVICE A warp_reduce(A value, Op op) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2)
        value = op(value, __shfl_xor_sync(WHOLE_WARP, value, distance));
    return value;
}

DEVICE u32 thread_in_block() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
DEVICE u32 threads_in_block() { return blockDim.x * blockDim.y * blockDim.z; }

// Reduces all values of a block, in every thread: first in each warp, then over the warps. The order depends only on the
// number of threads, a multiple of 32.
template <class A, class Op> DEVICE A block_reduce(A value, Op op) {
    __shared__ A of_warps[32];
    u32 thread = thread_in_block(), lane = thread % 32;
    value = warp_reduce(value, op);
    __syncthreads();  // other threads may still read the results of the call before
    if (lane == 0) of_warps[thread / 32] = value;
    __syncthreads();
    value = lane < threads_in_block() / 32 ? of_warps[lane] : Op::neutral();
    return warp_reduce(value, op);
}

// ----------------------------------------------------------------------------------------------------------- work

struct work_range { u64 begin, end; };

// The part-th of `parts` ranges of neighbouring items, whose sizes differ by one at most; parts < 2^32.
DEVICE work_range split_work(u64 count, u32 part, u32 parts) {
    // A division of 64 bits takes longer than small messages do.
    u64 each = count >> 32 ? count / parts : (u32)count / parts;
    u64 rest = count - each * parts;
    u64 begin = part * each + (part < rest ? part : rest);
    return work_range{begin, begin + each + (part < rest)};
}
// This block's, of a grid of one dimension.
DEVICE work_range work_of_block(u64 count) { return split_work(count, blockIdx.x, gridDim.x); }
// For loops in which neighbouring threads take neighbouring items: from grid_thread() in steps of grid_threads().
DEVICE u64 grid_thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u64 grid_threads() { return (u64)gridDim.x * blockDim.x; }

// ------------------------------------------------------------------------------------------------------- clusters
//
// For launches with LaunchConfig::cluster, on Hopper and newer; a block without is a cluster of its own. Addresses are of
// shared memory.

DEVICE u32 cluster_rank() {
    u32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
DEVICE u32 cluster_size() {
    u32 size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
    return size;
}

// The index of the cluster, and the number of clusters, in a grid of one dimension.
DEVICE u32 cluster_index() {
#if __CUDA_ARCH__ >= 900
    u32 index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
#else
    return blockIdx.x;
#endif
}
DEVICE u32 cluster_count() {
#if __CUDA_ARCH__ >= 900
    u32 count;
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
    return count;
#else
    return gridDim.x;
#endif
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// All threads of a cluster call this. Their earlier writes to shared memory are visible after the wait.
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// One word, to the same place in the shared memory of a block of the cluster, whole or not at all; for a reader that polls.
DEVICE void store_to_block(u64* place, u32 block, u64 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1; "
                 "st.relaxed.cluster.shared::cluster.u64 [place], %2; }"
                 :: "r"(shared_address(place)), "r"(block), "l"(value) : "memory");
#else
    asm volatile("st.volatile.shared.u64 [%0], %1;" :: "r"(shared_address(place)), "l"(value) : "memory");
#endif
}
DEVICE u64 load_from_blocks(const u64* place) {
    u64 value;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.relaxed.cluster.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(place)) : "memory");
#else
    asm volatile("ld.volatile.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(place)) : "memory");
#endif
    return value;
}

// --------------------------------------------------------------------------------------------------- shared memory

// Copies 16 bytes from global memory without a register; this thread sees them after copies_wait_all, or copies_wait of all
// groups but the last `GROUPS`.
DEVICE void copy_async16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <u32 GROUPS> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory"); }

// ------------------------------------------------------------------------------------------------------------ PDL
//
// For launches with LaunchConfig::programmatic; without it, and before Hopper, both do nothing.

// Waits until the kernel ahead in the stream has ended and its writes are visible.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the kernel behind start once every block has called this or ended.
DEVICE void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -------------------------------------------------------------------------------------------------------- waiting
//
// No wait lasts for ever. A kernel that gives up writes the reason to a wait_report and returns; the host finds the
// report (WaitBoard) and turns it into an error that names the rank. State 0: empty, 2: complete.
//
// A waiting thread reads only the memory of its own GPU. Host memory is behind PCIe: a grid whose warps all
// read one host word takes milliseconds for it, is late for its next call, and makes its peers wait in turn. So only one thread
// of the GPU at a time reads the host's word, once in LOOK_NS, and copies its value to the board, where the
// other threads read it. The number of reads does not depend on the grid.

// The call of a kernel, as two words that only the host interprets.
struct alignas(16) tag { u64 low, high; };

struct wait_report {
    u32 state, reason, rank, peer, block, thread;
    u64 doing[2], expected, seen[2], waited_ns;
};
static_assert(sizeof(wait_report) == 72, "report.rs has the same layout");

// The state of all waits that end together, in this GPU's memory.
struct alignas(32) wait_board {
    u32 stopped;          // whether a wait was in vain: then all waits end
    u32 waited;           // how long the last thread that found a reason to stop had waited, in ticks
    u64 looked_ns;        // when a thread last read the host's word
    const u32* abort;     // the host's word
    wait_report* report;  // in host memory
};
static_assert(sizeof(wait_board) == 32, "report.rs writes it");

// The lateness of a wait, in one register: none, or the reason why it stops (SILENTLY if another thread of this GPU reports the
// reason), or else the tick at which it was late for the first time.
constexpr u32 NOT_LATE = 0, DEADLINE = 1, ABORTED = 2, DISAGREED = 3, SILENTLY = 4;
// Besides, a reason why a call ends that no wait finds: another grid of the tenant runs at the same time.
constexpr u32 OVERLAPPED = 5;

// The common part of a thread's waits. The duration of a wait is in a register only during the wait.
struct waiter {
    u64 limit_ns;
    wait_board* board;
    u32 rank;
    tag doing;
};

// Nanoseconds of this device's clock, which ticks every 32 on an H200, on other devices about once a microsecond.
DEVICE u64 global_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) :: "memory");
    return ns;
}

// The duration of a wait is counted in ticks of 65.5 µs, which fit one register for three days, and differ from the numbers above.
constexpr u32 NS_PER_TICK_LOG2 = 16;
DEVICE u32 ticks() {
    const u32 now = (u32)(global_ns() >> NS_PER_TICK_LOG2);
    return now > SILENTLY ? now : SILENTLY + 1;
}

DEVICE waiter start_waiting(u64 limit_ns, wait_board* board, u32 rank, tag doing) {
    return waiter{limit_ns, board, rank, doing};
}

// The number of polls between two reads of the board and of the time, which is read outside of the multiprocessor: about half a
// millisecond.
constexpr u32 POLLS_PER_LOOK = 1024;
// The least time between two reads of the host's word by this GPU.
constexpr u64 LOOK_NS = 1000000;

// Writes the report, unless another thread has stopped the board. The compiler does not know that a pointer from memory is global,
// as these stores do. Not inlined, and given plain words, so that it costs a kernel
// neither registers nor local memory.
static __device__ __noinline__ void record_wait(wait_board* b, u32 reason, u32 rank, u32 peer, tag doing,
                                                u64 expected, tag seen) {
    if (atomicCAS(&b->stopped, 0u, 1u) != 0) return;
    wait_report* r = b->report;
    st_relaxed_sys(&r->reason, reason);
    st_relaxed_sys(&r->rank, rank);
    st_relaxed_sys(&r->peer, peer);
    st_relaxed_sys(&r->block, (u32)blockIdx.x);
    st_relaxed_sys(&r->thread, thread_in_block());
    st_relaxed_sys(&r->doing[0], doing.low);
    st_relaxed_sys(&r->doing[1], doing.high);
    st_relaxed_sys(&r->expected, expected);
    st_relaxed_sys(&r->seen[0], seen.low);
    st_relaxed_sys(&r->seen[1], seen.high);
    st_relaxed_sys(&r->waited_ns, (u64)ld_relaxed_sys(&b->waited) << NS_PER_TICK_LOG2);
    st_release_sys(&r->state, 2u);  // pairs with the host's acquire load in WaitBoard::report
}

// The present lateness of a wait, from its lateness before. Not inlined, so that it costs no registers.
static __device__ __noinline__ u32 how_late(wait_board* b, u32 late, u64 limit_ns) {
    if (ld_relaxed_sys(&b->stopped) != 0) return SILENTLY;
    if (late == NOT_LATE) late = ticks();
    const u64 now = global_ns(), looked = ld_relaxed_sys(&b->looked_ns);
    const u32 waited = ticks() - late;
    // One thread at a time.
    const bool may_look = now - looked >= LOOK_NS && atomicCAS(&b->looked_ns, looked, now) == looked;
    const bool aborted = may_look && ld_relaxed_sys(b->abort) != 0;
    if (!aborted && (u64)waited << NS_PER_TICK_LOG2 < limit_ns) return late;
    st_relaxed_sys(&b->waited, waited);
    return aborted ? ABORTED : DEADLINE;
}

// Calls `ready(seen)` until it returns true, and returns true; or gives up and returns false, and then the thread must
// not wait again (a further wait would give up soon) but lead its block out of the kernel. `ready` may
// leave in `seen` the value that it saw, and in `peer` the rank that is still missing, or this rank if none is; they and `expected`
// are only for the report. `look` is called now and then while the wait is late.
//
// TOGETHER: all threads of the warp call this, and continue when `ready` is true for all of them. A thread that continued alone
// would execute the following code by itself, and the others after it.
template <bool TOGETHER, class Ready, class Look>
DEVICE bool wait_until(const waiter& w, const u32& peer, u64 expected, Ready ready, Look look) {
    tag seen{0, 0};
    u32 late = NOT_LATE;
    for (;;) {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS_PER_LOOK; ++poll) {
            const bool is_ready = ready(seen);
            if (TOGETHER ? __all_sync(WHOLE_WARP, is_ready) : is_ready) return true;
        }
        const bool blames = TOGETHER ? __any_sync(WHOLE_WARP, peer != w.rank) : peer != w.rank;
        if (late != NOT_LATE && late <= SILENTLY) {  // and everything written before the reason is visible by now
            if (late != SILENTLY && (peer != w.rank || !blames))
                record_wait(w.board, late, w.rank, peer, w.doing, expected, seen);
            return false;
        }
        if (!TOGETHER || lane_id() == 0) {
            look();
            // A thread that waits for another thread of its own GPU lets that thread name the peer.
            const u64 grace_ns = blames ? 0 : (w.limit_ns >> 3) + 50 * LOOK_NS;
            late = how_late(w.board, late, w.limit_ns + grace_ns);
        }
        if (TOGETHER) late = __shfl_sync(WHOLE_WARP, late, 0);
    }
}
template <class Ready> DEVICE bool wait_until(const waiter& w, const u32& peer, u64 expected, Ready ready) {
    return wait_until<false>(w, peer, expected, ready, [] {});
}

// Waits until a counter that `peer` raises with release has reached `expected`, across wrapping.
DEVICE bool wait_for_signal(const waiter& w, u32 peer, const u32* signal, u32 expected) {
    return wait_until(w, peer, expected, [&](tag& seen) {
        u32 value = ld_acquire_sys(signal);
        seen.low = value;
        return (i32)(value - expected) >= 0;
    });
}
