// All-reduce with an epilogue over NVLink: one-shot and two-shot as in all_reduce/kernels.cuh, but the thread that has a
// vector of the sum also applies the epilogue to it. Behind slots.cuh, reduce.cuh and epilogue.cuh.
//
// Sums, residuals and norms may take a tensor's place: a thread writes its results for a vector after it has the vector's sum,
// for which the contributions of all ranks, this rank's among them, have been read.
//
// Vectors travel as in a plain all-reduce; sums are then read by rows, each by a team. A thread that has rows returns only at the
// end, because a team's blocks wait for each other: a call that has failed continues with NaN.

// Contributions that are computed are kept in this rank's own lane; a tensor is read again.
constexpr bool KEEPS_OWN = SOURCE != TENSOR;
// Whether teams that only reduce load their next vectors, AT_ONCE of every rank's, in advance, so that fewer such teams suffice.
// Between two ranks these teams keep up with the links anyway, and must repeat loads that came too early; there it is worth it
// only where the epilogue is large and needs the registers that this saves.
constexpr bool AHEAD = SPLIT && (WORLD > 2 || QUANTIZATION >= FP8_GROUPS);

// As in `begin_and_send`. Where contributions are computed, memory limits the sending, and small blocks would have too few
// registers.
constexpr bool EMPTIES = SOURCE == TENSOR && !SHORT && THREADS > 128;

// For a whole warp: waits for the vectors of all ranks at COUNT places of the lower lanes, and reduces them: those from `index` on in
// steps that come before `end`. `first` is where this rank's own begin.
template <u32 COUNT>
DEVICE bool reduce_at(reader& r, const fused& f, u32 first, u32 index, u32 step, u32 end, uint4 (&sums)[COUNT]) {
    if (KEEPS_OWN) {
        uint4 got[COUNT][WORLD];
        if (!collect<COUNT, true>(r, 0, index, step, end, got)) return false;
#pragma unroll
        for (u32 n = 0; n < COUNT; ++n) sums[n] = reduce(got[n]);
        return true;
    }
    return collect_and_reduce(r, index, step, end, [&](u32 index) { return contribution(f, first + index); }, sums);
}

// The result of `wait`, or NaN from the first wait in vain on.
template <u32 COUNT, class Wait> DEVICE void sums_or_nan(reader& r, bool& alive, uint4 (&sums)[COUNT], Wait wait) {
    if (alive) alive = wait();
    if (alive) r.ask_for_tag();
#pragma unroll
    for (u32 n = 0; n < COUNT; ++n)
        if (!alive) sums[n] = make_uint4(NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR);
}

// A vector of the sum that this rank has reduced, for the teams of all ranks.
DEVICE void publish(const arguments& a, const turn& t, u32 i, uint4 sum) {
    push(a, t, WORLD + a.rank, i, sum);
    store16_volatile(a.own + lane_at(a, t.slot, WORLD + a.rank) + i * 16, sum);
}

// Calls what(i, n, k) for the n-th of AT_ONCE places, i, from `first` on in steps that come before `end`, and for each rank k.
template <class What> DEVICE void each_vector(u32 first, u32 step, u32 end, What what) {
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; ++n)
        if (first + n * step < end)
#pragma unroll
            for (u32 k = 0; k < WORLD; ++k) what(first + n * step, n, k);
}

