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
    u32 record_bytes; // a multiple of LINE
    u32 half;         // places of half a ring
};

// A region whose records have so many words more, which only the GPU knows. Before that `record_bytes` is any multiple of 16.
[[maybe_unused]] DEVICE region_call with_words(const arguments& a, region_call g, u32 words) {
    g.record_bytes = (g.record_bytes + (words + 3) / 4 * 16 + LINE - 1) / LINE * LINE;
    g.half = min((u32)(g.lane_bytes / g.record_bytes), a.lane_stride / 4) / 2;
    return g;
}

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

// What Notify has counted, where every thread finds it soon. All threads of the block come here.
struct counts {
    struct shared {
        u32 rows[WORLD][WORLD]; // from rank to rank
        u32 starts[WORLD];      // where the rows of each rank begin at this one
    };
    u32 (&rows)[WORLD][WORLD];
    u32 (&starts)[WORLD];

    DEVICE counts(const u32* rows_at, const u32* starts_at) : rows(of_block().rows), starts(of_block().starts) {
        if (threadIdx.x < WORLD * WORLD) rows[threadIdx.x / WORLD][threadIdx.x % WORLD] = rows_at[threadIdx.x];
        if (threadIdx.x < WORLD) starts[threadIdx.x] = starts_at[threadIdx.x];
        __syncthreads();
    }
    static DEVICE shared& of_block() {
        __shared__ shared all;
        return all;
    }
};

// Rows of one or two tensors, whose n-th rows lie side by side in a record.
struct parts {
    const u8* data[2];
    u32 bytes[2]; // of a row, multiples of 16
};

