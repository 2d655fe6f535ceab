// LogFMT, as logfmt.rs defines it: the same operations in the same order. Included behind choices.cuh.
//
// A block of 128 elements is in the lanes of half a warp, 8 in each. Coded, it is 11 vectors, in the places of the first 11 of its
// 16. A lane's elements are 80 bits: a word, another word, and 16 bits that share a word with those of the lane beside it. Ten
// vectors hold the first words of the 16 lanes, their second ones, and the shared ones. The eleventh holds the scale, and ends with
// CODED.
//
// No word of these is EMPTY. An element is its sign and the complement of its code, so that only a negative zero has ten ones,
// which is not sent; and each word has the whole of some element. A lane behind the eleventh waits until its own vector has come,
// or the eleventh, ending with CODED: a sender stores either all 16 or the first 11, and a receiver empties all 16, so exactly one
// of both comes.

// The same number, as a word that is not EMPTY: one NaN for another.
DEVICE uint4 without_empty(uint4 v) {
    const auto one = [](u32 x) { return x == EMPTY ? 0x7FFF7FFFu : x; };
    return make_uint4(one(v.x), one(v.y), one(v.z), one(v.w));
}

constexpr bool IS_LOGFMT = FORMAT == 1;
constexpr u32 CODED = 0xFFFFFFFEu; // as a bf16 pair two NaNs, for which others are sent
constexpr u32 LARGEST = 511, ELEMENT = 1023;
constexpr u32 SCALE_LANE = 10; // of half a warp

struct log_scale {
    u32 exponent;
    float least, step;
};

DEVICE float log2_1p(float t) {
    float sum = -0.02645744f;
    const float terms[5] = {0.123451464f, -0.27953812f, 0.4582708f, -0.7182819f, 1.4425532f};
#pragma unroll
    for (u32 n = 0; n < 5; ++n) sum = plus(times(sum, t), terms[n]);
    return times(sum, t);
}

DEVICE float exp2_fraction(float t) {
    float sum = 0.013426685f;
    const float terms[3] = {0.052242473f, 0.2412802f, 0.69304484f};
#pragma unroll
    for (u32 n = 0; n < 3; ++n) sum = plus(times(sum, t), terms[n]);
    return plus(times(sum, t), 1.0f);
}

DEVICE float log2_from(u32 exponent, u32 magnitude) {
    const float whole = (float)((i32)(magnitude >> 7) - (i32)exponent);
    return plus(whole, log2_1p(times((float)(magnitude & 127), 1.0f / 128.0f)));
}

// An element of a lane's 8, as the bits of a bf16.
DEVICE u32 element_of(uint4 v, u32 n) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    return words[n / 2] >> n % 2 * 16 & 0xFFFF;
}

// The ten bits of an element. `inverse` and `rounding` follow from the scale.
DEVICE u32 encode(const log_scale& s, float inverse, float rounding, u32 x) {
    const float at = plus(times(plus(log2_from(s.exponent, x & 0x7FFF), -s.least), inverse), rounding);
    const u32 code = (u32)fminf(fmaxf(at, 0.0f), (float)LARGEST);
    return (code ^ LARGEST) | (code != 0 ? x >> 15 << 9 : 0);
}

DEVICE float decode(const log_scale& s, u32 element) {
    const u32 code = ~element & LARGEST;
    const float log = plus(s.least, times((float)(i32)(code - 1), s.step)), whole = floorf(log);
    const u32 bits = __float_as_uint(exp2_fraction(plus(log, -whole))) + ((u32)((i32)whole + (i32)s.exponent - 127) << 23);
    return code == 0 ? 0.0f : __uint_as_float(bits | element >> 9 << 31);
}

// The first lane of this lane's half of the warp, and this lane's number in it.
DEVICE u32 half_of_warp() { return lane_id() & 16; }
DEVICE u32 lane_of_half() { return lane_id() & 15; }

// What the lanes send of a block, from 8 elements of each; for a whole warp. `sends` is false for a lane that has nothing to send.
DEVICE uint4 coded(uint4 v, bool& sends) {
    const u32 half = half_of_warp(), lane = lane_of_half();
    u32 largest = 0, smallest = 0x7FFF;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
        const u32 magnitude = element_of(v, n) & 0x7FFF;
        largest = max(largest, magnitude);
        smallest = min(smallest, magnitude);
    }
