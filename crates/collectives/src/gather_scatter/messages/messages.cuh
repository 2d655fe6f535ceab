// Messages between GPUs: any bytes from one rank to another, without the other ranks. Behind rows.cuh.
//
// Each ordered pair of ranks has CHANNELS rings of rows in the receiver's memory. A message is a head, which describes it, and
// its rows. Row i goes through ring i % CHANNELS, and a warp serves one ring at a time, so warps need not wait for each other.
// The sender fills a ring as far as it knows that its rows are empty. The receiver waits for a row, empties it, and reports its
// position to the sender after each quarter of the ring. So a message may have any length, however small the memory; a short message
// neither waits for its receiver nor, usually, for a release to the sender.
//
// The position in a ring is in device memory, so that graphs may be replayed between other calls. Both ranks may send
// and receive in one kernel: different warps do so, so neither waits for the other. The warps of a message serve its rings in
// ascending order, so the lowest ring that is not done has a warp at either end, however many warps each end has.

static_assert(WORLD * CHANNELS <= MAX_BLOCKS, "a ring has a control of its own");
constexpr u32 SENT = 4; // rows that a sending warp stores at a time, while it loads as many
// A batch costs a receiving warp a poll and a release, whatever its size. A sender must be able to complete the batch that the
// receiver waits for: what the receiver has not reported yet, the batch, and what the sender holds back must fit into a ring. The
// receiver has not reported the batch before, and less than a quarter of the ring.
constexpr u32 RECEIVED_AT_ONCE = 14, RING = 64; // with 16, registers spill
static_assert(RECEIVED_AT_ONCE + (RING / 4 - 1) + RECEIVED_AT_ONCE + (SENT - 1) <= RING, "a sender can complete a batch");

// In the control words of a peer's ring, `slot` counts the rows sent and `dirty_lower` the rows received. `dirty_upper` counts the
// sent rows that the peer has received; the peer writes it.
DEVICE control* state_of(u8* arena, u32 peer, u32 channel) { return (control*)arena + peer * CHANNELS + channel; }

// Bytes of memory for the rings of one sender.
DEVICE u32 region_of(const arguments& a) { return SLOTS * a.slot_stride / WORLD / 512 * 512; }


// The address of this lane's vector of a ring's first row, in the receiver's arena. Half of the rings are in either channel of an arena.
DEVICE u8* ring_at(const arguments& a, u8* arena, u32 sender, u32 channel) {
    u8* const at = arena + (channel % 2 == 0 ? 0 : a.other - a.own);
    return at + SLOTS_AT + sender * region_of(a) + channel / 2 * RING * 512 + lane_id() * 16;
}

// For a whole warp: waits until `ready()` is true; until then the peer is the missing rank. False if it gave up.
template <class Ready> DEVICE bool wait_for(const arguments& a, waiter& patience, u32 peer, Ready ready) {
    u32 missing = a.rank;
    const auto is_ready = [&](tag&) {
        const bool is = ready();
        missing = is ? a.rank : peer;
        return is;
    };
    const bool came = wait_until<true>(patience, missing, 0, is_ready, [] {});
    if (!came) stop_calls((control*)a.own, (control*)a.other);
    return came;
}

// Stores the position up to which a warp has used a ring. If another launch has used the ring meanwhile, a graph was launched beside a
// call: both had the same position.
DEVICE void advance_ring(const arguments& a, u32* position, u32 from, u32 to) {
    if (lane_id() == 0 && atomicCAS(position, from, to) != from) stop_overlap(a);
}

// Sends the rows of one ring. Row 0 is the head.
DEVICE bool send_ring(const arguments& a, const messages& m, waiter& patience, u32 next, u32 peer, u32 channel) {
    control* const state = state_of(a.own, peer, channel);
    const u32 total = 1 + rows_of(m.sent[peer]);
    const bytes from(m.input[peer], m.sent[peer]);
    u8* const at = ring_at(a, a.peer[next], a.rank, channel);
    uint4 rows[SENT];
    const auto load = [&](u32 row) {
#pragma unroll
        for (u32 k = 0; k < SENT; ++k) {
            rows[k] = make_uint4(0, 0, 0, 0);
            const u32 index = row + k * CHANNELS;
            if (index != 0 && index < total) rows[k] = load_row(from, index - 1);
        }
    };
    load(channel); // while the state is loaded
    if (channel == 0 && lane_id() == 0)
        rows[0] = make_uint4((u32)a.doing.low, (u32)(a.doing.low >> 32), (u32)m.sent_count[peer], (u32)(m.sent_count[peer] >> 32));
    const u32 first = ld_relaxed_sys(&state->call);
    u32 n = first, known = ld_acquire_sys(&state->dirty_upper);
    for (u32 row = channel; row < total; row += SENT * CHANNELS) {
        const u32 left = (total - row + CHANNELS - 1) / CHANNELS, count = left < SENT ? left : SENT;
        // Lanes may have seen different reports: all wait if one has to.
        if (__any_sync(WHOLE_WARP, n + count - known > RING)) {
            // The rows are empty once the receiver has reported it: the acquire pairs with the release in `receive_ring`.
            const bool has_room = wait_for(a, patience, peer, [&] {
                known = ld_acquire_sys(&state->dirty_upper);
                return n + count - known <= RING;
            });
            if (!has_room) return false;
        }
        uint4 sent[SENT];
#pragma unroll
        for (u32 k = 0; k < SENT; ++k) sent[k] = masked(rows[k]);
        load(row + SENT * CHANNELS);
#pragma unroll
        for (u32 k = 0; k < SENT; ++k)
            if (k < count) store16_volatile(at + (n + k) % RING * 512, sent[k]);
        n += count;
    }
    advance_ring(a, &state->call, first, n);
    return true;
}

