// What both forms of a plan's kernel share: how a launch begins, and the steps that synchronise. Behind ops.cuh.
//
// A step `l` has the arguments `a` and `p`, the step's `step`, its items (`item`), their addresses (`place`) and its `number`.

// Beside the tags of a slot: the number of each rank's call, of which nothing says whether it comes ahead of the tag. It is EMPTY until it comes, and
// emptied with the tag.
DEVICE u32* call_of(u8* arena, u32 slot, u32 rank) { return (u32*)(arena + slot + TAGS_BYTES / 2) + rank; }

// For a wait in a launch that meets nobody: whether a rank meets in the launch of this number, or an earlier one that did not meet here.
// It does something else, then, and waits for this rank's tag, which it gets. A rank that is ahead meets in a later launch.
DEVICE void find_meeting(const arguments& a, u32 slot, u32 number) {
    for (u32 peer = 0; peer < PEERS; ++peer) {
        const u32 rank = rank_of(a, peer);
        tag theirs;
        load_tag(a.own + slot + rank * 16, theirs.low, theirs.high);
        const u32 call = ld_relaxed_sys(call_of(a.own, slot, rank));
        if (theirs.low == ~0ull || call == EMPTY || (i32)((call - number) << NUMBER_AT) > 0) continue;
        stop_calls((control*)a.own, (control*)a.other);
        st_relaxed_sys(call_of(a.peer[peer], slot, a.rank), number);
        store_tag(a.peer[peer] + slot + a.rank * 16, a.doing.low, a.doing.high);
        record_wait(a.board, DISAGREED, a.rank, rank, a.doing, 0, theirs);
    }
}

// For a wait that is late. Not inlined, so that it costs no registers.
static __device__ __noinline__ void look_around(const arguments& a) {
    const numbers launch = of_launch();
    if (!launch.meets) return find_meeting(a, launch.slot, launch.words >> NUMBER_AT);
    compare_tags(a.own + launch.slot, a.board, a.rank, a.doing);
    find_overlap(a, launch.slot);
}

// Waits for all threads of the warp. The report tells the step.
template <class Step> DEVICE bool wait(const Step& l, const awaited& w) {
    turn t{};
    t.slot = of_launch().slot;
    const u64 expected = w.what == until::NOW ? 0 : w.expected;
    const auto ready = [&](u32& missing, tag& seen) {
        const bool has_come = w.has_come(seen.low);
        if (!has_come) missing = w.peer, seen.high = l.number();
        return has_come;
    };
    return reader(l.a, t).wait_for<true>(expected, ready, [&] { look_around(l.a); });
}

// Adds one to some counters: behind what the threads of the block did before they last met.
template <class Step> DEVICE void add(const Step& l, u32 kind, bool relaxed, u32 counts) {
#pragma unroll 1
    for (u32 i = thread(); i < counts; i += THREADS) {
        u64* count = &((plan_counter*)l.item(i).at)->count;
        if (kind == STEP_RELEASE) atom_add_acq_rel_gpu(count, (u64)1);
        else if (relaxed && of_launch().meets) red_add_relaxed_sys(count, (u64)1); // else it publishes what was ahead of the launch
        else red_add_release_sys(count, (u64)1);
    }
}

// Takes one from each of some counters, each thread one in a round, and has to wait for those.
template <class Step> DEVICE bool take(const Step& l, u32 kind, u32 counts, u32& round, awaited& w) {
    const u32 i = round * THREADS + thread();
    if (i - thread() % 32 >= counts) return true;
    w.what = until::NOW;
    if (i < counts) {
        plan_counter* counter = (plan_counter*)l.item(i).at;
        w.what = kind == STEP_ACQUIRE ? until::COUNT_HERE : until::COUNT;
        w.place = (u64)&counter->count, w.peer = l.item(i).rank;
        w.expected = atom_add_relaxed_gpu(&counter->taken, (u64)1) + 1;
        u64 seen; // loaded while the number that was taken is on its way
        if (w.has_come(seen)) w.what = until::NOW;
    }
    ++round;
    return false;
}

