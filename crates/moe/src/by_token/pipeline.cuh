// Rows that a warp copies, with many bytes under way at once. Behind slots.cuh.
//
// On Hopper and newer GPUs the multiprocessor's bulk copies move rows, through a ring of stages in shared memory that every warp has.
// They take no registers, and one thread to issue. Older architectures copy through registers. When a row has arrived at a peer, its
// flag is raised there. When a row that came from a peer has been read, an acknowledgement is counted.

// What is done about a row besides copying it; null is nothing.
struct signals {
    u32* raised;  // becomes `value` behind the row
    u32* counted; // is raised by one when the row has been read
    u32 value;
};
constexpr signals NO_SIGNALS{nullptr, nullptr, 0};

// Rows of one or two tensors, whose n-th rows lie side by side in a record.
struct parts {
    const u8* data[2];
    u32 bytes[2]; // of a row, multiples of 16

    DEVICE parts row(u64 index) const { return parts{{data[0] + index * bytes[0], data[1] + index * bytes[1]}, {bytes[0], bytes[1]}}; }
    DEVICE parts of_record(const u8* record) const { return parts{{record, record + bytes[0]}, {bytes[0], bytes[1]}}; }
};

// Whether this warp of a block does nothing but raise flags.
DEVICE bool raises_flags(u32 warp) { return FLAG_WARPS != 0 && warp == RINGS; }

// A sending warp gathers, in BESIDE_BYTES, the words that lie beside several rows.

// Between warps of a block.
DEVICE u32 ld_acquire_block(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
    return v;
}
DEVICE void st_release_block(u32* p, u32 v) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"(shared_address(p)), "r"(v) : "memory");
}

#if __CUDA_ARCH__ >= 900

DEVICE void bulk_expect(u64* arrived, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(arrived)), "r"(bytes) : "memory");
}
// Part of what is expected there.
DEVICE void bulk_load(void* to, const void* from, u32 bytes, u64* arrived) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(arrived)) : "memory");
}
// Makes a barrier of the first lane's bulk loads for each of `count` stages; that lane alone uses them.
DEVICE void bulk_barriers(u64* arrived, u32 count) {
    if (lane_id() == 0)
        for (u32 s = 0; s < count; ++s)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(arrived + s)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void bulk_wait(u64* arrived, u32 parity) {
    u32 is_there = 0;
    while (!is_there)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_there) : "r"(shared_address(arrived)), "r"(parity) : "memory");
}
// A store is a group of its own.
DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All stores but the last `LEFT` have been read from shared memory; or are where they belong.
template <u32 LEFT> DEVICE void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory"); }
template <u32 LEFT> DEVICE void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(LEFT) : "memory"); }
// Order plain accesses before with bulk copies behind: of global memory, which waits for what is under way; of shared memory.
DEVICE void bulk_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DEVICE void bulk_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

constexpr u32 AHEAD = STAGES - 1; // loads that are under way
constexpr u32 LAG = FLAG_WARPS ? 8 : 4;    // stores that may be, when a sender looks which are done
constexpr u32 EVERY = FLAG_WARPS ? 1 : 8;  // stores: how often it looks
// Pieces that are begun and not stored yet, at least AHEAD + 1: those that are loaded, and those that are gathered beside them.
constexpr u32 PENDING = AHEAD == 1 ? 4 : 16;
constexpr u32 FLAGS = FLAG_WARPS ? 16 : 32; // that are not raised yet
// A sender that waits for room for a flag has stored all, and another warp has flags to raise; one that raises its own always has room.
static_assert(FLAGS > LAG + EVERY + (FLAG_WARPS ? 0 : PENDING), "each flag stands behind a store of its own");

