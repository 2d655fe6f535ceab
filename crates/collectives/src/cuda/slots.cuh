// Slots: how data travels between GPUs without flags. What every kernel of this crate shares.
//
// A word of four bytes that has not arrived is EMPTY; whatever else is there has arrived. There is no flag to wait for and
// no fence; each kernel sees to it that what it sends has no EMPTY in it.
//
// Each rank owns three slots in turn. A call writes into its slot on the peers, reads its own, and empties the slot of the
// call before, which every peer is done writing: this rank has read all of it. A peer comes to that slot again two calls
// later, and before that it needs something that this rank sends in its next call, after this kernel has ended. For that
// everybody sends everybody a tag in every call, which also says what is called: ranks that disagree find out.
//
// A slot begins with WORLD tags and has 2 × WORLD lanes, lower and upper; lane p is written by peer p.
//
// Which slot is next stands in device memory, so that graphs may be replayed between other calls. There is a copy of it for
// every block that a grid can have: a block reads its own and advances its own (and shares in advancing those that no
// block of this grid reads), and so blocks need not wait for each other.
//
// The first warp sends the tags, and its first threads look for a peer's each while they wait for data.

constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr u32 SLOTS = 3;
constexpr u32 TAGS_BYTES = 4096;

// At the start of an arena, MAX_BLOCKS times. Begins as zeros.
struct control {
    u32 slot;                     // of this call
    u32 dirty_lower, dirty_upper; // vectors of the lower and upper lanes that the call before has used
    u32 reserved;
};

// What a kernel is given. Rust's `Arguments` has the same layout.
struct arguments {
    tag doing;
    u8* arena[WORLD];
    u64 lane_stride; // bytes from lane to lane
    u64 limit_ns;
    const u32* abort;
    wait_report* report;
    const u8* input;
    u8* output;
    u64 count;       // elements, or bytes where nothing is reduced: of the tensor, or of one block of it
    u64 stride;      // bytes from block to block, where a tensor has one for each rank
    u32 rank, root;
};

// A call's view of the slots.
struct turn {
    u64 slot, before; // bytes from the start of an arena
    uint4 words;      // a control
};

DEVICE control* controls(const arguments& a) { return (control*)a.arena[a.rank]; }

DEVICE bool has_tag(const arguments& a) {
    return blockIdx.x == 0 && threadIdx.x < WORLD && threadIdx.x != a.rank;
}

// Begins a call, once the block's control words are there: sends the tags.
DEVICE turn begin(const arguments& a, uint4 words) {
    u64 slot_bytes = TAGS_BYTES + 2 * WORLD * a.lane_stride;
    u32 before = words.x == 0 ? SLOTS - 1 : words.x - 1;
    turn t{SLOTS_AT + words.x * slot_bytes, SLOTS_AT + before * slot_bytes, words};
    if (has_tag(a)) store_tag(a.arena[threadIdx.x] + t.slot + a.rank * 16, a.doing.low, a.doing.high);
    return t;
}

DEVICE u8* vector_at(const arguments& a, u32 rank, u64 slot, u32 lane, u64 index) {
    return a.arena[rank] + slot + TAGS_BYTES + lane * a.lane_stride + index * 16;
}

// Empties what the call before has filled; a lane of this rank itself was never written.
DEVICE void empty_lanes(const arguments& a, const turn& t, u32 first, u32 count) {
    const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    for (u64 i = grid_thread(); i < count; i += grid_threads())
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) store16(vector_at(a, a.rank, t.before, first + k, i), empty);
}

// Hands over to the call behind, which reads this after this one has ended: the next slot, with `lower` and `upper` vectors
// of its lanes to be emptied; and empties those of the call before.
DEVICE void advance(const arguments& a, const turn& t, u32 lower, u32 upper) {
    __syncthreads(); // all threads have read the block's own copy
    u32 next = t.words.x == SLOTS - 1 ? 0 : t.words.x + 1;
    for (u32 copy = blockIdx.x + threadIdx.x * gridDim.x; copy < MAX_BLOCKS; copy += blockDim.x * gridDim.x)
        store16((control*)a.arena[a.rank] + copy, make_uint4(next, lower, upper, 0));
    if (has_tag(a)) store16(a.arena[a.rank] + t.before + threadIdx.x * 16, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    empty_lanes(a, t, 0, t.words.y);
    empty_lanes(a, t, WORLD, t.words.z);
}

// This block's control words.
DEVICE uint4 load_control(const arguments& a) { return load16_volatile((control*)a.arena[a.rank] + blockIdx.x); }

// One thread's wait for its peers.
struct reader {
    const arguments& a;
    u64 slot;
    waiter patience;
    bool tag_missing; // of the peer with this thread's number

    DEVICE reader(const arguments& a, const turn& t)
        : a(a), slot(t.slot), patience(start_waiting(a.limit_ns, a.abort, a.report, a.rank, a.doing)),
          tag_missing(has_tag(a)) {}

    // Looks for the tag; whether it is still missing.
    DEVICE void look_for_tag() {
        tag theirs;
        load_tag(a.arena[a.rank] + slot + threadIdx.x * 16, theirs.low, theirs.high);
        if (theirs.low == ~0ull) return;
        tag_missing = false;
        if (theirs.low != a.doing.low || theirs.high != a.doing.high) disagree(patience, threadIdx.x, theirs);
    }

    // Waits until what `ready(missing)` asks for is there, which else says of whom it is missing.
    template <class Ready> DEVICE bool wait(Ready ready) {
        u32 missing = a.rank;
        return wait_until(patience, missing, 0, [&](tag&) {
            if (tag_missing) look_for_tag();
            return ready(missing);
        });
    }

    // At the end: every peer has come.
    DEVICE void finish() {
        if (!tag_missing) return;
        wait_until(patience, threadIdx.x, 0, [&](tag&) {
            look_for_tag();
            return !tag_missing;
        });
    }
};

DEVICE bool has_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

// Waits for the vectors of all peers at `index` of the lanes from `first`; false if it gave up.
DEVICE bool collect(reader& r, u32 first, u64 index, uint4 (&got)[WORLD]) {
    const arguments& a = r.a;
    return r.wait([&](u32& missing) {
        bool complete = true;
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) got[k] = load16_volatile(vector_at(a, a.rank, r.slot, first + k, index));
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank && has_empty(got[k])) {
                complete = false;
                missing = k;
            }
        return complete;
    });
}

// The same vector to every peer, beginning with the next so that they are not all written to at once.
DEVICE void push(const arguments& a, const turn& t, u32 lane, u64 index, uint4 v) {
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) store16_volatile(vector_at(a, (a.rank + k) % WORLD, t.slot, lane, index), v);
}
