// Slots: the transport of data between GPUs without flags. Every family's program begins with this file, behind the prelude.
//
// A word of four bytes that has not arrived is EMPTY; every other value has arrived. Readers need no flag and no fence. Each
// kernel guarantees that the words it sends are not EMPTY.
//
// Every tenant has three slots on each rank, which consecutive calls use in turn. A call writes into its slot on the peers, reads
// its own, and empties the slot of the call before. All peers have finished writing that slot, because this rank has read all of
// it. A peer uses that slot again two calls later, and before that it needs a word that this rank sends in its next call, after
// this kernel has ended. This word is the tag: in every call every rank sends each peer a tag, which also describes the call, so
// that ranks detect calls that disagree.
//
// A call that needs neither the tags nor the slot of its own may leave the slot to the next one (`advance`): if all ranks do so in the same call, the
// calls that take slots keep the rules above, whatever ranks do between them.
//
// Calls of a tenant follow each other, but a program may launch a graph beside a call. If the graph's grid begins before the call has
// advanced, both are the same call. So every block writes the number of its grid into a word of that call, where no peer writes, and one
// of the two finds the other's number there (`advance`). If the graph's grid begins later, it has the next slot. So every block notes
// the number of its call when it ends (`block_end`), and the blocks of the next call compare these notes before they end themselves. If
// a note is missing, the call before runs, and the communicator ends. So no call comes behind one that passes another, and nobody writes
// the slot of the passed call again, as that takes the third call behind it. The passed call may find that what it has not read was
// emptied: then it looks whether a later call has begun (`find_overlap`). So two such calls end with the right data, or with an error.
//
// A slot begins with WORLD tags and has 2 × WORLD lanes, lower and upper; lane p is written by peer p.
//
// The number of the next slot is in device memory, so that graphs may be replayed between other calls. There is a copy of it for
// every block that a grid can have. A block reads and advances its own copy, and the blocks share in advancing the copies that no
// block of this grid reads. So blocks need not wait for each other.
//
// The time of a small call is determined by how early its data is sent. Other work follows while the data travels, and the code
// before the first store has no avoidable branches.

constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr u32 SLOTS = 3;
constexpr u32 TAGS_BYTES = 4096;
constexpr u32 PEERS = WORLD - 1;
// For the sizes of arrays and for divisions, which exist also where a rank is alone.
DEVICE constexpr u32 at_least_one(u32 count) { return count == 0 ? 1 : count; }
constexpr u32 OWN_TOO = 0x80000000u; // beside a number of vectors: in the lane of this rank itself as well
[[maybe_unused]] constexpr u32 DEPTH = 2; // loads that a thread has under way where there is much to move

// At the start of an arena, MAX_BLOCKS times. Begins as zeros.
struct control {
    u32 call;                     // of this call: see SLOT_BITS
    u32 dirty_lower, dirty_upper; // vectors of the lower and upper lanes that the call before has used; words of its own if calls use none
    u32 failed;                   // whether a call has failed: then no call sends any more. Only `stop_calls` writes it
};

// A call's slot, in the lowest bits; how many blocks the call before has; and the number of this call, as far as there are bits.
constexpr u32 SLOT_BITS = 2, SLOT_MASK = (1u << SLOT_BITS) - 1, BLOCK_BITS = 10, NUMBER_AT = SLOT_BITS + BLOCK_BITS;
static_assert(MAX_BLOCKS < 1u << BLOCK_BITS, "the number of blocks fits");

// When the kernel behind may start, if it was launched programmatically: when this kernel ends, when it is certain that this kernel
// will end, or at once. A kernel that starts early may take all the free room of this GPU. So it starts at once only where the
// caller promises that no kernel for which a peer waits, for example of another communicator, will need that room.
[[maybe_unused]] constexpr u32 AT_END = 0, WHEN_CERTAIN = 1, AT_START = 2;

// Called by a thread of a block that has begun to receive. The blocks of all GPUs that send to this block then run, so they need no
// room, and wait for nothing that needs room. Once all blocks have called this, the kernel is certain to end.
DEVICE void release_dependents(const arguments& a) {
    if (a.dependents == WHEN_CERTAIN) pdl_launch_dependents();
}