// Arrives at a barrier, once; the block's first warp has to wait until as many blocks have arrived as meet there.
template <class Step> DEVICE bool arrive(const Step& l, u32& round, awaited& w) {
    if (round != 0 || thread() >= 32) return true;
    const u32 of = l.step->detail;
    u64* count = &((plan_counter*)l.item(0).at)->count;
    u64 last = 0;
    if (thread() == 0) last = atom_add_acq_rel_gpu(count, (u64)1) / of * of + of;
    w = awaited{until::COUNT_HERE, l.a.rank, (u64)count, __shfl_sync(WHOLE_WARP, last, 0)};
    round = 1;
    return false;
}

// The number of the block's last request to a copy engine in this launch; 0 if there is none.
DEVICE u64& last_request() {
    __shared__ u64 of_block;
    return of_block;
}

// Makes `count` requests, of which request(i) gives the i-th, without its number: the first thread does, behind what the threads of the block did
// before they last met. In each round it writes the one of the round before, and takes the number of the next, which has to wait for room.
template <class Step, class Request> DEVICE bool post(const Step& l, u32 count, Request request, u32& round, awaited& w) {
    if (thread() >= 32) return true;
    const plan_call& p = l.p;
    if (round != 0 && thread() == 0) {
        const u64 number = w.expected + REQUESTS;
        const plan_request next = request(round - 1);
        plan_request* slot = p.requests + (number - 1) % REQUESTS;
        st_relaxed_sys(&slot->from, next.from);
        st_relaxed_sys(&slot->to, next.to);
        st_relaxed_sys(&slot->bytes, next.bytes);
        st_release_sys(&slot->number, number); // pairs with the host's acquire load in Worker::next
        last_request() = number;
    }
    if (round == count) return true;
    w = awaited{until::NOW, l.a.rank, (u64)&p.requested->count, 0};
    if (thread() == 0) w.what = until::COUNT, w.expected = atom_add_relaxed_gpu(&p.requested->taken, (u64)1) + 1 - REQUESTS;
    ++round;
    return false;
}
template <class Step> DEVICE bool post_copy(const Step& l, work_range part, u32& round, awaited& w) {
    const auto request = [&](u32) { return plan_request{0, l.place(0) + part.begin, l.place(1) + part.begin, part.end - part.begin}; };
    return post(l, part.begin < part.end ? 1 : 0, request, round, w);
}
template <class Step> DEVICE bool post_signals(const Step& l, u32 counts, u32& round, awaited& w) {
    return post(l, counts, [&](u32 i) { return plan_request{0, 0, l.place(i), 0}; }, round, w);
}

// The first thread waits until the block's requests are done.
template <class Step> DEVICE bool flush(const Step& l, u32& round, awaited& w) {
    if (round != 0 || thread() >= 32) return true;
    const bool waits = thread() == 0 && last_request() != 0;
    w = awaited{waits ? until::COUNT : until::NOW, l.a.rank, (u64)&l.p.requested->count, waits ? last_request() : 0};
    round = 1;
    return false;
}

// Flags begin anew after 2^32 - 1 launches. Packets are cleared at the end of the last of them, when all blocks of this rank have
// ended, and once more behind the first launch of the new round: until all ranks have met in that, packets of the round before that
// nobody reads may arrive. No peer sends packets of the next launch before this rank has come to it.
DEVICE bool clears(u32 flag) { return flag == ~0u || flag == 1; }
DEVICE void clear_packets(const plan_call& p) {
#pragma unroll 1
    for (u64 at = grid_thread() * 16; at < p.packet_bytes; at += grid_threads() * 16)
        store<16>((u64)p.packets + at, bytes<16>{});
}

