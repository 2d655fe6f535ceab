// The region: where rows lie between the sender's and the receiver's tensors. Behind pipeline.cuh.
//
// Every rank has a part of its region for each slot, with a lane for each peer; parts change with the slots, so what the call
// before left there may still be read. A lane is a ring: the n-th record of a sender has place n % places. A record's flag, in the
// sender's lane of the slot, becomes the number of times that the ring had been filled before. If there are more records than
// places the sender goes on when the receiver has read what was there, half a ring at a time: the receiver counts what it has read of
// each half, in the upper lanes of the sender's slot.

// The region with `words` further words in each record: a number that only the GPU knows. Before this call `record_bytes` is any
// multiple of 16.
[[maybe_unused]] DEVICE region_call with_words(const arguments& a, region_call g, u32 words) {
    g.record_bytes = (g.record_bytes + (words + 3) / 4 * 16 + LINE - 1) / LINE * LINE;
    g.half = min((u32)(g.lane_bytes / g.record_bytes), a.lane_stride / 4) / 2;
    return g;
}

DEVICE u32 places_of(const region_call& g) { return 2 * g.half; }

// Where a record lies in its ring. Most calls fill no ring twice, and a division takes as long as many loads of shared memory.
struct spot {
    u32 place, half; // of its ring; of all halves that the records fill

    DEVICE spot(const region_call& g, u32 number) : half(number < g.half ? 0 : number < 2 * g.half ? 1 : number / g.half) {
        place = number - half / 2 * places_of(g);
    }
    DEVICE u32 round() const { return half / 2; }
    // Whether the sender, which has `records` records, waits until this one has been read.
    DEVICE bool is_waited_for(const region_call& g, u32 records) const { return (half + 2) * g.half < records; }
};

// The lane of rank `from` at rank `to`: a place for each peer.
DEVICE u64 record_at(const region_call& g, const turn& t, u32 from, u32 to, const spot& s) {
    const u32 lane = from > to ? from - to - 1 : from + WORLD - to - 1;
    return g.at + (t.index() * PEERS + lane) * g.lane_bytes + (u64)s.place * g.record_bytes;
}
DEVICE u32 flag_at(const arguments& a, const turn& t, u32 from, const spot& s) { return lane_at(a, t.slot, from) + s.place * 4; }
DEVICE u32 count_at(const arguments& a, const turn& t, u32 from, u32 half) { return lane_at(a, t.slot, WORLD + from) + half % 2 * 4; }

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
        const spot s(g, number);
        return ld_acquire_sys((const u32*)(a.own + count_at(a, t, peer, s.half))) + 1 >= s.round() * g.half;
    }
    // Of the whole warp, when a lane has found a place free that was not known to be, before the warp sends there. A vote orders nothing: the
    // copy behind it begins with a meeting of the lanes.
    static DEVICE void learn(const region_call& g, bool has_found, u32 number) {
        if (!__any_sync(WHOLE_WARP, has_found)) return;
        if (has_found) until() = (number / g.half + 1) * g.half;
        stores::see();
    }
};

// For a receiver: whether a record is there.
DEVICE bool is_there(const arguments& a, const region_call& g, const turn& t, u32 peer, u32 number) {
    const spot s(g, number);
    return ld_acquire_sys((const u32*)(a.own + flag_at(a, t, peer, s))) == s.round();
}

// The counters from which warps claim work are words of this rank's own upper lane of the slot, which no peer writes. They begin as
// EMPTY, one before 0, and the next call empties them (OWN_TOO).
DEVICE u32* counters(const arguments& a, const turn& t) { return (u32*)(a.own + lane_at(a, t.slot, WORLD + a.rank)); }
// The vectors of upper lanes that a call uses: counts of what has been read, and counters.
constexpr u32 UPPER_VECTORS = (PEERS + 3) / 4 > 0 ? (PEERS + 3) / 4 : 1;

// This warp's share of what `warps` warps of each block do, of which the block's `first` warp is the first.
DEVICE rows share_of_warp(u32 first, u32 warps) {
    return rows{blockIdx.x * warps + threadIdx.x / 32 - first, gridDim.x * warps};
}

// What has come of a step of some work.
enum progress { MOVED, WAITS, OVER };