// A call's view of the slots.
struct turn {
    u32 slot, before; // bytes from the start of an arena
    uint4 words;      // a control
    u32 emptied;      // vectors of each lane of `before` that this thread has emptied

    DEVICE bool has_failed() const { return index() == SLOT_MASK; } // no slot; so it needs no register of its own
    DEVICE u32 index() const { return words.x & SLOT_MASK; } // of the slot
};

// The rank of the peer with this index.
DEVICE u32 rank_of(const arguments& a, u32 peer) {
    const u32 rank = a.rank + 1 + peer;
    return rank < WORLD ? rank : rank - WORLD;
}

// The offset of a lane of a slot from the start of an arena.
DEVICE u32 lane_at(const arguments& a, u32 slot, u32 lane) { return slot + TAGS_BYTES + lane * a.lane_stride; }

// This block's control words.
DEVICE uint4 load_control(const arguments& a) { return load16_volatile((control*)a.own + blockIdx.x); }

// Begins a call with the block's control words. After a failed call it does nothing else.
DEVICE turn begin(const arguments& a, uint4 words) {
    if (words.w != 0) words.x |= SLOT_MASK;
    const u32 index = words.x & SLOT_MASK, before = index == 0 ? SLOTS - 1 : index - 1;
    return turn{SLOTS_AT + index * a.slot_stride, SLOTS_AT + before * a.slot_stride, words, 0};
}

// Empties a vector of each lane from `lane` on. The call before has filled `count` vectors of a lane; those of this rank's own lane
// only if `count` has OWN_TOO.
DEVICE void empty_at(const arguments& a, const turn& t, u32 lane, u32 count, u32 index) {
    const u32 spared = count & OWN_TOO ? WORLD : a.rank;
#pragma unroll
    for (u32 k = 0; k < WORLD; ++k)
        if (k != spared)
            store16(a.own + lane_at(a, t.before, lane + k) + index * 16, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
}

// All blocks but the first `busy` ones empty the vectors that the call before has filled. The index of this thread's next vector.
DEVICE u32 next_to_empty(const turn& t, u32 busy) {
    return (blockIdx.x - busy + t.emptied * (gridDim.x - busy)) * blockDim.x + threadIdx.x;
}

// Empties that vector of all lanes.
DEVICE void empty_next(const arguments& a, turn& t, u32 busy) {
    if (blockIdx.x < busy) return;
    const u32 lower = t.words.y, upper = t.words.z, index = next_to_empty(t, busy);
    if (index < (lower & ~OWN_TOO)) empty_at(a, t, 0, lower, index);
    if (index < (upper & ~OWN_TOO)) empty_at(a, t, WORLD, upper, index);
    ++t.emptied;
}

// Empties that vector and all later ones, of the lanes from `lane` on.
DEVICE void empty_rest(const arguments& a, const turn& t, u32 busy, u32 lane, u32 count) {
    if (blockIdx.x < busy) return;
    const u32 blocks = gridDim.x - busy, end = count & ~OWN_TOO;
    for (u32 i = next_to_empty(t, busy); i < end; i += blocks * blockDim.x) empty_at(a, t, lane, count, i);
}

// Begins a call, and calls send(t, i, load(i)) for every `step`-th i from `first` on that is before `end`: with FIRST loads under
// way before the control words are needed, and then COUNT at a time. EMPTIES: between the stores it empties the slot of the call
// before, which costs no time while the links are the limit; `busy` as for `advance`, which follows. Sends nothing if a call has failed.
template <u32 FIRST, u32 COUNT, bool EMPTIES, class Load, class Send>
DEVICE void begin_and_send(const arguments& a, turn& t, u32 first, u32 step, u32 end, Load load, Send send, u32 busy = 0) {
    const uint4 words = load_control(a);
    uint4 v[FIRST];
#pragma unroll
    for (u32 k = 0; k < FIRST; ++k)
        if (first + k * step < end) v[k] = load(first + k * step);
    t = begin(a, words);
    if (t.has_failed()) return;
#pragma unroll
    for (u32 k = 0; k < FIRST; ++k)
        if (first + k * step < end) send(t, first + k * step, v[k]);
    for (u32 i = first + FIRST * step; i < end; i += COUNT * step) {
        uint4 v[COUNT];
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k)
            if (i + k * step < end) v[k] = load(i + k * step);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k)
            if (i + k * step < end) send(t, i + k * step, v[k]);
        if (EMPTIES) empty_next(a, t, busy);
    }
}

