// The device side of the emulator: what CUDA gives a kernel, for one block on one thread of the operating system.
//
// Every thread of a block is a fiber. A fiber runs until it waits: at a barrier of its block, for the other lanes of its warp, or for
// memory that somebody else writes. The scheduler then switches to the next one. Blocks run at the same time, on threads of
// their own. Shared memory is memory of such a thread.
//
// Bulk copies are late on purpose: a load arrives when a thread asks for it, and a store when a thread waits for it, so that a kernel
// that reads too early reads old bytes.

#include <immintrin.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern "C" int sched_yield(void);

struct uint3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }

namespace emulator {

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulator: %s\n", what);
    abort();
}

// What the driver passes; lib.rs has the same layouts.
constexpr unsigned MAX_CLUSTER = 16;
struct cluster {
    unsigned arrived, generation;
    char* anchors[MAX_CLUSTER];
};
struct launch {
    void (*call)(void**);
    void** parameters;
    uint3 grid, block, index;
    unsigned cluster_size, cluster_rank;
    emulator::cluster* of_cluster;
    char* stacks;
    size_t stack_bytes;
    unsigned shared_bytes;
};

// Keeps the compiler from assuming that memory is the same behind an instruction with which other threads may have run. It
// would of shared memory, as no other function has its address.
struct other_threads {
    __attribute__((always_inline)) other_threads() { asm volatile("" ::: "memory"); }
    __attribute__((always_inline)) ~other_threads() { asm volatile("" ::: "memory"); }
};

// ------------------------------------------------------------------------------------------------------------ fibers

struct copy { char* to; const char* from; size_t bytes; char* taken; };
template <class T> struct list {
    T* items = nullptr;
    size_t len = 0, room = 0;
    void push(T item) {
        if (len == room) items = (T*)realloc(items, (room = room ? 2 * room : 16) * sizeof(T));
        items[len++] = item;
    }
    void remove_first(size_t count) { memmove(items, items + count, (len -= count) * sizeof(T)); }
};

// The copies that a thread has begun, the oldest first; the ends of groups are copies without bytes.
struct copies {
    list<copy> begun;
    size_t groups = 0;
    void begin(void* to, const void* from, size_t bytes) { begun.push(copy{(char*)to, (const char*)from, bytes, nullptr}); }
    void end_group() { begun.push(copy{nullptr, nullptr, 0, nullptr}); ++groups; }
    // All groups but the last `left` are complete, or have been read.
    void wait(size_t left, bool only_read) {
        size_t waited = groups > left ? groups - left : 0, done = 0;
        for (size_t at = 0; at < begun.len && waited; ++at) {
            copy& c = begun.items[at];
            if (c.bytes == 0) { --waited; if (!only_read) { --groups; done = at + 1; } continue; }
            if (only_read) {
                if (!c.taken) memcpy(c.taken = (char*)malloc(c.bytes), c.from, c.bytes);
                continue;
            }
            memcpy(c.to, c.taken ? c.taken : c.from, c.bytes);
            free(c.taken);
        }
        begun.remove_first(done);
    }
    void wait_all() { end_group(); wait(0, false); }
};

struct fiber {
    void* stack_pointer;
    uint3 index;
    unsigned number;
    bool over;
    // Runs only when this word differs from `asleep_at`, if there is one.
    const volatile unsigned* asleep_on;
    unsigned asleep_at;
    unsigned cluster_generation;
    copies small, bulk;
};

// Lanes of a warp that execute one instruction together.
struct meeting {
    unsigned mask, arrived, left;
    volatile unsigned complete;
    unsigned long long values[32];
};
constexpr unsigned MEETINGS = 32;
struct warp {
    unsigned used; // meetings
    unsigned over; // lanes that have returned
    meeting meetings[MEETINGS];
};

struct load { char* to; const char* from; size_t bytes; unsigned long long* barrier; };

