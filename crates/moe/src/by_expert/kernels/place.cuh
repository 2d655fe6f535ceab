// Where the rows of each expert begin and end at this rank, from what Notify has counted. No other rank has a part in it. Behind
// slots.cuh.

constexpr u32 MAX_LOCAL = 1024; // experts of a rank

// Rust's `PlaceCall` has the same layout.
struct place_call {
    const u32* chosen_by; // [WORLD, local], as in notify.cuh
    const u32* counts;    // [WORLD, WORLD], and so
    u32* first;           // [WORLD, local]: the row of the first token of each rank for each expert, room or not
    u32* kept;            // [local]: tokens that there is room for
    u32* padded;          // [local]: the rows of these, with the padding
    u32* overflow;        // whether there is no room for some
    u32* received;        // how many tokens arrive
    u32* needed;          // how many rows there would be without a limit, with the padding
    u32 local, multiple, limit;
};

DEVICE u32 padded_to(u32 count, u32 multiple) { return (count + multiple - 1) / multiple * multiple; }

// One block, whose threads have some experts each.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
place(const __grid_constant__ arguments a, const __grid_constant__ place_call k) {
    __shared__ u32 counts[MAX_LOCAL], rows[MAX_LOCAL];
    pdl_wait();
    if (a.dependents == AT_START) pdl_launch_dependents();
    for (u32 expert = threadIdx.x; expert < k.local; expert += THREADS) {
        u32 count = 0;
        for (u32 from = 0; from < WORLD; ++from) count += k.chosen_by[from * k.local + expert];
        counts[expert] = count;
        rows[expert] = padded_to(count, k.multiple);
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < k.local; expert += THREADS) {
        u32 base = 0;
        for (u32 before = 0; before < expert; ++before) base += rows[before];
        const u32 count = counts[expert], end = base + count, kept = min(end, k.limit) - min(base, k.limit);
        for (u32 from = 0, row = base; from < WORLD; ++from) {
            k.first[from * k.local + expert] = row;
            row += k.chosen_by[from * k.local + expert];
        }
        k.kept[expert] = kept;
        k.padded[expert] = padded_to(kept, k.multiple);
        if (expert == k.local - 1) {
            *k.overflow = end > k.limit;
            *k.needed = base + rows[expert];
        }
    }
    if (threadIdx.x == 0) {
        u32 received = 0;
        for (u32 from = 0; from < WORLD; ++from) received += k.counts[from * WORLD + a.rank];
        *k.received = received;
    }
}
