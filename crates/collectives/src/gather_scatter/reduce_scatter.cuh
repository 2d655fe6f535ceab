// Reduce-scatter over NVLink: (WORLD - 1) · n bytes out for a result of n, one hop. Behind cuda/slots.cuh and
// cuda/reduce.cuh.

template <bool PLAIN> DEVICE void reduce_scatter_of(const arguments& a) {
    const u32 vectors = vectors_of(a.count);
    turn t;
    const auto block_of = [&](u32 peer) { return elements<PLAIN>(a.input + peer * a.stride, a.count); };
    if (!begin_and_scatter<PLAIN, true>(a, t, vectors, block_of)) return;
    advance(a, t, vectors, 0);
    const elements<PLAIN> mine(a.input + a.rank * a.stride, a.count), out(a.output, a.count);
    reader r(a, t);
    for (u32 i = grid_thread(); is_warp_before(i, vectors); i += grid_threads()) {
        uint4 sum[1];
        const auto own = [&](u32 i) { return mine.load(i); };
        if (!collect_and_reduce(r, i, grid_threads(), vectors, own, sum)) return;
        if (i < vectors) out.store(i, sum[0]);
    }
    r.finish();
}

KERNEL(reduce_scatter) { reduce_scatter_of<false>(a); }
KERNEL(reduce_scatter_plain) { reduce_scatter_of<true>(a); }
