// The kernel that executes plans: every thread of a block goes through the block's steps. Behind ops.cuh. The page of the Rust module
// says why it ends.

// Adds one to some counters: behind what the threads of the block did before they last met.
DEVICE void add(const launch& l) {
    const plan_step& s = *l.step;
#pragma unroll 1
    for (u32 i = thread(); i < s.counts[0]; i += THREADS) {
        u64* count = &((plan_counter*)l.item(i).at)->count;
        if (s.kind == STEP_RELEASE) atom_add_acq_rel_gpu(count, (u64)1);
        else if (s.detail) red_add_relaxed_sys(count, (u64)1);
        else red_add_release_sys(count, (u64)1);
    }
}

// Takes one from each of some counters, each thread one in a round, and has to wait for those.
DEVICE bool take(const launch& l, u32& round, awaited& w) {
    const plan_step& s = *l.step;
    const u32 i = round * THREADS + thread();
    if (i - thread() % 32 >= s.counts[0]) return true;
    w.what = until::NOW;
    if (i < s.counts[0]) {
        plan_counter* counter = (plan_counter*)l.item(i).at;
        w.what = s.kind == STEP_ACQUIRE ? until::COUNT_HERE : until::COUNT;
        w.place = (u64)&counter->count, w.expected = atomicAdd(&counter->taken, 1ull) + 1, w.peer = l.item(i).rank;
    }
    ++round;
    return false;
}

// Arrives at a barrier, once; the block's first warp has to wait until as many blocks have arrived as meet there.
DEVICE bool arrive(const launch& l, u32& round, awaited& w) {
    if (round != 0 || thread() >= 32) return true;
    const u32 of = l.step->detail;
    u64* count = &((plan_counter*)l.item(0).at)->count;
    u64 last = 0;
    if (thread() == 0) last = atom_add_acq_rel_gpu(count, (u64)1) / of * of + of;
    w = awaited{until::COUNT_HERE, l.a.rank, (u64)count, __shfl_sync(WHOLE_WARP, last, 0)};
    round = 1;
    return false;
}

constexpr u32 NO_LOOP = ~0u;

// The loop that a warp is in: its step, or NO_LOOP, and the turn. In shared memory, as registers are few.
struct turns_of_loop {
    u32 head, turn;
};
DEVICE turns_of_loop& loop_of_warp() {
    __shared__ turns_of_loop of_warps[THREADS / 32];
    return of_warps[thread() / 32];
}
DEVICE void set_loop(u32 head, u32 turn) {
    __syncwarp(); // all lanes have read it
    if (thread() % 32 == 0) loop_of_warp() = turns_of_loop{head, turn};
    __syncwarp();
}

// The step behind one. A loop has a turn and a step at least.
DEVICE const plan_step* behind(const plan_call& p, const plan_step* step) {
    const turns_of_loop loop = loop_of_warp();
    if (loop.head == NO_LOOP) return step + 1;
    const plan_step* head = p.steps + loop.head;
    if (step != head + head->detail) return step + 1;
    const bool is_last = loop.turn + 1 >= head->share[0];
    set_loop(is_last ? NO_LOOP : loop.head, loop.turn + 1);
    return is_last ? step + 1 : head + 1;
}

// The bytes of a step that are this turn's.
DEVICE work_range part_of_turn(const plan_call& p, const plan_step& s) {
    u64 begin = s.share[0], end = s.share[1];
    const turns_of_loop loop = loop_of_warp();
    if (s.by_turn && loop.head != NO_LOOP) {
        const u64 unit = p.steps[loop.head].share[1];
        begin = min(begin + loop.turn * unit, end), end = min(begin + unit, end);
    }
    return work_range{max(begin, s.span[0]), min(end, s.span[1])};
}

// Flags begin anew after 2^32 - 1 launches. Packets are cleared at the end of the last of them, when all blocks of this rank have
// ended, and once more behind the first launch of the new round: until all ranks have met in that, packets of the round before that
// nobody reads may arrive. No peer sends packets of the next launch before this rank has come to it.
DEVICE bool clears(u32 flag) { return flag == ~0u || flag == 1; }
DEVICE void clear_packets(const launch& l) {
#pragma unroll 1
    for (u64 at = grid_thread() * 16; at < l.p.packet_bytes; at += grid_threads() * 16)
        store<16>((u64)l.p.packets + at, bytes<16>{});
}

// Does a step that is no meeting of threads, from a round on. False for a warp that has to wait and to come again.
DEVICE bool work(const launch& l, u32& round, awaited& w) {
    const u32 kind = l.step->kind;
    if (kind == STEP_WAIT || kind == STEP_ACQUIRE) return take(l, round, w);
    if (kind == STEP_ARRIVE) return arrive(l, round, w);
    if (kind == STEP_PLAIN) return do_plain(l, part_of_turn(l.p, *l.step)), true;
    if (kind == STEP_PACKETS) return do_packets(l, round, w);
    if (kind == STEP_CLEAR) return clear_packets(l), true;
    return add(l), true;
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
interpret(const __grid_constant__ arguments a, const __grid_constant__ plan_call p) {
    pdl_wait();
    const block_end end(a);
    const turn t = begin(a, load_control(a));
    const u32 flag = max(p.flags[blockIdx.x] + 1, 1u);
    if (__syncthreads_or(!meet_ranks(a, t))) return;
    if (threadIdx.x == 0) {
        of_launch() = numbers{t.slot, flag};
        p.flags[blockIdx.x] = flag;
    }
    set_loop(NO_LOOP, 0);
    __syncthreads();

    // A warp that has given up does nothing until the block's threads meet, and then the block ends.
    bool has_failed = false;
    launch l{a, p, p.steps + p.starts[blockIdx.x]};
    for (; l.step->kind != STEP_END; l.step = behind(p, l.step)) {
        const u32 kind = l.step->kind;
        if (kind == STEP_MEET) {
            if (__syncthreads_or(has_failed)) return;
        } else if (kind == STEP_LOOP) {
            set_loop((u32)(l.step - p.steps), 0);
        } else if (kind == STEP_IF_CLEARING) {
            if (!clears(of_launch().flag)) l.step += l.step->detail;
        } else {
            u32 round = 0;
            awaited w;
            while (!has_failed && !work(l, round, w)) has_failed = !wait(l, w);
        }
    }
}