// Sends tokens to all ranks that want them; each token's row is read once. A lane has the peer with its index; the lane behind those,
// PEERS, has this rank itself, whose rows go where they belong.
//
// heads[token][rank] is a token's number among those for a rank, which gets those below count(rank). `tokens` knows what is sent:
//   look_up(token)           begins to load what lies beside the row of the token after the next one; next() makes it the next one's
//   row(token), bytes()      the row, as lanes know it, and how long it is
//   own(number)              where the row goes if it is this rank's own, as lanes from PEERS on know it; keep(token, number) does the rest
//   store_words(token, receivers, place)   stores what lies beside the row in the records of these peers: the lane's is at `place`
//
// The first `senders` warps of each block send. Each of them claims tokens in ascending order and sends each to all its receivers as soon as
// all have a free place. That cannot stop, because every receiver takes the records of each ring as they come, whatever other rings do
// (`taking`). Consider the first token of a rank that is not sent. All records ahead of its own were sent, so they are read, and each of its
// records gets a free place. The warp that has claimed it sends it, since the warp sends what it has claimed in order.
template <class Copies, class Tokens> struct sending {
    const arguments& a;
    Copies& copies;
    const region_call& g;
    const turn& t;
    Tokens& tokens;
    const i32* heads;
    const u32 end;                // how many tokens there are; 0 for a warp that sends none
    free_places free;
    u32 shared_out;               // the first tokens, which no warp claims, so that none waits for a claim at the start
    u32 limit;                    // of the lane's rank: how many it gets
    u32 token, token_after;       // the one to be sent, and the one after that
    u32 number, number_after;     // theirs, of the lane's rank
    u32 claimed;                  // of the first lane: the next one, claimed in advance, as that takes as long as a row

    template <class Count>
    DEVICE sending(const arguments& a, Copies& copies, const region_call& g, const turn& t, Tokens& tokens, const i32* heads, u32 end, u32 senders,
                   Count count)
        : a(a), copies(copies), g(g), t(t), tokens(tokens), heads(heads), end(threadIdx.x / 32 < senders ? end : 0), free(g),
          shared_out(2 * senders * gridDim.x), limit(lane_id() < WORLD ? count(rank_of(a, lane_id())) : 0),
          token(threadIdx.x / 32 * gridDim.x + blockIdx.x), token_after(token + senders * gridDim.x), claimed(0) {
        number = look_up(token);
        tokens.next();
        number_after = look_up(token_after);
        claim();
    }
    DEVICE void claim() {
        if (lane_id() == 0) claimed = shared_out < end ? atomicAdd(counters(a, t), 1u) + 1 + shared_out : end;
    }
    DEVICE u32 look_up(u32 token) {
        if (token >= end) return ~0u;
        tokens.look_up(token);
        return lane_id() < WORLD ? ld_relaxed_sys((const u32*)heads + (u64)token * WORLD + rank_of(a, lane_id())) : ~0u;
    }
    DEVICE void advance() {
        token = token_after;
        number = number_after;
        tokens.next();
        token_after = __shfl_sync(WHOLE_WARP, claimed, 0);
        number_after = look_up(token_after);
        if (token_after < end) claim();
    }
    DEVICE bool goes() const { return lane_id() < WORLD && number < limit; } // -1 does not
    DEVICE bool is_sent() const { return lane_id() < PEERS && goes(); }
    DEVICE bool is_unknown() const { return is_sent() && !free.is_known(number); }
    DEVICE bool is_full() const { return is_unknown() && !free.is_free(a, g, t, rank_of(a, lane_id()), number); }
    DEVICE bool has_place() const { return !__any_sync(WHOLE_WARP, is_full()); }
    // The rank of a peer that has not read what it must before the token is sent. Of the lane; this rank for none.
    DEVICE u32 awaited() const { return is_full() ? rank_of(a, lane_id()) : a.rank; }

    // Sends the next token, if there are places for it. Not called again when it is OVER.
    DEVICE progress step() {
        if (token >= end) return OVER;
        const u32 receivers = __ballot_sync(WHOLE_WARP, goes());
        if (receivers != 0) {
            if (!has_place()) return WAITS;
            free.learn(g, is_unknown(), number);
            send(receivers);
        }
        advance();
        return MOVED;
    }
    DEVICE void send(u32 receivers) {
        const u32 bytes = tokens.bytes(), own = __shfl_sync(WHOLE_WARP, number, PEERS);
        const bool is_kept = receivers >> PEERS & 1, its = is_sent();
        const spot s(g, number);
        u8* const peer = its ? a.peer[lane_id()] : nullptr;
        u8* const place = its ? peer + record_at(g, t, a.rank, rank_of(a, lane_id()), s) : nullptr;
        copies.copy(tokens.row(token), bytes, [&] { return its ? extent{place, 0, bytes} : is_kept ? tokens.own(own) : no_extent(); });
        tokens.store_words(token, receivers & ~(1u << PEERS), place + bytes);
        copies.signal(its ? (u32*)(peer + flag_at(a, t, a.rank, s)) : nullptr, s.round());
        if (is_kept) tokens.keep(token, own);
    }
};

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
template <class Copies, class Count, class Send>
DEVICE bool send_as_places_are_free(reader& r, Copies& copies, const region_call& g, const turn& t, Count count, Send send) {
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
        free.learn(g, is_mine && !free.is_known(number), number);
        send(ready, number);
        if (is_mine) number = NONE;
    }
}