// Reduces vectors of the rows that are this rank's, which begin at `own`: those from `first` on in steps that come before `end`,
// AT_ONCE at a time, while the next vectors of all ranks are on their way to shared memory. A vector that was EMPTY when it was
// copied is copied again: a copy reads L2 word by word, as a volatile load does. For a whole warp; false if it waited in vain.
DEVICE bool reduce_ahead(reader& r, const turn& t, const fused& f, const row_team& team, u32 own, u32 first, u32 step, u32 end) {
    const arguments& a = r.a;
    const u8* lanes = a.own + lane_at(a, t.slot, 0);
    const auto place = [&](u32 n, u32 k) { return team.room(f) + (n * WORLD + k) * blockDim.x + threadIdx.x; };
    const auto is_tensor = [&](u32 k) { return !KEEPS_OWN && k == a.rank; };
    const auto copy = [&](u32 i, u32 n, u32 k) {
        const u8* tensor = f.input + ((u64)f.first * f.vectors + own + i) * 16;
        copy_async16(place(n, k), is_tensor(k) ? tensor : lanes + k * a.lane_stride + i * 16); // races: each word tells whether it came
    };
    bool alive = true;
    each_vector(first, step, end, copy);
    for (u32 i = first; is_warp_before(i, end); i += AT_ONCE * step) {
        uint4 got[AT_ONCE][WORLD];
        copies_wait_all();
        alive = r.wait<true>([&](u32& missing) {
            bool complete = true;
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; ++n)
#pragma unroll
                for (u32 k = 0; k < WORLD; ++k) got[n][k] = *place(n, k);
            each_vector(i, step, end, [&](u32 i, u32 n, u32 k) {
                if (is_tensor(k) || !has_empty(got[n][k])) return;
                copy(i, n, k);
                complete = false;
                if (k != a.rank) missing = k;
            });
            if (!complete) copies_wait_all();
            return complete;
        });
        if (!alive) break;
        each_vector(i + AT_ONCE * step, step, end, copy);
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; ++n) {
            const uint4 sum = reduce(got[n]);
            if (i + n * step < end) publish(a, t, i + n * step, sum);
        }
    }
    return alive; // only a wait in vain leaves copies under way, and nobody looks at what they bring
}

// Every rank gets all vectors and reduces them. The thread that sends a vector also writes the results for it.
DEVICE void one_shot(const arguments& a, const fused& f, row_team& team) {
    const u32 start = team.index * f.vectors + team.thread;
    const bool has_any = team.index < f.count && team.thread < f.vectors;
    // All loads are under way before any is needed.
    const uint4 words = load_control(a);
    uint4 first;
    if (has_any) first = contribution(f, start);
    const turn t = begin(a, words);
    if (!t.has_failed()) {
        const auto send = [&](u32 index, uint4 v) {
            v = without_empty(v);
            push(a, t, a.rank, index, v);
            if (KEEPS_OWN) store16(a.own + lane_at(a, t.slot, a.rank) + index * 16, v); // this thread loads it, and no other
        };
        if (has_any) send(start, first);
        for (u32 row = team.index; !SHORT && row < f.count; row += team.teams)
#pragma unroll 1
            for (u32 v = team.thread; v < f.vectors; v += team.threads)
                if (row * f.vectors + v != start) send(row * f.vectors + v, contribution(f, row * f.vectors + v));
    }
    const u32 vectors = f.count * f.vectors;
    bool alive = advance(a, t, KEEPS_OWN ? vectors | OWN_TOO : vectors, 0);
    begin_epilogue(f, team);
    epilogue e(f, team, team.index, team.index < f.count);
    reader r(a, t);
    for (u32 row = team.index, next; row < f.count; row = next) {
        next = row + team.teams;
        e.run(row, next, next < f.count, [&](u32 v, uint4 (&sums)[BATCH]) {
            const u32 begin = row * f.vectors;
            sums_or_nan(r, alive, sums,
                        [&] { return reduce_at(r, f, 0, begin + v, team.threads, begin + f.vectors, sums); });
        });
    }
    if (alive) r.finish();
}