struct block {
    emulator::launch launch;
    unsigned threads, alive;
    volatile unsigned generation; // of __syncthreads
    unsigned arrived, cluster_arrived;
    bool vote, votes[2]; // of __syncthreads_and
    bool progress;       // whether a fiber has written memory in this round
    unsigned looks;      // fibers that have looked at memory
    void* scheduler;
    fiber* fibers;
    warp* warps;
    list<load> loads;
};

static thread_local block* current_block;
static thread_local fiber* current;
static thread_local char anchor[16];
alignas(1024) static thread_local unsigned char dynamic_shared[232448];

inline char* dynamic() { return (char*)dynamic_shared; }

extern "C" void emulator_switch(void** from, void* to);
asm(".text\n"
    "emulator_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n");

__attribute__((noinline)) inline void leave() {
    fiber* me = current;
    emulator_switch(&me->stack_pointer, current_block->scheduler);
}
// For loops that wait for memory.
inline void look() {
    ++current_block->looks;
    leave();
}
inline void sleep_while(const volatile unsigned& word, unsigned value) {
    while (word == value) {
        current->asleep_on = &word;
        current->asleep_at = value;
        leave();
    }
}

inline void end_barrier_if_all_arrived(block& b) {
    if (b.arrived == 0 || b.arrived < b.alive) return;
    b.arrived = 0;
    b.votes[b.generation & 1] = b.vote;
    b.vote = true;
    b.generation = b.generation + 1;
}
inline bool barrier(bool vote) {
    block& b = *current_block;
    const unsigned generation = b.generation;
    b.vote &= vote;
    ++b.arrived;
    end_barrier_if_all_arrived(b);
    sleep_while(b.generation, generation);
    return b.votes[generation & 1];
}

// Deposits this lane's value, and returns when all lanes of the mask have; `leave_meeting` follows.
inline meeting& meet(unsigned mask, unsigned long long value) {
    warp& w = current_block->warps[current->number / 32];
    const unsigned lane = current->number % 32;
    if (!(mask >> lane & 1)) fail("a lane is not in the mask of its own instruction");
    meeting* found = nullptr;
    for (unsigned left = w.used; left && !found; left &= left - 1) {
        meeting& m = w.meetings[__builtin_ctz(left)];
        if (m.mask == mask && !m.complete && !(m.arrived >> lane & 1)) found = &m;
    }
    if (!found) {
        if (w.used == ~0u) fail("too many instructions of one warp wait for lanes");
        const unsigned place = __builtin_ctz(~w.used);
        w.used |= 1u << place;
        found = w.meetings + place;
        found->mask = mask;
        found->arrived = found->left = 0;
        found->complete = 0;
    }
    found->values[lane] = value;
    found->arrived |= 1u << lane;
    if ((found->arrived | w.over & mask) == mask) found->complete = 1;
    else sleep_while(found->complete, 0);
    return *found;
}
inline void leave_meeting(meeting& m) {
    m.left |= 1u << current->number % 32;
    if (m.left != m.arrived) return;
    warp& w = current_block->warps[current->number / 32];
    w.used &= ~(1u << (&m - w.meetings));
}

inline void end_thread() {
    fiber& me = *current;
    block& b = *current_block;
    me.small.wait_all();
    me.bulk.wait_all();
    me.over = true;
    b.progress = true;
    --b.alive;
    end_barrier_if_all_arrived(b);
    warp& w = b.warps[me.number / 32];
    w.over |= 1u << me.number % 32;
    for (unsigned left = w.used; left; left &= left - 1) {
        meeting& m = w.meetings[__builtin_ctz(left)];
        if ((m.arrived | w.over & m.mask) == m.mask) m.complete = 1;
    }
}
__attribute__((noinline)) inline void enter() {
    block& b = *current_block;
    b.launch.call(b.launch.parameters);
    end_thread();
    leave();
    fail("a thread goes on after its end");
}

