// Rows: bytes of any meaning, so any word may be EMPTY. Behind slots.cuh.
//
// A warp sends rows: 31 vectors of data and one of masks. A word that is EMPTY is sent as zero, and its bit is set in the
// mask. A word of the mask has 31 bits and so is never EMPTY itself. The masks cost a thirty-first of the links' bandwidth; a flag
// beside every 12 bytes would cost a third.

constexpr u32 ROW = 31;

// The vector that this lane sends of the row whose vector it has; all lanes of a warp call this together.
DEVICE uint4 masked(uint4 v) {
    const bool data = lane_id() < ROW;
    const uint4 mask = make_uint4(
        __ballot_sync(WHOLE_WARP, data && v.x == EMPTY), __ballot_sync(WHOLE_WARP, data && v.y == EMPTY),
        __ballot_sync(WHOLE_WARP, data && v.z == EMPTY), __ballot_sync(WHOLE_WARP, data && v.w == EMPTY));
    if (!data) return mask;
    if (v.x == EMPTY) v.x = 0;
    if (v.y == EMPTY) v.y = 0;
    if (v.z == EMPTY) v.z = 0;
    if (v.w == EMPTY) v.w = 0;
    return v;
}
DEVICE uint4 unmasked(uint4 v) {
    const u32 bit = 1u << lane_id();
    const uint4 mask = make_uint4(__shfl_sync(WHOLE_WARP, v.x, ROW), __shfl_sync(WHOLE_WARP, v.y, ROW),
                                  __shfl_sync(WHOLE_WARP, v.z, ROW), __shfl_sync(WHOLE_WARP, v.w, ROW));
    if (mask.x & bit) v.x = EMPTY;
    if (mask.y & bit) v.y = EMPTY;
    if (mask.z & bit) v.z = EMPTY;
    if (mask.w & bit) v.w = EMPTY;
    return v;
}

// Waits for some rows, at these places of the slot, of these peers; they are still masked. False if it gave up.
template <u32 COUNT>
DEVICE bool collect_rows(reader& r, const u32 (&at)[COUNT], const u32 (&peers)[COUNT], uint4 (&got)[COUNT]) {
    const u8* slot = r.a.own + lane_at(r.a, r.slot, 0) + lane_id() * 16;
    return r.wait<true>([&](u32& missing) {
        bool complete = true;
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) got[k] = load16_volatile(slot + at[k]);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k)
            if (has_empty(got[k])) {
                complete = false;
                missing = peers[k];
            }
        return complete;
    });
}

// A warp's share of rows that `blocks` blocks divide.
struct rows {
    u32 first, step;
};
DEVICE rows rows_of_warp(u32 block, u32 blocks) {
    const u32 warps = blockDim.x / 32;
    return rows{block * warps + threadIdx.x / 32, blocks * warps};
}
