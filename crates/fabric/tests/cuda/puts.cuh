// A test of puts: in each call every rank tells all others a row of words, which differ from call to call. Behind slots.cuh.
//
// A rank has two slots for each sender, which calls use in turn, and a word in each that has the number of the call which filled it. A
// rank sends call e + 2 when it has heard of call e + 1 from all: then they have read what it sent in call e.

constexpr u32 ROW_BYTES = 4096;

DEVICE u64* signal_of(u8* memory, u32 slot, u32 sender) { return (u64*)memory + 16 + slot * MOST_RANKS + sender; }
DEVICE u8* row_of(u8* memory, u32 slot, u32 sender) { return memory + 4096 + (slot * MOST_RANKS + sender) * ROW_BYTES; }
DEVICE u8* sent_of(u8* memory, u32 slot) { return row_of(memory, 2, slot); }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
puts_to_all(const __grid_constant__ arguments a, const __grid_constant__ mail p) {
    begin_kernel<AT_END>(a);
    const u64 call = *(u64*)p.own + 1;
    const u32 slot = call % 2, words = ROW_BYTES / 4;
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        const u32 word = (u32)call * 1000003 + p.rank * 10007 + i;
        ((u32*)sent_of(p.own, slot))[i] = word;
        for (u32 rank = 0; rank < p.ranks; ++rank)
            if (rank != p.rank && p.near[rank]) ((u32*)row_of(p.near[rank], slot, p.rank))[i] = word;
    }
    __syncthreads();
    if (threadIdx.x < p.ranks && threadIdx.x != p.rank) {
        const u32 rank = threadIdx.x;
        fence_sys();
        if (p.near[rank]) st_release_sys(signal_of(p.near[rank], slot, p.rank), call);
        else nvshmemi_transfer_put_signal<nvshmemi_threadgroup_thread>(
            row_of(p.own, slot, p.rank), sent_of(p.own, slot), ROW_BYTES, signal_of(p.own, slot, p.rank), call,
            NVSHMEMI_AMO_SIGNAL_SET, (int)rank, true);
    }
    bool came = true;
    if (threadIdx.x < p.ranks && threadIdx.x != p.rank) {
        u32 missing = threadIdx.x;
        const waiter patience = start_waiting(a.limit_ns, a.board, p.rank, a.doing);
        came = wait_until(patience, missing, call, [&](tag& seen) {
            seen.low = ld_acquire_sys(signal_of(p.own, slot, missing));
            return seen.low == call;
        });
        nvshmemi_transfer_syncapi_update_mem();
    }
    if (!__syncthreads_and(came)) return;
    // A difference anywhere is one in the output.
    for (u32 rank = 0; rank < p.ranks; ++rank)
        for (u32 i = threadIdx.x; rank != p.rank && i < words; i += blockDim.x) {
            const u32 word = (u32)call * 1000003 + rank * 10007 + i;
            if (((volatile u32*)row_of(p.own, slot, rank))[i] != word) atomicAdd((u32*)a.output, 1u);
        }
    __syncthreads();
    if (threadIdx.x == 0) *(u64*)p.own = call;
}