// Says which thread of a kernel has used a wrong address.
inline void report_fault(int signal, siginfo_t* fault, void* context) {
    ::signal(signal, SIG_DFL);
    if (!current_block || !current) return;
    const uint3 b = current_block->launch.index, t = current->index;
    const ptrdiff_t at = (char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] - (char*)&emulator_switch;
    fprintf(stderr, "emulator: no memory at %p: block %u, %u, %u, thread %u, %u, %u, %td bytes behind emulator_switch\n",
            fault->si_addr, b.x, b.y, b.z, t.x, t.y, t.z, at);
}

// From fiber to fiber in the order in which they run: 1, or any number that comes to all of them if there is a seed for it.
inline unsigned step_of(const launch& l, unsigned threads) {
    const char* seed = getenv("ANTIPHON_EMULATOR_SEED");
    if (!seed) return 1;
    unsigned step = ((atoi(seed) + l.index.x) * 2654435761u >> 8) % threads;
    const auto divisor = [](unsigned a, unsigned b) {
        while (b) { const unsigned rest = a % b; a = b; b = rest; }
        return a;
    };
    while (divisor(threads, step) != 1) ++step;
    return step;
}

inline void run(const launch& l) {
    struct sigaction action {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    block b{};
    b.launch = l;
    b.threads = b.alive = l.block.x * l.block.y * l.block.z;
    b.vote = true;
    b.fibers = new fiber[b.threads]{};
    b.warps = (warp*)calloc((b.threads + 31) / 32, sizeof(warp));
    // Lanes that the last warp does not have.
    if (b.threads % 32) b.warps[b.threads / 32].over = ~0u << b.threads % 32;
    current_block = &b;
    // Bytes behind what the launch asked for show whether a kernel writes there.
    const size_t wanted = l.shared_bytes + 4096, behind = wanted < sizeof(dynamic_shared) ? wanted : sizeof(dynamic_shared);
    memset(dynamic_shared, 0xCD, behind);
    if (l.of_cluster) __atomic_store_n(&l.of_cluster->anchors[l.cluster_rank], &anchor[0], __ATOMIC_RELEASE);
    for (unsigned t = 0; t < b.threads; ++t) {
        fiber& f = b.fibers[t];
        f.number = t;
        f.index = uint3{t % l.block.x, t / l.block.x % l.block.y, t / (l.block.x * l.block.y)};
        char* top = (char*)(((uintptr_t)l.stacks + (t + 1) * l.stack_bytes) & ~(uintptr_t)63);
        void** frame = (void**)top - 8;
        memset(frame, 0, 8 * sizeof(void*));
        frame[6] = (void*)&enter; // the stack is 8 off a multiple of 16 there, as behind a call
        f.stack_pointer = frame;
    }
    const unsigned step = step_of(l, b.threads);
    // Blocks that only look leave the processor to those that work: they rest, and then look with some warps at a time.
    unsigned rests = 0, next = 0;
    while (b.alive) {
        b.progress = false;
        b.looks = 0;
        unsigned switches = 0;
        const unsigned turns = rests > 4 && b.threads > 128 ? 128 : b.threads;
        for (unsigned turn = 0; turn < turns; ++turn, next = (next + step) % b.threads) {
            fiber& f = b.fibers[next];
            if (f.over || (f.asleep_on && *f.asleep_on == f.asleep_at)) continue;
            f.asleep_on = nullptr;
            current = &f;
            ++switches;
            emulator_switch(&b.scheduler, f.stack_pointer);
        }
        rests = b.progress || b.looks * 3 < switches ? 0 : rests + 1;
        const timespec pause{0, 10000l << (rests / 8 < 6 ? rests / 8 : 6)};
        if (rests > 4) nanosleep(&pause, nullptr);
        else if (rests) sched_yield();
    }
    for (unsigned t = 0; t < b.threads; ++t) {
        free(b.fibers[t].small.begun.items);
        free(b.fibers[t].bulk.begun.items);
    }
    if (b.loads.len) fail("a block has ended before its bulk loads");
    for (size_t at = l.shared_bytes; at < behind; ++at)
        if (dynamic_shared[at] != 0xCD) fail("a kernel writes more dynamic shared memory than its launch has");
    free(b.loads.items);
    free(b.warps);
    delete[] b.fibers;
    current_block = nullptr;
}

// ----------------------------------------------------------------------------------------------------------- kernels

struct kernel {
    const void* address;
    void (*call)(void**);
    const size_t* sizes;
    size_t parameters;
    const char* launch_bounds;
    kernel* next;
};
static kernel* kernels;

template <auto FUNCTION> struct registration;
template <class... A, void (*FUNCTION)(A...)> struct registration<FUNCTION> {
    template <size_t... I> struct indices {};
    template <size_t N, size_t... I> struct up_to : up_to<N - 1, N - 1, I...> {};
    template <size_t... I> struct up_to<0, I...> { typedef indices<I...> type; };
    template <size_t... I> static void call(void** p, indices<I...>) { FUNCTION(*(A*)p[I]...); }
    static void call(void** p) { call(p, typename up_to<sizeof...(A)>::type{}); }
    kernel entry;
    registration() {
        static const size_t sizes[] = {sizeof(A)..., 0};
        entry = kernel{(const void*)FUNCTION, call, sizes, sizeof...(A), nullptr, kernels};
        kernels = &entry;
    }
};

// ------------------------------------------------------------------------------------------------------ instructions

inline uint32_t address(const void* p) {
    const ptrdiff_t offset = (const char*)p - anchor;
    if (offset != (int32_t)offset || offset > (1 << 20) || offset < -(1 << 20)) fail("an address is not of shared memory");
    return (uint32_t)offset;
}
inline char* shared(uint32_t address) { return anchor + (int32_t)address; }
inline char* shared_of_block(uint32_t address, unsigned rank) {
    cluster* c = current_block->launch.of_cluster;
    if (!c) return rank == 0 ? shared(address) : (fail("there is no such block in the cluster"), nullptr);
    char* there;
    while (!(there = __atomic_load_n(&c->anchors[rank], __ATOMIC_ACQUIRE))) look();
    return there + (int32_t)address;
}

template <class T> inline T get(const volatile void* p) { return __atomic_load_n((const T*)p, __ATOMIC_ACQUIRE); }
// For memory that somebody else writes.
template <class T> inline T poll(const volatile void* p) { look(); return get<T>(p); }
template <class T> inline void put(volatile void* p, T value) {
    current_block->progress = true;
    __atomic_store_n((T*)p, value, __ATOMIC_RELEASE);
}
template <class T> inline T add(volatile void* p, T value) {
    current_block->progress = true;
    return __atomic_fetch_add((T*)p, value, __ATOMIC_ACQ_REL);
}
// Vectors of 16 bytes are whole: one instruction, of a processor that has AVX.
inline void check_vector(const void* p) { if ((uintptr_t)p % 16) fail("a vector of 16 bytes is not aligned"); }
inline uint4 get16(const void* p) {
    check_vector(p);
    __m128i v;
    asm volatile("vmovdqa (%1), %0" : "=x"(v) : "r"(p) : "memory");
    uint4 u;
    memcpy(&u, &v, 16);
    return u;
}
inline uint4 poll16(const void* p) { look(); return get16(p); }
inline void put16(void* p, uint4 u) {
    check_vector(p);
    current_block->progress = true;
    __m128i v;
    memcpy(&v, &u, 16);
    asm volatile("vmovdqa %1, (%0)" :: "r"(p), "x"(v) : "memory");
}
inline void split(uint4 u, uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w) { x = u.x, y = u.y, z = u.z, w = u.w; }
inline void split(uint4 u, unsigned long long& low, unsigned long long& high) { memcpy(&low, &u.x, 8); memcpy(&high, &u.z, 8); }
inline uint4 join(unsigned long long low, unsigned long long high) {
    return uint4{(unsigned)low, (unsigned)(low >> 32), (unsigned)high, (unsigned)(high >> 32)};
}

inline uint64_t global_timer() {
    look();
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

inline uint16_t narrow_f16(float x) { return x == x ? _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT) : 0x7FFF; }
inline float widen_f16(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t narrow_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : 0x7FFF;
}
template <class T> inline T pair(T first, T second) { return first | second << 16; }
inline float minimum(float a, float b) {
    if (a != a || b != b) return NAN;
    return a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
inline float maximum(float a, float b) {
    if (a != a || b != b) return NAN;
    return a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}

inline void cluster_arrive() {
    block& b = *current_block;
    cluster* c = b.launch.of_cluster;
    if (!c) { current->cluster_generation = b.generation; return; }
    current->cluster_generation = __atomic_load_n(&c->generation, __ATOMIC_ACQUIRE);
    b.progress = true;
    if (++b.cluster_arrived < b.threads) return;
    b.cluster_arrived = 0;
    if (__atomic_add_fetch(&c->arrived, 1, __ATOMIC_ACQ_REL) < b.launch.cluster_size) return;
    __atomic_store_n(&c->arrived, 0, __ATOMIC_RELEASE);
    __atomic_add_fetch(&c->generation, 1, __ATOMIC_ACQ_REL);
}
inline void cluster_wait() {
    cluster* c = current_block->launch.of_cluster;
    if (!c) return (void)barrier(true);
    while (__atomic_load_n(&c->generation, __ATOMIC_ACQUIRE) == current->cluster_generation) look();
    current_block->progress = true;
}
inline unsigned cluster_size() { return current_block->launch.cluster_size; }
inline unsigned cluster_rank() { return current_block->launch.cluster_rank; }
inline unsigned cluster_index() { return current_block->launch.index.x / cluster_size(); }
// The address of the launch's first argument, of which no other launch that runs has one; so the number is good for kernels with arguments.
inline uint64_t grid_number() { return (uint64_t)current_block->launch.parameters[0]; }
inline unsigned cluster_count() { return current_block->launch.grid.x / cluster_size(); }

// A barrier of bulk loads: its phase, the arrivals of a phase, those that are missing, and the bytes that are.
struct bulk_barrier { uint8_t phase, count; uint16_t pending; int32_t bytes; };
static_assert(sizeof(bulk_barrier) == 8);
inline void barrier_init(uint32_t at, unsigned count) {
    bulk_barrier b{0, (uint8_t)count, (uint16_t)count, 0};
    memcpy(shared(at), &b, 8);
}
inline void end_phase_if_complete(bulk_barrier& b) {
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.count;
}
inline void barrier_expect(uint32_t at, uint32_t bytes) {
    bulk_barrier& b = *(bulk_barrier*)shared(at);
    if (b.pending == 0) fail("a barrier has more arrivals than were announced");
    b.bytes += bytes;
    --b.pending;
    end_phase_if_complete(b);
}
inline void check_bulk(const void* p, const void* q, uint32_t bytes) {
    if ((uintptr_t)p % 16 || (uintptr_t)q % 16 || bytes % 16) fail("a bulk copy is not of multiples of 16 bytes");
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    check_bulk(shared(to), from, bytes);
    current_block->progress = true;
    current_block->loads.push(load{shared(to), (const char*)from, bytes, (unsigned long long*)shared(barrier)});
}
inline bool barrier_try_wait(uint32_t at, uint32_t parity) {
    bulk_barrier& b = *(bulk_barrier*)shared(at);
    list<load>& loads = current_block->loads;
    if (b.phase == (parity & 1))
        for (size_t l = 0; l < loads.len; ++l) {
            if ((void*)loads.items[l].barrier != &b) continue;
            const load due = loads.items[l];
            memmove(loads.items + l, loads.items + l + 1, (--loads.len - l) * sizeof(load));
            memcpy(due.to, due.from, due.bytes);
            b.bytes -= due.bytes;
            end_phase_if_complete(b);
            break;
        }
    if (b.phase != (parity & 1)) return true;
    look();
    return false;
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    check_bulk(to, shared(from), bytes);
    current_block->progress = true;
    current->bulk.begin(to, shared(from), bytes);
}

template <class T> inline unsigned long long bits(T value) {
    static_assert(sizeof(T) <= 8);
    unsigned long long all = 0;
    memcpy(&all, &value, sizeof(T));
    return all;
}
template <class T> inline T shuffle(unsigned mask, T value, unsigned source) {
    meeting& m = meet(mask, bits(value));
    T result;
    memcpy(&result, &m.values[source % 32], sizeof(T));
    if (!(m.arrived >> source % 32 & 1)) result = value;
    leave_meeting(m);
    return result;
}
inline unsigned lane() { return current->number % 32; }
inline unsigned ballot(unsigned mask, bool value) {
    meeting& m = meet(mask, value);
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l) result |= m.arrived >> l & 1 && m.values[l] ? 1u << l : 0;
    leave_meeting(m);
    return result;
}
inline unsigned present(unsigned mask) {
    const warp& w = current_block->warps[current->number / 32];
    return mask & ~w.over;
}

} // namespace emulator