// Every rank reduces some of the rows, which are then gathered.
DEVICE void two_shot(const arguments& a, const fused& f, row_team& team) {
    constexpr u32 TARGETS = KEEPS_OWN ? WORLD : PEERS;
    const u32 part = (f.count + WORLD - 1) / WORLD; // rows of a rank; the last ones may have fewer
    const auto rows_of = [&](u32 rank) {
        const u32 begin = rank * part;
        return begin >= f.count ? 0 : f.count - begin < part ? f.count - begin : part;
    };
    // Every block serves one rank, so that bursts are long.
    const u32 target = blockIdx.x % TARGETS, share = gridDim.x / TARGETS, place = blockIdx.x / TARGETS;
    const u32 to = target < PEERS ? rank_of(a, target) : a.rank;
    const u32 first = to * part * f.vectors, count = place < share ? rows_of(to) * f.vectors : 0;
    u8* arena = target < PEERS ? a.peer[target] : a.own;
    turn t;
    const auto load = [&](u32 i) { return contribution(f, first + i); };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(arena + lane_at(a, t.slot, a.rank) + i * 16, without_empty(v));
    };
    const u32 start = place * blockDim.x + threadIdx.x, step = share * blockDim.x;
    const u32 busy = SPLIT ? f.reducing * team.blocks : 0;
    begin_and_send<DEPTH, DEPTH, EMPTIES>(a, t, start, step, count, load, send, busy);
    const u32 vectors = part * f.vectors;
    bool alive = advance(a, t, KEEPS_OWN ? vectors | OWN_TOO : vectors, SHORT ? vectors : vectors | OWN_TOO, busy);
    begin_epilogue(f, team);
    reader r(a, t);
    const u32 own = a.rank * part * f.vectors;
    // Where a thread has several vectors of a row, all vectors are reduced before any team processes its row. With many rows, some
    // teams only reduce, as fast as the links allow, while the others process the rows as they arrive.
    if (!SHORT && (!SPLIT || team.index < f.reducing)) {
        const u32 end = rows_of(a.rank) * f.vectors, step = (SPLIT ? f.reducing : team.teams) * team.threads;
        const u32 first = team.index * team.threads + team.thread;
        if (AHEAD) {
            if (alive) alive = reduce_ahead(r, t, f, team, own, first, step, end);
        } else {
            constexpr u32 COUNT = SPLIT ? AT_ONCE : 1;
            for (u32 i = first; is_warp_before(i, end); i += COUNT * step) {
                uint4 sums[COUNT];
                sums_or_nan(r, alive, sums, [&] { return reduce_at(r, f, own, i, step, end, sums); });
                if (!alive) break;
#pragma unroll
                for (u32 n = 0; n < COUNT; ++n) {
                    if (i + n * step >= end) break;
                    publish(a, t, i + n * step, sums[n]);
                }
            }
        }
        if (SPLIT) {
            if (alive) r.finish();
            return;
        }
    }
    // The order of rows: the ranks' first rows, this rank's before the others', then their second rows and so on. So rows that
    // must be sent on are sent early.
    // A team that waits for a row waits for a team that has only earlier rows before that one.
    const u32 items = part * WORLD, before = SPLIT ? f.reducing : 0, teams = team.teams - before;
    const auto owner_of = [&](u32 item) {
        const u32 owner = a.rank + item % WORLD;
        return owner < WORLD ? owner : owner - WORLD;
    };
    const auto row_of = [&](u32 item) { return owner_of(item) * part + item / WORLD; };
    const auto from = [&](u32 item) { // the next row that exists
        while (item < items && item / WORLD >= rows_of(owner_of(item))) item += teams;
        return item;
    };
    u32 item = from(team.index - before);
    epilogue e(f, team, row_of(item), item < items);
    for (u32 next; item < items; item = next) {
        next = from(item + teams);
        const u32 owner = owner_of(item), begin = item / WORLD * f.vectors, end = begin + f.vectors;
        const bool is_reduced = !SHORT || owner != a.rank; // by another team
        e.run(row_of(item), row_of(next), next < items, [&](u32 v, uint4 (&sums)[BATCH]) {
            sums_or_nan(r, alive, sums, [&] {
                if (is_reduced) return collect_from(r, owner, WORLD + owner, begin + v, team.threads, end, sums);
                if (!reduce_at(r, f, own, begin + v, team.threads, end, sums)) return false;
#pragma unroll
                for (u32 n = 0; n < BATCH; ++n)
                    if (begin + v + n * team.threads < end)
                        push(a, t, WORLD + a.rank, begin + v + n * team.threads, sums[n]);
                return true;
            });
        });
    }
    if (alive) r.finish();
}

// As KERNEL in slots.cuh; ALGORITHM is one of the two. A SHORT grid lets the next kernel begin when this one is certain to end.
// In one-shot this is when a warp has its sums: the blocks of this index then run on all GPUs, and have sent the rest of this
// block's vectors. In two-shot it is when the team has its sums. (Other grids would become slower, because their teams are in the
// middle of their rows.)
extern "C" __global__ void __launch_bounds__(BOUND, RESIDENT)
fused_all_reduce(const __grid_constant__ arguments a, const __grid_constant__ fused f) {
    row_team team(f);
    begin_kernel(a);
    const block_end end(a);
    ALGORITHM(a, f, team);
}
