// All-gather, all-to-all and broadcast over NVLink. Behind rows.cuh.

// Bytes in this GPU's memory, of any number and at any address.
struct bytes {
    u8* data;
    u32 count;
    u32 alignment; // of the address: 16, 4 or 1

    DEVICE bytes(const void* at, u32 count)
        : data((u8*)at), count(count), alignment((u64)at % 16 == 0 ? 16 : (u64)at % 4 == 0 ? 4 : 1) {}

    // The vector at `index`; bytes past the end are zero.
    DEVICE uint4 load(u32 index) const {
        const u32 first = index * 16;
        if (first + 16 <= count) {
            if (alignment == 16) return load16(data + first);
            if (alignment == 4) {
                const u32* words = (const u32*)(data + first);
                return make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
        u64 low = 0, high = 0;
#pragma unroll 1
        for (u32 k = 0; k < 16 && first + k < count; ++k) {
            const u64 byte = data[first + k];
            if (k < 8) low |= byte << (k * 8);
            else high |= byte << (k * 8 - 64);
        }
        return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
    }

    DEVICE void store(u32 index, uint4 v) const {
        const u32 first = index * 16;
        if (first + 16 <= count) {
            if (alignment == 16) return store16(data + first, v);
            if (alignment == 4) {
                u32* words = (u32*)(data + first);
                words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
                return;
            }
        }
        const u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
#pragma unroll 1
        for (u32 k = 0; k < 16 && first + k < count; ++k)
            data[first + k] = (u8)((k < 8 ? low : high) >> (k % 8 * 8));
    }
};

DEVICE u32 rows_of(u32 count) { return (count + 16 * ROW - 1) / (16 * ROW); }

// This lane's vector of a row.
DEVICE uint4 load_row(const bytes& from, u32 row) {
    return lane_id() < ROW ? from.load(row * ROW + lane_id()) : make_uint4(0, 0, 0, 0);
}
DEVICE void store_row(const bytes& to, u32 row, uint4 v) {
    if (lane_id() < ROW) to.store(row * ROW + lane_id(), v);
}

// Begins a call, and calls send(t, row, vector) for a warp's share of `count` rows.
template <class Send>
DEVICE bool begin_and_send_rows(const arguments& a, turn& t, const bytes& from, const rows& mine, u32 count, Send send) {
    return begin_and_send<DEPTH, DEPTH, true>(a, t, mine.first, mine.step, count, [&](u32 row) { return load_row(from, row); }, send);
}

// Rows of one peer that a warp asks for at a time: how long a row takes is the way to memory, and what comes after the last row has
// been sent is waited for by nobody's links.
constexpr u32 RECEIVED = PEERS == 1 ? 4 : DEPTH;

// Stores a warp's share of the rows that a peer has sent; false if it gave up.
DEVICE bool receive_rows(reader& r, u32 peer, const rows& mine, u32 count, const bytes& to) {
    const u32 lane = peer * r.a.lane_stride;
    u32 row = mine.first;
    for (; row + (RECEIVED - 1) * mine.step < count; row += RECEIVED * mine.step) {
        u32 at[RECEIVED], peers[RECEIVED];
        uint4 got[RECEIVED];
#pragma unroll
        for (u32 k = 0; k < RECEIVED; ++k) at[k] = lane + (row + k * mine.step) * 512, peers[k] = peer;
        if (!collect_rows(r, at, peers, got)) return false;
        if (serves_its_senders()) release_dependents(r.a);
#pragma unroll
        for (u32 k = 0; k < RECEIVED; ++k) store_row(to, row + k * mine.step, unmasked(got[k]));
    }
    for (; row < count; row += mine.step) {
        uint4 got[1];
        if (!collect_rows(r, {lane + row * 512}, {peer}, got)) return false;
        if (serves_its_senders()) release_dependents(r.a);
        store_row(to, row, unmasked(got[0]));
    }
    return true;
}

// Nothing moves: waits until everyone is here. One block.
KERNEL(barrier) {
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    advance(a, t, 0, 0);
    reader(a, t).finish();
}

// Everyone sends its block to everyone: (WORLD - 1) · n bytes out.
KERNEL(all_gather) {
    const u32 count = rows_of(a.count);
    const bytes in(a.input, a.count), own(a.output + a.rank * a.stride, a.count);
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    turn t;
    const auto send = [&](const turn& t, u32 row, uint4 v) {
        push(a, t, a.rank, row * 32 + lane_id(), masked(v));
        if (own.data != in.data) store_row(own, row, v);
    };
    if (!begin_and_send_rows(a, t, in, mine, count, send)) return;
    advance(a, t, count * 32, 0);
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

// Everyone sends everyone a block of its own: (WORLD - 1) · n bytes out. Each block serves one peer, and each warp the same
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
    if (!begin_and_send_rows(a, t, in, mine, count, send)) return;
    advance(a, t, count * 32, 0);
    reader r(a, t);
    if (!receive_rows(r, peer, mine, count, out)) return;
    r.finish();
}

// The root sends the same to everyone: (WORLD - 1) · n bytes out of the root.
KERNEL(broadcast) {
    const u32 count = rows_of(a.count);
    const bytes in(a.input, a.count), out(a.output, a.count);
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    turn t;
    const auto send = [&](const turn& t, u32 row, uint4 v) {
        push(a, t, a.rank, row * 32 + lane_id(), masked(v));
        if (out.data != in.data) store_row(out, row, v);
    };
    if (!begin_and_send_rows(a, t, in, mine, a.rank == a.root ? count : 0, send)) return;
    advance(a, t, count * 32, 0);
    reader r(a, t);
    if (a.rank != a.root && !receive_rows(r, a.root, mine, count, out)) return;
    r.finish();
}

// The root sends every peer a part, which that one passes on to the others: n bytes out of the root, two hops.
KERNEL(broadcast_parts) {
    const u32 count = rows_of(a.count), part = (count + PEERS - 1) / PEERS;
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    const bytes in(a.input, a.count), out(a.output, a.count);
    // Which part a rank passes on: they are numbered from the root on.
    const auto number_of = [&](u32 rank) { return (rank + WORLD - a.root - 1) % WORLD; };
    const auto rows_in = [&](u32 number) {
        const u32 first = number * part;
        return first < count ? (count - first < part ? count - first : part) : 0;
    };
    if (a.rank == a.root) {
        const u32 next = blockIdx.x % PEERS, first = next * part; // the root's peers are numbered alike
        u8* theirs = a.peer[next] + lane_at(a, t.slot, a.rank) + lane_id() * 16;
        const rows mine = rows_of_warp(blockIdx.x / PEERS, gridDim.x / PEERS);
        for (u32 row = mine.first; row < rows_in(next); row += mine.step)
            store16_volatile(theirs + row * 512, masked(load_row(in, first + row)));
    }
    advance(a, t, part * 32, part * 32);
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
