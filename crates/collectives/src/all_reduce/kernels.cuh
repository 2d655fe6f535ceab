// All-reduce over NVLink, one-shot and two-shot, with data that is its own flag.
//
// A word of four bytes that has not arrived is EMPTY; whatever else is there has arrived. EMPTY is a NaN (two of them in
// half precision) that no reduction gives and that senders replace by the canonical one, so no value is lost: a sum with
// a NaN is the canonical NaN whichever NaN went in. There is no flag to wait for, and no fence.
//
// Each rank owns three slots in turn. A call writes into its slot on the peers, reads its own, and empties the slot of the
// call before, which every peer is done writing: it has sent what this rank has just read. A peer comes to that
// slot again two calls later, and to do so it needs what this rank sends after this kernel has ended.
//
// A slot has 2 × WORLD lanes. One-shot: peer p puts all of its input into lane p. Two-shot: peer p puts the part of its
// input that this rank reduces into lane p, and the part of the result that it reduced into lane WORLD + p.
//
// Which slot is next stands in device memory, so that graphs may be replayed between other calls. There is a copy of it for
// every block that a grid can have: a block reads its own and advances its own (and shares in advancing those that no
// block of this grid reads), and so blocks need not wait for each other.
//
// Compiled for one WORLD, one type ELEMENT and one OPERATOR of the prelude; AVERAGE divides a sum by WORLD.

constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr u32 SLOTS = 3;

typedef ELEMENT T;
typedef wide<T>::type A;

// At the start of an arena, MAX_BLOCKS times. Begins as zeros.
struct control {
    u32 slot;                     // of this call
    u32 dirty_lower, dirty_upper; // vectors of the lower and upper lanes that the call before has used
    u32 reserved;
};

struct peers { u8* arena[WORLD]; };

struct arguments {
    const T* input;
    T* output;
    u64 count;       // elements
    u64 lane_stride; // bytes from lane to lane
    u64 slots;       // bytes from the start of an arena to its first slot
    u64 limit_ns;
    const u32* abort;
    wait_report* report;
    peers ranks;
    u32 rank, operation;
};

DEVICE bool has_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

DEVICE uint4 without_empty(uint4 v) {
    constexpr u32 NANS = sizeof(T) == 4 ? 0x7FC00000u : NAN_PAIR;
    if (v.x == EMPTY) v.x = NANS;
    if (v.y == EMPTY) v.y = NANS;
    if (v.z == EMPTY) v.z = NANS;
    if (v.w == EMPTY) v.w = NANS;
    return v;
}

// The vector at `index`; elements past the end are zero.
DEVICE uint4 load_input(const arguments& a, u64 index, bool aligned) {
    u64 first = index * vec16<T>::LANES;
    if (aligned && first + vec16<T>::LANES <= a.count) return load16(a.input + first);
    vec16<T> v;
    v.words = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (u32 k = 0; k < vec16<T>::LANES; ++k)
        if (first + k < a.count) v.lane[k] = a.input[first + k];
    return v.words;
}

DEVICE void store_output(const arguments& a, u64 index, bool aligned, uint4 words) {
    u64 first = index * vec16<T>::LANES;
    if (aligned && first + vec16<T>::LANES <= a.count) return store16(a.output + first, words);
    vec16<T> v;
    v.words = words;
#pragma unroll
    for (u32 k = 0; k < vec16<T>::LANES; ++k)
        if (first + k < a.count) a.output[first + k] = v.lane[k];
}

// A call's view of the slots.
struct turn {
    u64 slot, before; // bytes from the start of an arena
    uint4 words;      // a control
};

DEVICE control* controls(const arguments& a) { return (control*)a.ranks.arena[a.rank]; }

DEVICE turn begin(const arguments& a, uint4 words) {
    u64 slot_bytes = 2 * WORLD * a.lane_stride;
    u32 before = words.x == 0 ? SLOTS - 1 : words.x - 1;
    return turn{a.slots + words.x * slot_bytes, a.slots + before * slot_bytes, words};
}

// The call behind reads these after this one has ended.
DEVICE void advance(const arguments& a, const turn& t, u32 lower, u32 upper) {
    __syncthreads(); // all threads have read the block's own copy
    u32 next = t.words.x == SLOTS - 1 ? 0 : t.words.x + 1;
    for (u32 copy = blockIdx.x + threadIdx.x * gridDim.x; copy < MAX_BLOCKS; copy += blockDim.x * gridDim.x)
        store16(controls(a) + copy, make_uint4(next, lower, upper, 0));
}

DEVICE u8* vector_at(const arguments& a, u32 rank, u64 slot, u32 lane, u64 index) {
    return a.ranks.arena[rank] + slot + lane * a.lane_stride + index * 16;
}

// Empties what the call before has filled; a lane of this rank itself was never written.
DEVICE void empty_before(const arguments& a, const turn& t) {
    const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    for (u64 i = grid_thread(); i < t.words.y; i += grid_threads())
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) store16(vector_at(a, a.rank, t.before, k, i), empty);
    for (u64 i = grid_thread(); i < t.words.z; i += grid_threads())
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) store16(vector_at(a, a.rank, t.before, WORLD + k, i), empty);
}

