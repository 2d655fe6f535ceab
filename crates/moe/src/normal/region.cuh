// The region: where rows lie between the sender's and the receiver's tensors. Behind pipeline.cuh.
//
// Every rank has a part of its region for each slot, with a lane for each peer; parts change with the slots, so what the call
// before left there may still be read. A lane is a ring: the n-th record of a sender has place n % places. A record's flag, in the
// sender's lane of the slot, becomes the number of times that the ring had been filled before. If there are more records than
// places the sender goes on when the receiver has read what was there, half a ring at a time: the receiver counts what it has read of
// each half, in the upper lanes of the sender's slot.

// Rust's `RegionCall` has the same layout.
struct region_call {
    u64 at;           // from the start of the first channel
    u64 lane_bytes;
    u32 record_bytes; // a multiple of 16
    u32 half;         // places of half a ring
};

DEVICE u32 places_of(const region_call& g) { return 2 * g.half; }

// The lane of rank `from` at rank `to`: a place for each peer.
DEVICE u64 record_at(const region_call& g, const turn& t, u32 from, u32 to, u32 number) {
    const u32 lane = from > to ? from - to - 1 : from + WORLD - to - 1;
    return g.at + (t.words.x * PEERS + lane) * g.lane_bytes + (u64)(number % places_of(g)) * g.record_bytes;
}
DEVICE u32 flag_at(const arguments& a, const region_call& g, const turn& t, u32 from, u32 number) {
    return lane_at(a, t.slot, from) + number % places_of(g) * 4;
}
DEVICE u32 round_of(const region_call& g, u32 number) { return number / places_of(g); }
DEVICE u32 count_at(const arguments& a, const region_call& g, const turn& t, u32 from, u32 number) {
    return lane_at(a, t.slot, WORLD + from) + number / g.half % 2 * 4;
}

// Vectors of flags of a lane with so many records.
DEVICE u32 flag_vectors(const region_call& g, u32 records) { return (min(records, places_of(g)) + 3) / 4; }

// Waits until `ready()`; what the warp copies is done before it waits, as others may wait for that. `peer` is to blame.
template <class Ready> DEVICE bool wait_for_peer(reader& r, pipeline& copies, u32 peer, Ready ready) {
    if (!__all_sync(WHOLE_WARP, ready())) {
        copies.drain();
        const bool came = r.wait<true>([&](u32& missing) {
            const bool is_ready = ready();
            if (!is_ready) missing = peer;
            return is_ready;
        });
        if (!came) return false;
    }
    copies.see();
    return true;
}

// For a sender: waits until the place of a record is free.
DEVICE bool wait_for_place(reader& r, pipeline& copies, const region_call& g, const turn& t, u32 peer, u32 number) {
    const u32 filled = round_of(g, number);
    if (filled == 0) return true;
    const u32* count = (const u32*)(r.a.own + count_at(r.a, g, t, peer, number));
    return wait_for_peer(r, copies, peer, [&] { return ld_acquire_sys(count) + 1 >= filled * g.half; });
}

// For a receiver: waits until a record is there.
DEVICE bool wait_for_record(reader& r, pipeline& copies, const region_call& g, const turn& t, u32 peer, u32 number) {
    const u32* flag = (const u32*)(r.a.own + flag_at(r.a, g, t, peer, number));
    const u32 filled = round_of(g, number);
    return wait_for_peer(r, copies, peer, [&] { return ld_acquire_sys(flag) == filled; });
}

// This warp's share of what `warps` warps of each block do, of which the block's `first` warp is the first.
DEVICE rows share_of_warp(u32 first, u32 warps) {
    return rows{blockIdx.x * warps + threadIdx.x / 32 - first, gridDim.x * warps};
}

// Whether the sender of so many records waits until this one has been read.
DEVICE bool is_waited_for(const region_call& g, u32 number, u32 records) { return (number / g.half + 2) * g.half < records; }

// Sends records to all peers in turn, the warp's share of them. `count(to)` is how many there are, row(to, number) which of the
// rows from `base` on one is, and beside(to, row, index) has the words that travel with it.
template <class Count, class Row, class Beside>
DEVICE bool send_records(reader& r, pipeline& copies, const region_call& g, const turn& t, rows mine, const u8* base, u32 row_bytes,
                         u32 words, Count count, Row row, Beside beside) {
    const arguments& a = r.a;
    u32 most = 0;
    for (u32 next = 0; next < PEERS; ++next) most = max(most, count(rank_of(a, next)));
    for (u32 i = mine.first; i < most * PEERS; i += mine.step) {
        const u32 next = i % PEERS, to = rank_of(a, next), number = i / PEERS;
        if (number >= count(to)) continue;
        const u32 from = row(to, number);
        if (!wait_for_place(r, copies, g, t, to, number)) return false;
        u8* record = a.peer[next] + record_at(g, t, a.rank, to, number);
        u32* flag = (u32*)(a.peer[next] + flag_at(a, g, t, a.rank, number));
        const auto word = [&](u32 index) { return beside(to, from, index); };
        const words_beside<decltype(word)> travelling{words, word};
        copies.copy(record, base + (u64)from * row_bytes, row_bytes, signals{flag, nullptr, round_of(g, number)}, travelling);
    }
    return true;
}
