// All-reduce over NVLink: one-shot and two-shot. Behind cuda/slots.cuh and cuda/reduce.cuh.

// Everyone gets everything and reduces everything: (WORLD - 1) · n bytes out, one hop.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const elements in(a.input, a.count), out(a.output, a.count);
    const u64 vectors = vectors_of(a.count), start = grid_thread();
    // Both loads are under way before either is needed.
    const uint4 words = load_control(a);
    const uint4 first = start < vectors ? in.load(start) : make_uint4(0, 0, 0, 0);
    const turn t = begin(a, words);
    if (start < vectors) push(a, t, a.rank, start, without_empty(first));
    for (u64 i = start + grid_threads(); i < vectors; i += grid_threads())
        push(a, t, a.rank, i, without_empty(in.load(i)));
    advance(a, t, (u32)vectors, 0);
    reader r(a, t);
    for (u64 i = start; i < vectors; i += grid_threads()) {
        uint4 sum;
        if (!collect_and_reduce(r, i, i == start ? first : in.load(i), sum)) return;
        out.store(i, sum);
    }
    r.finish();
}

// Everyone reduces a part, and the parts are gathered: 2 (WORLD - 1) / WORLD · n bytes out, two hops.
extern "C" __global__ void __launch_bounds__(THREADS) two_shot(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const elements in(a.input, a.count), out(a.output, a.count);
    const u64 part = (vectors_of(a.count) + WORLD - 1) / WORLD;
    const turn t = begin(a, load_control(a));
    scatter(a, t, part, [&](u32 peer) {
        const u64 first = peer * part * LANES;
        return elements(in.data + first, first < a.count ? a.count - first : 0);
    });
    advance(a, t, (u32)part, (u32)part);
    reader r(a, t);
    for (u64 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 sum;
        if (!collect_and_reduce(r, i, in.load(a.rank * part + i), sum)) return;
        push(a, t, WORLD + a.rank, i, sum);
        out.store(a.rank * part + i, sum);
    }
    for (u64 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 got[WORLD];
        if (!collect(r, WORLD, i, got)) return;
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) out.store(k * part + i, got[k]);
    }
    r.finish();
}
