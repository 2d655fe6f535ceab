// The operations on the rows of a sum: bias, residual, RMS norm, quantisation. One piece of code for all algorithms. The
// steps are those of mod.rs, in f32, and each rounds once. For a program that has HAS and QUANTIZATION. Behind team.cuh and
// quantize.cuh.
//
// SHORT: every thread of a team has one vector of a row at most, and keeps it in registers. Otherwise it keeps its vectors in
// shared memory, where the residuals of the next row are loaded meanwhile.

// Vectors that a thread waits for at once. More would need more registers.
constexpr u32 BATCH = SHORT || IS_ONE_SHOT ? 1 : THREADS > 128 || QUANTIZATION > FP8 || SOURCE != TENSOR ? 2 : 4;
constexpr bool PREFETCH = !SHORT && !has(PRE_NORM) && has(RESIDUAL) && QUANTIZATION != FP8_ODD_GROUPS;
constexpr bool KEEPS_WEIGHT = has(WEIGHT) && QUANTIZATION != FP8_ODD_GROUPS;

// While data travels, in all blocks.
DEVICE void begin_epilogue(const fused& f, const row_team& team) {
    team.meet();
    if (QUANTIZATION >= FP8_GROUPS) zero_padding(f);
}

struct epilogue {
    const fused& f;
    row_team& team;
    uint4 only, only_weight; // SHORT: of this thread's vector
    u32 turn;               // PREFETCH: which of two buffers has this row
    float scale;

    // `row` is the first row of this team, if it has one.
    DEVICE epilogue(const fused& f, row_team& team, u32 row, bool is_there) : f(f), team(team), turn(0) {
        each<1>([&](u32 round, u32 v) {
            if (!KEEPS_WEIGHT || v >= f.vectors) return;
            if (SHORT) only_weight = load16_once(f.weight + v * 16);
            else copy_async16(slot(2, round), f.weight + v * 16);
        });
        copies_end_group();
        if (is_there) prefetch(row);
        if (QUANTIZATION == FP8 || QUANTIZATION == NVFP4) scale = f.scale ? *f.scale : f.scale_value;
        if (QUANTIZATION == FP8) scale = 1.0f / scale;
        // In the constant cache before it is needed.
        asm volatile("" ::"l"(f.residual_out), "l"(f.norm_out), "l"(f.codes), "r"(f.slices), "f"(f.inverse_hidden), "f"(f.eps));
    }

    // Processes one row of this piece; the second row is the team's next one, if any. `sums_at(v, sums)` returns the v-th vector of
    // the row's sum, if there is one, and as many more of this thread's vectors as fit. All threads of the team call this together.
    template <class SumsAt> DEVICE void run(u32 row, u32 next, bool has_next, SumsAt sums_at) {
        const u64 begin = at(row);
        if (PREFETCH) {
            turn ^= 1;
            if (has_next) prefetch(next);
            has_next ? copies_wait<1>() : copies_wait<0>();
        } else if (!SHORT && KEEPS_WEIGHT) copies_wait<0>();
        each<BATCH>([&](u32 round, u32 v) {
            uint4 residual[BATCH], sums[BATCH];
            at_once(v, [&](u32 n, u32 v) { // loaded before the wait for the sum
                if (!PREFETCH && !has(PRE_NORM)) residual[n] = load_residual(begin + v);
            });
            sums_at(v, sums);
            if (SHORT && IS_ONE_SHOT && team.takes_part(f)) pdl_launch_dependents();
            at_once(v, [&](u32 n, u32 v) {
                if (has(SUM_OUT)) store16(f.sum_out + (begin + v) * 16, sums[n]);
                wide_vec<T> x = widen_words(sums[n]);
                if (has(BIAS)) add(x, load16_once(f.bias + v * 16));
                if (has(PRE_NORM)) sums[n] = keep(round + n, narrow_vec<T>(x).words);
                else sums[n] = keep_sum(begin, round + n, v, x, PREFETCH ? kept(round + n) : residual[n]);
            });
            if (has(PRE_NORM)) share<BATCH, false>(round, v, sums);
            else if (has(NORM)) share<BATCH, true>(round, v, sums);
        });
        if (has(PRE_NORM) && team.takes_part(f)) pre_norm(begin);
        if (!has(NORM)) return;
        float rms = 0;
        float most = 0;
        if (team.takes_part(f)) {
            rms = root(team.end_exchange(f, most), f.eps);
            if (SHORT && !IS_ONE_SHOT) pdl_launch_dependents();
        }
        norm(row, begin, rms, most);
    }

private:
    // The index of a row's first vector, among all vectors of the call.
    DEVICE u64 at(u32 row) const { return (u64)(f.first + row) * f.vectors; }