// One warp of each block polls the flags of the records that are the block's share: of each peer the n-th one where n modulo the number of
// blocks is the block's. The others find in shared memory how many of each peer have come, so that no copy waits for a poll.
struct arrivals {
    struct shared {
        u32 come[at_least_one(PEERS)];  // of each peer's records of this block, the first ones
        u32 claimed[at_least_one(PEERS)]; // of all of them, those that a warp has claimed
    };
    static DEVICE shared& of_block() {
        __shared__ shared all;
        return all;
    }
    // Before all threads of the block meet.
    static DEVICE void prepare() {
        if (threadIdx.x < PEERS) of_block().come[threadIdx.x] = of_block().claimed[threadIdx.x] = 0;
    }
    // The number of the block's `index`-th record of a peer; how many it has below `end`.
    static DEVICE u32 number(u32 index) { return blockIdx.x + index * gridDim.x; }
    static DEVICE u32 below(u32 end) { return end <= blockIdx.x ? 0 : (end - blockIdx.x - 1) / gridDim.x + 1; }

    // For the warp that polls, until all have come. `count(from)` is how many a peer sends.
    template <class Count> static DEVICE bool poll(reader& r, const region_call& g, const turn& t, Count count) {
        const arguments& a = r.a;
        constexpr u32 EACH = 32 / at_least_one(PEERS); // lanes of a peer
        const u32 peer = lane_id() / EACH, lane = lane_id() % EACH, from = rank_of(a, min(peer, at_least_one(PEERS) - 1));
        const u32 end = peer < PEERS ? below(count(from)) : 0;
        u32 come = 0; // of the lane's peer
        while (__any_sync(WHOLE_WARP, come < end)) {
            u32 more = 0;
            const bool is_later = r.wait<true>([&](u32& missing) {
                const bool is_one = come + lane < end, has_come = is_one && is_there(a, g, t, from, number(come + lane));
                if (is_one && !has_come) missing = from;
                const u32 which = __ballot_sync(WHOLE_WARP, has_come) >> (peer * EACH % 32);
                more = min((u32)__ffs(~which) - 1, EACH); // all bits of a lane that is of no peer are 0
                return __any_sync(WHOLE_WARP, more != 0);
            });
            if (!is_later) return false;
            stores::see();
            __syncwarp();
            come += more;
            if (more != 0 && lane == 0) st_release_block(&of_block().come[min(peer, at_least_one(PEERS) - 1)], come);
        }
        return true;
    }
};

// Counts for the senders which records of this block have been read, where they wait for that: half a ring at a time, as a count between
// GPUs takes as long as a row.
struct readings {
    const arguments& a;
    const region_call& g;
    const turn& t;

