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

// Takes one from each of some counters, of which `done` are done; a thread has to wait for the one that it has taken.
DEVICE bool take(const launch& l, u64& done, awaited& w) {
    const plan_step& s = *l.step;
    const u32 i = (u32)done + thread();
    if (i - thread() % 32 >= s.counts[0]) return true;
    w.what = until::NOW;
    if (i < s.counts[0]) {
        plan_counter* counter = (plan_counter*)l.item(i).at;
        w.what = s.kind == STEP_ACQUIRE ? until::COUNT_HERE : until::COUNT;
        w.place = (u64)&counter->count, w.expected = atomicAdd(&counter->taken, 1ull) + 1, w.peer = l.item(i).rank;
    }
    done += THREADS;
    return false;
}

// Arrives at a barrier, once; the block's first warp has to wait until as many blocks have arrived as meet there.
DEVICE bool arrive(const launch& l, u64& done, awaited& w) {
    if (done != 0 || thread() >= 32) return true;
    const u32 of = l.step->detail;
    u64* count = &((plan_counter*)l.item(0).at)->count;
    u64 last = 0;
    if (thread() == 0) last = atom_add_acq_rel_gpu(count, (u64)1) / of * of + of;
    w = awaited{until::COUNT_HERE, l.a.rank, (u64)count, __shfl_sync(WHOLE_WARP, last, 0)};
    done = 1;
    return false;
}

// The loop that a warp is in: its step, or ~0, and the turn. In shared memory, as registers are few.
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
    if (loop.head == ~0u) return step + 1;
    const plan_step* head = p.steps + loop.head;
    if (step != head + head->detail) return step + 1;
    const bool is_last = loop.turn + 1 >= head->share[0];
    set_loop(is_last ? ~0u : loop.head, loop.turn + 1);
    return is_last ? step + 1 : head + 1;
}

// The bytes of a step that are this turn's.
DEVICE work_range part_of_turn(const plan_call& p, const plan_step& s) {
    u64 begin = s.share[0], end = s.share[1];
    const turns_of_loop loop = loop_of_warp();
    if (s.by_turn && loop.head != ~0u) {
        const u64 unit = p.steps[loop.head].share[1];
        begin = min(begin + loop.turn * unit, end), end = min(begin + unit, end);
    }
    return work_range{max(begin, s.span[0]), min(end, s.span[1])};
}

// Does a step that is no meeting of threads, `done` of which is done. False for a warp that has to wait and to come again.
DEVICE bool work(const launch& l, u64& done, awaited& w) {
    const u32 kind = l.step->kind;
    if (kind == STEP_WAIT || kind == STEP_ACQUIRE) return take(l, done, w);
    if (kind == STEP_ARRIVE) return arrive(l, done, w);
    if (kind == STEP_PLAIN) return do_plain(l, part_of_turn(l.p, *l.step)), true;
    if (kind == STEP_PACKETS) return do_packets(l, done, w);
    return add(l), true;
}

// Flags begin anew after 2^32 - 1 launches. The first two launches of each round clear all packets before this rank tells its peers that
// it has come: the second, because packets of the round before that nobody reads may arrive until all ranks have met in the first.
DEVICE void clear_packets(const launch& l) {
#pragma unroll 1
    for (u64 at = grid_thread() * 16; at < l.p.packet_bytes; at += grid_threads() * 16)
        store<16>((u64)l.p.packets + at, bytes<16>{});
}

// All ranks have come to this launch, so that their earlier ones are over and their inputs are in place. Each block waits for the tags
// of all peers. False for a thread that gave up.
DEVICE bool meet_ranks(const arguments& a, const turn& t) {
    if (has_tag()) fence_sys(); // ahead of the tag: pairs with the fence behind the peers' loads of it
    advance(a, t, 0, 0);
    if (threadIdx.x >= PEERS) return true;
    const bool agrees = reader(a, t).agrees(rank_of(a, threadIdx.x));
    fence_sys(); // pairs with the fence ahead of the peer's tag
    return agrees;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
interpret(const __grid_constant__ arguments a, const __grid_constant__ plan_call p) {
    pdl_wait();
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    const u32 flag = max(p.flags[blockIdx.x] + 1, 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        of_launch() = numbers{t.slot, flag};
        p.flags[blockIdx.x] = flag;
    }
    __syncthreads();

    // A warp that has given up does nothing until the block's threads meet, and then the block ends.
    bool has_failed = false;
    set_loop(~0u, 0);
    launch l{a, p, p.steps + p.starts[blockIdx.x]};
    for (; l.step->kind != STEP_END; l.step = behind(p, l.step)) {
        const u32 kind = l.step->kind;
        if (kind == STEP_CLEAR) {
            if (of_launch().flag > 2) l.step += l.step->detail;
            else clear_packets(l);
        } else if (kind == STEP_RANKS) {
            has_failed = !meet_ranks(a, begin(a, load_control(a)));
        } else if (kind == STEP_MEET) {
            if (__syncthreads_or(has_failed)) return;
        } else if (kind == STEP_LOOP) {
            set_loop((u32)(l.step - p.steps), 0);
        } else {
            u64 done = 0;
            awaited w;
            while (!has_failed && !work(l, done, w)) has_failed = !wait(l, w);
        }
    }
}
