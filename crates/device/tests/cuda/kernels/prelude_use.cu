// Uses every part of the prelude, so that it is compiled for every architecture.

template <class T> DEVICE void reduce_vectors(T* to, const T* a, const T* b, u64 vectors) {
    work_range mine = work_of_block(vectors);
    for (u64 i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
        vec16<T> x;
        x.words = load16_once(a + i * vec16<T>::LANES);
        wide_vec<T> sum = widen_vec(x), other = widen_vec(load_vec(b + i * vec16<T>::LANES));
#pragma unroll
        for (u32 k = 0; k < vec16<T>::LANES; ++k)
            sum.lane[k] = sum_of<typename wide<T>::type>()(sum.lane[k], other.lane[k]);
        store_vec(to + i * vec16<T>::LANES, narrow_vec<T>(sum));
    }
    if (threadIdx.x == 0) to[0] = narrow<T>(widen(a[0]));
}

#define REDUCE(T) extern "C" __global__ void reduce_##T(T* to, const T* a, const T* b, u64 vectors) { \
    reduce_vectors(to, a, b, vectors);                                                                \
}
REDUCE(f16) REDUCE(bf16) REDUCE(float) REDUCE(double) REDUCE(e4m3) REDUCE(e5m2) REDUCE(i64) REDUCE(i32) REDUCE(i8) REDUCE(u8)

extern "C" __global__ void operators(float* floats, double* doubles, i64* integers, float_pair* pairs, u32* words) {
    u32 i = threadIdx.x;
    floats[i] = block_reduce(floats[i], sum_of<float>()) + block_reduce(floats[i], prod_of<float>());
    floats[i] += block_reduce(floats[i], max_of<float>()) + block_reduce(floats[i], min_of<float>());
    doubles[i] = block_reduce(doubles[i], max_of<double>()) + block_reduce(doubles[i], min_of<double>());
    integers[i] = block_reduce(integers[i], sum_of<i64>()) + block_reduce(integers[i], prod_of<i64>());
    integers[i] += warp_reduce(integers[i], max_of<i64>()) + warp_reduce(integers[i], min_of<i64>());
    e2m1x2 four = narrow_e2m1x2(floats[i], floats[i + 1]);
    pairs[4 * i] = widen(four);
    pairs[4 * i + 1] = widen_bf16x2(narrow_bf16x2(floats[i], floats[i + 1]));
    pairs[4 * i + 2] = widen_f16x2(narrow_f16x2(floats[i], floats[i + 1]));
    words[i] = four.bits;
}

// Pushes to a peer, signals, waits for the peer's signal, reads what it pushed.
extern "C" __global__ void exchange(u8* mine, u8* theirs, u32* my_signal, u32* their_signal, u64* counters,
                                    u64 limit_ns, wait_board* board, u32 epoch) {
    pdl_wait();
    pdl_launch_dependents();
    waiter w = start_waiting(limit_ns, board, 0, tag{7, 0});
    u64 i = grid_thread() * 16;
    tag read;
    load_tag(mine, read.low, read.high);
    store_tag(theirs, read.low, read.high);
    store16(theirs + i, load16(mine + i));
    store16_volatile(theirs + i + grid_threads() * 16, load16_volatile(mine + i));
    __syncthreads();
    if (threadIdx.x == 0) {
        st_release_sys(their_signal + blockIdx.x, epoch);
        st_relaxed_sys(counters, ld_acquire_sys(counters + 1) + ld_relaxed_sys(counters + 2));
        st_release_sys(counters + 3, ld_acquire_gpu(counters + 4));
        red_add_release_sys(counters + 5, 1ull);
        red_add_relaxed_sys(counters + 6, atom_add_acq_rel_gpu(counters + 7, 1ull));
        red_add_release_sys(my_signal + 64, 1u);
        red_add_relaxed_sys(my_signal + 65, atom_add_acq_rel_gpu(my_signal + 66, 1u));
        st_relaxed_sys(my_signal + 67, ld_relaxed_sys(my_signal + 68) + ld_acquire_gpu(my_signal + 69));
    }
    bool arrived = wait_for_signal(w, 1, my_signal + blockIdx.x, epoch);
    if (!__syncthreads_and(arrived)) return;
    fence_sys();
    fence_gpu();
    store16(mine + i, load16_volatile(mine + i + grid_threads() * 16));
}
