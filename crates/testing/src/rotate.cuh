// Every rank's vectors go to the next rank. No word of them has all bits set: that is EMPTY.
KERNEL(rotate) {
    const u32 vectors = a.count / 16, start = grid_thread(), step = grid_threads();
    const u32 from = (a.rank + WORLD - 1) % WORLD;
    const auto load = [&](u32 i) { return load16(a.input + i * 16); };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(a.peer[0] + lane_at(a, t.slot, a.rank) + i * 16, v);
    };
    turn t;
    begin_and_send<1, 1, false>(a, t, start, step, vectors, load, send);
    if (!advance(a, t, vectors, 0)) return;
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, vectors); i += step) {
        uint4 got[1];
        if (!collect_from(r, from, from, i, step, vectors, got)) return;
        if (i < vectors) store16(a.output + i * 16, got[0]);
    }
    r.finish();
}
