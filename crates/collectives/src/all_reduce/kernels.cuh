// All-reduce over NVLink: one-shot and two-shot. Behind cuda/slots.cuh and cuda/reduce.cuh.

// Everyone gets everything and reduces everything: (WORLD - 1) · n bytes out, one hop.
template <bool PLAIN> DEVICE void one_shot_of(const arguments& a) {
    const elements<PLAIN> in(a.input, a.count), out(a.output, a.count);
    const u32 vectors = vectors_of(a.count), start = grid_thread(), step = grid_threads();
    // Both loads are under way before either is needed.
    const uint4 words = load_control(a);
    const uint4 first = start < vectors ? in.load(start) : make_uint4(0, 0, 0, 0);
    const turn t = begin(a, words);
    if (start < vectors) push(a, t, a.rank, start, without_empty(first));
#pragma unroll 1
    for (u32 i = start + step; i < vectors; i += step) push(a, t, a.rank, i, without_empty(in.load(i)));
    advance(a, t, vectors, 0);
    reader r(a, t);
    for (u32 i = start; i < vectors; i += step) {
        uint4 sum;
        if (!collect_and_reduce(r, i, in.load(i), sum)) return; // read again, rather than kept in registers
        out.store(i, sum);
    }
    r.finish();
}

// Everyone reduces a part, and the parts are gathered: 2 (WORLD - 1) / WORLD · n bytes out, two hops. PLAIN: the parts are
// equal, whole vectors.
template <bool PLAIN> DEVICE void two_shot_of(const arguments& a) {
    const elements<PLAIN> in(a.input, a.count), out(a.output, a.count);
    const u32 part = (vectors_of(a.count) + WORLD - 1) / WORLD;
    const turn t = begin(a, load_control(a));
    scatter<PLAIN>(a, t, part, [&](u32 peer) {
        const u32 first = peer * part * LANES;
        return elements<PLAIN>(in.data + first, first < a.count ? a.count - first : 0);
    });
    advance(a, t, part, part);
    reader r(a, t);
    for (u32 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 sum;
        if (!collect_and_reduce(r, i, in.load(a.rank * part + i), sum)) return;
        push(a, t, WORLD + a.rank, i, sum);
        out.store(a.rank * part + i, sum);
    }
    for (u32 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 got[WORLD];
        if (!collect(r, WORLD, i, got)) return;
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) out.store(k * part + i, got[k]);
    }
    r.finish();
}

KERNEL(one_shot) { one_shot_of<false>(a); }
KERNEL(one_shot_plain) { one_shot_of<true>(a); }
KERNEL(two_shot) { two_shot_of<false>(a); }
KERNEL(two_shot_plain) { two_shot_of<true>(a); }
