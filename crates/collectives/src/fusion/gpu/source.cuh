// A rank's contribution to a fused all-reduce. For a program that has SOURCE. Behind
// reduce.cuh.

enum { TENSOR, MOE_REDUCTION, MOE_FINALIZE };                      // SOURCE
enum { NONE, FP8, FP8_TOKENS, FP8_GROUPS, FP8_ODD_GROUPS, NVFP4 }; // QUANTIZATION
enum {                                                             // HAS
    SUM_OUT = 1, BIAS = 2, PRE_NORM = 4, PRE_WEIGHT = 8, RESIDUAL = 16, RESIDUAL_OUT = 32, NORM = 64, WEIGHT = 128, NORM_OUT = 256,
    INVERSE_RMS_OUT = 512, ROUND_BEFORE_WEIGHT = 1024
};
DEVICE constexpr bool has(u32 what) { return HAS & what; }
enum { SWIZZLED_128X4, SWIZZLED_8X4, LINEAR };                     // layout

// The number of rows that are loaded at once: as many as the registers allow.
constexpr u32 GATHERED = SHORT && THREADS <= 128 ? 8 : 4;

DEVICE wide_vec<T> widen_words(uint4 words) {
    vec16<T> v;
    v.words = words;
    return widen_vec(v);
}

// One more addend: ROUND_EACH as the peer, which keeps the sum in T.
DEVICE void add_product(wide_vec<T>& sum, uint4 words, float weight) {
    wide_vec<T> x = widen_words(words);
#pragma unroll
    for (u32 k = 0; k < LANES; ++k) x.lane[k] *= weight;
    if (ROUND_EACH) x = widen_vec(narrow_vec<T>(x));
#pragma unroll
    for (u32 k = 0; k < LANES; ++k) sum.lane[k] += x.lane[k];
    if (ROUND_EACH) sum = widen_vec(narrow_vec<T>(sum));
}
DEVICE void add(wide_vec<T>& sum, uint4 words) {
    const wide_vec<T> x = widen_words(words);
#pragma unroll
    for (u32 k = 0; k < LANES; ++k) sum.lane[k] += x.lane[k];
}

// The weighted sum of the rows that a token's indices name. All loads are under way before any is needed:
// first some indices and weights, then their rows.
DEVICE void add_gathered(const fused& f, wide_vec<T>& sum, u64 token, u64 v) {
    const i32* index = f.index + token * f.experts;
    const T* weight = f.weights ? (const T*)f.weights + token * f.experts : nullptr;
    for (u32 first = 0; first < f.experts; first += GATHERED) {
        i32 rows[GATHERED];
        float weights[GATHERED];
        uint4 words[GATHERED];
#pragma unroll
        for (u32 k = 0; k < GATHERED; ++k) {
            const bool is_expert = first + k < f.experts;
            rows[k] = is_expert ? index[first + k] : -1;
            weights[k] = is_expert && weight ? widen(weight[first + k]) : 1.0f;
        }
#pragma unroll
        for (u32 k = 0; k < GATHERED; ++k) {
            words[k] = make_uint4(NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR); // for a row that does not exist
            if ((u32)rows[k] < f.rows) words[k] = load16_once(f.input + ((u64)(u32)rows[k] * f.vectors + v) * 16);
        }
#pragma unroll
        for (u32 k = 0; k < GATHERED; ++k)
            if (rows[k] != -1) add_product(sum, words[k], weights[k]);
    }
}

// The vector with this index, among those of this piece.
DEVICE uint4 contribution(const fused& f, u32 index) {
    const u64 first = (u64)f.first * f.vectors;
    if (SOURCE == TENSOR) return load16(f.input + (first + index) * 16);
    const u32 row = index / f.vectors;
    const u64 token = f.first + row, v = index - row * f.vectors;
    wide_vec<T> sum;
#pragma unroll
    for (u32 k = 0; k < LANES; ++k) sum.lane[k] = 0;
    if (SOURCE == MOE_REDUCTION) {
        const float* weights = (const float*)f.weights + token;
        const u8* from = f.input + (first + index) * 16;
        const u64 stride = (u64)f.tokens * f.vectors * 16;
#pragma unroll 4
        for (u32 e = 0; e < f.experts; ++e) add_product(sum, load16_once(from + e * stride), weights[e * (u64)f.tokens]);
    } else {
        add_gathered(f, sum, token, v);
#pragma unroll
        for (u32 k = 0; k < LANES; ++k) sum.lane[k] *= f.routed_scaling;
        if (ROUND_EACH) sum = widen_vec(narrow_vec<T>(sum));
    }
    if (f.shared) add(sum, load16_once(f.shared + (first + index) * 16));
    return narrow_vec<T>(sum).words;
}
