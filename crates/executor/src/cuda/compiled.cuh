// What the cases of a compiled kernel call, each with what is known of its steps: the kind, the operator, the numbers of sources and
// destinations. Behind steps.cuh, and ahead of the cases, which end with `run`. The page of the Rust module compiled.rs says more.

// A block's part of the table; its warps have copied it into shared memory if it fits there (IS_COPIED). A warp that has given up does
// nothing until the block's threads meet, and then the block ends.
struct block_steps {
    const arguments& a;
    const plan_call& p;
    const plan_step* steps;
    const plan_item* items; // of the launch's half of the scratch, as soon as it has begun
    const plan_block& block;
    bool has_failed;
};

// The part of a block that is copied, as it lies in the table: in one piece, so that nothing is loaded to find the rest.
struct alignas(16) block_table {
    plan_block block;
    plan_step steps[MOST_STEPS];
    plan_item items[HALVES][MOST_ITEMS]; // for each half of the scratch
};
DEVICE block_table& copied() {
    __shared__ block_table copy;
    return copy;
}

// Copies the part of a block, with addresses that hold for the launch. No launch writes to the table, so the one before may still run.
[[maybe_unused]] DEVICE void copy_table(const plan_call& p) {
    constexpr u32 ITEMS_AT = sizeof(block_table) / 16 - HALVES * MOST_ITEMS;
    const u32 vectors = ITEMS_AT + (u32)p.halves * MOST_ITEMS;
    const uint4* from = (const uint4*)((const block_table*)p.blocks + blockIdx.x);
#pragma unroll 1
    for (u32 i = thread(); i < vectors; i += THREADS) {
        uint4 v = from[i];
        if (i >= ITEMS_AT) {
            const u64 at = (v.x | (u64)v.y << 32) + p.bases[v.z];
            v.x = (u32)at, v.y = (u32)(at >> 32);
        }
        ((uint4*)&copied())[i] = v;
    }
    __syncthreads();
}

// A step of a block.
struct step_of {
    const arguments& a;
    const plan_call& p;
    const plan_step* step;
    const plan_item* items;
    const plan_block& block;
    u32 at; // among those of the block

    DEVICE step_of(const block_steps& b, u32 step, u32 item)
        : a(b.a), p(b.p), step(b.steps + step), items(b.items + item), block(b.block), at(step) {}

    DEVICE const plan_item& item(u32 index) const { return items[index]; }
    DEVICE u64 place(u32 index) const { return IS_COPIED ? items[index].at : address_of(p, items[index]); }
    DEVICE u64 number() const { return block.first_step + at + 1; }
};

// The step's bytes, in a turn of a loop of which each does as many: all of them but for a step that turns share.
[[maybe_unused]] DEVICE work_range part_of(const step_of& l) {
    const plan_step& s = *l.step;
    return work_range{max(s.share[0], s.span[0]), min(s.share[1], s.span[1])};
}
[[maybe_unused]] DEVICE work_range part_of(const step_of& l, u32 turn, u64 unit) {
    const plan_step& s = *l.step;
    const u64 begin = min(s.share[0] + turn * unit, s.share[1]), end = min(begin + unit, s.share[1]);
    return work_range{max(begin, s.span[0]), min(end, s.span[1])};
}

// ---------------------------------------------------------------------------------------------- steps that synchronise

// False if the block has to end.
[[maybe_unused]] DEVICE bool meet(const block_steps& b) { return !__syncthreads_or(b.has_failed); }

[[maybe_unused]] DEVICE void add(const block_steps& b, const step_of& l, u32 kind, bool relaxed, u32 counts) {
    if (!b.has_failed) add(l, kind, relaxed, counts);
}
// A step that has to wait until it comes again: step(round, w) is false then.
template <class Step> DEVICE void in_rounds(block_steps& b, const step_of& l, Step step) {
    u32 round = 0;
    awaited w;
    while (!b.has_failed && !step(round, w)) b.has_failed = !wait(l, w);
}
[[maybe_unused]] DEVICE void take(block_steps& b, const step_of& l, u32 kind, u32 counts) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return take(l, kind, counts, round, w); });
}
[[maybe_unused]] DEVICE void arrive(block_steps& b, const step_of& l) {
    u32 round = 0;
    awaited w;
    if (!b.has_failed && !arrive(l, round, w)) b.has_failed = !wait(l, w);
}
[[maybe_unused]] DEVICE void copy(block_steps& b, const step_of& l, work_range part) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return post_copy(l, part, round, w); });
}
[[maybe_unused]] DEVICE void raise(block_steps& b, const step_of& l, u32 counts) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return post_signals(l, counts, round, w); });
}
[[maybe_unused]] DEVICE void flush(block_steps& b, const step_of& l) {
    in_rounds(b, l, [&](u32& round, awaited& w) { return flush(l, round, w); });
}
