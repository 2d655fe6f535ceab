// Choices: the experts that all ranks' tokens chose, and the slots that follow from them. Included behind formats.cuh.
//
// A call has its own part of a slot of slots.cuh: the choices of rank r's tokens are in lower lane r, two in a word, behind a word
// with their number. A choice goes as its expert's number + 1, 0 if it names none.
//
// PHASES: a kernel sends (1), receives (2), or does both (3). A rank that only sends also sends to its own lanes, as the caller may
// write the inputs before the kernel that receives.

constexpr bool SENDS = PHASES & 1, RECEIVES = PHASES & 2, IS_SPLIT = !SENDS || !RECEIVES;
constexpr u32 TARGETS = IS_SPLIT ? WORLD : PEERS; // ranks that a rank sends to; the last of WORLD is the rank itself

// The arena of a target.
DEVICE u8* arena_of(const arguments& a, u32 target) {
    return IS_SPLIT && target == PEERS ? a.own : a.peer[target];
}

// This call's turn. A kernel that only receives has the turn of the kernel before, which has sent and advanced.
DEVICE turn begin_phase(const arguments& a, uint4 control_words) {
    turn t = begin(a, control_words);
    if (!SENDS) t.slot = t.before;
    return t;
}
// As `advance`, where the phase sends: whether no call has failed, for the whole block.
DEVICE bool begins(const arguments& a, const turn& t, u32 lower, u32 upper) {
    return SENDS ? advance(a, t, lower, upper) : !__syncthreads_or(t.has_failed());
}

// A choice of `places`: its row at this rank (expert · slots + slot), NOWHERE, or, of this rank's own tokens, ELSEWHERE - (32 r + k)
// of one whose row rank r has, where k is the first choice of the token that names the expert.
constexpr i32 NOWHERE = -1, ELSEWHERE = -2;

constexpr u32 HEADER = 2; // entries of two bytes before the choices

DEVICE u32 vectors_of_choices(u32 choices) { return (HEADER + choices + 7) / 8; }

// The expert + 1 that a choice of this rank names, or 0.
DEVICE u32 own_entry(const slot_call& k, u32 choice) {
    const i64 id = k.id_bytes == 8 ? ((const i64*)k.ids)[choice] : (i64)((const i32*)k.ids)[choice];
    return 0 <= id && id < k.experts ? (u32)id + 1 : 0;
}

// Whether nobody wants what a second half receives: the half was dropped. It has no outputs then, and empties the slot alone.
DEVICE bool discards(const slot_call& k) { return !SENDS && k.to_x == nullptr; }

// Words of marks of a rank's tokens.
DEVICE u32 words_of_rank(const slot_call& k) { return (k.most_tokens + 31) / 32; }

// Marks, [local][WORLD][words of a rank], for each of this rank's experts the tokens that chose it.
struct marks {
    u32* words;
    u32 of_rank; // words

    DEVICE u32 of_expert() const { return WORLD * of_rank; }
    DEVICE void set(u32 expert, u32 from, u32 token) const {
        atomicOr(words + expert * of_expert() + from * of_rank + token / 32, 1u << token % 32);
    }
    // How many tokens of the expert come before one.
    DEVICE u32 before(u32 expert, u32 from, u32 token) const {
        const u32* row = words + expert * of_expert();
        const u32 end = from * of_rank + token / 32;
        u32 count = __popc(row[end] & ((1u << token % 32) - 1));
        for (u32 i = 0; i < end; ++i) count += __popc(row[i]);
        return count;
    }
    // How many of the words from `first` on are set.
    DEVICE u32 among(u32 expert, u32 first, u32 count) const {
        const u32* row = words + expert * of_expert() + first;
        u32 sum = 0;
        for (u32 i = 0; i < count; ++i) sum += __popc(row[i]);
        return sum;
    }
};

// For every thread of a block: adds the nanoseconds that the first thread of the grid waits for the tag of each peer, one after the other.
DEVICE void time_waits(const arguments& a, reader& r, const slot_call& k) {
    if (k.waits == nullptr || blockIdx.x != 0 || threadIdx.x / 32 != 0) return;
    for (u32 peer = 0; peer < PEERS && threadIdx.x == 0; ++peer) {
        const u32 from = rank_of(a, peer);
        const u64 start = global_ns();
        r.wait<false>([&](u32& missing) {
            tag theirs;
            missing = from;
            load_tag(a.own + r.slot + from * 16, theirs.low, theirs.high);
            return theirs.low != ~0ull;
        });
        k.waits[from] += global_ns() - start;
    }
}

