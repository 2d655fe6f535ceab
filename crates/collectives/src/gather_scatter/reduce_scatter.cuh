// Reduce-scatter over NVLink: (WORLD - 1) · n bytes out for a result of n, one hop. Behind cuda/slots.cuh and
// cuda/reduce.cuh.

extern "C" __global__ void __launch_bounds__(THREADS) reduce_scatter(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const u64 vectors = vectors_of(a.count);
    const turn t = begin(a, load_control(a));
    scatter(a, t, vectors, [&](u32 peer) { return elements(a.input + peer * a.stride, a.count); });
    advance(a, t, (u32)vectors, 0);
    const elements mine(a.input + a.rank * a.stride, a.count), out(a.output, a.count);
    reader r(a, t);
    for (u64 i = grid_thread(); i < vectors; i += grid_threads()) {
        uint4 sum;
        if (!collect_and_reduce(r, i, mine.load(i), sum)) return;
        out.store(i, sum);
    }
    r.finish();
}