// Waits for the vectors of all peers at `index` of the lanes from `first`; false if it gave up.
DEVICE bool collect(const arguments& a, waiter& w, u64 slot, u32 first, u64 index, uint4 (&got)[WORLD]) {
    u32 missing = a.rank;
    return wait_until(w, missing, 0, [&](u64&) {
        bool complete = true;
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) got[k] = load16_volatile(vector_at(a, a.rank, slot, first + k, index));
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank && has_empty(got[k])) {
                complete = false;
                missing = k;
            }
        return complete;
    });
}

// In ascending rank order, rounded once.
DEVICE uint4 reduce(const uint4 (&values)[WORLD]) {
    vec16<T> v;
    v.words = values[0];
    wide_vec<T> sum = widen_vec(v);
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
        v.words = values[k];
        wide_vec<T> x = widen_vec(v);
#pragma unroll
        for (u32 lane = 0; lane < vec16<T>::LANES; ++lane) sum.lane[lane] = OPERATOR<A>()(sum.lane[lane], x.lane[lane]);
    }
    if (AVERAGE)
#pragma unroll
        for (u32 lane = 0; lane < vec16<T>::LANES; ++lane) sum.lane[lane] /= (A)WORLD;
    return narrow_vec<T>(sum).words;
}

DEVICE void push(const arguments& a, const turn& t, u32 lane, u64 index, uint4 v) {
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) store16_volatile(vector_at(a, (a.rank + k) % WORLD, t.slot, lane, index), v);
}

// Everyone gets everything and reduces everything: (WORLD - 1) · n bytes out, one hop.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot(arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const bool read_aligned = (u64)a.input % 16 == 0, write_aligned = (u64)a.output % 16 == 0;
    const u64 vectors = (a.count + vec16<T>::LANES - 1) / vec16<T>::LANES, start = grid_thread();
    // Both loads are under way before either is needed.
    const uint4 words = load16_volatile(controls(a) + blockIdx.x);
    const uint4 first = start < vectors ? load_input(a, start, read_aligned) : make_uint4(0, 0, 0, 0);
    const turn t = begin(a, words);
    if (start < vectors) push(a, t, a.rank, start, without_empty(first));
    for (u64 i = start + grid_threads(); i < vectors; i += grid_threads())
        push(a, t, a.rank, i, without_empty(load_input(a, i, read_aligned)));
    advance(a, t, (u32)vectors, 0);
    empty_before(a, t);
    waiter w = start_waiting(a.limit_ns, a.abort, a.report, a.rank, a.operation);
    for (u64 i = start; i < vectors; i += grid_threads()) {
        uint4 got[WORLD];
        const uint4 mine = i == start ? first : load_input(a, i, read_aligned);
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k) got[k] = mine; // an index known at run time would need local memory
        if (!collect(a, w, t.slot, 0, i, got)) return;
        store_output(a, i, write_aligned, reduce(got));
    }
}

// Everyone reduces a part, and the parts are gathered: 2 (WORLD - 1) / WORLD · n bytes out, two hops.
extern "C" __global__ void __launch_bounds__(THREADS) two_shot(arguments a) {
    pdl_wait();
    pdl_launch_dependents();
    const bool read_aligned = (u64)a.input % 16 == 0, write_aligned = (u64)a.output % 16 == 0;
    const u64 vectors = (a.count + vec16<T>::LANES - 1) / vec16<T>::LANES;
    const u64 part = (vectors + WORLD - 1) / WORLD;
    const turn t = begin(a, load16_volatile(controls(a) + blockIdx.x));
    for (u64 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 mine[WORLD];
#pragma unroll
        for (u32 k = 1; k < WORLD; ++k) mine[k] = load_input(a, (a.rank + k) % WORLD * part + i, read_aligned);
#pragma unroll
        for (u32 k = 1; k < WORLD; ++k)
            store16_volatile(vector_at(a, (a.rank + k) % WORLD, t.slot, a.rank, i), without_empty(mine[k]));
    }
    advance(a, t, (u32)part, (u32)part);
    empty_before(a, t);
    waiter w = start_waiting(a.limit_ns, a.abort, a.report, a.rank, a.operation);
    for (u64 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 got[WORLD];
        const uint4 mine = load_input(a, a.rank * part + i, read_aligned);
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k) got[k] = mine;
        if (!collect(a, w, t.slot, 0, i, got)) return;
        uint4 sum = reduce(got); // canonical, and so never EMPTY
        push(a, t, WORLD + a.rank, i, sum);
        store_output(a, a.rank * part + i, write_aligned, sum);
    }
    for (u64 i = grid_thread(); i < part; i += grid_threads()) {
        uint4 got[WORLD];
        if (!collect(a, w, t.slot, WORLD, i, got)) return;
#pragma unroll
        for (u32 k = 0; k < WORLD; ++k)
            if (k != a.rank) store_output(a, k * part + i, write_aligned, got[k]);
    }
}
