// Where the rows of each expert begin and end at this rank, from what Notify has counted. No other rank has a part in it. Behind
// slots.cuh.

constexpr u32 MAX_LOCAL = 1024; // experts of a rank

DEVICE u32 padded_to(u32 count, u32 multiple) { return (count + multiple - 1) / multiple * multiple; }

// One block, whose threads have some experts each.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
place(const __grid_constant__ arguments a, const __grid_constant__ place_call k) {
    __shared__ u32 counts[MAX_LOCAL], rows[MAX_LOCAL];
    begin_kernel(a);
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
