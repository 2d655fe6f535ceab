// Sums over tensor parallel ranks, fused with a gather or a scatter over data parallel ranks. Behind slots.cuh and reduce.cuh, for
// a program that has TP: rank r is in group r / TP, and GROUPS groups have a block each.
//
// There is one communicator of all ranks and none of the groups: lanes are by rank, and tags go to all ranks. A block may have any
// number of elements, equal on all ranks. The data sent is an input without EMPTY or a sum, which has none, so no masks are needed.
//
// In place the smaller tensor is the group's block in the larger one. A vector of it is overwritten by its sum, which comes after all
// ranks have received this rank's vector: the thread that overwrites the vector has sent it itself, or its receivers have answered.

constexpr u32 GROUPS = WORLD / TP;
constexpr u32 MATES = TP - 1; // other ranks of a group

DEVICE u32 group_of(u32 rank) { return rank / TP; }
DEVICE u32 own_group(const arguments& a) { return a.rank / TP; }
DEVICE u32 tp_rank_of(u32 rank) { return rank % TP; }

// The vectors of a group's block, and of the part that each of its ranks reduces: all but the last are equally long.
DEVICE u32 vectors_of_group(const blocks& b, u32 group) { return vectors_of(b.count[group]); }
DEVICE u32 part_of(u32 vectors) { return (vectors + TP - 1) / TP; }
DEVICE u32 vectors_of_part(u32 vectors, u32 tp_rank) {
    const u32 part = part_of(vectors), first = tp_rank * part;
    return first >= vectors ? 0 : vectors - first < part ? vectors - first : part;
}

template <bool PLAIN> DEVICE elements<PLAIN> block_in(const void* row, const blocks& b, u32 group) {
    return elements<PLAIN>((const u8*)row + b.at[group], b.count[group]);
}

// For a whole warp: waits for the vectors at `index` of the lanes from `first`, for those of COUNT ranks from `ranks` on whose
// `limit(rank)` is greater than `index`; a limit of 0 means that nothing is expected. This rank itself is skipped. False if it gave up.
template <u32 COUNT, class Limit>
DEVICE bool collect_some(reader& r, u32 first, u32 ranks, u32 index, Limit limit, uint4 (&got)[COUNT]) {
    const arguments& a = r.a;
    const u8* at = a.own + lane_at(a, r.slot, first + ranks) + index * 16;
    return r.wait<true>([&](u32& missing) {
        bool complete = true;
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k)
            if (ranks + k != a.rank && index < limit(ranks + k)) got[k] = load16_volatile(at + k * a.lane_stride);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k)
            if (ranks + k != a.rank && index < limit(ranks + k) && has_empty(got[k])) {
                complete = false;
                missing = ranks + k;
            }
        return complete;
    });
}

// Writes this thread's own vector to every place: an index known only at run time would need local memory.
template <u32 COUNT> DEVICE void fill_all(uint4 (&got)[COUNT], uint4 own) {
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) got[k] = own;
}

// The vector of a group, selected word by word: otherwise the compiler would index by the group, which needs local memory.
DEVICE uint4 select(const uint4 (&v)[GROUPS], u32 group) {
    uint4 found = v[0];
#pragma unroll
    for (u32 k = 1; k < GROUPS; ++k) {
        const bool is = k == group;
        found = make_uint4(is ? v[k].x : found.x, is ? v[k].y : found.y, is ? v[k].z : found.z, is ? v[k].w : found.w);
    }
    return found;
}

// The NaNs that a call which waited in vain writes to a row of blocks, or to the group's own block.
template <bool PLAIN> DEVICE void fail_row(const arguments& a, const blocks& b, u32 first, u32 step) {
    for (u32 group = 0; group < GROUPS; ++group)
        fill_nan(block_in<PLAIN>(a.output, b, group), first, step, vectors_of_group(b, group));
}
template <bool PLAIN> DEVICE void fail_block(const arguments& a, const blocks& b, u32 first, u32 step) {
    const u32 count = b.count[own_group(a)];
    fill_nan(elements<PLAIN>(a.output, count), first, step, vectors_of(count));
}

// Stores the sums of all groups at `i`, of which `got` has all ranks' vectors.
template <bool PLAIN, u32 GROUP = 0>
DEVICE void store_sums(const arguments& a, const blocks& b, u32 i, const uint4 (&got)[WORLD]) {
    if constexpr (GROUP < GROUPS) {
        uint4 values[TP];
#pragma unroll
        for (u32 k = 0; k < TP; ++k) values[k] = got[GROUP * TP + k];
        if (i < vectors_of_group(b, GROUP)) block_in<PLAIN>(a.output, b, GROUP).store(i, reduce(values));
        store_sums<PLAIN, GROUP + 1>(a, b, i, got);
    }
}

