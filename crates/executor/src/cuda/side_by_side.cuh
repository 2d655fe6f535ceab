// Steps of a compiled kernel that are done side by side. Behind data.cuh.
//
// STEPS steps that follow each other move as many bytes each, from one source to TO destinations. The proof lets operations between two meetings
// of the threads be done in any order, so all loads are issued before the first store.

// Whether some steps with packets have the same whole units.
template <u32 PACKETS, u32 TO, u32 PACKED, u32 STEPS> DEVICE bool are_alike(const block_steps& b, u32 step, u32 item) {
    const work_range first = part_of(step_of(b, step, item));
    bool alike = true;
#pragma unroll
    for (u32 k = 0; k < STEPS; ++k) {
        const step_of l(b, step + k, item + k * (1 + TO + PACKED));
        const work_range part = part_of(l);
        alike = alike && part.begin == first.begin && part.end == first.end && is_whole<1 - PACKETS, PACKETS, TO>(l, part);
    }
    return alike;
}

// Does some steps with packets, but for the first `done` bytes of each if they are alike.
template <u32 PACKETS, u32 TO, u32 PACKED, u32 STEPS>
DEVICE void packets_side_by_side(block_steps& b, u32 step, u32 item, u64 done = 0) {
    if (b.has_failed) return;
    constexpr u32 ITEMS = 1 + TO + PACKED, DEPTH = depth(STEPS, 2);
    const step_of l(b, step, item);
    if (!are_alike<PACKETS, TO, PACKED, STEPS>(b, step, item)) {
#pragma unroll 1
        for (u32 k = 0; k < STEPS; ++k) {
            const step_of l(b, step + k, item + k * ITEMS);
            packets<OPERATOR_NONE, 1 - PACKETS, PACKETS, TO, PACKED>(b, l, part_of(l));
        }
        return;
    }
    const work_range part = part_of(l);
#pragma unroll 1
    for (u64 at = part.begin + done + thread() * UNIT; at - thread() % 32 * UNIT < part.end; at += THREADS * DEPTH * UNIT) {
        bytes<UNIT> v[STEPS][DEPTH];
        u32 counts[DEPTH];
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n) counts[n] = at + n * THREADS * UNIT < part.end ? UNIT : 0;
        if constexpr (PACKETS != 0) {
            const auto take = [&](u32 k, u32 n, const bytes<UNIT>& value) { v[k][n] = value; };
            if (!load_packets<0, STEPS, DEPTH, UNIT>(sources_of_steps<ITEMS>(l), at, counts, take)) {
                b.has_failed = true;
                return;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < STEPS; ++k)
#pragma unroll
                for (u32 n = 0; n < DEPTH; ++n)
                    if (counts[n] != 0) v[k][n] = load<UNIT>(l.place(k * ITEMS) + at + n * THREADS * UNIT);
        }
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n) {
            if (counts[n] == 0) break;
            const u64 here = at + n * THREADS * UNIT;
#pragma unroll
            for (u32 k = 0; k < STEPS; ++k) {
#pragma unroll 8
                for (u32 to = 1; to < 1 + PACKED; ++to)
                    store_packets<UNIT>(l.place(k * ITEMS + TO + to) + here * 2, of_launch().flag, v[k][n], UNIT);
#pragma unroll 8
                for (u32 to = 1; to < 1 + TO; ++to) store<UNIT>(l.place(k * ITEMS + to) + here, v[k][n]);
            }
        }
    }
}

// Does some steps without packets; part(l) is what is done of one.
template <u32 TO, u32 STEPS, class Part> DEVICE void plain_side_by_side(block_steps& b, u32 step, u32 item, Part part_of_step) {
    if (b.has_failed) return;
    constexpr u32 ITEMS = 1 + TO, DEPTH = depth(STEPS, 4), STRIDE = THREADS * 16;
    const step_of l(b, step, item);
    const work_range part = part_of_step(l);
    u32 places = (u32)part.begin | (u32)part.end;
    bool alike = true;
#pragma unroll 8
    for (u32 k = 0; k < STEPS * ITEMS; ++k) places |= (u32)l.place(k);
#pragma unroll 8
    for (u32 k = 1; k < STEPS; ++k) {
        const work_range other = part_of_step(step_of(b, step + k, item + k * ITEMS));
        alike = alike && other.begin == part.begin && other.end == part.end;
    }
    if (!alike || places % 16 != 0) {
#pragma unroll 1
        for (u32 k = 0; k < STEPS; ++k) {
            const step_of l(b, step + k, item + k * ITEMS);
            plain<OPERATOR_NONE, 1, TO>(b, l, part_of_step(l));
        }
        return;
    }
#pragma unroll 1
    for (u64 at = part.begin + thread() * 16; at < part.end; at += DEPTH * STRIDE) {
        bytes<16> v[STEPS][DEPTH];
        const auto is_there = [&](u32 n) { return n == 0 || at + n * STRIDE < part.end; };
#pragma unroll
        for (u32 k = 0; k < STEPS; ++k)
#pragma unroll
            for (u32 n = 0; n < DEPTH; ++n)
                if (is_there(n)) v[k][n] = load<16>(l.place(k * ITEMS) + at + n * STRIDE);
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n)
#pragma unroll
            for (u32 k = 0; k < STEPS; ++k)
                if (is_there(n))
#pragma unroll 8
                    for (u32 to = 1; to < 1 + TO; ++to) store<16>(l.place(k * ITEMS + to) + at + n * STRIDE, v[k][n]);
    }
}