// A fence between GPUs takes as long as some rows do. With FLAG_WARPS the senders of a block leave it to one warp to raise their
// flags, which does so for all records that are done by then; else a sender raises its own, those of some pieces behind one fence.
struct pipeline {
    struct piece {
        u8* to;
        u32* counted; // null if nothing is counted
        u32 bytes;
        u32 from;     // in shared memory
        u32 stage;    // that is loaded; STAGES if none is
        u32 is_last;  // of those that store what was loaded
    };
    struct flag {
        u32* at;
        u32 value;
        u32 store; // the number of the store that it stands behind
    };
    struct shared {
        piece pieces[PENDING];
        flag flags[FLAGS];
        u64 arrived[STAGES];
        u32 done;    // flags whose records are where they belong
        u32 raised;  // of these, those that are raised
        u32 is_over; // whether `done` is what it will be
    };

    u8* stages;
    u8* gathered; // BESIDE_BYTES, if the warp is one that sends
    shared& mine;
    u32 begun, stored;        // pieces; only the first lane counts
    u32 flagged, done;        // flags: those that stand behind what is begun, and behind what is done
    u32 loaded, loads_stored; // pieces that are loaded
    u32 phases;               // of the stages' barriers

    // Bulk copies are half as fast where lines of memory and of shared memory do not coincide.
    static DEVICE u8* aligned(void* memory) { return (u8*)memory + (0u - shared_address(memory)) % LINE; }
    static DEVICE shared& of_warp(u32 warp) {
        __shared__ shared all[RINGS];
        return all[min(warp, RINGS - 1)];
    }
    // Before any is made, and before all threads of the block meet.
    static DEVICE void prepare() {
        if (threadIdx.x < RINGS) of_warp(threadIdx.x).done = of_warp(threadIdx.x).raised = of_warp(threadIdx.x).is_over = 0;
    }

    // `memory`: STAGES × STAGE_BYTES for each of the first RINGS warps, then BESIDE_BYTES for each that sends.
    DEVICE pipeline(void* memory)
        : stages(aligned(memory) + threadIdx.x / 32 * (STAGES * STAGE_BYTES)),
          gathered(aligned(memory) + RINGS * STAGES * STAGE_BYTES + threadIdx.x / 32 * BESIDE_BYTES), mine(of_warp(threadIdx.x / 32)),
          begun(0), stored(0), flagged(0), done(0), loaded(0), loads_stored(0), phases(0) {
        bulk_barriers(mine.arrived, STAGES);
    }

    DEVICE void store_next() {
        const piece& next = mine.pieces[stored % PENDING];
        if (next.stage < STAGES) {
            bulk_wait(mine.arrived + next.stage, phases >> next.stage & 1);
            phases ^= 1u << next.stage;
        }
        bulk_store(next.to, next.from, next.bytes);
        loads_stored += next.is_last;
        if (next.counted != nullptr) red_add_release_sys(next.counted, 1u);
        ++stored;
        if (done != flagged && (i32)(stored - mine.flags[done % FLAGS].store) >= (i32)(LAG + EVERY)) {
            bulk_stores_done<LAG>();
            finish_until(stored - LAG);
        }
    }
    // The stores before `end` are done.
    DEVICE void finish_until(u32 end) {
        const u32 before = done;
        while (done != flagged && (i32)(mine.flags[done % FLAGS].store - end) < 0) ++done;
        if (FLAG_WARPS) {
            if (done != before) st_release_block(&mine.done, done);
        } else {
            raise(mine, mine.raised, done);
        }
    }
    // Raises a sender's flags from `raised` to `end`.
    static DEVICE void raise(const shared& its, u32& raised, u32 end) {
        if (raised != end) fence_sys(); // pairs with the receivers' acquires of the flags
        for (; raised != end; ++raised) st_relaxed_sys(its.flags[raised % FLAGS].at, its.flags[raised % FLAGS].value);
    }
    // Stores until there is room for a piece, which is loaded or not, and for its flag if it has one. The code that stores is large,
    // so what calls this is kept together: instructions that are not in the cache take longer than a copy.
    DEVICE void make_room(bool is_loaded, bool is_flagged) {
        for (;;) {
            const bool is_full = begun - stored == PENDING || (is_loaded && loaded - loads_stored == AHEAD);
            if (!is_full && !(is_flagged && flagged - ld_acquire_block(&mine.raised) >= FLAGS)) return;
            if (stored < begun) store_next();
        }
    }
    DEVICE void begin(u8* to, u32 from, u32 bytes, u32 stage, bool is_last, signals after) {
        if (after.raised != nullptr) {
            mine.flags[flagged % FLAGS] = flag{after.raised, after.value, begun};
            ++flagged;
        }
        mine.pieces[begun % PENDING] = piece{to, after.counted, bytes, from, stage, is_last};
        ++begun;
    }
    // Raises the flags of all senders of the block as they go; of one warp.
    static DEVICE void raise_flags() {
        shared& its = of_warp(lane_id());
        const bool is_one = lane_id() < SENDING;
        u32 raised = 0;
        for (;;) {
            const bool is_over = !is_one || ld_acquire_block(&its.is_over) != 0;
            const u32 end = is_one ? ld_acquire_block(&its.done) : 0;
            if (__any_sync(WHOLE_WARP, end != raised)) {
                raise(its, raised, end);
                if (is_one) st_release_block(&its.raised, raised);
            } else if (__all_sync(WHOLE_WARP, is_over)) {
                return;
            }
        }
    }