// All-reduce + all-gather, one hop: every rank sends its vectors to all ranks, and each sums those of each group. (WORLD - 1) · n
// bytes leave a rank.
template <bool PLAIN> DEVICE void gather_waits_of(const arguments& a, const blocks& b) {
    const u32 mine = b.count[own_group(a)], vectors = vectors_of(mine), most = vectors_of(b.most);
    const elements<PLAIN> in(a.input, mine);
    const u32 start = grid_thread(), step = grid_threads();
    turn t;
    const auto load = [&](u32 i) { return in.load(i); };
    const auto send = [&](const turn& t, u32 i, uint4 v) { push(a, t, a.rank, i, without_empty(v)); };
    begin_and_send<1, 1, true>(a, t, start, step, vectors, load, send);
    if (!advance(a, t, most, 0)) return fail_row<PLAIN>(a, b, start, step);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, most); i += step) {
        uint4 got[WORLD];
        fill_all(got, i < vectors ? in.load(i) : make_uint4(0, 0, 0, 0));
        const auto limit = [&](u32 k) { return vectors_of_group(b, group_of(k)); };
        if (!collect_some(r, 0, 0, i, limit, got)) return fail_row<PLAIN>(a, b, start, step);
        if (b.even) release_dependents(a);
        store_sums<PLAIN>(a, b, i, got);
    }
    if (!r.finish()) fail_row<PLAIN>(a, b, 0, 1);
}

// All-reduce + all-gather, two hops: a group's ranks reduce a part each, and send the sums to all ranks. (TP - 1) / TP · n bytes
// out, and then (WORLD - 1) / TP · n.
template <bool PLAIN> DEVICE void gather_bytes1_of(const arguments& a, const blocks& b) {
    const u32 mine = b.count[own_group(a)], vectors = vectors_of(mine), part = part_of(vectors);
    const u32 most = part_of(vectors_of(b.most)), own_part = vectors_of_part(vectors, tp_rank_of(a.rank));
    const elements<PLAIN> in(a.input, mine), out = block_in<PLAIN>(a.output, b, own_group(a));
    const u32 start = grid_thread(), step = grid_threads();
    // Every block serves one rank of the group, so that bursts are long; there are a multiple of WORLD - 1 blocks.
    const u32 mate = blockIdx.x % MATES, serving = (gridDim.x - mate + MATES - 1) / MATES;
    const u32 tp_rank = mate < tp_rank_of(a.rank) ? mate : mate + 1, rank = own_group(a) * TP + tp_rank;
    u8* to = a.peer[(rank + WORLD - 1 - a.rank) % WORLD];
    turn t;
    const auto load = [&](u32 i) { return in.load(tp_rank * part + i); };
    const auto send = [&](const turn& t, u32 i, uint4 v) {
        store16_volatile(to + lane_at(a, t.slot, a.rank) + i * 16, without_empty(v));
    };
    const u32 first = blockIdx.x / MATES * blockDim.x + threadIdx.x;
    const u32 end = vectors_of_part(vectors, tp_rank);
    begin_and_send<PLAIN ? DEPTH : 1, 1, false>(a, t, first, serving * blockDim.x, end, load, send);
    if (!advance(a, t, most, most)) return fail_row<PLAIN>(a, b, start, step);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, own_part); i += step) {
        uint4 got[TP];
        const u32 at = tp_rank_of(a.rank) * part + i;
        fill_all(got, i < own_part ? in.load(at) : make_uint4(0, 0, 0, 0));
        const auto limit = [&](u32) { return own_part; };
        if (!collect_some(r, 0, own_group(a) * TP, i, limit, got)) return fail_row<PLAIN>(a, b, start, step);
        if (i >= own_part) break;
        const uint4 sum = reduce(got);
        push(a, t, WORLD + a.rank, i, sum);
        out.store(at, sum);
    }
    for (u32 i = start; is_warp_before(i, most); i += step) {
        uint4 got[WORLD];
        const auto limit = [&](u32 k) { return vectors_of_part(vectors_of_group(b, group_of(k)), tp_rank_of(k)); };
        if (!collect_some(r, WORLD, 0, i, limit, got)) return fail_row<PLAIN>(a, b, start, step);
        if (b.even) release_dependents(a);
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank && i < limit(k)) {
                const u32 group_part = part_of(vectors_of_group(b, group_of(k)));
                block_in<PLAIN>(a.output, b, group_of(k)).store(tp_rank_of(k) * group_part + i, got[k]);
            }
    }
    if (!r.finish()) fail_row<PLAIN>(a, b, 0, 1);
}

// Reduce-scatter + all-reduce, one hop: every rank gets its group's block from all ranks, and sums the blocks. (WORLD - 1) · n
// bytes out. In place, a thread has sent the vectors that it overwrites.
template <bool PLAIN> DEVICE void scatter_waits_of(const arguments& a, const blocks& b) {
    const u32 count = b.count[own_group(a)], vectors = vectors_of(count), most = vectors_of(b.most);
    const elements<PLAIN> mine = block_in<PLAIN>(a.input, b, own_group(a)), out(a.output, count);
    const u32 start = grid_thread(), step = grid_threads();
    const auto load = [&](u32 i, uint4 (&v)[GROUPS]) {
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group)
            if (i < vectors_of_group(b, group)) v[group] = block_in<PLAIN>(a.input, b, group).load(i);
    };
    const auto send = [&](const turn& t, u32 i, const uint4 (&v)[GROUPS]) {
        const u32 at = lane_at(a, t.slot, a.rank) + i * 16;
#pragma unroll
        for (u32 k = 0; k < PEERS; ++k) {
            const u32 theirs = group_of(rank_of(a, k));
            if (i < vectors_of_group(b, theirs)) store16_volatile(a.peer[k] + at, without_empty(select(v, theirs)));
        }
    };
    // All loads are under way before any is needed.
    const uint4 words = load_control(a);
    uint4 first[GROUPS];
    load(start, first);
    const turn t = begin(a, words);
    if (!t.has_failed()) send(t, start, first);
