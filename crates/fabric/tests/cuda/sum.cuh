// The sum of all ranks' elements, whole vectors at multiples of 16 bytes, in one hop. Behind reduce.cuh.
KERNEL(sum) {
    const elements<true> in(a.input, a.count), out(a.output, a.count);
    const u32 vectors = vectors_of(a.count), start = grid_thread(), step = grid_threads();
    const auto load = [&](u32 i) { return in.load(i); };
    const auto send = [&](const turn& t, u32 i, uint4 v) { push(a, t, a.rank, i, without_empty(v)); };
    turn t;
    begin_and_send<1, 1, false>(a, t, start, step, vectors, load, send);
    if (!advance(a, t, vectors, 0)) return;
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, vectors); i += step) {
        uint4 sums[1];
        if (!collect_and_reduce(r, i, step, vectors, load, sums)) return;
        if (i < vectors) out.store(i, sums[0]);
    }
    r.finish();
}
