// What the measuring itself needs on the GPU.

// Costs nothing but its launch.
extern "C" __global__ void empty() {}

// Keeps the stream busy, so that what is submitted behind it is all there when it starts.
extern "C" __global__ void delay(u64 ns) {
    const u64 start = global_ns();
    while (global_ns() - start < ns) {
    }
}

// c = a · b, where a is SIDE × DEPTH and b is DEPTH × SIDE: a product that keeps the GPU busy beside what is measured. A block
// computes a tile of 64 × 64, and a thread 4 × 4 of it.
constexpr u32 SIDE = 2048, DEPTH = 256, TILE = 64, STEP = 16;
extern "C" __global__ void __launch_bounds__(256) gemm(const float* a, const float* b, float* c) {
    __shared__ float left[STEP][TILE], right[STEP][TILE];
    const u32 row = blockIdx.y * TILE, column = blockIdx.x * TILE, x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
    float sums[4][4] = {};
    for (u32 k = 0; k < DEPTH; k += STEP) {
        for (u32 i = threadIdx.x; i < STEP * TILE; i += blockDim.x) {
            left[i % STEP][i / STEP] = a[(row + i / STEP) * DEPTH + k + i % STEP];
            right[i / TILE][i % TILE] = b[(k + i / TILE) * SIDE + column + i % TILE];
        }
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < STEP; ++step)
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) sums[i][j] += left[step][y + i] * right[step][x + j];
        __syncthreads();
    }
    for (u32 i = 0; i < 4; ++i)
        for (u32 j = 0; j < 4; ++j) c[(row + y + i) * SIDE + column + x + j] = sums[i][j];
}

// What a program without fused calls does behind its all-reduce: adds the residual to each row of the sum, stores it, and stores
// its RMS norm, or that as E4M3. Each row has a block, whose threads keep VECTORS vectors of the row each, in registers.
constexpr u32 HIDDEN = 7168, NORM_THREADS = 448, VECTORS = HIDDEN / 8 / NORM_THREADS;
template <bool IS_FP8> DEVICE void add_norm_row(const bf16* sum, bf16* residual, const bf16* weight, float eps, u8* out) {
    __shared__ float squares_of_warps[NORM_THREADS / 32];
    const u64 row = (u64)blockIdx.x * HIDDEN;
    wide_vec<bf16> values[VECTORS];
    float squares = 0;
#pragma unroll
    for (u32 k = 0; k < VECTORS; ++k) {
        const u64 at = row + (k * NORM_THREADS + threadIdx.x) * 8;
        const wide_vec<bf16> a = widen_vec(load_vec(sum + at)), b = widen_vec(load_vec(residual + at));
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            values[k].lane[i] = a.lane[i] + b.lane[i];
            squares += values[k].lane[i] * values[k].lane[i];
        }
        store_vec(residual + at, narrow_vec<bf16>(values[k]));
    }
    for (u32 distance = 16; distance; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFF, squares, distance);
    if (threadIdx.x % 32 == 0) squares_of_warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
    for (float of_warp : squares_of_warps) squares += of_warp;
    const float scale = rsqrtf(squares / HIDDEN + eps);
#pragma unroll
    for (u32 k = 0; k < VECTORS; ++k) {
        const u64 at = (k * NORM_THREADS + threadIdx.x) * 8;
        const wide_vec<bf16> w = widen_vec(load_vec(weight + at));
#pragma unroll
        for (u32 i = 0; i < 8; ++i) values[k].lane[i] *= scale * w.lane[i];
        if (IS_FP8) {
            u32 codes[2] = {};
#pragma unroll
            for (u32 i = 0; i < 8; i += 2)
                codes[i / 4] |= (u32)narrow_e4m3x2(values[k].lane[i], values[k].lane[i + 1]) << (i % 4 * 8);
            *(uint2*)(out + row + at) = make_uint2(codes[0], codes[1]);
        } else {
            store_vec((bf16*)out + row + at, narrow_vec<bf16>(values[k]));
        }
    }
}
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
add_norm(const bf16* sum, bf16* residual, const bf16* weight, float eps, u8* out) { add_norm_row<false>(sum, residual, weight, eps, out); }
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
add_norm_fp8(const bf16* sum, bf16* residual, const bf16* weight, float eps, u8* out) { add_norm_row<true>(sum, residual, weight, eps, out); }

// For an all-to-all of a mixture of experts: to[i] = from[order[i]], where a row is `vectors` vectors of 16 bytes.
extern "C" __global__ void gather_rows(const uint4* from, const i32* order, uint4* to, u64 rows, u64 vectors) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * vectors; i += step)
        to[i] = from[order[i / vectors] * vectors + i % vectors];
}

// Behind an all-to-all: sums each token's rows in float. A token has a row from each of `ranks` ranks, whose number is in `places`; −1
// stands for no row.
template <class T>
DEVICE void sum_rows(const u8* rows, const i32* places, u8* to, u64 tokens, u64 vectors, u64 ranks) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < tokens * vectors; i += step) {
        wide_vec<T> sum{};
        for (u64 rank = 0; rank < ranks; ++rank) {
            const i32 place = places[i / vectors * ranks + rank];
            if (place < 0) continue;
            const wide_vec<T> x = widen_vec(load_vec((const T*)(rows + (place * vectors + i % vectors) * 16)));
#pragma unroll
            for (u32 lane = 0; lane < vec16<T>::LANES; ++lane) sum.lane[lane] += x.lane[lane];
        }
        store_vec((T*)(to + i * 16), narrow_vec<T>(sum));
    }
}
#define SUM_ROWS(name, T)                                                                                             \
    extern "C" __global__ void name(const u8* rows, const i32* places, u8* to, u64 tokens, u64 vectors, u64 ranks) { \
        sum_rows<T>(rows, places, to, tokens, vectors, ranks);                                                        \
    }
SUM_ROWS(sum_rows_f32, float)
SUM_ROWS(sum_rows_f16, f16)
SUM_ROWS(sum_rows_bf16, bf16)
