// Rows that a warp copies, with many bytes under way at once. Behind slots.cuh.
//
// A copy reads some bytes once and stores them at several places, of which each lane of the warp knows one. On Hopper and newer GPUs the
// multiprocessor's bulk copies move them, through a ring of stages in shared memory that every warp has; they take no registers. Older
// architectures copy through registers. When the bytes have arrived at a peer, a flag is raised there. When they have been read, that is
// counted.

// A part of what a warp copies: the bytes from `begin` up to `end`, multiples of 16, of which the first is at `at`. Most lanes have none.
struct extent {
    u8* at;
    u32 begin, end;
};
DEVICE extent no_extent() { return extent{nullptr, 0, 0}; }

// The rows of one or two tensors, which lie side by side in a record.
struct parts {
    u8* data[2];
    u32 bytes[2]; // of a row, multiples of 16

    DEVICE u32 all() const { return bytes[0] + bytes[1]; }
    // The rows with this index, as those two lanes from `lane` on know them.
    DEVICE extent rows(u64 index, u32 lane = 0) const {
        if (lane_id() == lane) return extent{data[0] + index * bytes[0], 0, bytes[0]};
        if (lane_id() == lane + 1) return extent{data[1] + index * bytes[1], bytes[0], all()};
        return no_extent();
    }
    // The same rows in a record.
    DEVICE extent record(const u8* at) const { return lane_id() == 0 ? extent{(u8*)at, 0, all()} : no_extent(); }
};

constexpr u32 NOT_COUNTED = ~0u;
// Of a warp that copies nothing that is counted.
struct uncounted {
    DEVICE void operator()(u32) const {}
};

// The memory of a block, which begins with the stages of its warps, from a line on, as bulk copies are half as fast where lines of memory and of
// shared memory do not coincide.
DEVICE u8* aligned(void* memory) { return (u8*)memory + (0u - shared_address(memory)) % LINE; }
constexpr u32 STAGES_BYTES = __CUDA_ARCH__ >= 900 ? RINGS * STAGES * STAGE_BYTES : 0;

// Whether this warp of a block does nothing but raise flags.
DEVICE bool raises_flags(u32 warp) { return warp == RINGS; }

// Between warps of a block.
DEVICE u32 ld_acquire_block(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
    return v;
}
DEVICE void st_release_block(u32* p, u32 v) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"(shared_address(p)), "r"(v) : "memory");
}
DEVICE u32 atom_add_acq_rel_block(u32* p, u32 v) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(p)), "r"(v) : "memory");
    return before;
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
// Makes a barrier for each of `count` stages, at which the first lane arrives.
DEVICE void bulk_barriers(u64* arrived, u32 count) {
    if (lane_id() == 0)
        for (u32 s = 0; s < count; ++s)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(arrived + s)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
}
DEVICE void bulk_wait(u64* arrived, u32 parity) {
    u32 is_there = 0;
    while (!is_there)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_there) : "r"(shared_address(arrived)), "r"(parity) : "memory");
}
DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
// All groups of the lane but the last `LEFT` have been read from shared memory; or are where they belong.
template <u32 LEFT> DEVICE void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory"); }
template <u32 LEFT> DEVICE void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(LEFT) : "memory"); }
// Order plain accesses before with bulk copies behind: of global memory, which waits for what is under way; of shared memory.
DEVICE void bulk_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DEVICE void bulk_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

constexpr u32 AHEAD = STAGES - 1; // stages that are loaded and not stored yet
constexpr u32 LAG = 2;            // stages whose stores may be under way when a warp looks which are done
constexpr u32 FLAGS = PEERS <= 1 ? 16 : PEERS <= 3 ? 32 : 64; // that are not raised yet
static_assert(FLAGS >= (LAG + AHEAD + 1) * PEERS, "a warp seldom waits for a flag, and never for one behind a stage that it has not stored");

// A fence between GPUs takes as long as some rows do. So the warps of a block leave it to one warp to raise their flags, which does so
// for all records that are done by then.
struct stores {
    struct flag {
        u32* at;
        u32 value;
        u32 stage; // the number of the stage that it stands behind
    };
    struct shared {
        flag flags[FLAGS];
        u64 arrived[STAGES];
        u32 done;    // flags whose records are where they belong
        u32 raised;  // of these, those that are raised
        u32 is_over; // whether `done` is what it will be
    };

    u8* stages;
    shared& mine;
    u32 begun, stored; // stages
    u32 flagged, done; // flags: those that stand behind what is begun, and behind what is done

