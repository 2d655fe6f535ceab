// Lists of tensors in one launch: the rows or vectors of all tensors, one tensor after the other. Behind slots.cuh.

// The index of the tensor to which a row or a vector belongs.
DEVICE u32 tensor_of(const list& l, u32 index) {
    u32 found = 0;
#pragma unroll
    for (u32 step = MAX_TENSORS / 2; step > 0; step /= 2)
        if (found + step < l.tensors && l.first[found + step] <= index) found += step;
    return found;
}
