// The device side of the emulator: what CUDA gives a kernel.
//
// Every thread of a block is a fiber. A fiber runs until it waits: at a barrier of its block, for the other lanes of its warp, or for
// memory that somebody else writes. The scheduler then switches to the next one. Blocks run at the same time, on threads of
// their own. Shared memory is memory of the block, which its launch has.
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

// Says how to repeat the run, where one scheduler has all fibers.
static void (*failed)();

[[noreturn]] RUNTIME void fail(const char* what) {
    fprintf(stderr, "emulator: %s\n", what);
    if (failed) failed();
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
// What the scheduler shares with all blocks; schedule/fibers.rs has the same layouts.
struct pace {
    long long left;            // accesses until the next switch
    unsigned long long clock;  // nanoseconds
    unsigned long long moves;  // what is not only a look at memory
    unsigned long long works;  // of those, what is no compare-and-swap, as waiting threads do it to agree who asks the host
    unsigned writes[256];      // to places by their offset in a page, which is the same wherever memory is mapped
};
// Why a fiber has left.
enum why : unsigned { PASSES, SLEEPS_IN_WARP, SLEEPS_IN_BLOCK, LOOKS, SPINS, ENDS };
// Memory that a fiber has looked at, and what it saw.
struct watched { const volatile void* at; unsigned bytes; unsigned long long seen[2]; };
constexpr unsigned MOST_LOOKS = 16;
struct turn {
    void (*leave)();
    void (*failed)();
    unsigned why;
    unsigned woken_count;
    const watched* looks; // of the fiber, and how many
    unsigned looks_count;
    const volatile void* at; // the last of them
    size_t pc;
    unsigned short woken[1024]; // fibers that slept and go on
};
struct launch {
    void (*call)(void**);
    void** parameters;
    uint3 grid, block, index;
    unsigned cluster_size, cluster_rank;
    emulator::cluster* of_cluster;
    char* stacks;
    size_t stack_bytes;
    // The block's shared memory: BLOCK_BYTES, of which a launch asks for `shared_bytes` of dynamic size.
    char* memory;
    unsigned shared_bytes;
    // Where the number of the thread that runs is written.
    unsigned* running;
    emulator::watch* watch;
    // Null where each block has a thread of the operating system.
    emulator::pace* pace;
    emulator::turn* turn;
};

// What checks the order of accesses, in the library: races/hooks.rs has the same layout. Null without checks.
struct checks {
    void (*end_thread)();
    // The thread ends, and with its block this shared memory, which one of its copies reads.
    void (*end_shared)(const void* at, size_t bytes);
    void (*weak)(const void* at, size_t pc, unsigned what);
    // No other thread accesses the place between `enter` and `leave`.
    void* (*enter)(const void* at, size_t pc, unsigned what, unsigned bytes, unsigned unit);
    // Of a load between them: replaces the value by an older one, if it is late. Whether it is.
    bool (*older)(const void* at, void* value, unsigned bytes);
    // Of a store between them: whether it comes before the one that is there.
    bool (*is_lost)();
    void (*leave)(void* entered);
    void (*fence)(unsigned scope);
    void (*proxy_fence)(unsigned spaces);
    void (*block_barrier)();
    void (*warp_barrier)(unsigned warp, unsigned lanes);
    void (*cluster_arrive)(bool orders);
    void (*cluster_wait)();
    // A copy that is complete later: its number among those of its thread.
    unsigned (*copy)(void* to, const void* from, size_t bytes, size_t pc, bool is_bulk);
    // It reads now, at the latest: what it sees it has observed.
    void (*copied)(const void* from, size_t bytes, size_t pc, unsigned number);
    void (*copies_done)(unsigned number, bool only_read);
    void (*barrier_arrive)(const void* barrier);
    void (*barrier_complete)(const void* barrier, unsigned thread, unsigned number);
    void (*barrier_wait)(const void* barrier);
    void (*grid_wait)();
};
static const checks* check;

