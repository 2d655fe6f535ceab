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

// Functions of the emulator itself: their accesses are none of a kernel's, so they are without hooks. For that g++ must not
// inline them into a program with hooks, which it would with `always_inline`.
#define RUNTIME inline __attribute__((no_sanitize("thread")))

template <class To, class From> inline To emulator_cast(From from) { To to; static_assert(sizeof(To) == sizeof(From)); memcpy(&to, &from, sizeof(To)); return to; }

namespace emulator {

#ifdef ANTIPHON_EMULATOR_CHECKED
constexpr bool CHECKED = true;
#else
constexpr bool CHECKED = false;
#endif

[[noreturn]] RUNTIME void fail(const char* what) {
    fprintf(stderr, "emulator: %s\n", what);
    abort();
}

// What the driver passes; execution.rs has the same layouts.
constexpr unsigned MAX_CLUSTER = 16;
struct cluster {
    unsigned arrived, generation;
    char* anchors[MAX_CLUSTER];
};
// The state that a block publishes; circle.rs has the same layout.
struct watch {
    unsigned rests, moves;
    size_t looks_at, pc;
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
    // Where the number of the thread that runs is written.
    unsigned* running;
    emulator::watch* watch;
};

// What checks the order of accesses, in the library: races/hooks.rs has the same layout. Null without checks.
struct checks {
    void (*begin_block)(const void* shared);
    void (*end_thread)();
    void (*weak)(const void* at, size_t pc, unsigned what);
    // No other thread accesses the place between `enter` and `leave`.
    void* (*enter)(const void* at, size_t pc, unsigned what, unsigned bytes);
    void (*leave)(void* entered);
    void (*fence)(unsigned scope);
    void (*proxy_fence)(unsigned spaces);
    void (*block_barrier)();
    void (*warp_barrier)(unsigned warp, unsigned lanes);
    void (*cluster_arrive)(bool orders);
    void (*cluster_wait)();
    // A copy that is complete later: its number among those of its thread.
    unsigned (*copy)(void* to, const void* from, size_t bytes, size_t pc, bool is_bulk);
    void (*copies_done)(unsigned number, bool only_read);
    void (*barrier_arrive)(const void* barrier);
    void (*barrier_complete)(const void* barrier, unsigned thread, unsigned number);
    void (*barrier_wait)(const void* barrier);
    void (*grid_wait)();
};
static const checks* check;

// ------------------------------------------------------------------------------------------------------------ fibers

struct copy { char* to; const char* from; size_t bytes; char* taken; unsigned number; };
template <class T> struct list {
    T* items = nullptr;
    size_t len = 0, room = 0;
    RUNTIME void push(T item) {
        if (len == room) items = (T*)realloc(items, (room = room ? 2 * room : 16) * sizeof(T));
        items[len++] = item;
    }
    RUNTIME void remove_first(size_t count) { memmove(items, items + count, (len -= count) * sizeof(T)); }
};

// The copies that a thread has begun, the oldest first; the ends of groups are copies without bytes.
struct copies {
    list<copy> begun;
    size_t groups = 0;
    RUNTIME void begin(void* to, const void* from, size_t bytes, unsigned number) {
        begun.push(copy{(char*)to, (const char*)from, bytes, nullptr, number});
    }
    RUNTIME void end_group() { begun.push(copy{}); ++groups; }
    // All groups but the last `left` are complete, or have been read. Returns the number of the last copy that is.
    RUNTIME unsigned wait(size_t left, bool only_read) {
        unsigned number = 0;
        size_t waited = groups > left ? groups - left : 0, done = 0;
        for (size_t at = 0; at < begun.len && waited; ++at) {
            copy& c = begun.items[at];
            if (c.bytes == 0) { --waited; if (!only_read) { --groups; done = at + 1; } continue; }
            number = c.number;
            if (only_read) {
                if (!c.taken) memcpy(c.taken = (char*)malloc(c.bytes), c.from, c.bytes);
                continue;
            }
            memcpy(c.to, c.taken ? c.taken : c.from, c.bytes);
            free(c.taken);
        }
        begun.remove_first(done);
        return number;
    }
    RUNTIME unsigned wait_all() { end_group(); return wait(0, false); }
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
    size_t pc; // of the instruction, for reports
    copies small, bulk;
};

// Lanes of a warp that execute one instruction together.
struct meeting {
    unsigned mask, arrived, left;
    bool orders; // as __syncwarp does; shuffles and votes do not
    volatile unsigned complete;
    unsigned long long values[32];
};
constexpr unsigned MEETINGS = 32;
struct warp {
    unsigned used; // meetings
    unsigned over; // lanes that have returned
    meeting meetings[MEETINGS];
};

struct bulk_copy { char* to; const char* from; size_t bytes; unsigned long long* barrier; unsigned thread, number; };

struct block {
    emulator::launch launch;
    unsigned threads, alive;
    volatile unsigned generation; // of __syncthreads
    unsigned arrived, cluster_arrived;
    bool vote, votes[2]; // of __syncthreads_and
    bool progress;       // whether a fiber has written memory in this round
    unsigned looks;      // fibers that have looked at memory
    size_t looks_at, looks_pc; // the last of them
    void* scheduler;
    fiber* fibers;
    warp* warps;
    list<bulk_copy> loads;
};

static thread_local block* current_block;
static thread_local fiber* current;
static thread_local char anchor[16];
alignas(1024) static thread_local unsigned char dynamic_shared[232448];

RUNTIME char* dynamic() { return (char*)dynamic_shared; }
// For a thread of a kernel they never change.
__attribute__((const)) RUNTIME fiber* me() { return current; }
__attribute__((const)) RUNTIME block* own_block() { return current_block; }

// Keeps the compiler from assuming that memory is the same behind an instruction with which other threads may have run. It
// would of shared memory, as no other function has its address. And remembers where the instruction is.
struct other_threads {
    __attribute__((always_inline)) other_threads() {
        if (CHECKED) {
            fiber* mine = me();
            asm volatile("leaq 0(%%rip), %%rax\nmovq %%rax, %0" : "=m"(mine->pc) :: "rax", "memory");
        }
        asm volatile("" ::: "memory");
    }
    __attribute__((always_inline)) ~other_threads() { asm volatile("" ::: "memory"); }
};

extern "C" void emulator_switch(void** from, void* to);
asm(".text\n"
    "emulator_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n");

__attribute__((noinline)) RUNTIME void leave() {
    fiber* mine = current;
    emulator_switch(&mine->stack_pointer, current_block->scheduler);
}
// For loops that wait for memory.
RUNTIME void look() {
    ++current_block->looks;
    leave();
}
RUNTIME void sleep_while(const volatile unsigned& word, unsigned value) {
    while (word == value) {
        current->asleep_on = &word;
        current->asleep_at = value;
        leave();
    }
}

RUNTIME void end_barrier_if_all_arrived(block& b) {
    if (b.arrived == 0 || b.arrived < b.alive) return;
    if (check) check->block_barrier();
    b.arrived = 0;
    b.votes[b.generation & 1] = b.vote;
    b.vote = true;
    b.generation = b.generation + 1;
}
RUNTIME bool barrier(bool vote) {
    block& b = *current_block;
    const unsigned generation = b.generation;
    b.vote &= vote;
    ++b.arrived;
    end_barrier_if_all_arrived(b);
    sleep_while(b.generation, generation);
    return b.votes[generation & 1];
}

RUNTIME void complete(meeting& m, unsigned warp) {
    if (check && m.orders) check->warp_barrier(warp, m.arrived);
    m.complete = 1;
}
// Deposits this lane's value, and returns when all lanes of the mask have; `leave_meeting` follows.
RUNTIME meeting& meet(unsigned mask, unsigned long long value, bool orders = false) {
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
        found->orders = orders;
    }
    found->values[lane] = value;
    found->arrived |= 1u << lane;
    if ((found->arrived | w.over & mask) == mask) complete(*found, current->number / 32);
    else sleep_while(found->complete, 0);
    return *found;
}
RUNTIME void leave_meeting(meeting& m) {
    m.left |= 1u << current->number % 32;
    if (m.left != m.arrived) return;
    warp& w = current_block->warps[current->number / 32];
    w.used &= ~(1u << (&m - w.meetings));
}

