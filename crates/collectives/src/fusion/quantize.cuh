// Quantised vectors and where their scales stand: antiphon-tensor's `quantize`, `PackedScales` and `ScaleGrid`, bit by bit.
// Behind source.cuh.

// ---------------------------------------------------------------------------------------------------------- scales

DEVICE u32 round_up(u32 x, u32 unit) { return (x + unit - 1) / unit * unit; }

// A group has so many vectors, and an odd one so many elements.
DEVICE u32 groups_of_row(const fused& f) { return f.vectors * (QUANTIZATION == FP8_ODD_GROUPS ? LANES : 1) / f.group; }

// FP8 groups: four neighbouring groups' bytes of a token in a word, the words of all tokens after each other.
DEVICE u64 packed_at(const fused& f, u32 token, u32 group) {
    return ((u64)(group / 4) * round_up(f.tokens, 4) + token) * 4 + group % 4;
}

// FP4: by tiles of some rows and four columns.
DEVICE u64 scale_at(const fused& f, u32 token, u32 column) {
    const u32 columns = f.vectors / 2, tiles = (columns + 3) / 4;
    if (f.layout == LINEAR) return (u64)token * columns + column;
    if (f.layout == SWIZZLED_8X4) return ((u64)(token / 8) * tiles + column / 4) * 32 + token % 8 * 4 + column % 4;
    return ((u64)(token / 128) * tiles + column / 4) * 512 + token % 32 * 16 + token % 128 / 32 * 4 + column % 4;
}

// Bytes that no scale has are 0. The last piece's part, while data travels.
DEVICE void zero_padding(const fused& f) {
    if (f.first + f.count != f.tokens) return;
    const u32 start = grid_thread(), step = grid_threads();
    if (QUANTIZATION == FP8_GROUPS || QUANTIZATION == FP8_ODD_GROUPS) {
        const u32 groups = groups_of_row(f), packs = (groups + 3) / 4, padded = round_up(f.tokens, 4);
        for (u32 i = start; i < packs - 1; i += step)
            for (u32 token = f.tokens; token < padded; ++token) ((u32*)f.scales)[(u64)i * padded + token] = 0;
        if (groups % 4 != 0)
            for (u32 token = start; token < f.tokens; token += step)
                for (u32 g = groups; g % 4 != 0; ++g) f.scales[packed_at(f, token, g)] = 0;
    } else if (f.layout != LINEAR) {
        // 16 bytes at a time: four words, which are those of rows that lie 32 (8x4: one) apart.
        const u32 rows = f.layout == SWIZZLED_8X4 ? 8 : 128, apart = rows == 8 ? 1 : 32, used = f.tokens % rows;
        const u32 columns = f.vectors / 2, tiles = (columns + 3) / 4, in_tile = rows / 4;
        u8* last = f.scales + (u64)(f.tokens / rows) * tiles * rows * 4;
        for (u32 i = start; i < tiles * in_tile && used != 0; i += step) {
            const u32 first = rows == 8 ? i % 2 * 4 : i % 32;
            for (u32 k = 0; k < 4; ++k)
                if (first + k * apart >= used) ((u32*)(last + (u64)i * 16))[k] = 0;
        }
        if (columns % 4 != 0)
            for (u32 token = start; token < f.tokens; token += step)
                for (u32 column = columns; column % 4 != 0; ++column) f.scales[scale_at(f, token, column)] = 0;
    }
}

// ----------------------------------------------------------------------------------------------------------- codes

DEVICE u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
// The larger magnitude; a NaN has none.
DEVICE float larger_number(float most, float x) { return fmaxf(most, fabsf(x)); }

DEVICE u32 most_of(const wide_vec<T>& x) {
    u32 most = magnitude(x.lane[0]);
#pragma unroll
    for (u32 k = 1; k < LANES; ++k) most = larger(most, magnitude(x.lane[k]));
    return most;
}
DEVICE u32 most_of_numbers(const wide_vec<T>& x) {
    float most = 0;
#pragma unroll
    for (u32 k = 0; k < LANES; ++k) most = larger_number(most, x.lane[k]);
    return __float_as_uint(most);
}

// Divides by the same number many times: what IEEE's division gives, where it makes a difference for a code (cuda.rs has the
// proof). A product with the inverse is put right by its remainder, which is exact unless the quotient is far below any code.
// Where the inverse would be too small for that, both are made smaller; by infinity it is a product with 0. There are no
// branches.
struct quotient {
    float unit, divisor, inverse;

