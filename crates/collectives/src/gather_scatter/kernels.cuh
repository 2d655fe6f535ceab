// All-gather, all-to-all and broadcast over NVLink: bytes of any meaning, so any word may be EMPTY. Behind cuda/slots.cuh.
//
// A warp sends rows: 31 vectors of data and one of masks. A word that is EMPTY goes as zero and has its bit set in the
// mask, whose words are never EMPTY themselves, having 31 bits. That costs a thirty-first of the links, where a flag beside
// every 12 bytes would cost a third.

constexpr u32 ROW = 31;

// Bytes in this GPU's memory, of any number and at any address.
struct bytes {
    u8* data;
    u64 count;
    u32 alignment; // of the address: 16, 4 or 1

    DEVICE bytes(const void* at, u64 count)
        : data((u8*)at), count(count), alignment((u64)at % 16 == 0 ? 16 : (u64)at % 4 == 0 ? 4 : 1) {}

    // The vector at `index`; bytes past the end are zero.
    DEVICE uint4 load(u64 index) const {
        const u64 first = index * 16;
        if (first + 16 <= count) {
            if (alignment == 16) return load16(data + first);
            if (alignment == 4) {
                const u32* words = (const u32*)(data + first);
                return make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 k = 0; k < 16; ++k)
            if (first + k < count) words[k / 4] |= (u32)data[first + k] << (k % 4 * 8);
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    DEVICE void store(u64 index, uint4 v) const {
        const u64 first = index * 16;
        if (first + 16 <= count) {
            if (alignment == 16) return store16(data + first, v);
            if (alignment == 4) {
                u32* words = (u32*)(data + first);
                words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
                return;
            }
        }
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 k = 0; k < 16; ++k)
            if (first + k < count) data[first + k] = (u8)(words[k / 4] >> (k % 4 * 8));
    }
};

DEVICE u32 lane_id() { return threadIdx.x % 32; }
DEVICE u64 rows_of(u64 count) { return (count + 16 * ROW - 1) / (16 * ROW); }

// What this lane sends of the row whose vector it has; all lanes of a warp together.
DEVICE uint4 masked(uint4 v) {
    const bool data = lane_id() < ROW;
    const uint4 mask = make_uint4(
        __ballot_sync(~0u, data && v.x == EMPTY), __ballot_sync(~0u, data && v.y == EMPTY),
        __ballot_sync(~0u, data && v.z == EMPTY), __ballot_sync(~0u, data && v.w == EMPTY));
    if (!data) return mask;
    if (v.x == EMPTY) v.x = 0;
    if (v.y == EMPTY) v.y = 0;
    if (v.z == EMPTY) v.z = 0;
    if (v.w == EMPTY) v.w = 0;
    return v;
}
DEVICE uint4 unmasked(uint4 v) {
    const u32 bit = 1u << lane_id();
    const uint4 mask = make_uint4(__shfl_sync(~0u, v.x, ROW), __shfl_sync(~0u, v.y, ROW),
                                  __shfl_sync(~0u, v.z, ROW), __shfl_sync(~0u, v.w, ROW));
    if (mask.x & bit) v.x = EMPTY;
    if (mask.y & bit) v.y = EMPTY;
    if (mask.z & bit) v.z = EMPTY;
    if (mask.w & bit) v.w = EMPTY;
    return v;
}

// This lane's vector of a row.
DEVICE uint4 load_row(const bytes& from, u64 row) {
    return lane_id() < ROW ? from.load(row * ROW + lane_id()) : make_uint4(0, 0, 0, 0);
}
DEVICE void store_row(const bytes& to, u64 row, uint4 v) {
    if (lane_id() < ROW) to.store(row * ROW + lane_id(), v);
}

// Waits for a row of a peer; false, in all lanes, if one gave up.
DEVICE bool collect_row(reader& r, u32 peer, u64 row, uint4& v) {
    const arguments& a = r.a;
    const bool came = r.wait([&](u32& missing) {
        v = load16_volatile(vector_at(a, a.rank, r.slot, peer, row * 32 + lane_id()));
        missing = peer;
        return !has_empty(v);
    });
    if (!__all_sync(~0u, came)) return false;
    v = unmasked(v);
    return true;
}

// A warp's share of rows, where so many blocks share them.
struct rows {
    u64 first, step;
};
DEVICE rows rows_of_warp(u32 block, u32 blocks) {
    const u32 warps = blockDim.x / 32;
    return rows{(u64)block * warps + threadIdx.x / 32, (u64)blocks * warps};
}

// Nothing moves: waits until everyone is here. One block.
extern "C" __global__ void __launch_bounds__(THREADS) barrier(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const turn t = begin(a, load_control(a));
    advance(a, t, 0, 0);
    reader(a, t).finish();
}

// Everyone sends its block to everyone: (WORLD - 1) · n bytes out.
extern "C" __global__ void __launch_bounds__(THREADS) all_gather(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const u64 count = rows_of(a.count);
    const turn t = begin(a, load_control(a));
    const bytes in(a.input, a.count), own(a.output + a.rank * a.stride, a.count);
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    for (u64 row = mine.first; row < count; row += mine.step) {
        const uint4 v = load_row(in, row);
        push(a, t, a.rank, row * 32 + lane_id(), masked(v));
        if (own.data != in.data) store_row(own, row, v);
    }
    advance(a, t, (u32)count * 32, 0);
    reader r(a, t);
    for (u64 row = mine.first; row < count; row += mine.step)
#pragma unroll
        for (u32 k = 1; k < WORLD; ++k) {
            const u32 peer = (a.rank + WORLD - k) % WORLD;
            uint4 v;
            if (!collect_row(r, peer, row, v)) return;
            store_row(bytes(a.output + peer * a.stride, a.count), row, v);
        }
    r.finish();
}

// Everyone sends everyone a block of its own: (WORLD - 1) · n bytes out. Each block serves one peer, and each warp the same
// rows in both directions, so that the output may be the input.
extern "C" __global__ void __launch_bounds__(THREADS) all_to_all(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const u64 count = rows_of(a.count);
    const turn t = begin(a, load_control(a));
    const u32 peer = (a.rank + 1 + blockIdx.x % (WORLD - 1)) % WORLD;
    const rows mine = rows_of_warp(blockIdx.x / (WORLD - 1), gridDim.x / (WORLD - 1));
    const bytes in(a.input + peer * a.stride, a.count), out(a.output + peer * a.stride, a.count);
    for (u64 row = mine.first; row < count; row += mine.step)
        store16_volatile(vector_at(a, peer, t.slot, a.rank, row * 32 + lane_id()), masked(load_row(in, row)));
    advance(a, t, (u32)count * 32, 0);
    const bytes own(a.input + a.rank * a.stride, a.count), to(a.output + a.rank * a.stride, a.count);
    const rows all = rows_of_warp(blockIdx.x, gridDim.x);
    if (own.data != to.data)
        for (u64 row = all.first; row < count; row += all.step) store_row(to, row, load_row(own, row));
    reader r(a, t);
    for (u64 row = mine.first; row < count; row += mine.step) {
        uint4 v;
        if (!collect_row(r, peer, row, v)) return;
        store_row(out, row, v);
    }
    r.finish();
}

// The root sends the same to everyone: (WORLD - 1) · n bytes out of the root.
extern "C" __global__ void __launch_bounds__(THREADS) broadcast(const __grid_constant__ arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const u64 count = rows_of(a.count);
    const turn t = begin(a, load_control(a));
    const bytes in(a.input, a.count), out(a.output, a.count);
    const rows mine = rows_of_warp(blockIdx.x, gridDim.x);
    if (a.rank == a.root)
        for (u64 row = mine.first; row < count; row += mine.step) {
            const uint4 v = load_row(in, row);
            push(a, t, a.rank, row * 32 + lane_id(), masked(v));
            if (out.data != in.data) store_row(out, row, v);
        }
    advance(a, t, (u32)count * 32, 0);
    reader r(a, t);
    if (a.rank != a.root)
        for (u64 row = mine.first; row < count; row += mine.step) {
            uint4 v;
            if (!collect_row(r, a.root, row, v)) return;
            store_row(out, row, v);
        }
    r.finish();
}