    static DEVICE shared& of_warp(u32 warp) {
        __shared__ shared all[RINGS];
        return all[min(warp, RINGS - 1)];
    }
    // Before any is made, and before all threads of the block meet.
    static DEVICE void prepare() {
        if (threadIdx.x < RINGS) of_warp(threadIdx.x).done = of_warp(threadIdx.x).raised = of_warp(threadIdx.x).is_over = 0;
    }

    // `memory`: STAGES × STAGE_BYTES for each of the first RINGS warps.
    DEVICE stores(void* memory)
        : stages(aligned(memory) + threadIdx.x / 32 * (STAGES * STAGE_BYTES)), mine(of_warp(threadIdx.x / 32)), begun(0), stored(0), flagged(0), done(0) {}

    DEVICE u8* stage(u32 number) const { return stages + number % STAGES * STAGE_BYTES; }

    // Ends a lane's group of stores: those of a stage, of which there may be none.
    DEVICE void end_stage() {
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        ++stored;
        publish<LAG>();
    }
    // Hands over the flags of what is where it belongs: of all stages but the last `LEFT`.
    template <u32 LEFT> DEVICE void publish() {
        const u32 end = stored - LEFT;
        const auto is_done = [&] { return done != flagged && (i32)(end - mine.flags[done % FLAGS].stage) > 0; };
        if (!is_done()) return;
        bulk_stores_done<LEFT>();
        __syncwarp(); // each lane's
        do ++done;
        while (is_done());
        if (lane_id() == 0) st_release_block(&mine.done, done);
    }
    // Raises each lane's flag, if that is not null, behind the last stage and what the warp has stored.
    DEVICE void signal(u32* raised, u32 value) {
        const u32 which = __ballot_sync(WHOLE_WARP, raised != nullptr), number = __popc(which);
        while (__any_sync(WHOLE_WARP, flagged - ld_acquire_block(&mine.raised) + number > FLAGS)) publish<0>();
        if (raised != nullptr)
            mine.flags[(flagged + __popc(which & ((1u << lane_id()) - 1))) % FLAGS] = flag{raised, value, begun - 1};
        flagged += number;
        __syncwarp(); // before lanes read which flags there are
    }
    // Raises a warp's flags from `raised` to `end`.
    static DEVICE void raise(const shared& its, u32& raised, u32 end) {
        if (raised != end) fence_sys(); // pairs with the receivers' acquires of the flags
        for (; raised != end; ++raised) st_relaxed_sys(its.flags[raised % FLAGS].at, its.flags[raised % FLAGS].value);
    }
    // Raises the flags of all warps of the block as they go; of one warp.
    static DEVICE void raise_flags() {
        shared& its = of_warp(lane_id());
        const bool is_one = lane_id() < RINGS;
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

    // Where the warp writes what it computes for this place, STAGE_BYTES at most, which `store_piece` moves.
    DEVICE u8* piece(u8*) {
        bulk_stores_read<STAGES - 1>();
        __syncwarp();
        return stage(begun);
    }
    DEVICE void store_piece(u8* to, u32 bytes) {
        bulk_fence_shared();
        __syncwarp();
        if (lane_id() == 0) bulk_store(to, shared_address(stage(begun)), bytes);
        ++begun;
        end_stage();
    }

    // Does what others may wait for.
    DEVICE void drain() { publish<0>(); }
    // At the end.
    DEVICE void finish() {
        drain();
        bulk_stores_done<0>();
        __syncwarp(); // each lane's
        if (lane_id() == 0) st_release_block(&mine.is_over, 1u);
    }
    // Behind a flag that says that a row is there, before it is copied; and behind one that says that a place is free.
    static DEVICE void see() { bulk_fence(); }
};

// Copies, of which `Counted` counts some when the bytes have been read.
template <class Counted = uncounted> struct pipeline : stores {
    // What a stage holds, as a lane knows it.
    struct unit {
        u8* to;
        u32 from, bytes; // in shared memory; 0 bytes for a lane that stores none
        u32 counted;     // or NOT_COUNTED
    };

    Counted count;
    unit pending[AHEAD]; // the last one is the newest
    u32 phases;          // of the stages' barriers

    DEVICE pipeline(void* memory, Counted count = Counted()) : stores(memory), count(count), phases(0) { bulk_barriers(mine.arrived, STAGES); }

    DEVICE void store_next() {
        unit next = pending[AHEAD - 1];
#pragma unroll
        for (u32 n = 2; n <= AHEAD; ++n)
            if (begun - stored == n) next = pending[AHEAD - n];
        const u32 which = stored % STAGES;
        bulk_wait(mine.arrived + which, phases >> which & 1);
        phases ^= 1u << which;
        if (next.bytes != 0) bulk_store(next.to, next.from, next.bytes);
        if (next.counted != NOT_COUNTED && lane_id() == 0) count(next.counted);
        end_stage();
    }
    // Copies `bytes` bytes, which the lanes' `from` together are, to each lane's to(), which is asked for when the first of them are
    // being loaded.
    template <class To> DEVICE void copy(extent from, u32 bytes, To to) {
        __syncwarp(); // another lane may have acquired what is copied, or the place that it is copied to
        extent its_to = no_extent();
#pragma unroll 1
        for (u32 at = 0; at < bytes; at += STAGE_BYTES) {
            const u32 end = min(bytes, at + STAGE_BYTES), first = max(from.begin, at), last = min(from.end, end);
            if (begun - stored == AHEAD) store_next();
            bulk_stores_read<STAGES - AHEAD>();
            __syncwarp(); // each lane's
            u8* const memory = stage(begun);
            u64* const arrived = mine.arrived + begun % STAGES;
            if (lane_id() == 0) bulk_expect(arrived, end - at);
            if (first < last) bulk_load(memory + (first - at), from.at + (first - from.begin), last - first, arrived);
            if (at == 0) its_to = to();
            begin(its_to, at, end, shared_address(memory));
        }
    }
    DEVICE void begin(extent to, u32 at, u32 end, u32 from) {
        const u32 first = max(to.begin, at), last = min(to.end, end);
#pragma unroll
        for (u32 n = 1; n < AHEAD; ++n) pending[n - 1] = pending[n];
        pending[AHEAD - 1] = unit{to.at + (first - to.begin), from + (first - at), first < last ? last - first : 0, NOT_COUNTED};
        ++begun;
    }
    // Behind a copy: counts that it has been read.
    DEVICE void count_when_read(u32 counted) { pending[AHEAD - 1].counted = counted; }
    DEVICE void drain() {
        while (stored != begun) store_next();
        publish<0>();
    }
    DEVICE void finish() {
        drain();
        stores::finish();
    }
};

#else

struct stores {
    DEVICE stores(void*) {}
    DEVICE u8* piece(u8* to) { return to; }
    DEVICE void store_piece(u8*, u32) {}
    DEVICE void signal(u32* raised, u32 value) {
        __syncwarp();
        if (raised != nullptr) st_release_sys(raised, value);
    }
    DEVICE void drain() {}
    DEVICE void finish() {}
    static DEVICE void see() {}
    static DEVICE void prepare() {}
    static DEVICE void raise_flags() {}
};

template <class Counted = uncounted> struct pipeline : stores {
    Counted count;

    DEVICE pipeline(void* memory, Counted count = Counted()) : stores(memory), count(count) {}

    template <class To> DEVICE void copy(extent from, u32, To to) {
        __syncwarp(); // another lane may have written what is copied, or where it is copied to
        const extent its_to = to();
        const u32 receivers = __ballot_sync(WHOLE_WARP, its_to.begin < its_to.end);
        for (u32 left = __ballot_sync(WHOLE_WARP, from.begin < from.end); left != 0; left &= left - 1) copy_from(of_lane(from, __ffs(left) - 1), its_to, receivers);
    }
    static DEVICE extent of_lane(const extent& its, u32 lane) {
        return extent{(u8*)__shfl_sync(WHOLE_WARP, (u64)its.at, lane), __shfl_sync(WHOLE_WARP, its.begin, lane), __shfl_sync(WHOLE_WARP, its.end, lane)};
    }
    static DEVICE void copy_from(const extent& from, const extent& its_to, u32 receivers) {
        constexpr u32 COUNT = 4;
#pragma unroll 1
        for (u32 some = from.begin; some < from.end; some += COUNT * 512) {
            uint4 v[COUNT];
#pragma unroll
            for (u32 n = 0; n < COUNT; ++n)
                if (some + n * 512 + lane_id() * 16 < from.end) v[n] = load16_volatile(from.at + (some - from.begin) + n * 512 + lane_id() * 16);
#pragma unroll 1
            for (u32 left = receivers; left != 0; left &= left - 1) {
                const extent to = of_lane(its_to, __ffs(left) - 1);
#pragma unroll
                for (u32 n = 0; n < COUNT; ++n) {
                    const u32 at = some + n * 512 + lane_id() * 16;
                    if (to.begin <= at && at < min(to.end, from.end)) store16(to.at + (at - to.begin), v[n]);
                }
            }
        }
    }
    DEVICE void count_when_read(u32 counted) {
        __syncwarp();
        if (counted != NOT_COUNTED && lane_id() == 0) count(counted);
    }
};

#endif
