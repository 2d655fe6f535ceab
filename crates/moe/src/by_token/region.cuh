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

// The region with `words` further words in each record: a number that only the GPU knows. Before this call `record_bytes` is any
// multiple of 16.
[[maybe_unused]] DEVICE region_call with_words(const arguments& a, region_call g, u32 words) {
    g.record_bytes = (g.record_bytes + (words + 3) / 4 * 16 + LINE - 1) / LINE * LINE;
    g.half = min((u32)(g.lane_bytes / g.record_bytes), a.lane_stride / 4) / 2;
    return g;
}

DEVICE u32 places_of(const region_call& g) { return 2 * g.half; }

// The lane of rank `from` at rank `to`: a place for each peer.
DEVICE u64 record_at(const region_call& g, const turn& t, u32 from, u32 to, u32 number) {
    const u32 lane = from > to ? from - to - 1 : from + WORLD - to - 1;
    return g.at + (t.index() * PEERS + lane) * g.lane_bytes + (u64)(number % places_of(g)) * g.record_bytes;
}
DEVICE u32 flag_at(const arguments& a, const region_call& g, const turn& t, u32 from, u32 number) {
    return lane_at(a, t.slot, from) + number % places_of(g) * 4;
}
DEVICE u32 round_of(const region_call& g, u32 number) { return number / places_of(g); }
DEVICE u32 count_at(const arguments& a, const region_call& g, const turn& t, u32 from, u32 number) {
    return lane_at(a, t.slot, WORLD + from) + number / g.half % 2 * 4;
}

// The vectors that hold the flags of a lane with `records` records.
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

// What a sending warp knows of its rings, in shared memory; a lane has the ring to the peer with its index. Places are free up to a
// record, as those of half a ring become free at once. A bulk copy needs a fence behind the acquire that tells so, and the fence waits
// for all copies under way, so a warp fences once for half a ring.
struct free_places {
    // The first record whose place is not known to be free.
    static DEVICE u32& until() {
        __shared__ u32 all[THREADS / 32][at_least_one(PEERS)];
        return all[threadIdx.x / 32][min(lane_id(), at_least_one(PEERS) - 1)];
    }
    DEVICE free_places(const region_call& g) {
        if (lane_id() < PEERS) until() = places_of(g);
    }
    // Whether a place is free without looking.
    static DEVICE bool is_known(u32 number) { return number < until(); }
    static DEVICE bool is_free(const arguments& a, const region_call& g, const turn& t, u32 peer, u32 number) {
        return ld_acquire_sys((const u32*)(a.own + count_at(a, g, t, peer, number))) + 1 >= round_of(g, number) * g.half;
    }
    // Of the whole warp, when a lane has found a place free that was not known to be, before the warp sends there. A vote orders nothing: the
    // copy behind it begins with a meeting of the lanes.
    template <class Copies> static DEVICE void learn(Copies& copies, const region_call& g, bool has_found, u32 number) {
        if (!__any_sync(WHOLE_WARP, has_found)) return;
        if (has_found) until() = (number / g.half + 1) * g.half;
        copies.see();
    }
};

// For a receiver: whether a record is there. Lanes may ask for different ones.
DEVICE bool is_there(const arguments& a, const region_call& g, const turn& t, u32 peer, u32 number) {
    return ld_acquire_sys((const u32*)(a.own + flag_at(a, g, t, peer, number))) == round_of(g, number);
}

// Some of the records for all ranks in turn, number by number: the first, the way from one to the next, and how many.
struct window {
    u32 first, step, count;
};

// The counters from which warps claim records are words of this rank's own upper lane of the slot, which no peer writes. They begin as
// EMPTY, one before 0, and the next call empties them (OWN_TOO).
DEVICE u32* counters(const arguments& a, const turn& t) { return (u32*)(a.own + lane_at(a, t.slot, WORLD + a.rank)); }
// The vectors of upper lanes that a call uses: counts of what has been read, and counters.
constexpr u32 UPPER_VECTORS = (PEERS + 3) / 4 > 0 ? (PEERS + 3) / 4 : 1;

// Records as warps claim them, for each rank those of one number. What a multiprocessor can send to peers differs, as some share a
// port; so each warp takes the next ones when it is ready.
struct claims {
    u32* counter;
    u32 next; // of the first lane; claimed in advance, as that takes as long as a record

    DEVICE claims(const arguments& a, const turn& t) : counter(counters(a, t)), next(0) { claim(); }
    DEVICE void claim() {
        if (lane_id() == 0) next = atomicAdd(counter, 1u) + 1;
    }
    DEVICE window take(u32 at_once, u32 ranks) {
        const u32 count = min(at_once, ranks), first = __shfl_sync(WHOLE_WARP, next, 0) * count;
        claim();
        return window{first, 1, count};
    }
};
// The warp's share of records.
struct share : rows {
    DEVICE window take(u32 at_once, u32) {
        const window some{first, step, at_once};
        first += at_once * step;
        return some;
    }
};