#pragma unroll
    for (u32 lanes = 1; lanes < 16; lanes *= 2) {
        largest = max(largest, __shfl_xor_sync(WHOLE_WARP, largest, lanes));
        smallest = min(smallest, __shfl_xor_sync(WHOLE_WARP, smallest, lanes));
    }
    const bool is_coded = largest < 127u << 7 && largest >= 34u << 7 && smallest != largest;
    log_scale s;
    s.exponent = largest >> 7;
    const float most = log2_from(s.exponent, largest);
    s.least = fmaxf(log2_from(s.exponent, smallest), plus(most, -32.0f));
    s.step = times(plus(most, -s.least), 1.0f / 510.0f);
    const float inverse = __fdiv_rn(1.0f, s.step), rounding = plus(1.5f, -times(s.step, 0.6931471805599453f / 8.0f));
    u32 element[8];
#pragma unroll
    for (u32 n = 0; n < 8; ++n) element[n] = encode(s, inverse, rounding, element_of(v, n));
    const u32 first = element[0] | element[1] << 10 | element[2] << 20 | element[6] << 30;
    const u32 second = element[3] | element[4] << 10 | element[5] << 20 | element[6] >> 2 << 30;
    const u32 third = element[7] | element[6] >> 4 << 10;
    const u32 shared = third | __shfl_xor_sync(WHOLE_WARP, third, 1) << 16; // of an even lane
    u32 words[4];
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
        const u32 of_first = __shfl_sync(WHOLE_WARP, first, half | lane % 4 * 4 + n);
        const u32 of_second = __shfl_sync(WHOLE_WARP, second, half | lane % 4 * 4 + n);
        const u32 of_shared = __shfl_sync(WHOLE_WARP, shared, half | lane % 2 * 8 + n * 2);
        words[n] = lane < 4 ? of_first : lane < 8 ? of_second : of_shared;
    }
    sends = !is_coded || lane <= SCALE_LANE;
    if (!is_coded) {
        const auto one = [](u32 x) { return x == CODED ? 0x7FFF7FFFu : x; };
        return without_empty(make_uint4(one(v.x), one(v.y), one(v.z), one(v.w)));
    }
    if (lane >= SCALE_LANE) return make_uint4(__float_as_uint(s.least), __float_as_uint(s.step), s.exponent, CODED);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Whether a block is coded, of which a lane has loaded the vector in its place; for a whole warp.
DEVICE bool is_block_coded(uint4 v) { return __shfl_sync(WHOLE_WARP, v.w, half_of_warp() | SCALE_LANE) == CODED; }

// A word of the vector that another lane has.
DEVICE u32 word_of(uint4 v, u32 lane, u32 word) {
    const u32 x = __shfl_sync(WHOLE_WARP, v.x, lane), y = __shfl_sync(WHOLE_WARP, v.y, lane);
    const u32 z = __shfl_sync(WHOLE_WARP, v.z, lane), w = __shfl_sync(WHOLE_WARP, v.w, lane);
    return word < 2 ? (word == 0 ? x : y) : (word == 2 ? z : w);
}

// The elements of this lane, from the vectors of a block; for a whole warp.
DEVICE wide_vec<bf16> decoded(uint4 v) {
    const u32 half = half_of_warp(), lane = lane_of_half();
    const bool is_coded = is_block_coded(v);
    const log_scale s{__shfl_sync(WHOLE_WARP, v.z, half | SCALE_LANE),
                      __uint_as_float(__shfl_sync(WHOLE_WARP, v.x, half | SCALE_LANE)),
                      __uint_as_float(__shfl_sync(WHOLE_WARP, v.y, half | SCALE_LANE))};
    const u32 first = word_of(v, half | lane / 4, lane % 4), second = word_of(v, half | 4 + lane / 4, lane % 4);
    const u32 third = word_of(v, half | 8 + lane / 8, lane / 2 % 4) >> lane % 2 * 16 & 0xFFFF;
    vec16<bf16> plain;
    plain.words = v;
    if (!is_coded) return widen_vec(plain);
    const u32 element[8] = {first, first >> 10, first >> 20, second, second >> 10, second >> 20,
                            first >> 30 | second >> 30 << 2 | third >> 10 << 4, third};
    wide_vec<bf16> x;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) x.lane[n] = decode(s, element[n] & ELEMENT);
    return x;
}