extern "C" __attribute__((visibility("default"))) const emulator::kernel* emulator_kernels() { return emulator::kernels; }
extern "C" __attribute__((visibility("default"))) void emulator_run(const emulator::launch* l) { emulator::run(*l); }

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current_block->launch.index)
#define blockDim (emulator::current_block->launch.block)
#define gridDim (emulator::current_block->launch.grid)

#define EMULATED inline __attribute__((always_inline))
EMULATED void __syncthreads() {
    emulator::other_threads run;
    emulator::barrier(true);
}
EMULATED int __syncthreads_and(int value) {
    emulator::other_threads run;
    return emulator::barrier(value != 0);
}
EMULATED int __syncthreads_or(int value) {
    emulator::other_threads run;
    return !emulator::barrier(value == 0);
}
EMULATED void __syncwarp(unsigned mask = ~0u) {
    emulator::other_threads run;
    emulator::leave_meeting(emulator::meet(mask, 0));
}
EMULATED unsigned __activemask() {
    emulator::other_threads run;
    return 1u << emulator::lane();
}
template <class T> EMULATED T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    emulator::other_threads run;
    const unsigned lane = emulator::lane();
    return emulator::shuffle(mask, value, (lane & ~(width - 1u)) | ((unsigned)source & (width - 1u)));
}
template <class T> EMULATED T __shfl_xor_sync(unsigned mask, T value, int distance) {
    emulator::other_threads run;
    return emulator::shuffle(mask, value, emulator::lane() ^ (unsigned)distance);
}
template <class T> EMULATED T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
    emulator::other_threads run;
    const unsigned lane = emulator::lane();
    return emulator::shuffle(mask, value, lane < distance ? lane : lane - distance);
}
template <class T> EMULATED T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
    emulator::other_threads run;
    const unsigned lane = emulator::lane();
    return emulator::shuffle(mask, value, lane + distance > 31 ? lane : lane + distance);
}
EMULATED unsigned __ballot_sync(unsigned mask, int value) {
    emulator::other_threads run;
    return emulator::ballot(mask, value != 0);
}
EMULATED int __any_sync(unsigned mask, int value) {
    emulator::other_threads run;
    return emulator::ballot(mask, value != 0) != 0;
}
EMULATED int __all_sync(unsigned mask, int value) {
    emulator::other_threads run;
    return emulator::ballot(mask, value == 0) == 0;
}
template <class T> EMULATED unsigned __match_any_sync(unsigned mask, T value) {
    emulator::other_threads run;
    emulator::meeting& m = emulator::meet(mask, emulator::bits(value));
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l) result |= m.arrived >> l & 1 && m.values[l] == emulator::bits(value) ? 1u << l : 0;
    emulator::leave_meeting(m);
    return result;
}
template <class F> EMULATED unsigned emulator_reduce(unsigned mask, unsigned value, F f) {
    emulator::other_threads run;
    emulator::meeting& m = emulator::meet(mask, value);
    bool any = false;
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l)
        if (m.arrived >> l & 1) result = any ? f(result, (unsigned)m.values[l]) : (unsigned)m.values[l], any = true;
    emulator::leave_meeting(m);
    return result;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a & b; }); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a + b; }); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; }); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; }); }

