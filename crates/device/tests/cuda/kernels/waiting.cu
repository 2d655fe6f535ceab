// Waits for a signal; says in `outcome` how that ended: 1 it came, 2 it did not.
extern "C" __global__ void wait_once(u32* outcome, const u32* signal, u32 expected, u64 limit_ns, wait_board* board) {
    waiter w = start_waiting(limit_ns, board, 3, tag{42, 43});
    bool came = wait_for_signal(w, 5, signal, expected);
    if (threadIdx.x == 0) outcome[blockIdx.x] = came ? 1 : 2;
}

extern "C" __global__ void send_signal(u32* signal, u32 value) { st_release_sys(signal, value); }