    // Copies `bytes` bytes, a multiple of 16.
    DEVICE void copy(u8* to, const u8* from, u32 bytes, signals after) {
        __syncwarp(); // another lane may have acquired what is copied, or the place that it is copied to
        if (lane_id() != 0) return;
        for (u32 at = 0; at < bytes; at += STAGE_BYTES) {
            const u32 size = min(STAGE_BYTES, bytes - at), stage = loaded % STAGES;
            const signals its = at + size == bytes ? after : NO_SIGNALS;
            make_room(true, its.raised != nullptr);
            bulk_stores_read<STAGES - AHEAD>();
            u8* memory = stages + stage * STAGE_BYTES;
            begin(to + at, shared_address(memory), size, stage, true, its);
            bulk_expect(mine.arrived + stage, size);
            bulk_load(memory, from + at, size, mine.arrived + stage);
            ++loaded;
        }
    }
    // Copies them to `count` places, to(index); they are read once.
    template <class To> DEVICE void copy_to_each(u32 count, To to, const u8* from, u32 bytes, signals after) {
        __syncwarp();
        if (lane_id() != 0) return;
        for (u32 at = 0; at < bytes; at += STAGE_BYTES) {
            const u32 size = min(STAGE_BYTES, bytes - at), stage = loaded % STAGES;
            make_room(true, after.raised != nullptr);
            bulk_stores_read<STAGES - AHEAD>();
            u8* memory = stages + stage * STAGE_BYTES;
            bulk_expect(mine.arrived + stage, size);
            bulk_load(memory, from + at, size, mine.arrived + stage);
            ++loaded;
            for (u32 index = 0; index < count; ++index) {
                const bool is_last = index == count - 1;
                if (index != 0) make_room(false, after.raised != nullptr);
                begin(to(index) + at, shared_address(memory), size, index == 0 ? stage : STAGES, is_last,
                      is_last && at + size == bytes ? after : NO_SIGNALS);
            }
        }
    }
    // The index-th piece of STAGE_BYTES at most that the warp computes: where it writes what belongs to `to`.
    DEVICE u8* piece_for(u8*, u32 index) {
        if (lane_id() == 0) bulk_stores_read<STAGES - 1>();
        __syncwarp();
        return stages + index % STAGES * STAGE_BYTES;
    }
    // Moves that piece.
    DEVICE void copy_piece(u8* to, u32 index, u32 bytes, signals after) {
        bulk_fence_shared();
        __syncwarp();
        if (lane_id() != 0) return;
        make_room(false, after.raised != nullptr);
        begin(to, shared_address(stages + index % STAGES * STAGE_BYTES), bytes, STAGES, false, after);
        while (stored < begun) store_next();
    }
    // Before what was gathered is written anew.
    DEVICE void before_gathering() {
        if (lane_id() == 0) {
            while (stored < begun) store_next();
            bulk_stores_read<0>();
        }
        __syncwarp();
    }
    // When all lanes have written what they gather.
    DEVICE void after_gathering() {
        bulk_fence_shared();
        __syncwarp();
    }
    // Copies some of that, of the whole warp.
    DEVICE void copy_gathered(u8* to, u32 at, u32 bytes, signals after) {
        if (lane_id() != 0) return;
        make_room(false, after.raised != nullptr);
        begin(to, shared_address(gathered + at), bytes, STAGES, false, after);
    }
    // Does what others may wait for.
    DEVICE void drain() {
        if (lane_id() == 0) {
            while (stored < begun) store_next();
            if (done != flagged) {
                bulk_stores_done<0>();
                finish_until(stored);
            }
        }
    }
    // At the end.
    DEVICE void finish() {
        drain();
        if (lane_id() != 0) return;
        bulk_stores_done<0>();
        st_release_block(&mine.is_over, 1u);
    }
    // Behind a flag that says that a row is there, before it is copied.
    static DEVICE void see() { bulk_fence(); }
};