// This warp's share of what `warps` warps of each block do, of which the block's `first` warp is the first.
DEVICE share share_of_warp(u32 first, u32 warps) {
    return share{{blockIdx.x * warps + threadIdx.x / 32 - first, gridDim.x * warps}};
}

// Whether the sender, which has `records` records, waits until the record `number` has been read.
DEVICE bool is_waited_for(const region_call& g, u32 number, u32 records) { return (number / g.half + 2) * g.half < records; }

// What has come of a step of some work.
enum progress { MOVED, WAITS, OVER };

// What some lanes have beside a row, word(to, row, index) of `words` words for the row `its_row` of the lane's record for rank `its_to`,
// one record behind the other where the warp gathers; zeros for lanes whose row is ~0.
template <class Word>
DEVICE void gather(pipeline& copies, u32* gathered, u32 count, u32 words, u32 its_to, u32 its_row, Word word) {
    const u32 padded = (words + 3) / 4 * 4;
#pragma unroll 4
    for (u32 at = 0; at < count * padded; at += 32) {
        const u32 index = at + lane_id(), record = index / padded, which = index % padded;
        const u32 row = __shfl_sync(WHOLE_WARP, its_row, record), to = __shfl_sync(WHOLE_WARP, its_to, record);
        if (record < count) gathered[index] = row != ~0u && which < words ? word(to, row, which) : 0;
    }
    copies.after_gathering();
}

// Sends a record to the peer with this index: a row and, from `gathered` on, the bytes beside it.
DEVICE void send_record(const arguments& a, pipeline& copies, const region_call& g, const turn& t, u32 next, u32 number, parts row,
                        u32 gathered, u32 bytes_beside) {
    u8* peer = a.peer[next];
    u8* place = peer + record_at(g, t, a.rank, rank_of(a, next), number);
    const signals after{(u32*)(peer + flag_at(a, g, t, a.rank, number)), nullptr, round_of(g, number)};
    copy_parts(copies, row, place, place + row.bytes[0], bytes_beside == 0 ? after : NO_SIGNALS);
    if (bytes_beside != 0) copies.copy_gathered(place + row.bytes[0] + row.bytes[1], gathered, bytes_beside, after);
}

// Sends records to all peers in turn, those of `mine`; or if KEEPS to this rank too, where keep(number, row, words) puts them where
// they belong.
//
// `count(to)` is how many there are, row(to, number) which of the rows from `base` on one is, and word(to, row, index) one of the
// `words` words that travel with it. Of some records at once the warp looks up rows and words, which takes as long as for one.
template <bool KEEPS, class Mine, class Count, class Row, class Word, class Keep> struct sending {
    static constexpr u32 RANKS = KEEPS ? WORLD : PEERS;
    const arguments& a;
    pipeline& copies;
    const region_call& g;
    const turn& t;
    Mine mine;
    const parts from;
    const u32 words;
    const Count count;
    const Row row;
    const Word word;
    const Keep keep;
    u32 end;
    window some; // the records that are looked up
    u32 record;  // of these the next
    u32 used;    // of the records that fit where words are gathered, before these
    u32 its_row; // of the lane's; ~0 if there is none
    free_places free;

    DEVICE sending(const arguments& a, pipeline& copies, const region_call& g, const turn& t, Mine mine, parts from, u32 words,
                   Count count, Row row, Word word, Keep keep)
        : a(a), copies(copies), g(g), t(t), mine(mine), from(from), words(words), count(count), row(row), word(word), keep(keep),
          end(0), some{0, 0, 0}, record(0), used(0), its_row(~0u), free(g) {
        for (u32 next = 0; next < RANKS; ++next) end = max(end, count(rank_of(a, next)));
        end *= RANKS;
    }

    DEVICE u32 padded() const { return (words + 3) / 4 * 4; }
    DEVICE u32 at_once() const { return words == 0 ? 32 : min(32, BESIDE_BYTES / 4 / padded()); }
    DEVICE u32 index_of(u32 record) const { return some.first + record * some.step; }
    DEVICE u32 next_of(u32 record) const { return index_of(record) % at_least_one(RANKS); }
    DEVICE u32 to() const { return rank_of(a, next_of(record)); }
    DEVICE u32 number() const { return index_of(record) / at_least_one(RANKS); }
    DEVICE bool is_of_lane() const { return lane_id() == next_of(record); }
    DEVICE bool has_place() const {
        const bool waits = is_of_lane() && !free.is_known(number()) && !free.is_free(a, g, t, to(), number());
        return !__any_sync(WHOLE_WARP, waits);
    }

    DEVICE void look_up() {
        const u32 i = index_of(lane_id()), to = rank_of(a, i % at_least_one(RANKS));
        const bool is_one = lane_id() < some.count && i < end && i / at_least_one(RANKS) < count(to);
        its_row = is_one ? row(to, i / at_least_one(RANKS)) : ~0u;
        if (words == 0) return;
        if (used + some.count > at_once()) {
            copies.before_gathering();
            used = 0;
        }
        gather(copies, (u32*)copies.gathered + used * padded(), some.count, words, to, its_row, word);
    }
    // Sends the next record, if there is a place for it. Not called again when it is OVER.
    DEVICE progress step() {
        for (;; ++record) {
            if (record == some.count) {
                used += some.count;
                some = mine.take(at_once(), RANKS);
                record = 0;
                if (some.first >= end) return OVER;
                look_up();
            }
            const u32 of = __shfl_sync(WHOLE_WARP, its_row, record), gathered = (used + record) * padded() * 4;
            if (of == ~0u) continue;
            if (KEEPS && to() == a.rank) {
                keep(number(), of, (const u32*)(copies.gathered + gathered));
            } else {
                if (!has_place()) return WAITS;
                free.learn(copies, g, is_of_lane() && !free.is_known(number()), number());
                send_record(a, copies, g, t, next_of(record), number(), from.row(of), gathered, padded() * 4);
            }
            ++record;
            return MOVED;
        }
    }
};
template <bool KEEPS, class Mine, class Count, class Row, class Word, class Keep>
DEVICE auto to_be_sent(const arguments& a, pipeline& copies, const region_call& g, const turn& t, Mine mine, parts from, u32 words,
                       Count count, Row row, Word word, Keep keep) {
    return sending<KEEPS, Mine, Count, Row, Word, Keep>(a, copies, g, t, mine, from, words, count, row, word, keep);
}

