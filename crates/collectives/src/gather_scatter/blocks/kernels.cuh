// All-gather, all-to-all and broadcast over NVLink. Behind rows.cuh.

// Moves no data: waits until all ranks have called it. One block.
KERNEL(barrier) {
    const turn t = begin(a, load_control(a));
    if (!advance(a, t, 0, 0)) return;
    reader(a, t).finish();
}

// Every rank sends its block to all ranks: (WORLD - 1) · n bytes out.
KERNEL(all_gather) {
    const u32 count = rows_of(a.count);
    const bytes in(a.input, a.count), own(a.output + a.rank * a.stride, a.count);
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    turn t;
    const auto send = [&](const turn& t, u32 row, uint4 v) {
        push(a, t, a.rank, row * 32 + lane_id(), masked(v));
        if (own.data != in.data) store_row(own, row, v);
    };
    begin_and_send_rows(a, t, in, mine, count, send);
    if (!advance(a, t, count * 32, 0)) return;
    reader r(a, t);
    if constexpr (PEERS == 1) {
        const u32 peer = rank_of(a, 0);
        if (receive_rows(r, peer, mine, count, bytes(a.output + peer * a.stride, a.count))) r.finish();
    } else {
        u32 peers[PEERS];
#pragma unroll
        for (u32 k = 0; k < PEERS; ++k) peers[k] = rank_of(a, k);
        for (u32 row = mine.first; row < count; row += mine.step) {
            u32 at[PEERS];
            uint4 got[PEERS];
#pragma unroll
            for (u32 k = 0; k < PEERS; ++k) at[k] = peers[k] * a.lane_stride + row * 512;
            if (!collect_rows(r, at, peers, got)) return;
            release_dependents(a);
#pragma unroll
            for (u32 k = 0; k < PEERS; ++k)
                store_row(bytes(a.output + peers[k] * a.stride, a.count), row, unmasked(got[k]));
        }
        r.finish();
    }
}

// Every rank sends each rank another block: (WORLD - 1) · n bytes out. Each block serves one peer, and each warp the same
// rows in both directions, so that the output may be the input.
KERNEL(all_to_all) {
    const u32 count = rows_of(a.count);
    const u32 next = blockIdx.x % PEERS, peer = rank_of(a, next);
    const rows mine = rows_of_warp(blockIdx.x / PEERS, gridDim.x / PEERS);
    const bytes in(a.input + peer * a.stride, a.count), out(a.output + peer * a.stride, a.count);
    const bytes own(a.input + a.rank * a.stride, a.count), to(a.output + a.rank * a.stride, a.count);
    turn t;
    u32 sent = 0;
    const auto send = [&](const turn& t, u32 row, uint4 v) {
        store16_volatile(a.peer[next] + lane_at(a, t.slot, a.rank) + (row * 32 + lane_id()) * 16, masked(v));
        // This rank's own block is copied while the links are busy. Of the blocks that have a row, one for each peer, one does it.
        if (sent++ % PEERS == next && own.data != to.data) store_row(to, row, load_row(own, row));
    };
    begin_and_send_rows(a, t, in, mine, count, send);
    if (!advance(a, t, count * 32, 0)) return;
    reader r(a, t);
    if (!receive_rows(r, peer, mine, count, out)) return;
    r.finish();
}

// The root sends the same to all ranks: (WORLD - 1) · n bytes out of the root.
KERNEL(broadcast) {
    const u32 count = rows_of(a.count);
    const bytes in(a.input, a.count), out(a.output, a.count);
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    turn t;
    const auto send = [&](const turn& t, u32 row, uint4 v) {
        push(a, t, a.rank, row * 32 + lane_id(), masked(v));
        if (out.data != in.data) store_row(out, row, v);
    };
    begin_and_send_rows(a, t, in, mine, a.rank == a.root ? count : 0, send);
    if (!advance(a, t, count * 32, 0)) return;
    reader r(a, t);
    if (a.rank != a.root && !receive_rows(r, a.root, mine, count, out)) return;
    r.finish();
}

// The root sends every peer a part, which the peer forwards to the others: n bytes out of the root, two hops.
KERNEL(broadcast_parts) {
    const u32 count = rows_of(a.count), part = (count + PEERS - 1) / PEERS;
    const turn t = begin(a, load_control(a));
    const bytes in(a.input, a.count), out(a.output, a.count);
    // The part that a rank forwards: parts are numbered from the root on.
    const auto number_of = [&](u32 rank) { return (rank + WORLD - a.root - 1) % WORLD; };
    const auto rows_in = [&](u32 number) {
        const u32 first = number * part;
        return first < count ? (count - first < part ? count - first : part) : 0;
    };
    if (a.rank == a.root && !t.has_failed()) {
        const u32 next = blockIdx.x % PEERS, first = next * part; // the root's peers are numbered alike
        u8* theirs = a.peer[next] + lane_at(a, t.slot, a.rank) + lane_id() * 16;
        const rows mine = rows_of_warp(blockIdx.x / PEERS, gridDim.x / PEERS);
        for (u32 row = mine.first; row < rows_in(next); row += mine.step)
            store16_volatile(theirs + row * 512, masked(load_row(in, first + row)));
    }
    if (!advance(a, t, part * 32, part * 32)) return;
    reader r(a, t);
    if (a.rank != a.root) {
        const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
        const u32 own = number_of(a.rank), to = lane_at(a, t.slot, WORLD + a.rank) + lane_id() * 16;
        for (u32 row = mine.first; row < rows_in(own); row += mine.step) {
            uint4 got[1];
            if (!collect_rows(r, {a.root * a.lane_stride + row * 512}, {a.root}, got)) return;
#pragma unroll
            for (u32 k = 0; k < PEERS; ++k)
                if (rank_of(a, k) != a.root) store16_volatile(a.peer[k] + to + row * 512, got[0]);
            store_row(out, own * part + row, unmasked(got[0]));
        }
        for (u32 k = 0; k < PEERS; ++k) {
            const u32 peer = rank_of(a, k), number = number_of(peer);
            if (peer == a.root) continue;
            for (u32 row = mine.first; row < rows_in(number); row += mine.step) {
                uint4 got[1];
                if (!collect_rows(r, {(WORLD + peer) * a.lane_stride + row * 512}, {peer}, got)) return;
                store_row(out, number * part + row, unmasked(got[0]));
            }
        }
    }
    r.finish();
}
