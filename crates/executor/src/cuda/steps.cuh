// What both forms of a plan's kernel share: how a launch begins, and the steps that synchronise. Behind ops.cuh.
//
// A step `l` has the arguments `a` and `p`, the step's `step`, its items (`item`), their addresses (`place`) and its `number`.

// Waits for all threads of the warp. The report tells the step.
template <class Step> DEVICE bool wait(const Step& l, const awaited& w) {
    turn t{};
    t.slot = of_launch().slot;
    const u64 expected = w.what == until::NOW ? 0 : w.expected;
    return reader(l.a, t).wait_for<true>(expected, [&](u32& missing, tag& seen) {
        const bool has_come = w.has_come(seen.low);
        if (!has_come) missing = w.peer, seen.high = l.number();
        return has_come;
    });
}

// Adds one to some counters: behind what the threads of the block did before they last met.
template <class Step> DEVICE void add(const Step& l, u32 kind, bool relaxed, u32 counts) {
#pragma unroll 1
    for (u32 i = thread(); i < counts; i += THREADS) {
        u64* count = &((plan_counter*)l.item(i).at)->count;
        if (kind == STEP_RELEASE) atom_add_acq_rel_gpu(count, (u64)1);
        else if (relaxed) red_add_relaxed_sys(count, (u64)1);
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
        w.place = (u64)&counter->count, w.expected = atomicAdd(&counter->taken, 1ull) + 1, w.peer = l.item(i).rank;
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
// of all peers. False for a thread that gave up.
DEVICE bool meet_ranks(const arguments& a, const turn& t) {
    if (has_tag()) fence_sys(); // ahead of the tag: pairs with the fence behind the peers' loads of it
    if (!advance(a, t, 0, 0)) return false;
    if (threadIdx.x >= PEERS) return true;
    const bool agrees = reader(a, t).agrees(rank_of(a, threadIdx.x));
    fence_sys(); // pairs with the fence ahead of the peer's tag
    return agrees;
}

// Begins a launch of this rank's blocks. False, for all threads of the block, if it failed.
DEVICE bool begin_launch(const arguments& a, const plan_call& p) {
    const turn t = begin(a, load_control(a));
    const u32 flag = max(p.flags[blockIdx.x] + 1, 1u);
    if (__syncthreads_or(!meet_ranks(a, t))) return false;
    if (threadIdx.x == 0) {
        of_launch() = numbers{t.slot, flag};
        p.flags[blockIdx.x] = flag;
    }
    return true;
}