// Sends all of them, as for `sending`.
template <bool KEEPS, class Mine, class Count, class Row, class Word, class Keep>
DEVICE bool send_records(reader& r, pipeline& copies, const region_call& g, const turn& t, Mine mine, parts from, u32 words,
                         Count count, Row row, Word word, Keep keep) {
    auto records = to_be_sent<KEEPS>(r.a, copies, g, t, mine, from, words, count, row, word, keep);
    for (;;) {
        const progress come = records.step();
        if (come == OVER) return true;
        if (come != WAITS) continue;
        copies.drain(); // others may wait for that
        const bool has_place = r.wait<true>([&](u32& missing) {
            const bool is_ready = records.has_place();
            if (!is_ready) missing = records.to();
            return is_ready;
        });
        if (!has_place) return false;
    }
}

// Sends the records of all peers, each as soon as its place is free, whatever the rings to other peers do: send(ready, number) sends,
// with the whole warp, a record to each peer whose bit is set in `ready`; `number` is the lane's, of the peer with the lane's index.
// `count(to)` is how many there are.
//
// A receiver that reads tokens in order waits for a record of every rank that holds one, so a warp that waited at one full ring could
// hold back the record that another receiver needs before it reads on: from three ranks on, all would wait in a circle. Instead
// each peer has a counter of its own, and a warp holds one claimed record for each peer. That cannot stop. Consider the first token of
// a rank that is not summed. All records before its own were read in every ring, so each of its records has a free place. The lowest
// record of a ring that is not sent is held by a warp, because a warp claims in ascending order; and the warp sends it, because it
// waits only while none of the records that it holds has a free place.
template <class Count, class Send>
DEVICE bool send_as_places_are_free(reader& r, pipeline& copies, const region_call& g, const turn& t, Count count, Send send) {
    const arguments& a = r.a;
    const bool has_peer = lane_id() < PEERS;
    const u32 to = rank_of(a, has_peer ? lane_id() : 0);
    const auto is_one = [&](u32 number) { return has_peer && number < count(to); };
    constexpr u32 NONE = ~0u;
    const auto claim = [&] { return atomicAdd(counters(a, t) + lane_id(), 1u) + 1; };
    u32 next = is_one(0) ? claim() : NONE; // claimed in advance, as that takes as long as a record
    u32 number = NONE;                     // of the record that the lane holds
    free_places free(g);
    for (;;) {
        if (number == NONE && is_one(next)) {
            number = next;
            next = claim();
        }
        if (!__any_sync(WHOLE_WARP, number != NONE)) return true;
        const auto poll = [&] {
            return __ballot_sync(WHOLE_WARP, number != NONE && (free.is_known(number) || free.is_free(a, g, t, to, number)));
        };
        u32 ready = poll();
        if (ready == 0) {
            copies.drain(); // others may wait for that
            const bool came = r.wait<true>([&](u32& missing) {
                ready = poll();
                if (ready == 0 && number != NONE) missing = to;
                return ready != 0;
            });
            if (!came) return false;
        }
        const bool is_mine = ready >> lane_id() & 1;
        free.learn(copies, g, is_mine && !free.is_known(number), number);
        send(ready, number);
        if (is_mine) number = NONE;
    }
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
        const u32 i = first + lane_id() * mine.step, from = rank_of(a, i % at_least_one(PEERS)), number = i / at_least_one(PEERS);
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
            __syncwarp(); // a vote orders nothing: what one lane has acquired another reads
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
                    sources[m] = rank_of(a, which % at_least_one(PEERS)), numbers[m] = which / at_least_one(PEERS);
                }
                take(some, sources, numbers);
            }
        }
    }
    return true;
}

