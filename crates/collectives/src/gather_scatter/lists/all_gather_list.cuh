// All-gather of a list of tensors: as the all-gather of one tensor that has the rows of all. Behind rows.cuh and lists.cuh.

KERNEL_OF(all_gather_list, list, l) {
    const u32 count = l.first[l.tensors];
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    turn t;
    const auto block_of = [&](u32 tensor, u32 rank) {
        return bytes(l.output[tensor] + (u64)rank * l.count[tensor], l.count[tensor]);
    };
    const auto load = [&](u32 row) {
        const u32 tensor = tensor_of(l, row);
        return load_row(bytes(l.input[tensor], l.count[tensor]), row - l.first[tensor]);
    };
    const auto send = [&](const turn& t, u32 row, uint4 v) {
        push(a, t, a.rank, row * 32 + lane_id(), masked(v));
        const u32 tensor = tensor_of(l, row);
        const bytes own = block_of(tensor, a.rank);
        if (own.data != l.input[tensor]) store_row(own, row - l.first[tensor], v);
    };
    begin_and_send<DEPTH, DEPTH, true>(a, t, mine.first, mine.step, count, load, send);
    if (!advance(a, t, count * 32, 0)) return;
    reader r(a, t);
    for (u32 row = mine.first; row < count; row += mine.step) {
        u32 at[PEERS], peers[PEERS];
        uint4 got[PEERS];
#pragma unroll
        for (u32 k = 0; k < PEERS; ++k) peers[k] = rank_of(a, k), at[k] = peers[k] * a.lane_stride + row * 512;
        if (!collect_rows(r, at, peers, got)) return;
        const u32 tensor = tensor_of(l, row);
#pragma unroll
        for (u32 k = 0; k < PEERS; ++k) store_row(block_of(tensor, peers[k]), row - l.first[tensor], unmasked(got[k]));
    }
    r.finish();
}
