// Reduce-scatter of uneven parts, and reduction for one rank alone: each rank sends each peer the peer's part, and reduces the
// parts that it receives. Behind slots.cuh and reduce.cuh.

template <bool PLAIN> DEVICE void reduce_parts_of(const arguments& a, const parts& p) {
    const u32 sent = vectors_of(p.count[rank_of(a, blockIdx.x % PEERS)]), vectors = vectors_of(p.count[a.rank]);
    turn t;
    const auto part_of = [&](u32 rank) { return elements<PLAIN>(p.input[rank], p.count[rank]); };
    const elements<PLAIN> mine = part_of(a.rank), out(a.output, p.count[a.rank]);
    const u32 start = grid_thread(), step = grid_threads();
    begin_and_scatter<PLAIN, true>(a, t, sent, part_of);
    if (!advance(a, t, vectors, 0)) return fill_nan(out, start, step, vectors);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, vectors); i += step) {
        uint4 sum[1];
        const auto own = [&](u32 i) { return mine.load(i); };
        if (!collect_and_reduce(r, i, step, vectors, own, sum)) return fill_nan(out, i, step, vectors);
        if (i < vectors) out.store(i, sum[0]);
    }
    if (!r.finish()) fill_nan(out, 0, 1, vectors);
}

KERNEL_OF(reduce_parts, parts, p) { reduce_parts_of<false>(a, p); }
KERNEL_OF(reduce_parts_plain, parts, p) { reduce_parts_of<true>(a, p); }
