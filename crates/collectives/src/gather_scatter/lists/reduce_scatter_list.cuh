// Reduce-scatter of a list of tensors: as the reduce-scatter of one tensor that has the vectors of all. Behind reduce.cuh and
// lists.cuh.

KERNEL_OF(reduce_scatter_list, list, l) {
    const u32 vectors = l.first[l.tensors], next = blockIdx.x % PEERS, peer = rank_of(a, next);
    turn t;
    const auto load_for = [&](u32 rank, u32 i) {
        const u32 tensor = tensor_of(l, i), count = l.count[tensor];
        return elements<false>(l.input[tensor] + (u64)rank * count * sizeof(T), count).load(i - l.first[tensor]);
    };
    const auto spoil = [&](u32 first, u32 step) {
        for (u32 tensor = 0; tensor < l.tensors; ++tensor) {
            const elements<false> out(l.output[tensor], l.count[tensor]);
            fill_nan(out, first, step, vectors_of(l.count[tensor]));
        }
    };
    const auto load = [&](u32 i) { return load_for(peer, i); };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(a.peer[next] + lane_at(a, t.slot, a.rank) + i * 16, without_empty(v));
    };
    const u32 block = blockIdx.x / PEERS, blocks = gridDim.x / PEERS;
    begin_and_send<1, 1, true>(a, t, block * blockDim.x + threadIdx.x, blocks * blockDim.x, vectors, load, send);
    if (!advance(a, t, vectors, 0)) return spoil(grid_thread(), grid_threads());
    reader r(a, t);
    const u32 step = grid_threads();
    for (u32 i = grid_thread(); is_warp_before(i, vectors); i += step) {
        uint4 sum[1];
        const auto own = [&](u32 i) { return load_for(a.rank, i); };
        if (!collect_and_reduce(r, i, step, vectors, own, sum)) return spoil(grid_thread(), step);
        if (i >= vectors) continue;
        const u32 tensor = tensor_of(l, i);
        elements<false>(l.output[tensor], l.count[tensor]).store(i - l.first[tensor], sum[0]);
    }
    if (!r.finish()) spoil(0, 1);
}