// Whether this thread sends and reads the tag of a peer.
DEVICE bool has_tag() { return blockIdx.x == 0 && threadIdx.x < PEERS; }

// Where each block serves one peer: whether everything that this block receives, the tags included, comes from blocks that are known
// to run once it has begun to receive. Block 0 also waits for the tags of the peers' blocks 0, which may be other blocks if there
// are several peers.
DEVICE bool serves_its_senders() { return PEERS == 1 || blockIdx.x != 0; }

// The number of this grid, which differs from those of all grids that run on this GPU at the same time.
DEVICE u32 grid_number() {
    u64 number;
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
    return (u32)number;
}

// Where the grid of a call writes its number: one of four words in the tag of its own rank in the first slot, which no peer uses.
DEVICE u32* owner_of(const arguments& a, u32 number) { return (u32*)(a.own + SLOTS_AT + a.rank * 16) + number % 4; }

// The number of a call among those of its tenant, as far as there are bits.
DEVICE u32 number_of(const turn& t) { return t.words.x >> NUMBER_AT; }

// Behind the control words: the number of the last call that a block has ended.
DEVICE u32* note_of(const arguments& a, u32 block) { return (u32*)((control*)a.own + MAX_BLOCKS) + block; }
DEVICE bool is_note_of(u32 note, u32 number) { return (note ^ number) << NUMBER_AT == 0; }

// The thread of a block that claims a slot, and so is late by an atomic operation: of a warp that waits for peers, in most kernels.
DEVICE bool claims_slot() { return threadIdx.x == 31; }

// In every kernel that begins a call. If the kernel also advances, the last thread that leaves notes that the block has ended. No thread
// waits: after a failure some threads of a warp leave, while the others still meet each other.
struct block_end {
    const arguments& a;
    const bool advances;
    DEVICE explicit block_end(const arguments& a, bool advances = true) : a(a), advances(advances) {}
    DEVICE ~block_end() {
        if (!advances) return;
        const u32 together = __activemask(); // they count as one
        if (lane_id() != __ffs(together) - 1) return;
        const u32 leave = __popc(together);
        if (atomicAdd(&left(), leave) + leave == blockDim.x) st_relaxed_sys(note_of(a, blockIdx.x), number());
    }
    // The call's, and how many threads have left. They take no register until the end. After a failure nobody reads the notes.
    static DEVICE u32& number() {
        __shared__ u32 of_block;
        return of_block;
    }
    static DEVICE u32& left() {
        __shared__ u32 of_block;
        return of_block;
    }
    // By the thread that claims a slot, before the threads of the block meet.
    static DEVICE void prepare(u32 call) {
        number() = call;
        atomicExch(&left(), 0); // a thread that found a failure may have left
    }
};

// Two grids run at once. What is passed is copied: the compiler knows of a copy that it is in no memory but registers.
static __device__ __noinline__ void stop_calls(control* own, control* other);
static __device__ __noinline__ void stop_overlap(u8* own, u8* other, wait_board* board, u32 rank, tag doing) {
    stop_calls((control*)own, (control*)other);
    record_wait(board, OVERLAPPED, rank, rank, doing, 0, tag{0, 0});
}
DEVICE void stop_overlap(const arguments& a) { stop_overlap(a.own, a.other, a.board, a.rank, a.doing); }

// What the thread that claims a slot has found, and looks at when it has done other work: whose call it is, and the note of the call before.
struct claim {
    u32 owner, note;
};