// Receives the rows of one ring, and compares the head with what is expected.
DEVICE bool receive_ring(const arguments& a, const messages& m, waiter& patience, u32 next, u32 peer, u32 channel) {
    control* const state = state_of(a.own, peer, channel);
    u32* const told = &state_of(a.peer[next], a.rank, channel)->dirty_upper;
    const u32 total = 1 + rows_of(m.received[peer]), quarter = RING / 4;
    const bytes to(m.output[peer], m.received[peer]);
    u8* const at = ring_at(a, a.own, peer, channel);
    const u32 first = ld_relaxed_sys(&state->dirty_lower);
    u32 n = first, said = n / quarter;
    // Reports to the sender the whole quarters that have been emptied. A release waits for the stores before it, so the release for
    // a batch follows the wait for the next batch.
    const auto tell = [&] {
        if (n / quarter == said) return;
        said = n / quarter;
        __syncwarp(); // all lanes have emptied their vectors
        if (lane_id() == 0) st_release_sys(told, said * quarter); // pairs with the sender's acquire
    };
    for (u32 row = channel; row < total; row += RECEIVED_AT_ONCE * CHANNELS) {
        const u32 left = (total - row + CHANNELS - 1) / CHANNELS, count = left < RECEIVED_AT_ONCE ? left : RECEIVED_AT_ONCE;
        uint4 got[RECEIVED_AT_ONCE];
        const bool came = wait_for(a, patience, peer, [&] {
            bool complete = true;
#pragma unroll
            for (u32 k = 0; k < RECEIVED_AT_ONCE; ++k)
                if (k < count) got[k] = load16_volatile(at + (n + k) % RING * 512);
#pragma unroll
            for (u32 k = 0; k < RECEIVED_AT_ONCE; ++k)
                if (k < count) complete &= !has_empty(got[k]);
            return complete;
        });
        if (!came) return false;
        release_dependents(a);
        tell();
#pragma unroll
        for (u32 k = 0; k < RECEIVED_AT_ONCE; ++k) {
            if (k >= count) break;
            store16(at + (n + k) % RING * 512, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
            const uint4 v = unmasked(got[k]);
            if (row + k * CHANNELS != 0) {
                store_row(to, row + k * CHANNELS - 1, v);
                continue;
            }
            const tag theirs{v.x | (u64)v.y << 32, v.z | (u64)v.w << 32};
            const bool differs = theirs.low != a.doing.low || theirs.high != m.received_count[peer];
            if (!__shfl_sync(WHOLE_WARP, differs, 0)) continue;
            if (lane_id() == 0) {
                stop_calls((control*)a.own, (control*)a.other);
                record_wait(a.board, DISAGREED, a.rank, peer, tag{a.doing.low, m.received_count[peer]}, 0, theirs);
            }
            return false;
        }
        n += count;
    }
    tell();
    advance_ring(a, &state->dirty_lower, first, n);
    return true;
}

// The peer of the `n`-th message of a direction; `ranks` are the bits of the ranks that have one.
DEVICE u32 peer_of(const arguments& a, u32 ranks, u32 n) {
    u32 next = 0;
    for (; next < PEERS; ++next)
        if ((ranks >> rank_of(a, next) & 1) != 0 && n-- == 0) break;
    return next;
}

// All messages of a launch. Each message has an equal number of blocks. The blocks that receive, or all if none does, also copy the
// piece that this rank keeps, while the peers' rows travel.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
exchange(const __grid_constant__ arguments a, const __grid_constant__ messages m) {
    begin_kernel(a);
    const u32 sends = __popc(m.to), messages_here = sends + __popc(m.from);
    const u32 message = blockIdx.x % messages_here, block = blockIdx.x / messages_here, blocks = gridDim.x / messages_here;
    if (ld_relaxed_sys(&((control*)a.own + blockIdx.x)->failed) != 0) return;
    const u32 before = m.from != 0 ? sends : 0; // the messages whose blocks copy nothing
    if (message >= before) {
        const bytes from(m.own_input, m.own_bytes), to(m.own_output, m.own_bytes);
        const u32 copying = messages_here - before, step = blocks * copying * THREADS;
        const u32 first = (block * copying + message - before) * THREADS + threadIdx.x;
        for (u32 at = first; at * 16 < m.own_bytes; at += step) to.store(at, from.load(at));
    }
    const bool is_sent = message < sends;
    const u32 next = is_sent ? peer_of(a, m.to, message) : peer_of(a, m.from, message - sends), peer = rank_of(a, next);
    const u64 count = is_sent ? m.sent_count[peer] : m.received_count[peer];
    waiter patience = start_waiting(a.limit_ns, a.board, a.rank, tag{a.doing.low, count});
    const rows mine = rows_of_warp(block, blocks);
    const u32 total = 1 + rows_of(is_sent ? m.sent[peer] : m.received[peer]);
    for (u32 channel = mine.first; channel < CHANNELS && channel < total; channel += mine.step) {
        const bool done = is_sent ? send_ring(a, m, patience, next, peer, channel)
                                  : receive_ring(a, m, patience, next, peer, channel);
        if (!done) return;
    }
}