RUNTIME void end_thread() {
    fiber& me = *current;
    block& b = *current_block;
    me.small.wait_all();
    me.bulk.wait_all();
    me.over = true;
    if (check) check->end_thread();
    b.progress = true;
    --b.alive;
    end_barrier_if_all_arrived(b);
    warp& w = b.warps[me.number / 32];
    w.over |= 1u << me.number % 32;
    for (unsigned left = w.used; left; left &= left - 1) {
        meeting& m = w.meetings[__builtin_ctz(left)];
        if ((m.arrived | w.over & m.mask) == m.mask) complete(m, me.number / 32);
    }
}
__attribute__((noinline)) RUNTIME void enter() {
    block& b = *current_block;
    b.launch.call(b.launch.parameters);
    end_thread();
    leave();
    fail("a thread goes on after its end");
}

// Says which thread of a kernel has used a wrong address.
RUNTIME void report_fault(int signal, siginfo_t* fault, void* context) {
    ::signal(signal, SIG_DFL);
    if (!current_block || !current) return;
    const uint3 b = current_block->launch.index, t = current->index;
    const ptrdiff_t at = (char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] - (char*)&emulator_switch;
    fprintf(stderr, "emulator: no memory at %p: block %u, %u, %u, thread %u, %u, %u, %td bytes behind emulator_switch\n",
            fault->si_addr, b.x, b.y, b.z, t.x, t.y, t.z, at);
}

// The step from a fiber to the next one in the order in which they run: 1 without a seed. With a seed it is a number whose multiples
// reach all fibers.
RUNTIME unsigned step_of(const launch& l, unsigned threads) {
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

RUNTIME void run(const launch& l) {
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
    if (check) check->begin_block(anchor);
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
            if (CHECKED) *l.running = f.number;
            ++switches;
            emulator_switch(&b.scheduler, f.stack_pointer);
        }
        rests = b.progress || b.looks * 3 < switches ? 0 : rests + 1;
        if (rests == 0) __atomic_store_n(&l.watch->moves, l.watch->moves + 1, __ATOMIC_RELAXED);
        __atomic_store_n(&l.watch->looks_at, b.looks_at, __ATOMIC_RELAXED);
        __atomic_store_n(&l.watch->pc, b.looks_pc, __ATOMIC_RELAXED);
        __atomic_store_n(&l.watch->rests, rests, __ATOMIC_RELAXED);
        if (const timespec pause{0, 10000l << (rests / 8 < 6 ? rests / 8 : 6)}; rests > 4) nanosleep(&pause, nullptr);
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

