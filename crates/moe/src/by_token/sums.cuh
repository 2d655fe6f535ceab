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

// A bit for each rank that has a row of a token. Of the whole warp.
DEVICE u32 held_of(const arguments& a, const i32* heads, const counts& n, u32 token) {
    const u32 rank = lane_id();
    return __ballot_sync(WHOLE_WARP, rank < WORLD && (u32)heads[(u64)token * WORLD + rank] < n.rows[a.rank][rank]);
}

// Whether all rows of a token that come from peers are there; `missing` is a peer whose is not. Of the whole warp.
DEVICE bool are_there(const arguments& a, const i32* heads, const region_call& g, const counts& n, const turn& t, u32 token, u32& missing) {
    bool is_ready = true;
    if (lane_id() < PEERS) {
        const u32 peer = rank_of(a, lane_id()), head = (u32)heads[(u64)token * WORLD + peer];
        is_ready = head >= n.rows[a.rank][peer] || is_there(a, g, t, peer, head);
        if (!is_ready) missing = peer;
    }
    return __all_sync(WHOLE_WARP, is_ready);
}

// Waits until they are. Of the whole warp.
DEVICE bool wait_for_rows(reader& r, const i32* heads, const region_call& g, const counts& n, const turn& t, u32 token) {
    const bool came = r.wait<true>([&](u32& missing) { return are_there(r.a, heads, g, n, t, token, missing); });
    __syncwarp(); // a vote orders nothing: what one lane has acquired another reads
    return came;
}

// Writes NaN as the sums that a call cannot make, so that their users notice: the sums of every `step`-th token from `first` on, and the
// `words` f32 beside each. The whole warp calls it. It is not inlined, so that it costs no registers.
static __device__ __noinline__ void leave_nan(u8* sums, u32 row_bytes, u32* beside, u32 words, u32 first, u32 step, u32 tokens) {
    for (u32 token = first; token < tokens; token += step) {
        write_nan((u64)sums + (u64)token * row_bytes, row_bytes, lane_id(), 32, row_bytes / 16);
        if (beside == nullptr) continue;
        for (u32 i = lane_id(); i < words; i += 32) st_relaxed_sys(beside + (u64)token * words + i, 0x7FC00000u);
    }
}

// Tells the peers that the rows of a token have been read, where they wait for that.
DEVICE void count_read(const arguments& a, const i32* heads, const region_call& g, const counts& n, const turn& t, u32 token) {
    __syncwarp();
    if (lane_id() >= PEERS) return;
    const u32 peer = rank_of(a, lane_id()), head = (u32)heads[(u64)token * WORLD + peer], count = n.rows[a.rank][peer];
    if (head < count && is_waited_for(g, head, count))
        red_add_release_sys((u32*)(a.peer[lane_id()] + count_at(a, g, t, a.rank, head)), 1u);
}

constexpr u32 AT_ONCE = WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1; // vectors that a lane has under way of each rank