// A vector of the message that has this rank's choices.
DEVICE uint4 vector_of_choices(const slot_call& k, u32 i) {
    const u32 choices = k.tokens * k.top_k;
    u32 words[4];
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
        const u32 first = (i * 4 + n) * 2;
        const auto entry = [&](u32 index) { return index < HEADER + choices ? own_entry(k, index - HEADER) : 0; };
        words[n] = first == 0 ? k.tokens : entry(first) | entry(first + 1) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Sends this rank's choices to every target; one block, whose threads have loaded their first vectors.
DEVICE void send_choices(const arguments& a, const turn& t, const slot_call& k, uint4 v) {
    for (u32 i = threadIdx.x; i < vectors_of_choices(k.tokens * k.top_k); i += THREADS) {
        if (i != threadIdx.x) v = vector_of_choices(k, i);
#pragma unroll
        for (u32 to = 0; to < TARGETS; ++to) store16_volatile(arena_of(a, to) + lane_at(a, t.slot, a.rank) + i * 16, v);
    }
}

// The most entries that a block keeps in shared memory. If there are more, the block reads them again.
constexpr u32 MAX_KEPT = 8192;

// All ranks' choices, as a block keeps them in shared memory.
struct choices {
    marks chose;
    u32* tokens; // [WORLD]
    u16* kept;   // [WORLD, most_tokens, top_k]
    bool is_kept;
};

// A choice of a rank's tokens: its expert + 1, or 0.
DEVICE u32 entry_of(const arguments& a, u32 slot, const slot_call& k, const choices& all, u32 from, u32 choice) {
    if (all.is_kept) return all.kept[from * k.most_tokens * k.top_k + choice];
    const u8* theirs = a.own + lane_at(a, slot, from) + (HEADER + choice) * 2;
    return from == a.rank && !IS_SPLIT ? own_entry(k, choice) : *(const volatile u16*)theirs;
}

// Waits for all ranks' choices, and marks those of this rank's experts. All blocks do so, and a warp waits for one rank. Each time a warp
// looks, it also calls `peek`, to load what it needs next. False for a thread that gave up.
template <class Peek>
DEVICE bool mark_choices(const arguments& a, reader& r, const slot_call& k, const choices& all, Peek peek) {
    const u32 local = k.experts / WORLD, first = a.rank * local, of_rank = k.most_tokens * k.top_k;
    const auto mark = [&](u32 from, u32 choice, u32 entry) {
        if (all.is_kept) all.kept[from * of_rank + choice] = entry;
        const u32 expert = entry - 1 - first; // far beyond `local` for none, and for a smaller one
        if (entry != 0 && expert < local) all.chose.set(expert, from, choice / k.top_k);
    };
    if (!IS_SPLIT) {
        for (u32 i = threadIdx.x; i < k.tokens * k.top_k; i += THREADS) mark(a.rank, i, own_entry(k, i));
        if (threadIdx.x == 0) all.tokens[a.rank] = k.tokens;
    }
    if (TARGETS == 0) return true;
    constexpr u32 WARPS = THREADS / 32, SOURCES = at_least_one(TARGETS);
    static_assert(WARPS >= SOURCES, "a rank needs a warp");
    const u32 warp = threadIdx.x / 32, source = warp % SOURCES, warps = (WARPS - source + SOURCES - 1) / SOURCES;
    const u32 from = rank_of(a, source), begin = warp / SOURCES * 32 + lane_id();
    const u8* lane = a.own + lane_at(a, r.slot, from);
    u32 theirs = 0, end = 1;
    // The first vector says how many there are; a thread asks for its own with it.
    for (u32 i = begin; i == begin || is_warp_before(i, end); i += warps * 32) {
        uint4 v;
        const bool came = r.wait<true>([&](u32& missing) {
            const uint4 head = load16_volatile(lane);
            v = load16_volatile(lane + min(i, vectors_of_choices(of_rank) - 1) * 16);
            peek();
            theirs = min(head.x, k.most_tokens);
            end = vectors_of_choices(theirs * k.top_k);
            const bool complete = head.x != EMPTY && (i >= end || !has_empty(v));
            if (!complete) missing = from;
            return complete;
        });
        if (!came) return false;
        if (i == 0) all.tokens[from] = theirs;
        if (i >= end) continue;
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
            const u32 choice = i * 8 + n - HEADER;
            if (i * 8 + n >= HEADER && choice < theirs * k.top_k) mark(from, choice, words[n / 2] >> n % 2 * 16 & 0xFFFF);
        }
    }
    return true;
}
