// Reduce-scatter over NVLink: (WORLD - 1) · n bytes out for a result of n, one hop. Behind slots.cuh and
// reduce.cuh.

template <bool PLAIN> DEVICE void reduce_scatter_of(const arguments& a) {
    const u32 vectors = vectors_of(a.count);
    turn t;
    const auto block_of = [&](u32 peer) { return elements<PLAIN>(a.input + peer * a.stride, a.count); };
    const elements<PLAIN> mine(a.input + a.rank * a.stride, a.count), out(a.output, a.count);
    const u32 start = grid_thread(), step = grid_threads();
    begin_and_scatter<PLAIN, true>(a, t, vectors, block_of);
    if (!advance(a, t, vectors, 0)) return fill_nan(out, start, step, vectors);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, vectors); i += step) {
        uint4 sum[1];
        const auto own = [&](u32 i) { return mine.load(i); };
        if (!collect_and_reduce(r, i, step, vectors, own, sum)) return fill_nan(out, i, step, vectors);
        if (serves_its_senders()) release_dependents(a);
        if (i < vectors) out.store(i, sum[0]);
    }
    if (!r.finish()) fill_nan(out, 0, 1, vectors);
}

KERNEL(reduce_scatter) { reduce_scatter_of<false>(a); }
KERNEL(reduce_scatter_plain) { reduce_scatter_of<true>(a); }