#pragma unroll 1
    for (u32 i = start + step; i < most && !t.has_failed(); i += step) {
        uint4 v[GROUPS];
        load(i, v);
        send(t, i, v);
    }
    if (!advance(a, t, vectors, 0)) return fail_block<PLAIN>(a, b, start, step);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, vectors); i += step) {
        uint4 sum[1];
        const auto own = [&](u32 i) { return mine.load(i); };
        if (!collect_and_reduce(r, i, step, vectors, own, sum)) return fail_block<PLAIN>(a, b, start, step);
        if (b.even) release_dependents(a);
        if (i < vectors) out.store(i, sum[0]);
    }
    if (!r.finish()) fail_block<PLAIN>(a, b, 0, 1);
}

// Reduce-scatter + all-reduce, two hops: every rank sums a part of its group's block, and sends the sum to the group. (WORLD - 1) / TP
// · n bytes out, and then (TP - 1) / TP · n.
template <bool PLAIN> DEVICE void scatter_bytes1_of(const arguments& a, const blocks& b) {
    const u32 count = b.count[own_group(a)], vectors = vectors_of(count), part = part_of(vectors);
    const u32 most = part_of(vectors_of(b.most)), own_part = vectors_of_part(vectors, tp_rank_of(a.rank));
    const elements<PLAIN> mine = block_in<PLAIN>(a.input, b, own_group(a)), out(a.output, count);
    const u32 start = grid_thread(), step = grid_threads(), base = tp_rank_of(a.rank) * part;
    // Every block serves one peer.
    const u32 theirs = rank_of(a, blockIdx.x % PEERS), their_vectors = vectors_of_group(b, group_of(theirs));
    const auto part_for = [&](u32 peer) {
        const elements<PLAIN> block = block_in<PLAIN>(a.input, b, group_of(peer));
        const u32 first = tp_rank_of(peer) * part_of(their_vectors) * LANES;
        return elements<PLAIN>(block.data + first, first < block.count ? block.count - first : 0);
    };
    turn t;
    const u32 to_send = vectors_of_part(their_vectors, tp_rank_of(theirs));
    begin_and_scatter<PLAIN, false>(a, t, to_send, part_for);
    if (!advance(a, t, most, most)) return fail_block<PLAIN>(a, b, start, step);
    reader r(a, t);
    for (u32 i = start; is_warp_before(i, own_part); i += step) {
        uint4 sum[1];
        const auto own = [&](u32 i) { return mine.load(base + i); };
        if (!collect_and_reduce(r, i, step, own_part, own, sum)) return fail_block<PLAIN>(a, b, start, step);
        if (i >= own_part) break;
        const u32 at = lane_at(a, t.slot, WORLD + a.rank) + i * 16;
#pragma unroll
        for (u32 k = 0; k < PEERS; ++k)
            if (group_of(rank_of(a, k)) == own_group(a)) store16_volatile(a.peer[k] + at, sum[0]);
        out.store(base + i, sum[0]);
    }
    for (u32 i = start; is_warp_before(i, part); i += step) {
        uint4 got[TP];
        const u32 mates = own_group(a) * TP;
        const auto limit = [&](u32 rank) { return vectors_of_part(vectors, rank - mates); };
        if (!collect_some(r, WORLD, mates, i, limit, got)) return fail_block<PLAIN>(a, b, start, step);
        if (b.even) release_dependents(a);
#pragma unroll
        for (u32 k = 0; k < TP; ++k)
            if (mates + k != a.rank && i < limit(mates + k)) out.store(k * part + i, got[k]);
    }
    if (!r.finish()) fail_block<PLAIN>(a, b, 0, 1);
}

KERNEL_OF(gather_waits, blocks, b) { gather_waits_of<false>(a, b); }
KERNEL_OF(gather_waits_plain, blocks, b) { gather_waits_of<true>(a, b); }
KERNEL_OF(gather_bytes1, blocks, b) { gather_bytes1_of<false>(a, b); }
KERNEL_OF(gather_bytes1_plain, blocks, b) { gather_bytes1_of<true>(a, b); }
KERNEL_OF(scatter_waits, blocks, b) { scatter_waits_of<false>(a, b); }
KERNEL_OF(scatter_waits_plain, blocks, b) { scatter_waits_of<true>(a, b); }
KERNEL_OF(scatter_bytes1, blocks, b) { scatter_bytes1_of<false>(a, b); }
KERNEL_OF(scatter_bytes1_plain, blocks, b) { scatter_bytes1_of<true>(a, b); }