    // Visits this thread's vectors of a row, some at once. Warps stay together, so the last vectors may be beyond the row.
    template <u32 COUNT, class Step> DEVICE void each(Step step) const {
        if (SHORT) return step(0, team.thread);
        u32 round = 0;
        for (u32 v = team.thread; v - threadIdx.x % 32 < f.vectors; v += COUNT * team.threads, round += COUNT) step(round, v);
    }
    template <class Step> DEVICE void at_once(u32 v, Step step) const {
#pragma unroll
        for (u32 n = 0; n < BATCH; ++n)
            if (v + n * team.threads < f.vectors) step(n, v + n * team.threads);
    }

    // Room for this thread's vectors of three rows: two that are kept or being loaded, and the weights; or of one that is kept.
    DEVICE uint4* slot(u32 which, u32 round) const {
        return team.room(f) + (which * f.rounds + round) * blockDim.x + threadIdx.x;
    }
    DEVICE u32* group_most() const { return (u32*)(team.room(f) + f.rounds * blockDim.x); } // there is only one row

    DEVICE uint4 keep(u32 round, uint4 words) {
        if (SHORT) only = words;
        else *slot(turn, round) = words;
        return words;
    }
    DEVICE uint4 kept(u32 round) const { return SHORT ? only : *slot(turn, round); }

    // The residuals of the row after this one.
    DEVICE void prefetch(u32 row) const {
        if (!PREFETCH) return;
        const u64 begin = at(row);
        each<1>([&](u32 round, u32 v) {
            if (v < f.vectors) copy_async16(slot(turn ^ 1, round), f.residual + (begin + v) * 16);
        });
        copies_end_group();
    }

    // 1 / √(mean of the squares + eps)
    DEVICE float root(float squares, float eps) const {
        return __frcp_rn(__fsqrt_rn(squares * f.inverse_hidden + eps));
    }

    DEVICE uint4 load_residual(u64 at) const {
        return has(RESIDUAL) ? load16(f.residual + at * 16) : make_uint4(0, 0, 0, 0);
    }

    DEVICE uint4 keep_sum(u64 begin, u32 round, u32 v, wide_vec<T> x, uint4 residual) {
        if (has(RESIDUAL)) add(x, residual);
        const uint4 words = narrow_vec<T>(x).words;
        if (has(RESIDUAL_OUT)) store16(f.residual_out + (begin + v) * 16, words);
        return keep(round, words);
    }

