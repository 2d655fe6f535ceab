// Lists of tensors in one launch: the rows or vectors of all tensors, one tensor after the other. Behind slots.cuh.

constexpr u32 MAX_TENSORS = 64;

// Rust's `List` has the same layout.
struct list {
    const u8* input[MAX_TENSORS];
    u8* output[MAX_TENSORS];
    u32 count[MAX_TENSORS];     // bytes of a block, or elements where they are reduced
    u32 first[MAX_TENSORS + 1]; // the first row, or vector, of each; then the number of all
    u32 tensors;
};

// The index of the tensor to which a row or a vector belongs.
DEVICE u32 tensor_of(const list& l, u32 index) {
    u32 found = 0;
#pragma unroll
    for (u32 step = MAX_TENSORS / 2; step > 0; step /= 2)
        if (found + step < l.tensors && l.first[found + step] <= index) found += step;
    return found;
}

#define LIST_KERNEL(name)                                                                                   \
    DEVICE void name##_body(const arguments& a, const list& l);                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)                                         \
    name(const __grid_constant__ arguments a, const __grid_constant__ list l) {                             \
        pdl_wait();                                                                                         \
        const block_end end(a);                                                                             \
        if (a.dependents == AT_START) pdl_launch_dependents();                                              \
        name##_body(a, l);                                                                                  \
    }                                                                                                       \
    DEVICE void name##_body(const arguments& a, const list& l)
