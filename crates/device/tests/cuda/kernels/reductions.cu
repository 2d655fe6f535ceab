// Block reductions and work splitting, for comparison with the host's.

#define REDUCTIONS(A, name)                                                                    \
    extern "C" __global__ void reduce_##name(A* to, const A* from) {                           \
        u32 i = thread_in_block();                                                             \
        A* mine = to + 4 * i;                                                                  \
        mine[0] = block_reduce(from[i], sum_of<A>());                                          \
        mine[1] = block_reduce(from[i], prod_of<A>());                                         \
        mine[2] = block_reduce(from[i], min_of<A>());                                          \
        mine[3] = block_reduce(from[i], max_of<A>());                                          \
    }
REDUCTIONS(float, f32)
REDUCTIONS(double, f64)
REDUCTIONS(i64, i64)

extern "C" __global__ void split(u64* to, u64 count) {
    work_range mine = work_of_block(count);
    if (threadIdx.x == 0) {
        to[2 * blockIdx.x] = mine.begin;
        to[2 * blockIdx.x + 1] = mine.end;
    }
}