    // A thread's part of the row's squares, and of its largest product with a weight, which the team exchanges.
    template <u32 COUNT, bool LAST> DEVICE void share(u32 round, u32 v, const uint4 (&words)[COUNT]) const {
        float squares[COUNT];
        float most[COUNT];
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n) {
            squares[n] = most[n] = 0;
            if (v + n * team.threads >= f.vectors) continue;
            const wide_vec<T> x = widen_words(words[n]);
            squares[n] = x.lane[0] * x.lane[0];
#pragma unroll
            for (u32 k = 1; k < LANES; ++k) squares[n] += x.lane[k] * x.lane[k];
            if (QUANTIZATION == FP8_TOKENS && LAST && !has(ROUND_BEFORE_WEIGHT)) {
                const wide_vec<T> w = weight(round + n, v + n * team.threads);
#pragma unroll
                for (u32 k = 0; k < LANES; ++k) most[n] = larger_number(most[n], x.lane[k] * w.lane[k]);
            }
        }
        team.share(f, v, squares, most);
    }

    DEVICE void pre_norm(u64 begin) {
        float unused;
        const float rms = root(team.end_exchange(f, unused), f.pre_eps);
        each<1>([&](u32 round, u32 v) {
            uint4 sum[1];
            if (v < f.vectors) {
                wide_vec<T> x = widen_words(kept(round)), w;
                if (has(PRE_WEIGHT)) w = widen_words(load16_once(f.pre_weight + v * 16));
#pragma unroll
                for (u32 k = 0; k < LANES; ++k) x.lane[k] = (has(PRE_WEIGHT) ? x.lane[k] * w.lane[k] : x.lane[k]) * rms;
                x = widen_vec(narrow_vec<T>(x));
                sum[0] = keep_sum(begin, round, v, x, load_residual(begin + v));
            }
            if (has(NORM)) share<1, true>(round, v, sum);
        });
    }

    DEVICE wide_vec<T> weight(u32 round, u32 v) const {
        wide_vec<T> w;
        if (has(WEIGHT)) w = widen_words(!KEEPS_WEIGHT ? load16_once(f.weight + v * 16) : SHORT ? only_weight : *slot(2, round));
#pragma unroll
        for (u32 k = 0; k < LANES; ++k) w.lane[k] = has(WEIGHT) ? f.weight_bias + w.lane[k] : 1.0f;
        return w;
    }

    // The norm of a vector that is kept.
    DEVICE uint4 normed(u32 round, u32 v, float rms) const {
        wide_vec<T> x = widen_words(kept(round));
        const wide_vec<T> w = weight(round, v);
        if (has(ROUND_BEFORE_WEIGHT)) {
#pragma unroll
            for (u32 k = 0; k < LANES; ++k) x.lane[k] *= rms;
            x = widen_vec(narrow_vec<T>(x));
        }
#pragma unroll
        for (u32 k = 0; k < LANES; ++k) x.lane[k] = has(ROUND_BEFORE_WEIGHT) ? x.lane[k] * w.lane[k] : x.lane[k] * w.lane[k] * rms;
        return narrow_vec<T>(x).words;
    }

    // The largest magnitude of a row's norm, where it does not follow from the largest product with a weight, because a rounding
    // before the weight may make another element the largest. This takes another exchange.
    DEVICE float most_of_norm(float rms) const {
        each<1>([&](u32 round, u32 v) {
            float none[1] = {0}, most[1] = {0};
            if (v < f.vectors) {
                const wide_vec<T> n = widen_words(normed(round, v, rms));
#pragma unroll
                for (u32 k = 0; k < LANES; ++k) most[0] = larger_number(most[0], n.lane[k]);
            }
            team.share(f, v, none, most);
        });
        float most = 0;
        if (team.takes_part(f)) team.end_exchange(f, most);
        return most;
    }

    DEVICE void norm(u32 row, u64 begin, float rms, float most) {
        const u32 token = f.first + row;
        quotient scaled;
        if (has(INVERSE_RMS_OUT) && team.thread == 0) f.inverse_rms_out[token] = canonical(rms);
        if (QUANTIZATION == FP8_TOKENS) {
            // A product with the root and the rounding keep the order, so the largest one stays the largest.
            const float amax = has(ROUND_BEFORE_WEIGHT) ? most_of_norm(rms) : widen(narrow<T>(most * rms)), least = 0.001953125f / 448.0f;
            const float most_scaled = f.reciprocal ? amax * (1.0f / 448.0f) : amax / 448.0f;
            const float divisor = amax == amax ? most_scaled : 0.0f;
            scaled = quotient(divisor < least ? least : divisor);
            if (team.thread == 0) ((float*)f.scales)[token] = divisor < least ? least : divisor;
        }
        if (QUANTIZATION == FP8_ODD_GROUPS) {
            for (u32 g = threadIdx.x; g < groups_of_row(f); g += blockDim.x) group_most()[g] = 0;
            __syncthreads();
        }
        each<1>([&](u32 round, u32 v) {
            const bool is_there = v < f.vectors;
            uint4 words = make_uint4(0, 0, 0, 0);
            if (is_there) {
                words = normed(round, v, rms);
                if (has(NORM_OUT)) store16(f.norm_out + (begin + v) * 16, words);
            }
            if (QUANTIZATION == NONE) return;
            const wide_vec<T> n = widen_words(words);
            if (QUANTIZATION == FP8 && is_there) store_e4m3(f.codes, begin + v, n, [&](float x) { return x * scale; });
            if (QUANTIZATION == FP8_TOKENS && is_there) store_e4m3(f.codes, begin + v, n, scaled);
            if (QUANTIZATION == FP8_ODD_GROUPS && is_there) {
                keep(round, words);
                reach_odd_groups(f, v, n, group_most());
            }
            if (QUANTIZATION == FP8_GROUPS) { // neighbouring lanes'
                u32 amax = most_of_numbers(n);
                for (u32 distance = f.group / 2; distance > 0; distance /= 2)
                    amax = larger(amax, __shfl_xor_sync(WHOLE_WARP, amax, distance));
                if (is_there) store_group(f, token, begin, v, v >> __ffs(f.group) - 1, n, amax);
            }
            if (QUANTIZATION == NVFP4) {
                const u32 amax = most_of(n); // sixteen elements share a scale: two neighbouring lanes'
                const u32 both = larger(amax, __shfl_xor_sync(WHOLE_WARP, amax, 1));
                if (is_there) store_nvfp4(f, token, begin, v, n, both, scale);
            }
        });
        if (QUANTIZATION == FP8_ODD_GROUPS) {
            __syncthreads();
            each<1>([&](u32 round, u32 v) {
                if (v < f.vectors) store_odd_groups(f, token, begin, v, widen_words(kept(round)), group_most());
            });
            __syncthreads(); // before the next row begins
        }
    }
};
