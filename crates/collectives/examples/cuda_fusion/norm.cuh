// What a fused all-reduce is to beat: a kernel of its own for residual, RMS norm and FP8, behind the all-reduce. A block has a
// row and a thread PER vectors of 16 bytes of it, in registers from the first load to the last store.

template <u32 PER, bool FP8> DEVICE void norm_of(
    const bf16* sum, const bf16* residual, const bf16* gamma, bf16* residual_out, u8* out, float eps, float factor
) {
    constexpr u32 VECTORS = HIDDEN / 8, THREADS = VECTORS / PER, WARPS = THREADS / 32;
    static_assert(THREADS * PER == VECTORS && WARPS * 32 == THREADS, "whole vectors, whole warps");
    __shared__ float of_warps[WARPS];
    const u32 thread = threadIdx.x;
    const u64 row = (u64)blockIdx.x * HIDDEN;
    // The kernel behind starts as soon as all rows have a block; the weight is nobody's output.
    pdl_launch_dependents();
    vec16<bf16> weight[PER], x[PER], added[PER];
#pragma unroll
    for (u32 n = 0; n < PER; ++n) weight[n].words = load16_once(gamma + (thread + n * THREADS) * 8);
    pdl_wait();
#pragma unroll
    for (u32 n = 0; n < PER; ++n) {
        const u64 at = row + (thread + n * THREADS) * 8;
        x[n] = load_vec(sum + at);
        added[n] = load_vec(residual + at);
    }
    float squares = 0.0f;
#pragma unroll
    for (u32 n = 0; n < PER; ++n) {
        wide_vec<bf16> a = widen_vec(x[n]);
        const wide_vec<bf16> b = widen_vec(added[n]);
#pragma unroll
        for (u32 k = 0; k < 8; ++k) a.lane[k] += b.lane[k];
        x[n] = narrow_vec(a);
        store_vec(residual_out + row + (thread + n * THREADS) * 8, x[n]);
        a = widen_vec(x[n]);
#pragma unroll
        for (u32 k = 0; k < 8; ++k) squares = __fmaf_rn(a.lane[k], a.lane[k], squares);
    }
    squares = warp_reduce(squares, sum_of<float>());
    if (thread % 32 == 0) of_warps[thread / 32] = squares;
    __syncthreads();
    squares = warp_reduce(thread % 32 < WARPS ? of_warps[thread % 32] : 0.0f, sum_of<float>());
    const float rms = rsqrtf(squares * (1.0f / HIDDEN) + eps);
#pragma unroll
    for (u32 n = 0; n < PER; ++n) {
        wide_vec<bf16> y = widen_vec(x[n]);
        const wide_vec<bf16> w = widen_vec(weight[n]);
#pragma unroll
        for (u32 k = 0; k < 8; ++k) y.lane[k] *= w.lane[k] * rms;
        const vec16<bf16> norm = narrow_vec(y);
        const u64 at = row + (thread + n * THREADS) * 8;
        if constexpr (FP8) {
            y = widen_vec(norm);
            u32 codes[4];
#pragma unroll
            for (u32 k = 0; k < 4; ++k) codes[k] = narrow_e4m3x2(y.lane[2 * k] * factor, y.lane[2 * k + 1] * factor);
            *(uint2*)(out + at) = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
        } else {
            store_vec((bf16*)out + at, norm);
        }
    }
}

#define NORM(name, PER, FP8)                                                                                         \
    extern "C" __global__ void __launch_bounds__(HIDDEN / 8 / PER) name(                                             \
        const bf16* sum, const bf16* residual, const bf16* gamma, bf16* residual_out, u8* out, float eps, float factor \
    ) {                                                                                                              \
        norm_of<PER, FP8>(sum, residual, gamma, residual_out, out, eps, factor);                                     \
    }
NORM(norm_1, 1, false)
NORM(norm_2, 2, false)
NORM(norm_4, 4, false)
NORM(fp8_1, 1, true)
NORM(fp8_2, 2, true)
NORM(fp8_4, 4, true)