// Where rows are also taken by the warps that send, one warp of each block polls the flags of the records that are the block's share.
// The others find the number of those that have come, of the first ones, in shared memory, so that no copy waits for a poll.
struct arrivals {
    static DEVICE u32& of_block() {
        __shared__ u32 come;
        return come;
    }
    // Before all threads of the block meet.
    static DEVICE void prepare() {
        if (threadIdx.x == 0) of_block() = 0;
    }
    template <class Count> static DEVICE u32 end(const arguments& a, Count count) {
        u32 most = 0;
        for (u32 next = 0; next < PEERS; ++next) most = max(most, count(rank_of(a, next)));
        return most * PEERS;
    }
    // For the warp that polls, until all have come. `count(from)` is how many a peer sends.
    template <class Count> static DEVICE bool poll(reader& r, const region_call& g, const turn& t, Count count) {
        const arguments& a = r.a;
        const u32 end = arrivals::end(a, count);
        for (u32 first = 0; blockIdx.x + first * gridDim.x < end; first += 32) {
            const u32 i = blockIdx.x + (first + lane_id()) * gridDim.x, from = rank_of(a, i % at_least_one(PEERS)), number = i / at_least_one(PEERS);
            bool has_come = i >= end || number >= count(from);
            u32 come = 0; // of the first ones
            while (come < 32) {
                u32 now = 0;
                const bool is_later = r.wait<true>([&](u32& missing) {
                    if (!has_come) has_come = is_there(a, g, t, from, number);
                    const u32 left = __ballot_sync(WHOLE_WARP, !has_come);
                    now = left == 0 ? 32 : __ffs(left) - 1;
                    if (now == lane_id()) missing = from;
                    return now != come;
                });
                if (!is_later) return false;
                come = now;
                pipeline::see();
                __syncwarp();
                if (lane_id() == 0) st_release_block(&of_block(), first + come);
            }
        }
        return true;
    }
};

// Takes the records that come from peers, the warp's share of its block's: take(source, number). `count(from)` is how many a peer
// sends.
template <class Count, class Take> struct taking {
    const arguments& a;
    pipeline& copies;
    const u32 warps;
    const Count count;
    const Take take;
    u32 end, next, come; // records of the block

    DEVICE taking(const arguments& a, pipeline& copies, u32 warp, u32 warps, Count count, Take take)
        : a(a), copies(copies), warps(warps), count(count), take(take), end(arrivals::end(a, count)), next(warp), come(0) {}

    DEVICE u32 index() const { return blockIdx.x + next * gridDim.x; }
    DEVICE u32 from() const { return rank_of(a, index() % at_least_one(PEERS)); }
    DEVICE bool has_come() {
        if (next >= come) come = ld_acquire_block(&arrivals::of_block());
        return next < come;
    }
    // Takes the next record, if it has come. Not called again when it is OVER.
    DEVICE progress step() {
        while (index() < end && index() / at_least_one(PEERS) >= count(from())) next += warps;
        if (index() >= end) return OVER;
        if (!__all_sync(WHOLE_WARP, has_come())) return WAITS;
        take(from(), index() / at_least_one(PEERS));
        next += warps;
        return MOVED;
    }
};
template <class Count, class Take>
DEVICE auto to_be_taken(const arguments& a, pipeline& copies, u32 warp, u32 warps, Count count, Take take) {
    return taking<Count, Take>(a, copies, warp, warps, count, take);
}

// Sends and takes by turns, so that neither waits for the other.
template <class Sending, class Taking> DEVICE bool exchange(reader& r, pipeline& copies, Sending sent, Taking taken) {
    progress sends = MOVED, takes = MOVED;
    for (;;) {
        if (takes != OVER) takes = taken.step();
        if (sends != OVER) sends = sent.step();
        if (sends == MOVED || takes == MOVED) continue;
        if (sends == OVER && takes == OVER) return true;
        copies.drain(); // others may wait for that
        const bool came = r.wait<true>([&](u32& missing) {
            const bool can_take = takes != OVER && taken.has_come(), can_send = sends != OVER && sent.has_place();
            missing = takes != OVER ? taken.from() : sent.to();
            return can_take || can_send;
        });
        if (!came) return false;
    }
}