// Waits until `ready()`; what the warp copies is done before it waits, as others may wait for that. `peer` is to blame.
template <class Copies, class Ready> DEVICE bool wait_for_peer(reader& r, Copies& copies, u32 peer, Ready ready) {
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
template <class Copies>
DEVICE bool wait_for_place(reader& r, Copies& copies, const region_call& g, const turn& t, u32 peer, u32 number) {
    const u32 filled = round_of(g, number);
    if (filled == 0) return true;
    const u32* count = (const u32*)(r.a.own + count_at(r.a, g, t, peer, number));
    return wait_for_peer(r, copies, peer, [&] { return ld_acquire_sys(count) + 1 >= filled * g.half; });
}

// For a receiver: whether a record is there. Lanes may ask for different ones.
DEVICE bool is_there(const arguments& a, const region_call& g, const turn& t, u32 peer, u32 number) {
    return ld_acquire_sys((const u32*)(a.own + flag_at(a, g, t, peer, number))) == round_of(g, number);
}

// This warp's share of what `warps` warps of each block do, of which the block's `first` warp is the first.
DEVICE rows share_of_warp(u32 first, u32 warps) {
    return rows{blockIdx.x * warps + threadIdx.x / 32 - first, gridDim.x * warps};
}

// Whether the sender of so many records waits until this one has been read.
DEVICE bool is_waited_for(const region_call& g, u32 number, u32 records) { return (number / g.half + 2) * g.half < records; }

// Sends records to all peers in turn, the warp's share of them; or if `keep` says so to this rank too, which puts its own where they
// belong.
//
// `count(to)` is how many there are, row(to, number) which of the rows from `base` on one is, and word(to, row, index) one of the
// `words` words that travel with it. Of some records at once the warp looks up rows and words, which takes as long as for one.
template <bool KEEPS, class Count, class Row, class Word, class Keep>
DEVICE bool send_records(reader& r, pipeline& copies, const region_call& g, const turn& t, rows mine, parts from, u32 words,
                         Count count, Row row, Word word, Keep keep) {
    constexpr u32 RANKS = KEEPS ? WORLD : PEERS;
    const arguments& a = r.a;
    const u32 padded = (words + 3) / 4 * 4, at_once = words == 0 ? 32 : min(32, BESIDE_BYTES / 4 / padded);
    u32 most = 0;
    for (u32 next = 0; next < RANKS; ++next) most = max(most, count(rank_of(a, next)));
    const u32 end = most * RANKS;
    for (u32 first = mine.first; first < end; first += at_once * mine.step) {
        const u32 i = first + lane_id() * mine.step;
        const bool is_one = lane_id() < at_once && i < end && i / RANKS < count(rank_of(a, i % RANKS));
        const u32 its_row = is_one ? row(rank_of(a, i % RANKS), i / RANKS) : ~0u;
        if (words != 0) {
            copies.before_gathering();
#pragma unroll 4
            for (u32 at = 0; at < at_once * padded; at += 32) {
                const u32 index = at + lane_id(), record = index / padded, which = index % padded;
                const u32 of = __shfl_sync(WHOLE_WARP, its_row, record);
                const u32 to = rank_of(a, (first + record * mine.step) % RANKS);
                if (record < at_once) ((u32*)copies.gathered)[index] = of != ~0u && which < words ? word(to, of, which) : 0;
            }
            copies.after_gathering();
        }
        for (u32 record = 0; record < at_once; ++record) {
            const u32 i = first + record * mine.step, next = i % RANKS, to = rank_of(a, next), number = i / RANKS;
            const u32 of = __shfl_sync(WHOLE_WARP, its_row, record), gathered = record * padded * 4;
            if (of == ~0u) continue;
            if (KEEPS && to == a.rank) {
                keep(number, of, (const u32*)(copies.gathered + gathered));
                continue;
            }
            if (!wait_for_place(r, copies, g, t, to, number)) return false;
            u8* place = a.peer[next] + record_at(g, t, a.rank, to, number);
            const signals after{(u32*)(a.peer[next] + flag_at(a, g, t, a.rank, number)), nullptr, round_of(g, number)};
            const bool has_second = from.bytes[1] != 0, has_words = words != 0;
            copies.copy(place, from.data[0] + (u64)of * from.bytes[0], from.bytes[0], has_second || has_words ? NO_SIGNALS : after);
            place += from.bytes[0];
            if (has_second) copies.copy(place, from.data[1] + (u64)of * from.bytes[1], from.bytes[1], has_words ? NO_SIGNALS : after);
            if (has_words) copies.copy_gathered(place + from.bytes[1], gathered, padded * 4, after);
        }
    }
    return true;
}

// Where the reading of a record is counted; null if nobody waits for that.
DEVICE u32* counted_at(const arguments& a, const region_call& g, const turn& t, u32 source, u32 number, u32 records) {
    if (!is_waited_for(g, number, records)) return nullptr;
    return (u32*)(a.peer[(source + WORLD - a.rank - 1) % WORLD] + count_at(a, g, t, a.rank, number));
}

constexpr u32 RECORDS = 4; // that are taken at once, as their loads take as long as those of one

// Waits for the records that come from peers, the warp's share of them; take(some, sources, numbers) takes up to RECORDS that have
// come. `count(from)` is how many a peer sends.
template <class Count, class Take>
DEVICE bool take_records(reader& r, pipeline& copies, const region_call& g, const turn& t, rows mine, Count count, Take take) {
    const arguments& a = r.a;
    u32 most = 0;
    for (u32 next = 0; next < PEERS; ++next) most = max(most, count(rank_of(a, next)));
    const u32 end = most * PEERS;
    for (u32 first = mine.first; first < end; first += 32 * mine.step) {
        const u32 i = first + lane_id() * mine.step, from = rank_of(a, i % PEERS), number = i / PEERS;
        u32 left = __ballot_sync(WHOLE_WARP, i < end && number < count(from));
        while (left != 0) {
            const bool is_wanted = left >> lane_id() & 1;
            const auto poll = [&] { return __ballot_sync(WHOLE_WARP, is_wanted && is_there(a, g, t, from, number)); };
            u32 come = poll();
            if (come == 0) {
                copies.drain(); // others may wait for that
                const bool came = r.wait<true>([&](u32& missing) {
                    come = poll();
                    if (come == 0 && is_wanted) missing = from;
                    return come != 0;
                });
                if (!came) return false;
            }
            copies.see();
            left &= ~come;
            while (come != 0) {
                u32 sources[RECORDS], numbers[RECORDS], some = 0;
#pragma unroll
                for (u32 m = 0; m < RECORDS; ++m) {
                    const u32 lane = come == 0 ? 0 : __ffs(come) - 1;
                    if (come != 0) ++some;
                    come &= come - 1;
                    const u32 which = first + lane * mine.step;
                    sources[m] = rank_of(a, which % PEERS), numbers[m] = which / PEERS;
                }
                take(some, sources, numbers);
            }
        }
    }
    return true;
}