// Claims the slot: one thread of each block does, at any time while the block runs. If blocks of two grids have begun one call, one of them
// finds the other's number: also where each grid has begun two calls, as blocks of both are in either. The number stays until the call after
// the next begins.
DEVICE claim claim_slot(const arguments& a, const turn& t) {
    const u32 number = number_of(t), blocks_before = t.words.x >> SLOT_BITS & ((1u << BLOCK_BITS) - 1);
    claim c{EMPTY, number - 1};
    if (!claims_slot() || t.has_failed()) return c;
    c.owner = atomicCAS(owner_of(a, number), EMPTY, grid_number());
    if (blockIdx.x < blocks_before) c.note = ld_relaxed_sys(note_of(a, blockIdx.x));
    if (blockIdx.x == 0) st_relaxed_sys(owner_of(a, number + 1), EMPTY);
    return c;
}

// Sends the tags. False, for all threads of the block, if a call has failed, also if it failed while the block began: then some threads have
// loaded control words that say so, and others have not. All threads come here, since a thread that went on alone would wait for the others.
DEVICE bool enter(const arguments& a, const turn& t, bool takes_slot = true) {
    if (claims_slot()) block_end::prepare(number_of(t));
    if (has_tag() && takes_slot && !t.has_failed()) {
        store_tag(a.peer[threadIdx.x] + t.slot + a.rank * 16, a.doing.low, a.doing.high);
        store16(a.own + t.before + rank_of(a, threadIdx.x) * 16, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY)); // races: a hint may have seen the tag
    }
    return !__syncthreads_or(t.has_failed()); // all threads have read the block's own copy
}

// Empties the slot of the call before, stores the state for the next call, and looks at what the claim found: behind `enter`.
DEVICE void hand_on(const arguments& a, const turn& t, const claim& c, u32 lower, u32 upper, u32 busy = 0, bool takes_slot = true) {
    const u32 number = number_of(t), blocks_before = t.words.x >> SLOT_BITS & ((1u << BLOCK_BITS) - 1);
    const u32 next = !takes_slot ? t.index() : t.index() == SLOTS - 1 ? 0 : t.index() + 1;
    for (u32 copy = blockIdx.x + threadIdx.x * gridDim.x; copy < MAX_BLOCKS; copy += blockDim.x * gridDim.x) {
        // Not the whole vector: another block, or one of the other channel, may have failed meanwhile.
        control* const handed = (control*)a.own + copy;
        st_relaxed_sys(&handed->call, next | gridDim.x << SLOT_BITS | (number + 1) << NUMBER_AT);
        st_relaxed_sys(&handed->dirty_lower, lower);
        st_relaxed_sys(&handed->dirty_upper, upper);
    }
    empty_rest(a, t, busy, 0, t.words.y);
    if (t.words.z != 0) empty_rest(a, t, busy, WORLD, t.words.z);
    // The call before had more blocks than this one.
    for (u32 block = gridDim.x + blockIdx.x + threadIdx.x * gridDim.x; block < blocks_before; block += blockDim.x * gridDim.x)
        if (!is_note_of(ld_relaxed_sys(note_of(a, block)), number - 1)) stop_overlap(a);
    if (claims_slot() && ((c.owner != EMPTY && c.owner != grid_number()) || !is_note_of(c.note, number - 1))) stop_overlap(a);
}

// While data travels: sends the tags, empties the slot of the call before, and stores the state for the next call, which reads
// it after this one has ended: the next slot, and the `lower` and `upper` vectors of this call's lanes, which that call empties. The
// first `busy` blocks empty nothing. A call that takes no slot, on no rank, sends no tags and leaves the slots as they are; it has no lanes
// either. False, for all threads of the block, if a call has failed.
DEVICE bool advance(const arguments& a, const turn& t, u32 lower, u32 upper, u32 busy = 0, bool takes_slot = true) {
    const claim c = claim_slot(a, t);
    if (!enter(a, t, takes_slot)) return false;
    hand_on(a, t, c, lower, upper, busy, takes_slot);
    return true;
}

// Whether all tags in a slot equal this rank's; reports the first that differs.
static __device__ __noinline__ void compare_tags(const u8* tags, wait_board* board, u32 rank, tag doing) {
    for (u32 peer = 0; peer < WORLD; ++peer) {
        tag theirs;
        load_tag(tags + peer * 16, theirs.low, theirs.high);
        const bool there = peer != rank && theirs.low != ~0ull;
        if (there && (theirs.low != doing.low || theirs.high != doing.high))
            return record_wait(board, DISAGREED, rank, peer, doing, 0, theirs);
    }
}