    DEVICE quotient() {}
    DEVICE quotient(float given) {
        const bool is_large = given >= 1e30f, is_infinite = given == __uint_as_float(0x7F800000u);
        unit = is_large ? 0x1p-32f : 1.0f;
        divisor = is_infinite ? 0.0f : given * unit;
        inverse = is_infinite ? 0.0f : __frcp_rn(divisor);
    }
    DEVICE float operator()(float x) const {
        const float scaled = x * unit;
        float q = scaled * inverse;
        q = __fmaf_rn(__fmaf_rn(-q, divisor, scaled), inverse, q);
        return __uint_as_float(__float_as_uint(q) & 0x7FFFFFFFu | __float_as_uint(x) & 0x80000000u); // of zeros as well
    }
};

template <class Scaled> DEVICE void store_e4m3(const fused& f, u64 at, const wide_vec<T>& n, Scaled scaled) {
    u32 words[2];
#pragma unroll
    for (u32 k = 0; k < LANES; k += 4)
        words[k / 4] = narrow_e4m3x2(scaled(n.lane[k]), scaled(n.lane[k + 1])) |
                       (u32)narrow_e4m3x2(scaled(n.lane[k + 2]), scaled(n.lane[k + 3])) << 16;
    if (LANES == 8) *(uint2*)(f.codes + at * 8) = make_uint2(words[0], words[1]);
    else *(u32*)(f.codes + at * 4) = words[0];
}

// The exponent of the power of two that a group shares, by its largest magnitude: the least power that is no less than
// amax / 448 and 1e-10. A mantissa above that of 448 is by more than a division could round away.
DEVICE u32 group_exponent(u32 amax) {
    const int above = ((int)amax - 0x43E00000 + 0x3F800000 + 0x7FFFFF) >> 23;
    return amax == 0x7F800000u ? 255 : above < 94 ? 94 : above;
}
// A product with it is the quotient by that power.
DEVICE float inverse_power(u32 exponent) { return __uint_as_float(exponent == 255 ? 0 : 254 - exponent << 23); }

DEVICE void store_group(const fused& f, u32 token, u64 begin, u32 v, u32 group, const wide_vec<T>& n, u32 amax) {
    const u32 exponent = group_exponent(amax);
    const float inverse = inverse_power(exponent);
    store_e4m3(f, begin + v, n, [&](float x) { return x * inverse; });
    if (v == group * f.group) f.scales[packed_at(f, token, group)] = (u8)exponent;
}

// Odd groups begin and end anywhere in a vector. Each vector's part of the groups' largest magnitudes:
DEVICE void reach_odd_groups(const fused& f, u32 v, const wide_vec<T>& n, u32* most_of_groups) {
    u32 group = v * LANES / f.group, left = (group + 1) * f.group - v * LANES;
    float most = 0;
#pragma unroll
    for (u32 k = 0; k < LANES; ++k, --left) {
        if (left == 0) {
            atomicMax(most_of_groups + group++, __float_as_uint(most));
            left = f.group, most = 0;
        }
        most = larger_number(most, n.lane[k]);
    }
    atomicMax(most_of_groups + group, __float_as_uint(most));
}

// And when those are known.
DEVICE void store_odd_groups(const fused& f, u32 token, u64 begin, u32 v, wide_vec<T> n, const u32* most_of_groups) {
    u32 group = v * LANES / f.group, left = (group + 1) * f.group - v * LANES;
    u32 exponent = group_exponent(most_of_groups[group]);
#pragma unroll
    for (u32 k = 0; k < LANES; ++k, --left) {
        if (left == 0) exponent = group_exponent(most_of_groups[++group]), left = f.group;
        if (left == f.group) f.scales[packed_at(f, token, group)] = (u8)exponent;
        n.lane[k] *= inverse_power(exponent);
    }
    store_e4m3(f, begin + v, n, [](float x) { return x; });
}

// A scale is shared by two vectors, whose largest magnitude is known.
DEVICE void store_nvfp4(const fused& f, u32 token, u64 begin, u32 v, const wide_vec<T>& n, u32 amax, float scale) {
    const e4m3 code = narrow<e4m3>(scale * (__uint_as_float(amax) / 6.0f));
    const float divisor = widen(code), factor = divisor == 0.0f ? 0.0f : scale / divisor;
    u32 codes = 0;
#pragma unroll
    for (u32 k = 0; k < LANES; k += 2)
        codes |= (u32)narrow_e2m1x2(n.lane[k] * factor, n.lane[k + 1] * factor).bits << k * 4;
    *(u32*)(f.codes + (begin + v) * 4) = codes;
    if (v % 2 == 0) f.scales[scale_at(f, token, v / 2)] = code.bits;
}
