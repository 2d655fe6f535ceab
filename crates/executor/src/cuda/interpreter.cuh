// The kernel that executes plans: every thread of a block goes through the block's steps. Behind ops.cuh. The page of the Rust module
// says why it ends.

// Blocks of this rank meet, `of` of them each time. All threads of the block come here; false if one of them has given up.
DEVICE bool meet_blocks(launch& l, plan_counter* counter, u32 of, bool has_failed) {
    if (__syncthreads_or(has_failed)) return false;
    if (threadIdx.x < 32) {
        u64 last = 0;
        if (lane_id() == 0) last = atom_add_acq_rel_gpu(&counter->count, (u64)1) / of * of + of;
        last = __shfl_sync(WHOLE_WARP, last, 0);
        has_failed = !l.wait(last, [&](u32&, u64& seen) {
            seen = ld_acquire_gpu(&counter->count);
            return seen >= last;
        });
    }
    return !__syncthreads_or(has_failed);
}

// Adds one to some counters: behind what the threads of the block did before they last met.
DEVICE void add(const launch& l, const plan_step& s) {
    for (u32 i = threadIdx.x; i < s.counts[0]; i += THREADS) {
        u64* count = &((plan_counter*)l.p.items[s.first + i].at)->count;
        if (s.kind == STEP_RELEASE) atom_add_acq_rel_gpu(count, (u64)1);
        else if (s.detail) red_add_relaxed_sys(count, (u64)1);
        else red_add_release_sys(count, (u64)1);
    }
}

// Takes one from each of some counters, as soon as it is there. False for a warp that gave up.
DEVICE bool take(launch& l, const plan_step& s) {
    for (u32 i = threadIdx.x; i - lane_id() < s.counts[0]; i += THREADS) {
        const bool is_mine = i < s.counts[0];
        const plan_item& item = l.p.items[s.first + (is_mine ? i : 0)];
        plan_counter* counter = (plan_counter*)item.at;
        const u64 ticket = is_mine ? atomicAdd(&counter->taken, 1ull) + 1 : 0;
        const bool came = l.wait(ticket, [&](u32& missing, u64& seen) {
            seen = !is_mine ? 0 : s.kind == STEP_WAIT ? ld_acquire_sys(&counter->count) : ld_acquire_gpu(&counter->count);
            const bool is_there = (i64)seen >= (i64)ticket;
            if (!is_there) missing = item.rank;
            return is_there;
        });
        if (!came) return false;
    }
    return true;
}

// The loop that a block is in.
struct turns_of_loop {
    u32 head, behind; // its step, and the one behind its last; that is ~0 outside of loops
    u64 turn, turns, unit;

    DEVICE void begin(const plan_step& s, u32 step) {
        head = step, behind = step + 1 + s.detail, turn = 0, turns = s.share[0], unit = s.share[1];
    }
    // The step behind one. A loop has a turn and a step at least.
    DEVICE u32 after(u32 step) {
        if (step + 1 != behind) return step + 1;
        if (++turn < turns) return head + 1;
        behind = ~0u;
        return step + 1;
    }
    // The bytes of a step's share that are this turn's.
    DEVICE work_range part(const plan_step& s) const {
        if (!s.by_turn || behind == ~0u) return work_range{s.share[0], s.share[1]};
        const u64 begin = min(s.share[0] + turn * unit, s.share[1]);
        return work_range{begin, min(begin + unit, s.share[1])};
    }
};

// Does a step of one warp or thread. False for a warp that gave up.
DEVICE bool work(launch& l, const plan_step& s, const turns_of_loop& loop) {
    if (s.kind == STEP_WAIT || s.kind == STEP_ACQUIRE) return take(l, s);
    if (s.kind != STEP_DATA) return add(l, s), true;
    const work_range part = loop.part(s);
    return do_data(l, s, max(part.begin, s.span[0]), min(part.end, s.span[1]));
}

// Flags begin anew after 2^32 - 1 launches. The first two launches of each round clear all packets before this rank tells its peers that
// it has come: the second, because packets of the round before that nobody reads may arrive until all ranks have met in the first.
DEVICE bool clear_packets(launch& l) {
    for (u64 at = grid_thread() * 16; at < l.p.packet_bytes; at += grid_threads() * 16)
        store<16>((u64)l.p.packets + at, bytes<16>{});
    return meet_blocks(l, l.p.cleared, gridDim.x, false);
}

// All ranks have come to this launch, so that their earlier ones are over and their inputs are in place. Each block waits for the tags
// of all peers.
DEVICE bool meet_ranks(launch& l, const turn& t) {
    if (has_tag()) fence_sys(); // ahead of the tag: pairs with the fence behind the peers' loads of it
    advance(l.a, t, 0, 0);
    bool has_failed = false;
    if (threadIdx.x < PEERS) {
        has_failed = !l.r.agrees(rank_of(l.a, threadIdx.x));
        fence_sys(); // pairs with the fence ahead of the peer's tag
    }
    return !__syncthreads_or(has_failed);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
interpret(const __grid_constant__ arguments a, const __grid_constant__ plan_call p) {
    pdl_wait();
    const turn t = begin(a, load_control(a));
    if (t.has_failed()) return;
    reader r(a, t);
    const u32 flag = max(p.flags[blockIdx.x] + 1, 1u);
    launch l{a, p, r, flag, ~0u};
    if (flag <= 2 && !clear_packets(l)) return;
    if (!meet_ranks(l, t)) return;
    if (threadIdx.x == 0) p.flags[blockIdx.x] = flag;

    // A warp that has given up does nothing until the block's threads meet, and then the block ends.
    bool has_failed = false;
    const plan_step* steps = p.steps + p.starts[blockIdx.x];
    const u32 end = p.starts[blockIdx.x + 1] - p.starts[blockIdx.x];
    turns_of_loop loop{0, ~0u, 0, 0, 0};
    for (l.step = 0; l.step < end; l.step = loop.after(l.step)) {
        const plan_step& s = steps[l.step];
        if (s.kind == STEP_MEET) {
            if (__syncthreads_or(has_failed)) return;
        } else if (s.kind == STEP_BARRIER) {
            if (!meet_blocks(l, (plan_counter*)p.items[s.first].at, s.detail, has_failed)) return;
        } else if (s.kind == STEP_LOOP) {
            if (s.share[0] == 0 || s.detail == 0) l.step += s.detail;
            else loop.begin(s, l.step);
        } else if (!has_failed) {
            has_failed = !work(l, s, loop);
        }
    }
}
