// Reducing vectors of one type: for a program that has ELEMENT, OPERATOR, AVERAGE and ROUND_EACH. Behind slots.cuh.
//
// EMPTY is a NaN (two NaNs in half precision). No reduction returns it, and senders replace it by the canonical NaN. This loses
// no value: a sum with any NaN is the canonical NaN.

typedef ELEMENT T;
typedef wide<T>::type A;
constexpr u32 LANES = vec16<T>::LANES;

DEVICE u32 vectors_of(u32 elements) { return (elements + LANES - 1) / LANES; }

DEVICE uint4 without_empty(uint4 v) {
    constexpr u32 NANS = sizeof(T) == 4 ? 0x7FC00000u : NAN_PAIR;
    if (v.x == EMPTY) v.x = NANS;
    if (v.y == EMPTY) v.y = NANS;
    if (v.z == EMPTY) v.z = NANS;
    if (v.w == EMPTY) v.w = NANS;
    return v;
}

// Elements in this GPU's memory. PLAIN: whole vectors at a multiple of 16 bytes; otherwise any number, at any address.
template <bool PLAIN> struct elements {
    T* data;
    u32 count;
    bool aligned;

    DEVICE elements(const void* at, u32 count)
        : data((T*)at), count(count), aligned(PLAIN || (u64)at % 16 == 0) {}

    // The vector at `index`; elements past the end are zero.
    DEVICE uint4 load(u32 index) const {
        const u32 first = index * LANES;
        if (PLAIN || aligned && first + LANES <= count) return load16(data + first);
        vec16<T> v;
        v.words = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (u32 k = 0; k < LANES; ++k)
            if (first + k < count) v.lane[k] = data[first + k];
        return v.words;
    }

    DEVICE void store(u32 index, uint4 words) const {
        const u32 first = index * LANES;
        if (PLAIN || aligned && first + LANES <= count) return store16(data + first, words);
        vec16<T> v;
        v.words = words;
#pragma unroll
        for (u32 k = 0; k < LANES; ++k)
            if (first + k < count) data[first + k] = v.lane[k];
    }
};

// A reduction that waited in vain writes NaN into its output, so that its users notice: in every `step`-th vector from
// `first` on. Not inlined, so that it costs no registers.
[[maybe_unused]] static __device__ __noinline__ void write_nan(u64 data, u32 bytes, u32 first, u32 step, u32 end) {
    for (u32 i = first; i < end; i += step)
#pragma unroll 1
        for (u32 at = i * 16; at < i * 16 + 16 && at < bytes; ++at)
            asm volatile("st.global.u8 [%0], %1;" :: "l"(data + at), "r"((NAN_PAIR >> at % 4 * 8) & 0xFF) : "memory");
}
template <bool PLAIN> DEVICE void fill_nan(const elements<PLAIN>& out, u32 first, u32 step, u32 end) {
    write_nan((u64)out.data, out.count * sizeof(T), first, step, end);
}

// Reduces in the order of the values, which is that of their ranks, and rounds once (ROUND_EACH: after each). The result has no
// EMPTY: a NaN is the canonical NaN.
template <u32 COUNT> DEVICE uint4 reduce(const uint4 (&values)[COUNT]) {
    vec16<T> v;
    v.words = values[0];
    wide_vec<T> sum = widen_vec(v);
#pragma unroll
    for (u32 k = 1; k < COUNT; ++k) {
        v.words = values[k];
        wide_vec<T> x = widen_vec(v);
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane) sum.lane[lane] = OPERATOR<A>()(sum.lane[lane], x.lane[lane]);
        if (ROUND_EACH) sum = widen_vec(narrow_vec<T>(sum));
    }
    if (AVERAGE)
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane) sum.lane[lane] /= (A)COUNT;
    return narrow_vec<T>(sum).words;
}

// Waits for all ranks' vectors at `index` of the lower lanes (and further ones, as `collect`), and reduces them with this
// rank's own, which `mine(i)` loads. For a whole warp.
template <u32 COUNT, class Mine>
DEVICE bool collect_and_reduce(reader& r, u32 index, u32 step, u32 end, Mine mine, uint4 (&result)[COUNT]) {
    uint4 got[COUNT][WORLD];
#pragma unroll
    for (u32 n = 0; n < COUNT; ++n) {
        if (index + n * step >= end) break;
        const uint4 own = mine(index + n * step);
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k) got[n][k] = own; // an index known at run time would need local memory
    }
    if (!collect(r, 0, index, step, end, got)) return false;
#pragma unroll
    for (u32 n = 0; n < COUNT; ++n) result[n] = reduce(got[n]);
    return true;
}

// Begins a call, and sends each peer its own vectors: the elements `of(peer)`. Every block serves one peer, so that
// bursts are long; there are a multiple of WORLD - 1 blocks. EMPTIES as in `begin_and_send`.
template <bool PLAIN, bool EMPTIES, class Of> DEVICE void begin_and_scatter(const arguments& a, turn& t, u32 vectors, Of of) {
    const u32 peer = blockIdx.x % PEERS, step = gridDim.x / PEERS * blockDim.x;
    const u32 first = blockIdx.x / PEERS * blockDim.x + threadIdx.x;
    const elements<PLAIN> block = of(rank_of(a, peer));
    const auto load = [&](u32 i) { return block.load(i); };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(a.peer[peer] + lane_at(a, t.slot, a.rank) + i * 16, without_empty(v));
    };
    // With many rounds the loads of other warps are in flight anyway, and more loads would only slow each other down.
    begin_and_send<PLAIN ? DEPTH : 1, 1, EMPTIES>(a, t, first, step, vectors, load, send);
}
