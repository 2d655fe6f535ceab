// Block 0 gives up a wait while the others are between the beginning of the call and `advance`; they go on when it has given up. A call
// with the root 1 only says, for each of its blocks, whether it finds the failure.
KERNEL(delayed) {
    const turn t = begin(a, load_control(a));
    if (a.root == 1) {
        if (threadIdx.x == 0) ((u32*)a.output)[blockIdx.x] = t.has_failed();
        return;
    }
    if (blockIdx.x != 0 && !t.has_failed()) {
        const control* const last = (const control*)a.own + MAX_BLOCKS - 1;
        for (const u64 start = global_ns(); ld_relaxed_sys(&last->failed) == 0 && global_ns() - start < 20000000000ull;) {}
    }
    if (!advance(a, t, 0, 0) || blockIdx.x != 0) return;
    reader r(a, t);
    r.wait<true>([&](u32& missing) {
        missing = rank_of(a, 0);
        return false;
    });
}

// A call fails while a block begins it: of each two warps, the first has loaded the control words before that, the second afterwards.
// Each warp writes 1 if it goes on, else 2.
KERNEL(divided) {
    const uint4 before = load_control(a);
    __syncthreads();
    if (threadIdx.x == 0) stop_calls((control*)a.own, (control*)a.other);
    __syncthreads();
    const turn t = begin(a, threadIdx.x / 32 % 2 == 0 ? before : load_control(a));
    const bool goes_on = advance(a, t, 0, 0);
    if (lane_id() == 0) ((u32*)a.output)[threadIdx.x / 32] = goes_on ? 1 : 2;
}
