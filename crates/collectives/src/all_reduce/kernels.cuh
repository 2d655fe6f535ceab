// All-reduce over NVLink: one-shot and two-shot. Behind slots.cuh and reduce.cuh.

// Every rank receives and reduces everything: (WORLD - 1) · n bytes out, one hop. A thread has ROUND vectors at a time.
template <bool PLAIN, u32 ROUND> DEVICE void one_shot_of(const arguments& a) {
    const elements<PLAIN> in(a.input, a.count), out(a.output, a.count);
    const u32 vectors = vectors_of(a.count), start = grid_thread(), step = grid_threads();
    // All loads are under way before any is needed.
    const uint4 words = load_control(a);
    uint4 first[ROUND];
#pragma unroll
    for (u32 n = 0; n < ROUND; ++n)
        if (start + n * step < vectors) first[n] = in.load(start + n * step);
    const turn t = begin(a, words);
    const u32 sent = t.has_failed() ? 0 : vectors;
#pragma unroll
    for (u32 n = 0; n < ROUND; ++n)
        if (start + n * step < sent) push(a, t, a.rank, start + n * step, without_empty(first[n]));
#pragma unroll 1
    for (u32 i = start + ROUND * step; i < sent; i += step) push(a, t, a.rank, i, without_empty(in.load(i)));
    if (!advance(a, t, vectors, 0)) return fill_nan(out, start, step, vectors);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, vectors); i += ROUND * step) {
        uint4 sums[ROUND];
        const auto mine = [&](u32 i) { return in.load(i); }; // again, rather than kept in registers
        if (!collect_and_reduce(r, i, step, vectors, mine, sums)) return fill_nan(out, i, step, vectors);
        release_dependents(a);
#pragma unroll
        for (u32 n = 0; n < ROUND; ++n)
            if (i + n * step < vectors) out.store(i + n * step, sums[n]);
    }
    if (!r.finish()) fill_nan(out, 0, 1, vectors);
}

// Every rank reduces a part, and the parts are gathered: 2 (WORLD - 1) / WORLD · n bytes out, two hops. PLAIN: the parts are
// equal, whole vectors.
template <bool PLAIN> DEVICE void two_shot_of(const arguments& a) {
    const elements<PLAIN> in(a.input, a.count), out(a.output, a.count);
    const u32 part = (vectors_of(a.count) + WORLD - 1) / WORLD;
    turn t;
    const auto part_of = [&](u32 peer) {
        const u32 first = peer * part * LANES;
        return elements<PLAIN>(in.data + first, first < a.count ? a.count - first : 0);
    };
    const u32 start = grid_thread(), step = grid_threads();
    const auto give_up = [&] {
        for (u32 k = 0; k < WORLD; ++k) fill_nan(out, k * part + start, step, (k + 1) * part);
    };
    begin_and_scatter<PLAIN, false>(a, t, part, part_of);
    if (!advance(a, t, part, part)) return give_up();
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, part); i += step) {
        uint4 sum[1];
        const auto mine = [&](u32 i) { return in.load(a.rank * part + i); };
        if (!collect_and_reduce(r, i, step, part, mine, sum)) return give_up();
        if (i >= part) break;
        push(a, t, WORLD + a.rank, i, sum[0]);
        out.store(a.rank * part + i, sum[0]);
    }
    for (u32 i = start; is_warp_before(i, part); i += step) {
        uint4 got[1][WORLD];
        if (!collect(r, WORLD, i, step, part, got)) return give_up();
        release_dependents(a);
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank && i < part) out.store(k * part + i, got[0][k]);
    }
    if (!r.finish()) fill_nan(out, 0, 1, vectors_of(a.count));
}

KERNEL(one_shot) { one_shot_of<false, 1>(a); }
KERNEL(one_shot_plain) { one_shot_of<true, 1>(a); }
// With more ranks there are no registers for two.
KERNEL(one_shot_pairs) { one_shot_of<true, WORLD == 2 ? 2 : 1>(a); }
KERNEL(two_shot) { two_shot_of<false>(a); }
KERNEL(two_shot_plain) { two_shot_of<true>(a); }