#else

struct pipeline {
    u8* gathered;

    DEVICE pipeline(void*) : gathered(of_warp()) {}
    static DEVICE u8* of_warp() {
        __shared__ uint4 all[SENDING][BESIDE_BYTES / 16];
        return (u8*)all[min(threadIdx.x / 32, SENDING - 1)];
    }

    DEVICE void copy(u8* to, const u8* from, u32 bytes, signals after) {
        copy_to_each(1, [&](u32) { return to; }, from, bytes, after);
    }
    template <class To> DEVICE void copy_to_each(u32 count, To to, const u8* from, u32 bytes, signals after) {
        constexpr u32 COUNT = 4;
        __syncwarp(); // a lane may have written what `to` reads
        for (u32 first = lane_id() * 16; first < bytes; first += COUNT * 512) {
            uint4 v[COUNT];
#pragma unroll
            for (u32 n = 0; n < COUNT; ++n)
                if (first + n * 512 < bytes) v[n] = load16_volatile(from + first + n * 512);
#pragma unroll 1
            for (u32 index = 0; index < count; ++index)
#pragma unroll
                for (u32 n = 0; n < COUNT; ++n)
                    if (first + n * 512 < bytes) store16(to(index) + first + n * 512, v[n]);
        }
        signal(after);
    }
    DEVICE u8* piece_for(u8* to, u32) { return to; }
    DEVICE void copy_piece(u8*, u32, u32, signals after) { signal(after); }
    DEVICE void before_gathering() { __syncwarp(); }
    DEVICE void after_gathering() { __syncwarp(); }
    DEVICE void copy_gathered(u8* to, u32 at, u32 bytes, signals after) {
        for (u32 i = lane_id() * 4; i < bytes; i += 128) *(u32*)(to + i) = *(const u32*)(gathered + at + i);
        signal(after);
    }
    DEVICE void signal(signals after) {
        __syncwarp();
        if (lane_id() != 0) return;
        if (after.raised != nullptr) st_release_sys(after.raised, after.value);
        if (after.counted != nullptr) red_add_release_sys(after.counted, 1u);
    }
    DEVICE void drain() {}
    DEVICE void finish() {}
    static DEVICE void see() {}
    static DEVICE void prepare() {}
    static DEVICE void raise_flags() {}
};

#endif

// Copies the rows of one token of one or two tensors, by code that is there once.
DEVICE void copy_parts(pipeline& copies, parts from, u8* to, u8* second_to, signals after) {
#pragma unroll 1
    for (u32 part = 0; part < (from.bytes[1] != 0 ? 2u : 1u); ++part) {
        const bool is_last = part == 1 || from.bytes[1] == 0;
        copies.copy(part == 0 ? to : second_to, part == 0 ? from.data[0] : from.data[1], part == 0 ? from.bytes[0] : from.bytes[1],
                    is_last ? after : NO_SIGNALS);
    }
}
