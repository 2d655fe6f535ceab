// All-reduce on registered memory: every rank loads the inputs from its peers' memory. Behind slots.cuh and reduce.cuh.
//
// Nothing is staged: the lanes carry only flags, a vector for each block. A block synchronises with the blocks of the same index
// on the other GPUs before it loads, because their inputs are complete then, and before it ends: then no peer loads from its
// input any more, and the peers' stores into its output have arrived. A flag is released and acquired, because it orders other
// data.

// Synchronises with the peers' blocks of this index, in the lanes from `first`; false if a peer is missing.
DEVICE bool meet(const arguments& a, reader& r, u32 first) {
    __syncthreads();
    bool came = true;
    if (threadIdx.x < PEERS) {
        const u32 peer = rank_of(a, threadIdx.x);
        st_release_sys((u32*)(a.peer[threadIdx.x] + lane_at(a, r.slot, first + a.rank)) + blockIdx.x * 4, 1u);
        const u32* flag = (const u32*)(a.own + lane_at(a, r.slot, first + peer)) + blockIdx.x * 4;
        came = r.wait<false>([&](u32& missing) {
            missing = peer;
            return ld_acquire_sys(flag) != EMPTY;
        });
    }
    return __syncthreads_and(came);
}

// Between two synchronisations, calls store(i, reduced) for the vectors of all ranks' inputs from `first` to `end`. False for a thread that
// waited in vain or found a failure.
template <bool PLAIN, class Store>
DEVICE bool reduce_registered(const arguments& a, const places& p, u32 first, u32 end, Store store) {
    const turn t = begin(a, load_control(a));
    if (!advance(a, t, gridDim.x, gridDim.x)) return false;
    reader r(a, t);
    if (!meet(a, r, 0)) return false;
    const u32 step = grid_threads();
    for (u32 i = first + grid_thread(); i < end; i += DEPTH * step) {
        uint4 got[DEPTH][WORLD];
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n)
#pragma unroll
            for (u32 k = 0; k < WORLD; ++k)
                if (n == 0 || i + n * step < end) got[n][k] = elements<PLAIN>(p.input[k], a.count).load(i + n * step);
#pragma unroll
        for (u32 n = 0; n < DEPTH; ++n)
            if (n == 0 || i + n * step < end) store(i + n * step, reduce(got[n]));
    }
    if (!meet(a, r, WORLD)) return false;
    return r.finish();
}

// Every rank loads and reduces everything: (WORLD - 1) · n bytes in.
template <bool PLAIN> DEVICE void one_shot_registered_of(const arguments& a, const places& p) {
    const elements<PLAIN> out(a.output, a.count);
    const u32 vectors = vectors_of(a.count);
    const bool done = reduce_registered<PLAIN>(a, p, 0, vectors, [&](u32 i, uint4 sum) { out.store(i, sum); });
    if (!done) fill_nan(out, grid_thread(), grid_threads(), vectors);
}

// Every rank loads and reduces a part, and stores it to all ranks: (WORLD - 1) / WORLD · n bytes in, and as many out. It works in
// place, because no other rank loads or stores this part of any rank.
template <bool PLAIN> DEVICE void two_shot_registered_of(const arguments& a, const places& p) {
    const u32 vectors = vectors_of(a.count), part = (vectors + WORLD - 1) / WORLD;
    const u32 first = a.rank * part < vectors ? a.rank * part : vectors;
    const u32 end = first + part < vectors ? first + part : vectors;
    const bool done = reduce_registered<PLAIN>(a, p, first, end, [&](u32 i, uint4 sum) {
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k) elements<PLAIN>(p.output[k], a.count).store(i, sum);
    });
    if (!done) fill_nan(elements<PLAIN>(a.output, a.count), grid_thread(), grid_threads(), vectors);
}

KERNEL_OF(one_shot_registered, places, p) { one_shot_registered_of<false>(a, p); }
KERNEL_OF(one_shot_registered_plain, places, p) { one_shot_registered_of<true>(a, p); }
KERNEL_OF(two_shot_registered, places, p) { two_shot_registered_of<false>(a, p); }
KERNEL_OF(two_shot_registered_plain, places, p) { two_shot_registered_of<true>(a, p); }