// After a failed call no later call sends, because the peers may not have read their slots. Marks all copies of both
// channels, the last one last. Nothing takes a mark away, so a thread that finds the last one has nothing to do.
static __device__ __noinline__ void stop_calls(control* own, control* other) {
    if (ld_relaxed_sys(&own[MAX_BLOCKS - 1].failed) && ld_relaxed_sys(&other[MAX_BLOCKS - 1].failed)) return;
    for (u32 copy = 0; copy < MAX_BLOCKS; ++copy) {
        st_relaxed_sys(&own[copy].failed, 1u);
        st_relaxed_sys(&other[copy].failed, 1u);
    }
}

// For a wait in vain: whether a call behind this one has begun, which empties the slot that this one reads.
DEVICE void find_overlap(const arguments& a, u32 slot) {
    const u32 current = (slot - SLOTS_AT) / a.slot_stride;
    const u32 next = ld_relaxed_sys(&((control*)a.own + blockIdx.x)->call) & SLOT_MASK;
    if ((next + SLOTS - current) % SLOTS == 2) stop_overlap(a);
}

// One thread's wait for its peers.
struct reader {
    const arguments& a;
    u32 slot;
    waiter patience;
    bool has_asked;

    DEVICE reader(const arguments& a, const turn& t)
        : a(a), slot(t.slot), patience(start_waiting(a.limit_ns, a.board, a.rank, a.doing)), has_asked(false) {}

    // Loads the tag for which `finish` waits in advance, without a register. The loaded tag is only a hint, because such a copy is
    // not indivisible.
    DEVICE void ask_for_tag() {
        if (has_tag()) copy_async16(hint(), a.own + slot + rank_of(a, threadIdx.x) * 16); // races: `finish` takes it only if it is the tag
        has_asked = true;
    }
    static DEVICE uint4* hint() {
        __shared__ uint4 hints[at_least_one(PEERS)];
        return hints + threadIdx.x;
    }

    // Waits until `ready(missing)` returns true; until then it sets `missing` to the awaited rank. TOGETHER: for all threads of
    // the warp. A thread that waits in vain compares the tags, because the ranks may disagree.
    template <bool TOGETHER, class Ready> DEVICE bool wait(Ready ready) {
        return wait_for<TOGETHER>(0, [&](u32& missing, tag&) { return ready(missing); });
    }

    // As `wait`, until ready(missing, seen), for a number that is `expected`: the report has this and what was `seen`.
    template <bool TOGETHER, class Ready> DEVICE bool wait_for(u64 expected, Ready ready) {
        return wait_for<TOGETHER>(expected, ready, [&] {
            compare_tags(a.own + slot, a.board, a.rank, a.doing);
            find_overlap(a, slot);
        });
    }

    // The same for a call that has other things to look at now and then while it waits.
    template <bool TOGETHER, class Ready, class Look> DEVICE bool wait_for(u64 expected, Ready ready, Look look) {
        u32 missing = a.rank;
        const auto is_ready = [&](tag& seen) {
            missing = a.rank; // a thread that is ready while others of the warp wait names no peer
            return ready(missing, seen);
        };
        const bool came = wait_until<TOGETHER>(patience, missing, expected, is_ready, look);
        if (!came) stop_calls((control*)a.own, (control*)a.other);
        return came;
    }

    // At the end: waits for the tags of all peers, and compares them. False for a thread that finds a failure.
    DEVICE bool finish() {
        if (!has_tag()) return true;
        const u32 peer = rank_of(a, threadIdx.x);
        if (has_asked) {
            copies_wait_all();
            const uint4 hinted = *hint();
            const bool is_low = (hinted.x | (u64)hinted.y << 32) == a.doing.low;
            if (is_low && (hinted.z | (u64)hinted.w << 32) == a.doing.high) return true;
        }
        return agrees(peer);
    }

