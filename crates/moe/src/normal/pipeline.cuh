// Rows that a warp copies, with many bytes under way at once. Behind slots.cuh.
//
// From Hopper on the multiprocessor's bulk copies move them, through a ring of stages in shared memory that every warp has: that
// takes no registers, and one thread to issue. Older architectures copy through registers. Of a row that goes to a peer a flag is
// raised when the row is there; of one that came from a peer an acknowledgement is counted when it has been read.

// What is done about a row besides copying it; null is nothing.
struct signals {
    u32* raised;  // becomes `value` behind the row
    u32* counted; // is raised by one when the row has been read
    u32 value;
};

// Words that lie beside a row, for `pipeline::copy`: `count` of them, word(i) is the i-th.
template <class Word> struct words_beside {
    u32 count;
    Word word;
};

#if __CUDA_ARCH__ >= 900

DEVICE void bulk_load(void* to, const void* from, u32 bytes, u64* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(arrived)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(arrived)) : "memory");
}
DEVICE void bulk_wait(u64* arrived, u32 parity) {
    u32 is_there = 0;
    while (!is_there)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_there) : "r"(shared_address(arrived)), "r"(parity) : "memory");
}
// A store is a group of its own.
DEVICE void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All stores but the last `LEFT` have been read from shared memory; or are where they belong.
template <u32 LEFT> DEVICE void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory"); }
template <u32 LEFT> DEVICE void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(LEFT) : "memory"); }
// Orders plain accesses with those of bulk copies.
DEVICE void bulk_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

constexpr u32 AHEAD = STAGES - 1; // loads that are under way
constexpr u32 LAG = 4;            // stores that are, when a flag is raised
constexpr u32 REMEMBERED = 8;     // at least AHEAD + LAG + 1

struct pipeline {
    struct piece {
        u8* to;
        u32 bytes;
        bool is_loaded;
        signals after;
    };
    struct shared {
        piece pieces[REMEMBERED];
        u64 arrived[STAGES];
    };

    u8* stages;
    shared& mine;
    u32 begun, stored, raised; // pieces; only the first lane counts
    u32 phases;                // of the stages' barriers

    // `memory`: RINGS × STAGES × STAGE_BYTES, for the first RINGS warps.
    DEVICE pipeline(void* memory) : stages((u8*)memory + threadIdx.x / 32 * (STAGES * STAGE_BYTES)), mine(of_warp()), begun(0), stored(0), raised(0), phases(0) {
        if (lane_id() == 0)
            for (u32 s = 0; s < STAGES; ++s)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(mine.arrived + s)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    static DEVICE shared& of_warp() {
        __shared__ shared all[THREADS / 32];
        return all[threadIdx.x / 32];
    }

    DEVICE void store_next() {
        const u32 s = stored % STAGES;
        const piece& next = mine.pieces[stored % REMEMBERED];
        if (next.is_loaded) {
            bulk_wait(mine.arrived + s, phases >> s & 1);
            phases ^= 1u << s;
        }
        bulk_store(next.to, stages + s * STAGE_BYTES, next.bytes);
        if (next.after.counted != nullptr) red_add_release_sys(next.after.counted, 1u);
        ++stored;
        if (stored > LAG) {
            if (mine.pieces[raised % REMEMBERED].after.raised != nullptr) bulk_stores_done<LAG>();
            raise();
        }
    }
    DEVICE void raise() {
        const signals& after = mine.pieces[raised % REMEMBERED].after;
        if (after.raised != nullptr) st_release_sys(after.raised, after.value);
        ++raised;
    }
    // A stage for the next piece.
    DEVICE u8* begin(u8* to, u32 bytes, bool is_loaded, const signals& after) {
        if (begun - stored == AHEAD) store_next();
        bulk_stores_read<STAGES - AHEAD>();
        mine.pieces[begun % REMEMBERED] = piece{to, bytes, is_loaded, after};
        return stages + begun++ % STAGES * STAGE_BYTES;
    }

    // Copies `bytes` bytes, a multiple of 16, and writes the words behind the copy.
    template <class Word>
    DEVICE void copy(u8* to, const u8* from, u32 bytes, const signals& after, const words_beside<Word>& beside) {
        const bool is_first = lane_id() == 0;
        __syncwarp();
        if (is_first) {
            for (u32 at = 0; at < bytes; at += STAGE_BYTES) {
                const u32 size = min(STAGE_BYTES, bytes - at), s = begun % STAGES;
                const bool is_last = at + size == bytes && beside.count == 0;
                u8* stage = begin(to + at, size, true, is_last ? after : signals{nullptr, nullptr, 0});
                bulk_load(stage, from + at, size, mine.arrived + s);
            }
        }
        for (u32 first = 0; first < beside.count; first += STAGE_BYTES / 4) {
            const u32 count = min(STAGE_BYTES / 4, beside.count - first), size = (count + 3) / 4 * 16;
            u64 stage = 0;
            if (is_first)
                stage = (u64)begin(to + bytes + first * 4, size, false, first + count == beside.count ? after : signals{nullptr, nullptr, 0});
            stage = __shfl_sync(WHOLE_WARP, stage, 0);
            for (u32 i = lane_id(); i < size / 4; i += 32) ((u32*)stage)[i] = i < count ? beside.word(first + i) : 0;
            bulk_fence(); // before the store, which is the first lane's
            __syncwarp();
        }
    }
    // Until all that was begun is done.
    DEVICE void drain() {
        if (lane_id() == 0) {
            while (stored < begun) store_next();
            bulk_stores_done<0>();
            while (raised < stored) raise();
        }
        __syncwarp();
    }
    // Behind a flag that says that a row is there, before it is copied.
    DEVICE void see() { bulk_fence(); }
};

#else

struct pipeline {
    DEVICE pipeline(void*) {}

    template <class Word>
    DEVICE void copy(u8* to, const u8* from, u32 bytes, const signals& after, const words_beside<Word>& beside) {
        constexpr u32 COUNT = 4;
        for (u32 first = lane_id() * 16; first < bytes; first += COUNT * 512) {
            uint4 v[COUNT];
#pragma unroll
            for (u32 n = 0; n < COUNT; ++n)
                if (first + n * 512 < bytes) v[n] = load16_volatile(from + first + n * 512);
#pragma unroll
            for (u32 n = 0; n < COUNT; ++n)
                if (first + n * 512 < bytes) store16(to + first + n * 512, v[n]);
        }
        for (u32 i = lane_id(); i < beside.count; i += 32) ((u32*)(to + bytes))[i] = beside.word(i);
        __syncwarp();
        if (lane_id() != 0) return;
        if (after.raised != nullptr) st_release_sys(after.raised, after.value);
        if (after.counted != nullptr) red_add_release_sys(after.counted, 1u);
    }
    DEVICE void drain() { __syncwarp(); }
    DEVICE void see() {}
};

#endif
