// Quantised vectors and the places of their scales: antiphon-tensor's `quantize`, `PackedScales` and `ScaleGrid`, bit by bit.
// Behind formats.cuh and source.cuh.

// ---------------------------------------------------------------------------------------------------------- scales

// The vectors of a group, and the elements of an odd group.
DEVICE u32 groups_of_row(const fused& f) { return f.vectors * (QUANTIZATION == FP8_ODD_GROUPS ? LANES : 1) / f.group; }

// FP8 groups.
DEVICE u64 packed_at(const fused& f, u32 token, u32 group) {
    return packed_scale_at(f.tokens, token, group);
}

// FP4: by tiles of some rows and four columns.
DEVICE u64 scale_at(const fused& f, u32 token, u32 column) {
    const u32 columns = f.vectors / 2, tiles = (columns + 3) / 4;
    if (f.layout == LINEAR) return (u64)token * columns + column;
    if (f.layout == SWIZZLED_8X4) return ((u64)(token / 8) * tiles + column / 4) * 32 + token % 8 * 4 + column % 4;
    return ((u64)(token / 128) * tiles + column / 4) * 512 + token % 32 * 16 + token % 128 / 32 * 4 + column % 4;
}

// Bytes of the layout without a scale are 0. The last piece writes them, while data travels.
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

DEVICE void store_group(const fused& f, u32 token, u64 begin, u32 v, u32 group, const wide_vec<T>& n, u32 amax) {
    const u32 exponent = group_exponent(amax);
    const float inverse = inverse_power(exponent);
    store_e4m3(f.codes, begin + v, n, [&](float x) { return x * inverse; });
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

// Then the codes, once those magnitudes are known.
DEVICE void store_odd_groups(const fused& f, u32 token, u64 begin, u32 v, wide_vec<T> n, const u32* most_of_groups) {
    u32 group = v * LANES / f.group, left = (group + 1) * f.group - v * LANES;
    u32 exponent = group_exponent(most_of_groups[group]);
#pragma unroll
    for (u32 k = 0; k < LANES; ++k, --left) {
        if (left == 0) exponent = group_exponent(most_of_groups[++group]), left = f.group;
        if (left == f.group) f.scales[packed_at(f, token, group)] = (u8)exponent;
        n.lane[k] *= inverse_power(exponent);
    }
    store_e4m3(f.codes, begin + v, n, [](float x) { return x; });
}

// A scale is shared by two vectors, whose largest magnitude is known.
DEVICE void store_nvfp4(const fused& f, u32 token, u64 begin, u32 v, const wide_vec<T>& n, u32 amax, float scale) {
    const e4m3 code = nvfp4_scale(amax, scale);
    *(u32*)(f.codes + (begin + v) * 4) = narrow_e2m1(n, nvfp4_factor(code, scale));
    if (v % 2 == 0) f.scales[scale_at(f, token, v / 2)] = code.bits;
}
