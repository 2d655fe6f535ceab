// The kernel that interprets plans: every thread of a block goes through the block's steps in the table. Behind steps.cuh. The page of
// the Rust module says why it ends.

// A thread's view of a step. Registers are what this kernel has least of, so it holds what cannot be found again.
struct launch {
    const arguments& a;
    const plan_call& p;
    const plan_step* step;

    DEVICE const plan_item& item(u32 index) const { return p.items[step->first + index]; }
    DEVICE u64 place(u32 index) const { return address_of(p, item(index)); }
    DEVICE u64 number() const { return step - p.steps + 1; }
};

// Does some bytes of a step without packets, in vectors of the first source.
DEVICE void do_plain(const launch& l, work_range part) {
    const plan_step& s = *l.step;
    const i64 end = part.end, begin = part.begin - (l.place(0) + part.begin) % 16;
    u32 first = thread() == 0 ? (u32)(part.begin - begin) : 0; // of the vector's bytes
#pragma unroll 1
    for (i64 at = begin + thread() * 16; at < end; at += THREADS * 16, first = 0) {
        const u32 last = (u32)min((i64)16, end - at);
        bytes<16> v;
        reduced<16> value;
#pragma unroll 1
        for (u32 source = 0; source < s.counts[0]; ++source) {
            v = load_part<16>(l.place(source) + at, first, last);
            if (source == 0) value.begin(v);
            else value.add(s.detail, v);
        }
        if (s.detail != OPERATOR_NONE) v = value.end(); // else there is one source
#pragma unroll 1
        for (u32 to = s.counts[0]; to < items_of(s); ++to) store_part<16>(l.place(to) + at, v, first, last);
    }
}

// Does a step with packets from a round on: each thread does as many bytes in a round as whole packets and whole elements have. Every
// turn of a loop does all, as packets carry no turn. False for a warp that has to wait.
DEVICE bool do_packets(const launch& l, u32& round, awaited& w) {
    constexpr u32 UNIT = sizeof(T) > PAYLOAD ? sizeof(T) : PAYLOAD;
    const plan_step& s = *l.step;
#pragma unroll 1
    for (;; ++round) {
        const u64 end = min(s.share[1], s.span[1]), at = max(s.share[0], s.span[0]) + ((u64)round * THREADS + thread()) * UNIT;
        if (at - thread() % 32 * UNIT >= end) return true;
        const u32 count = at < end ? (u32)min((u64)UNIT, end - at) : 0, flag = of_launch().flag;
        bytes<UNIT> v;
        reduced<UNIT> value;
        u32 absent = ~0u; // a source that has not come
#pragma unroll 1
        for (u32 source = 0; source < sources_of(s); ++source) {
            if (source < s.counts[0]) v = load_part<UNIT>(l.place(source) + at, 0, count);
            else {
                const u64 from = l.place(source) + at * 2;
                const auto note = [&](u32 k, u64) { absent = source, w.place = from + k * 8; };
                load_words<UNIT>(from, flag, count).take(flag, v, note);
            }
            if (source == 0) value.begin(v);
            else value.add(s.detail, v);
        }
        if (!__all_sync(WHOLE_WARP, absent == ~0u)) {
            w.what = absent == ~0u ? until::NOW : until::PACKET;
            w.expected = flag;
            if (absent != ~0u) w.peer = l.item(absent).rank;
            return false;
        }
        if (count == 0) continue;
        if (s.detail != OPERATOR_NONE) v = value.end(); // else there is one source
#pragma unroll 1
        for (u32 to = sources_of(s); to < items_of(s); ++to) {
            if (to < items_of(s) - s.counts[3]) store_part<UNIT>(l.place(to) + at, v, 0, count);
            else store_packets<UNIT>(l.place(to) + at * 2, flag, v, count);
        }
    }
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

// Does a step that is no meeting of threads, from a round on. False for a warp that has to wait and to come again.
DEVICE bool work(const launch& l, u32& round, awaited& w) {
    const plan_step& s = *l.step;
    const u32 kind = s.kind;
    if (kind == STEP_WAIT || kind == STEP_ACQUIRE) return take(l, kind, s.counts[0], round, w);
    if (kind == STEP_ARRIVE) return arrive(l, round, w);
    if (kind == STEP_PLAIN) return do_plain(l, part_of_turn(l.p, s)), true;
    if (kind == STEP_PACKETS) return do_packets(l, round, w);
    if (kind == STEP_COPY) return post_copy(l, part_of_turn(l.p, s), round, w);
    if (kind == STEP_RAISE) return post_signals(l, s.counts[0], round, w);
    if (kind == STEP_FLUSH) return flush(l, round, w);
    if (kind == STEP_CLEAR) return clear_packets(l.p), true;
    return add(l, kind, s.detail != 0, s.counts[0]), true;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
execute(const __grid_constant__ arguments a, const __grid_constant__ plan_call p) {
    begin_kernel(a);
    const block_end end(a);
    if (!begin_launch(a, p, load_state(a, p))) return;
    end_beginning(a, p);
    set_loop(NO_LOOP, 0);

    // A warp that has given up does nothing until the block's threads meet, and then the block ends.
    bool has_failed = false;
    launch l{a, p, p.steps + p.blocks[number_of_block(p, of_launch().flag)].first_step};
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
