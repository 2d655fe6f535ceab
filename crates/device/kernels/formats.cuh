// Quantising: numbers of few bits with the scales that they share, as antiphon-tensor's `quantize` does, bit by bit. Behind the
// prelude. T is the type of the elements, of which a vector has 16 bytes.

DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
// The larger magnitude; a NaN has none.
DEVICE float larger_number(float most, float x) { return fmaxf(most, fabsf(x)); }

// The largest magnitude of a vector, as the bits of a float. A NaN is larger than any number.
template <class T> DEVICE u32 most_of(const wide_vec<T>& x) {
    u32 most = magnitude(x.lane[0]);
#pragma unroll
    for (u32 k = 1; k < vec16<T>::LANES; ++k) most = larger(most, magnitude(x.lane[k]));
    return most;
}
// As `most_of`, but NaNs are ignored.
template <class T> DEVICE u32 most_of_numbers(const wide_vec<T>& x) {
    float most = 0;
#pragma unroll
    for (u32 k = 0; k < vec16<T>::LANES; ++k) most = larger_number(most, x.lane[k]);
    return __float_as_uint(most);
}

// Divides many numbers by one number. The quotient is that of IEEE's division wherever a code of e4m3 depends on it (formats.rs of
// the tests has the proof): the product with the inverse is corrected by its remainder, which is exact unless the quotient is far
// below any code. Where the inverse would be too small for that, dividend and divisor are both made smaller; a division by infinity
// is a product with 0. There are no branches.
struct quotient {
    float unit, divisor, inverse;

    DEVICE quotient() {}
    DEVICE quotient(float by) {
        const bool is_large = by >= 1e30f, is_infinite = by == __uint_as_float(0x7F800000u);
        unit = is_large ? 0x1p-32f : 1.0f;
        divisor = is_infinite ? 0.0f : by * unit;
        inverse = is_infinite ? 0.0f : __frcp_rn(divisor);
    }
    DEVICE float operator()(float x) const {
        const float scaled = x * unit;
        float q = scaled * inverse;
        q = __fmaf_rn(__fmaf_rn(-q, divisor, scaled), inverse, q);
        return __uint_as_float(__float_as_uint(q) & 0x7FFFFFFFu | __float_as_uint(x) & 0x80000000u); // of zeros as well
    }
};

// Stores a vector's codes of e4m3 as the `at`-th vector: those of scaled(x) for each element x.
template <class T, class Scaled> DEVICE void store_e4m3(u8* codes, u64 at, const wide_vec<T>& n, Scaled scaled) {
    constexpr u32 COUNT = vec16<T>::LANES;
    u32 words[2];
#pragma unroll
    for (u32 k = 0; k < COUNT; k += 4)
        words[k / 4] = narrow_e4m3x2(scaled(n.lane[k]), scaled(n.lane[k + 1])) |
                       (u32)narrow_e4m3x2(scaled(n.lane[k + 2]), scaled(n.lane[k + 3])) << 16;
    if (COUNT == 8) *(uint2*)(codes + at * 8) = make_uint2(words[0], words[1]);
    else *(u32*)(codes + at * 4) = words[0];
}

// UE8M0: the exponent of the power of two that a group of e4m3 shares, by its largest magnitude: the least power that is not less
// than amax / 448 and 1e-10. A mantissa above that of 448 exceeds it by more than the rounding of a division.
DEVICE u32 group_exponent(u32 amax) {
    const int above = ((int)amax - 0x43E00000 + 0x3F800000 + 0x7FFFFF) >> 23;
    return amax == 0x7F800000u ? 255 : above < 94 ? 94 : above;
}
// A product with it is the quotient by that power.
DEVICE float inverse_power(u32 exponent) { return __uint_as_float(exponent == 255 ? 0 : 254 - exponent << 23); }

DEVICE u32 round_up(u32 x, u32 unit) { return (x + unit - 1) / unit * unit; }

// The index of the scale of a token's group among the bytes of packed scales: four neighbouring groups of a token in a word, the words
// of all tokens, of which there are a multiple of four, after each other. (`tokens` by reference: an argument of a kernel is then
// loaded where it is needed.)
DEVICE u64 packed_scale_at(const u32& tokens, u32 token, u32 group) {
    return ((u64)(group / 4) * round_up(tokens, 4) + token) * 4 + group % 4;
}

// NVFP4: the scale of a group from its largest magnitude, and the factor of its elements before they are narrowed.
DEVICE e4m3 nvfp4_scale(u32 amax, float scale) { return narrow<e4m3>(scale * (__uint_as_float(amax) / 6.0f)); }
DEVICE float nvfp4_factor(e4m3 code, float scale) {
    const float divisor = widen(code);
    return divisor == 0.0f ? 0.0f : scale / divisor;
}
// A vector's codes of e2m1, the first in the low bits.
template <class T> DEVICE u32 narrow_e2m1(const wide_vec<T>& n, float factor) {
    u32 codes = 0;
#pragma unroll
    for (u32 k = 0; k < vec16<T>::LANES; k += 2)
        codes |= (u32)narrow_e2m1x2(n.lane[k] * factor, n.lane[k + 1] * factor).bits << k * 4;
    return codes;
}