// All ranks have come to this launch, so that their earlier ones are over and their inputs are in place. Each block waits for the tags
// and the numbers of all peers. False for a thread that gave up, or found that another rank is in another call.
DEVICE bool meet_ranks(const arguments& a, const turn& t) {
    if (threadIdx.x >= PEERS) return true;
    const u32 rank = rank_of(a, threadIdx.x);
    tag theirs;
    u32 call;
    const bool came = reader(a, t).wait<false>([&](u32& missing) {
        missing = rank;
        load_tag(a.own + t.slot + rank * 16, theirs.low, theirs.high);
        call = ld_acquire_sys(call_of(a.own, t.slot, rank)); // pairs with the fence ahead of the peer's number
        return theirs.low != ~0ull && call != EMPTY;
    });
    if (!came) return false;
    if (theirs.low == a.doing.low && theirs.high == a.doing.high && call == number_of(t)) return true;
    stop_calls((control*)a.own, (control*)a.other);
    record_wait(a.board, DISAGREED, a.rank, rank, a.doing, 0, theirs);
    return false;
}

// Whether ranks meet in a launch, of a size that may follow back to back: unless the launch before was of the same size, on the same places.
// Also behind flags that begin anew, since packets are cleared and a half of the scratch follows itself.
DEVICE bool meets_ranks(const plan_call& p, const turn& t, u32 flag) {
    return p.size == 0 || t.words.y != p.size || t.words.z != p.places || flag <= 2;
}

// Which half of the scratch a launch uses, and where the steps are that a block does there.
DEVICE u32 half_of(const plan_call& p, u32 flag) { return p.halves == 2 && flag % 2 == 0 ? 1 : 0; }
DEVICE u32 number_of_block(const plan_call& p, u32 flag) { return blockIdx.x + half_of(p, flag) * gridDim.x; }

// What the first warp of a block loads when its launch begins. The others have the numbers of the launch from it.
struct state {
    uint4 words; // a control
    u32 flag;    // of the launch before
};
DEVICE state load_state(const arguments& a, const plan_call& p) {
    if (threadIdx.x >= 32) return state{};
    return state{load_control(a), p.flags[blockIdx.x]};
}

// The launch's view of the slots: of the lanes, the launch before has used none.
DEVICE turn turn_of_launch(const arguments& a) { return begin(a, make_uint4(of_launch().words, 0, 0, 0)); }

// Begins a launch of this rank's blocks. False, for all threads of the block, if it failed. `end_beginning` has to follow.
DEVICE bool begin_launch(const arguments& a, const plan_call& p, const state& s) {
    const turn t = begin(a, s.words);
    bool meets = false;
    if (threadIdx.x < 32) {
        const u32 flag = max(s.flag + 1, 1u);
        meets = meets_ranks(p, t, flag);
        if (has_tag() && meets && !t.has_failed()) {
            // What is ahead of the launch in its stream is over: pairs with the peers' acquire loads of the number. Nothing is on its way yet that
            // the fence would wait for.
            fence_sys();
            st_relaxed_sys(call_of(a.peer[threadIdx.x], t.slot, a.rank), number_of(t));
            st_relaxed_sys(call_of(a.own, t.before, rank_of(a, threadIdx.x)), EMPTY);
        }
        if (threadIdx.x == 0) { // ahead of the meeting of the threads in `enter`
            of_launch() = numbers{t.slot, flag, meets, t.words.x};
            last_request() = 0;
        }
    }
    if (!enter(a, t, meets)) return false;
    return !of_launch().meets || !__syncthreads_or(!meet_ranks(a, turn_of_launch(a)));
}

// What need not be done ahead of a block's first step.
DEVICE void end_beginning(const arguments& a, const plan_call& p) {
    const turn t = turn_of_launch(a);
    hand_on(a, t, claim_slot(a, t), (u32)p.size, (u32)p.places, 0, of_launch().meets);
    if (threadIdx.x == 0) p.flags[blockIdx.x] = of_launch().flag;
}
