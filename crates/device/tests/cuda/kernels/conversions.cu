// Every conversion of the prelude, one by one and in pairs, for comparison with the host's.

struct narrowed { u16 f16, bf16; u8 e4m3, e5m2, e2m1, unused; };

// `to` has two entries per value: converted alone, and as the first and second of pairs.
extern "C" __global__ void narrow_all(narrowed* to, const u32* patterns, u32 count) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        float x = __uint_as_float(patterns[i]), other = __uint_as_float(patterns[(i + 1) % count]);
        narrowed alone = {narrow<f16>(x).bits, narrow<bf16>(x).bits, narrow<e4m3>(x).bits, narrow<e5m2>(x).bits,
                          (u8)(narrow_e2m1x2(x, 0.0f).bits & 0xF), 0};
        to[2 * i] = alone;
        // As the first of one pair and the second of another: equal, or marked.
        u32 f[2] = {narrow_f16x2(x, other) & 0xFFFF, narrow_f16x2(other, x) >> 16};
        u32 b[2] = {narrow_bf16x2(x, other) & 0xFFFF, narrow_bf16x2(other, x) >> 16};
        u32 e[2] = {narrow_e4m3x2(x, other) & 0xFFu, (u32)narrow_e4m3x2(other, x) >> 8};
        u32 g[2] = {narrow_e5m2x2(x, other) & 0xFFu, (u32)narrow_e5m2x2(other, x) >> 8};
        u32 h[2] = {narrow_e2m1x2(x, other).bits & 0xFu, (u32)narrow_e2m1x2(other, x).bits >> 4};
        bool equal = f[0] == f[1] && b[0] == b[1] && e[0] == e[1] && g[0] == g[1] && h[0] == h[1];
        to[2 * i + 1] = narrowed{(u16)f[0], (u16)b[0], (u8)e[0], (u8)g[0], (u8)h[0], (u8)(equal ? 0 : 1)};
    }
}

// The f32 patterns of all 65536 codes: as f16, as bf16, and of the low byte as e4m3, e5m2 and two e2m1.
extern "C" __global__ void widen_all(u32* to) {
    u32 code = (u32)grid_thread();
    if (code >= 65536) return;
    u32* mine = to + code * 6;
    float_pair four = widen(e2m1x2{(u8)code});
    mine[0] = __float_as_uint(widen(f16{(u16)code}));
    mine[1] = __float_as_uint(widen(bf16{(u16)code}));
    mine[2] = __float_as_uint(widen(e4m3{(u8)code}));
    mine[3] = __float_as_uint(widen(e5m2{(u8)code}));
    mine[4] = __float_as_uint(four.first);
    mine[5] = __float_as_uint(four.second);
}

// Widened and narrowed again as vectors: the same elements, but for NaNs.
template <class T> DEVICE void there_and_back(T* data, u32 count) {
    for (u64 i = grid_thread() * vec16<T>::LANES; i < count; i += grid_threads() * vec16<T>::LANES)
        store_vec(data + i, narrow_vec<T>(widen_vec(load_vec(data + i))));
}
extern "C" __global__ void back_f16(f16* data, u32 count) { there_and_back(data, count); }
extern "C" __global__ void back_bf16(bf16* data, u32 count) { there_and_back(data, count); }
extern "C" __global__ void back_e4m3(e4m3* data, u32 count) { there_and_back(data, count); }
extern "C" __global__ void back_e5m2(e5m2* data, u32 count) { there_and_back(data, count); }
