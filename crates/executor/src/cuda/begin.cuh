// How a block of a compiled kernel begins and ends. Behind side_by_side.cuh, and ahead of the cases, which end with `run`.
//
// What a block finds in the table it finds before the launch ahead has ended. When that has, the launch's state and what the first step loads
// are on their way at once, and what the first step sends goes ahead of all that can wait.

// Begins the launch: calls load() when the launch before has ended, and send() as soon as this one's state is there. False, for all threads of
// the block, if the launch failed.
template <class Load, class Send> DEVICE bool begin(block_steps& b, Load load, Send send) {
    begin_kernel(b.a);
    const state s = load_state(b.a, b.p);
    load();
    if (!begin_launch(b.a, b.p, s)) return false;
    const u32 flag = of_launch().flag;
    b.items = IS_COPIED ? copied().items[half_of(b.p, flag)] : b.p.items + b.p.blocks[number_of_block(b.p, flag)].first_item;
    send();
    end_beginning(b.a, b.p);
    return true;
}
[[maybe_unused]] DEVICE bool begin(block_steps& b) {
    return begin(b, [] {}, [] {});
}

// Begins the launch with steps that send packets of this rank's own tensor, which nothing of the launch has written: the first units of all are
// loaded while its state is on its way.
template <u32 PACKED, u32 STEPS> DEVICE bool begin_with_packets(block_steps& b, u32 step, u32 item) {
    constexpr u32 ITEMS = 1 + PACKED;
    const work_range part = part_of(step_of(b, step, item));
    const u64 at = part.begin + thread() * UNIT;
    const bool alike = are_alike<0, 0, PACKED, STEPS>(b, step, item), is_there = alike && at < part.end;
    bytes<UNIT> v[STEPS];
    const auto load_first = [&] {
        const step_of l(b, step, item);
#pragma unroll
        for (u32 k = 0; k < STEPS; ++k)
            if (is_there) v[k] = load<UNIT>(l.place(k * ITEMS) + at);
    };
    const auto send_first = [&] {
        const step_of l(b, step, item);
        if (!is_there) return;
#pragma unroll
        for (u32 k = 0; k < STEPS; ++k)
#pragma unroll 8
            for (u32 to = 1; to < 1 + PACKED; ++to)
                store_packets<UNIT>(l.place(k * ITEMS + to) + at * 2, of_launch().flag, v[k], UNIT);
    };
    if (!begin(b, load_first, send_first)) return false;
    packets_side_by_side<0, 0, PACKED, STEPS>(b, step, item, alike ? THREADS * UNIT : 0);
    return true;
}

// Begins the launch with signals that the plan has relaxed. They publish what was ahead of the launch and nothing else, so the fence of each
// thread is behind that alone, where it waits for nothing that the launch does.
[[maybe_unused]] DEVICE bool begin_with_signals(block_steps& b, u32 step, u32 item, u32 counts) {
    const auto publish = [&] {
        if (thread() < counts) fence_sys();
    };
    const auto signal = [&] {
        const step_of l(b, step, item);
#pragma unroll 1
        for (u32 i = thread(); i < counts; i += THREADS) red_add_relaxed_sys(&((plan_counter*)l.item(i).at)->count, (u64)1);
    };
    return begin(b, publish, signal);
}

// Called where no thread of the block has anything left to wait for, so the block is certain to end: the kernel behind may start as soon as all
// blocks have come here. The threads have met, as the first warp that comes counts for its block.
[[maybe_unused]] DEVICE void release(const block_steps& b) { release_dependents(b.a); }

// Does the steps of a shape. False if the block has ended before.
DEVICE bool run(block_steps& b, u32 shape);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
execute(const __grid_constant__ arguments a, const __grid_constant__ plan_call p) {
    if constexpr (IS_COPIED) copy_table(p);
    const block_end end(a);
    const plan_block& block = IS_COPIED ? copied().block : p.blocks[blockIdx.x];
    const plan_step* steps = IS_COPIED ? copied().steps : p.steps + block.first_step;
    const plan_item* items = IS_COPIED ? copied().items[0] : p.items + block.first_item;
    block_steps b{a, p, steps, items, block, false};
    if (!run(b, block.shape) || !clears(of_launch().flag)) return;
    // The last steps: IF_CLEARING, MEET, ARRIVE, MEET, CLEAR, END.
    if (!meet(b)) return;
    arrive(b, step_of(b, block.steps - 4, block.items - 1));
    if (meet(b)) clear_packets(p);
}