    // Waits for the tag of a peer, and compares it. False for a thread that finds a failure.
    DEVICE bool agrees(u32 peer) {
        tag theirs;
        const bool came = wait<false>([&](u32& missing) {
            missing = peer;
            load_tag(a.own + slot + peer * 16, theirs.low, theirs.high);
            return theirs.low != ~0ull;
        });
        if (!came) return false;
        if (theirs.low == a.doing.low && theirs.high == a.doing.high) return true;
        stop_calls((control*)a.own, (control*)a.other);
        record_wait(a.board, DISAGREED, a.rank, peer, a.doing, 0, theirs);
        return false;
    }
};

DEVICE bool has_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

// Whether any thread of this warp has an index before `end`. `index` is this thread's; the threads have neighbouring ones.
DEVICE bool is_warp_before(u32 index, u32 end) { return index - lane_id() < end; }

// For a whole warp: waits for the vectors of all peers (OWN: and of this rank) at COUNT places of the lanes from `first`: the places
// from `index` on, in steps, that are before `end`. False if it gave up.
template <u32 COUNT, bool OWN = false>
DEVICE bool collect(reader& r, u32 first, u32 index, u32 step, u32 end, uint4 (&got)[COUNT][WORLD]) {
    const arguments& a = r.a;
    const u8* at = a.own + lane_at(a, r.slot, first) + index * 16;
    return r.wait<true>([&](u32& missing) {
        bool complete = true;
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n)
#pragma unroll
            for (u32 k = 0; k < WORLD; ++k)
                if ((OWN || k != a.rank) && index + n * step < end)
                    got[n][k] = load16_volatile(at + n * step * 16 + k * a.lane_stride);
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n)
#pragma unroll
            for (u32 k = 0; k < WORLD; ++k)
                if ((OWN || k != a.rank) && index + n * step < end && has_empty(got[n][k])) {
                    complete = false;
                    if (k != a.rank) missing = k;
                }
        return complete;
    });
}

// As `collect`, but for the lane of one peer.
template <u32 COUNT>
DEVICE bool collect_from(reader& r, u32 peer, u32 lane, u32 index, u32 step, u32 end, uint4 (&got)[COUNT]) {
    const u8* at = r.a.own + lane_at(r.a, r.slot, lane) + index * 16;
    return r.wait<true>([&](u32& missing) {
        bool complete = true;
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n)
            if (index + n * step < end) got[n] = load16_volatile(at + n * step * 16);
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n)
            if (index + n * step < end) complete &= !has_empty(got[n]);
        if (!complete) missing = peer;
        return complete;
    });
}

// Stores the same vector to every peer, beginning with the next rank, so that not all ranks store to one peer at once.
DEVICE void push(const arguments& a, const turn& t, u32 lane, u32 index, uint4 v) {
    const u32 at = lane_at(a, t.slot, lane) + index * 16;
#pragma unroll
    for (u32 k = 0; k < PEERS; ++k) store16_volatile(a.peer[k] + at, v);
}

// What a kernel begins with, which may begin while the kernel ahead in the stream ends. EARLIEST is the earliest that any launch of it lets
// the kernel behind start.
template <u32 EARLIEST = AT_START> DEVICE void begin_kernel(const arguments& a) {
    pdl_wait();
    if (EARLIEST == AT_START && a.dependents == AT_START) pdl_launch_dependents();
}

#define KERNEL_WITH(name, parameters, references, passed)                                                   \
    DEVICE void name##_body references;                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) name parameters {                       \
        begin_kernel(a);                                                                                    \
        const block_end end(a);                                                                             \
        name##_body passed;                                                                                 \
    }                                                                                                       \
    DEVICE void name##_body references

// Defines a kernel that takes `arguments a`. RESIDENT blocks fit a multiprocessor; see `Family::most_blocks`.
#define KERNEL(name) KERNEL_WITH(name, (const __grid_constant__ arguments a), (const arguments& a), (a))

// As KERNEL; it takes a call of some type, too.
#define KERNEL_OF(name, type, call)                                                                         \
    KERNEL_WITH(name, (const __grid_constant__ arguments a, const __grid_constant__ type call),             \
                (const arguments& a, const type& call), (a, call))
