// Bytes in this GPU's memory as rows, and calls that send and receive them. Behind rows.cuh.

// Bytes in this GPU's memory, of any number and at any address.
struct bytes {
    u8* data;
    u32 count;
    u32 alignment; // of the address: 16, 4 or 1

    DEVICE bytes(const void* at, u32 count)
        : data((u8*)at), count(count), alignment((u64)at % 16 == 0 ? 16 : (u64)at % 4 == 0 ? 4 : 1) {}

    // The vector at `index`; bytes past the end are zero.
    DEVICE uint4 load(u32 index) const {
        const u32 first = index * 16;
        if (first + 16 <= count) {
            if (alignment == 16) return load16(data + first);
            if (alignment == 4) {
                const u32* words = (const u32*)(data + first);
                return make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
        u64 low = 0, high = 0;
#pragma unroll 1
        for (u32 k = 0; k < 16 && first + k < count; ++k) {
            const u64 byte = data[first + k];
            if (k < 8) low |= byte << (k * 8);
            else high |= byte << (k * 8 - 64);
        }
        return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
    }

    DEVICE void store(u32 index, uint4 v) const {
        const u32 first = index * 16;
        if (first + 16 <= count) {
            if (alignment == 16) return store16(data + first, v);
            if (alignment == 4) {
                u32* words = (u32*)(data + first);
                words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
                return;
            }
        }
        const u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
#pragma unroll 1
        for (u32 k = 0; k < 16 && first + k < count; ++k)
            data[first + k] = (u8)((k < 8 ? low : high) >> (k % 8 * 8));
    }
};

DEVICE u32 rows_of(u32 count) { return (count + 16 * ROW - 1) / (16 * ROW); }

// This lane's vector of a row.
DEVICE uint4 load_row(const bytes& from, u32 row) {
    return lane_id() < ROW ? from.load(row * ROW + lane_id()) : make_uint4(0, 0, 0, 0);
}
DEVICE void store_row(const bytes& to, u32 row, uint4 v) {
    if (lane_id() < ROW) to.store(row * ROW + lane_id(), v);
}

// Begins a call, and calls send(t, row, vector) for a warp's share of `count` rows.
template <class Send>
DEVICE void begin_and_send_rows(const arguments& a, turn& t, const bytes& from, const rows& mine, u32 count, Send send) {
    begin_and_send<DEPTH, DEPTH, true>(a, t, mine.first, mine.step, count, [&](u32 row) { return load_row(from, row); }, send);
}

// Rows of one peer that a warp loads at a time: the latency of memory determines the time of a row, and rows behind the last
// sent one keep no links waiting.
constexpr u32 RECEIVED = PEERS == 1 ? 4 : DEPTH;

// Stores a warp's share of the rows that a peer has sent; false if it gave up.
DEVICE bool receive_rows(reader& r, u32 peer, const rows& mine, u32 count, const bytes& to) {
    const u32 lane = peer * r.a.lane_stride;
    u32 row = mine.first;
    for (; row + (RECEIVED - 1) * mine.step < count; row += RECEIVED * mine.step) {
        u32 at[RECEIVED], peers[RECEIVED];
        uint4 got[RECEIVED];
#pragma unroll
        for (u32 k = 0; k < RECEIVED; ++k) at[k] = lane + (row + k * mine.step) * 512, peers[k] = peer;
        if (!collect_rows(r, at, peers, got)) return false;
        if (serves_its_senders()) release_dependents(r.a);
#pragma unroll
        for (u32 k = 0; k < RECEIVED; ++k) store_row(to, row + k * mine.step, unmasked(got[k]));
    }
    for (; row < count; row += mine.step) {
        uint4 got[1];
        if (!collect_rows(r, {lane + row * 512}, {peer}, got)) return false;
        if (serves_its_senders()) release_dependents(r.a);
        store_row(to, row, unmasked(got[0]));
    }
    return true;
}