template <class T> inline T __ldg(const T* p) { return *p; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i); return r; }
inline size_t __cvta_generic_to_shared(const void* p) { return emulator::address(p); }
template <class To, class From> inline To emulator_cast(From from) { To to; static_assert(sizeof(To) == sizeof(From)); memcpy(&to, &from, sizeof(To)); return to; }
inline float __uint_as_float(unsigned x) { return emulator_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emulator_cast<int>(x); }
inline float __int_as_float(int x) { return emulator_cast<float>(x); }
inline double __longlong_as_double(long long x) { return emulator_cast<double>(x); }
inline long long __double_as_longlong(double x) { return emulator_cast<long long>(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline unsigned __vmins2(unsigned a, unsigned b) {
    const int16_t low = (int16_t)a < (int16_t)b ? (int16_t)a : (int16_t)b;
    const int16_t high = (int16_t)(a >> 16) < (int16_t)(b >> 16) ? (int16_t)(a >> 16) : (int16_t)(b >> 16);
    return (uint16_t)low | (unsigned)(uint16_t)high << 16;
}
// The number, if one of the two is none, whatever its kind.
namespace emulator {
inline float fminf(float a, float b) { return a != a ? b : b != b ? a : minimum(a, b); }
inline float fmaxf(float a, float b) { return a != a ? b : b != b ? a : maximum(a, b); }
} // namespace emulator
#define fminf emulator::fminf
#define fmaxf emulator::fmaxf
EMULATED void __nanosleep(unsigned) {
    emulator::other_threads run;
    emulator::look();
}
EMULATED void __threadfence() {
    emulator::other_threads run;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
EMULATED void __threadfence_system() {
    emulator::other_threads run;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __trap() { emulator::fail("a kernel has trapped"); }

#define ANTIPHON_ATOMIC(name, builtin)                                                                              \
    template <class T, class V> EMULATED T name(T* p, V value) {                                                    \
        emulator::other_threads run;                                                                                \
        emulator::current_block->progress = true;                                                                   \
        return builtin(p, (T)value, __ATOMIC_ACQ_REL);                                                              \
    }
ANTIPHON_ATOMIC(atomicAdd, __atomic_fetch_add)
ANTIPHON_ATOMIC(atomicSub, __atomic_fetch_sub)
ANTIPHON_ATOMIC(atomicOr, __atomic_fetch_or)
ANTIPHON_ATOMIC(atomicAnd, __atomic_fetch_and)
ANTIPHON_ATOMIC(atomicXor, __atomic_fetch_xor)
ANTIPHON_ATOMIC(atomicExch, __atomic_exchange_n)
#undef ANTIPHON_ATOMIC
template <class T, class V> EMULATED T atomicCAS(T* p, V expected, V value) {
    emulator::other_threads run;
    emulator::current_block->progress = true;
    T seen = (T)expected;
    __atomic_compare_exchange_n(p, &seen, (T)value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return seen;
}
template <class T, class V> EMULATED T atomicMax(T* p, V value) {
    emulator::other_threads run;
    T seen = __atomic_load_n(p, __ATOMIC_ACQUIRE);
    while (seen < (T)value && !__atomic_compare_exchange_n(p, &seen, (T)value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    return seen;
}
template <class T, class V> EMULATED T atomicMin(T* p, V value) {
    emulator::other_threads run;
    T seen = __atomic_load_n(p, __ATOMIC_ACQUIRE);
    while ((T)value < seen && !__atomic_compare_exchange_n(p, &seen, (T)value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    return seen;
}

template <class A, class B> inline auto min(A a, B b) -> decltype(A() + B()) { return b < a ? b : a; }
template <class A, class B> inline auto max(A a, B b) -> decltype(A() + B()) { return a < b ? b : a; }
