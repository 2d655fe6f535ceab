// Sums of what ranks made of a token. Behind region.cuh and reduce.cuh.

// A sum that begins with the first that is added to it, so that a zero keeps its sign.
struct growing {
    wide_vec<T> elements;
    bool is_begun;

    DEVICE growing() : is_begun(false) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane) elements.lane[lane] = 0;
    }
    DEVICE void add(uint4 words) {
        vec16<T> v;
        v.words = words;
        const wide_vec<T> x = widen_vec(v);
#pragma unroll
        for (u32 lane = 0; lane < LANES; ++lane)
            elements.lane[lane] = is_begun ? plus(elements.lane[lane], x.lane[lane]) : x.lane[lane];
        is_begun = true;
    }
};

// Some of the tokens that a warp sums, each `step` behind the one before, as their numbers and flags are loaded at once. The lane
// index × WORLD + rank has what that rank has of the index-th of them.
struct batch {
    static constexpr u32 COUNT = 32 / WORLD;
    static constexpr u32 NO_RECORD = ~0u;

    const arguments& a;
    const region_call& g;
    const counts& n;
    const turn& t;
    u32 number;         // of the record; NO_RECORD if the rank has no row of the token
    bool has_come;      // whether the record is known to be there
    u32 holders, read;  // a bit for each lane: whether it has a record; whether the record was read and is not counted

    DEVICE batch(const arguments& a, const region_call& g, const counts& n, const turn& t, const i32* heads, u32 first, u32 step, u32 tokens)
        : a(a), g(g), n(n), t(t), number(NO_RECORD), read(0) {
        const u32 token = first + lane_id() / WORLD * step;
        if (lane_id() < COUNT * WORLD && token < tokens) number = (u32)heads[(u64)token * WORLD + rank()];
        if (number >= n.rows[a.rank][rank()]) number = NO_RECORD; // -1 too
        has_come = number == NO_RECORD || rank() == a.rank;
        holders = __ballot_sync(WHOLE_WARP, number != NO_RECORD);
    }
    static DEVICE u32 rank() { return lane_id() % WORLD; }
    DEVICE u32 peer() const { return (rank() + WORLD - a.rank - 1) % WORLD; }
    static DEVICE u32 lanes_of(u32 index) { return ((1u << WORLD) - 1) << (index * WORLD); }
    // A bit for each rank that has a row of the token.
    DEVICE u32 held(u32 index) const { return (holders & lanes_of(index)) >> (index * WORLD); }
    DEVICE u32 number_of(u32 index, u32 rank) const { return __shfl_sync(WHOLE_WARP, number, index * WORLD + rank); }

    // Waits until all records of a token are there. Of the whole warp.
    DEVICE bool wait(reader& r, u32 index) {
        const auto is_missing = [&] { return __ballot_sync(WHOLE_WARP, !has_come) & lanes_of(index); };
        if (is_missing() != 0) {
            count(); // the sender of what is missing may wait for that
            const bool came = r.wait<true>([&](u32& missing) {
                if (!has_come) has_come = is_there(a, g, t, rank(), number);
                if (!has_come && lanes_of(index) >> lane_id() & 1) missing = rank();
                return is_missing() == 0;
            });
            if (!came) return false;
        }
        __syncwarp(); // a vote orders nothing: what one lane has acquired another reads
        return true;
    }
    // Notes that the records of a token have been read.
    DEVICE void note_read(u32 index) { read |= holders & lanes_of(index); }
    // Tells the peers, where they wait for that: one fence for all.
    DEVICE void count() {
        __syncwarp();
        const spot s(g, number);
        if (read >> lane_id() & 1 && rank() != a.rank && s.is_waited_for(g, n.rows[a.rank][rank()]))
            red_add_release_sys((u32*)(a.peer[peer()] + count_at(a, t, a.rank, s.half)), 1u);
        read = 0;
    }
};

// Writes NaN as the sums that a call cannot make, so that their users notice: the sums of every `step`-th token from `first` on, and the
// `words` f32 beside each. The whole warp calls it. It is not inlined, so that it costs no registers.
static __device__ __noinline__ void leave_nan(u8* sums, u32 row_bytes, u32* beside, u32 words, u32 first, u32 step, u32 tokens) {
    for (u32 token = first; token < tokens; token += step) {
        write_nan((u64)sums + (u64)token * row_bytes, row_bytes, lane_id(), 32, row_bytes / 16);
        if (beside == nullptr) continue;
        for (u32 i = lane_id(); i < words; i += 32) st_relaxed_sys(beside + (u64)token * words + i, 0x7FC00000u);
    }
}

// Goes through the warp's share of this rank's `tokens` tokens: sum(token, some, index) sums the index-th of some, when its records are there.
// False if a record did not come, behind leave(token), for the first token of the share that is not summed.
template <class Sum, class Leave>
DEVICE bool sum_tokens(reader& r, const region_call& g, const counts& n, const turn& t, const i32* heads, u32 tokens, rows mine, Sum sum, Leave leave) {
    for (u32 first = mine.first; first < tokens; first += batch::COUNT * mine.step) {
        batch some(r.a, g, n, t, heads, first, mine.step, tokens);
        for (u32 index = 0; index < batch::COUNT; ++index) {
            const u32 token = first + index * mine.step;
            if (token >= tokens) break;
            if (!some.wait(r, index)) {
                leave(token);
                return false;
            }
            sum(token, some, index);
            some.note_read(index);
        }
        some.count();
    }
    return true;
}

// Where a lane's vectors arrive that are summed: STREAM places of 16 bytes of shared memory, which it alone uses, so that copies take no
// registers, and no lane waits for another. `index` is the warp's among those of the block that have one.
struct stream {
    u8* mine;

    DEVICE stream(void* memory, u32 index) : mine(aligned(memory) + STAGES_BYTES + index * (STREAM * 512) + lane_id() * 16) {}
    DEVICE u8* place(u32 index) const { return mine + index % STREAM * 512; }
};