    // How many of the block's records have been read, of each peer and of two halves that follow each other.
    static DEVICE u32 (&of_block())[at_least_one(PEERS)][2] {
        __shared__ u32 all[at_least_one(PEERS)][2];
        return all;
    }
    // Before all threads of the block meet.
    static DEVICE void prepare() {
        if (threadIdx.x < 2 * PEERS) of_block()[threadIdx.x / 2][threadIdx.x % 2] = 0;
    }
    // What a pipeline hands back when it has read a record; `records` is how many the peer sends.
    static DEVICE u32 code(const region_call& g, u32 peer, u32 number, u32 records) {
        const spot s(g, number);
        return s.is_waited_for(g, records) ? s.half * PEERS + peer : NOT_COUNTED;
    }
    // By one lane.
    DEVICE void operator()(u32 code) const {
        const u32 peer = code % at_least_one(PEERS), half = code / at_least_one(PEERS);
        const u32 share = arrivals::below((half + 1) * g.half) - arrivals::below(half * g.half);
        u32& read = of_block()[peer][half % 2];
        if (atom_add_acq_rel_block(&read, 1u) + 1 != share) return;
        *(volatile u32*)&read = 0; // no record of the half after the next comes before this one is counted
        red_add_release_sys((u32*)(a.peer[peer] + count_at(a, t, a.rank, half)), share);
    }
};

// Takes the records that come from peers, as they come: take(peer, source, number), and take.finish() behind the last one. `count(from)` is
// how many a peer sends. A warp holds a claimed record of each peer, and takes one that has come, whatever those of other peers do.
template <class Take> struct taking {
    const arguments& a;
    Take take;
    u32 end;     // of the lane's peer: the block's records
    u32 claimed; // of these, the one that the warp holds
    u32 first;   // the peer to begin with

    template <class Count> DEVICE taking(const arguments& a, Count count, Take take)
        : a(a), take(take), end(lane_id() < PEERS ? arrivals::below(count(rank_of(a, lane_id()))) : 0), claimed(0), first(0) {
        claim();
    }
    static DEVICE u32 peer() { return min(lane_id(), at_least_one(PEERS) - 1); }
    DEVICE void claim() {
        if (lane_id() < PEERS) claimed = atomicAdd(&arrivals::of_block().claimed[peer()], 1u);
    }
    DEVICE bool has_come() const { return claimed < end && claimed < ld_acquire_block(&arrivals::of_block().come[peer()]); }
    DEVICE bool may_go_on() const { return __any_sync(WHOLE_WARP, has_come()); }
    // Takes a record, if one has come. Not called again when it is OVER.
    DEVICE progress step() {
        const u32 which = __ballot_sync(WHOLE_WARP, has_come());
        if (which == 0) {
            if (__any_sync(WHOLE_WARP, claimed < end)) return WAITS;
            take.finish();
            return OVER;
        }
        __syncwarp(); // a vote orders nothing: one lane has acquired what others read
        const u32 later = which >> first << first, its_peer = __ffs(later != 0 ? later : which) - 1;
        first = its_peer + 1 == PEERS ? 0 : its_peer + 1;
        const u32 index = __shfl_sync(WHOLE_WARP, claimed, its_peer);
        if (lane_id() == its_peer) claim();
        take(its_peer, rank_of(a, its_peer), arrivals::number(index));
        return MOVED;
    }
    // The rank of a peer whose records are missing. Of the lane; this rank for none.
    DEVICE u32 awaited() const { return claimed < end ? rank_of(a, lane_id()) : a.rank; }
};

// Sends a token, if the warp sends, and takes a record of each peer by turns, so that neither waits for the other, nor do records pile up.
template <class Copies, class Sending, class Taking> DEVICE bool exchange(reader& r, Copies& copies, Sending sent, Taking taken) {
    progress sends = MOVED, takes = MOVED;
    for (;;) {
        if (takes != OVER) takes = taken.step();
#pragma unroll 1
        for (u32 peer = 1; peer < PEERS && takes == MOVED; ++peer) takes = taken.step();
        if (sends != OVER) sends = sent.step();
        if (sends == MOVED || takes == MOVED) continue;
        if (sends == OVER && takes == OVER) return true;
        copies.drain(); // others may wait for that
        const bool came = r.wait<true>([&](u32& missing) {
            missing = takes != OVER ? taken.awaited() : sent.awaited();
            return (takes != OVER && taken.may_go_on()) || (sends != OVER && sent.has_place());
        });
        if (!came) return false;
    }
}
