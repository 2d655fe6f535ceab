// A block, from its beginning to its end: its shared memory, and its fibers.

// ----------------------------------------------------------------------------------------------------- shared memory

constexpr size_t BLOCK_BYTES = 1 << 20, MOST_DYNAMIC_BYTES = 232448;
// What the functions of the program declare, one behind the other in a block's memory.
static size_t static_shared_bytes;
RUNTIME size_t take_shared(const char*, size_t bytes, size_t alignment) {
    if (alignment < 16) alignment = 16;
    const size_t at = (static_shared_bytes + alignment - 1) / alignment * alignment;
    static_shared_bytes = at + bytes;
    return at;
}
// The place of what one statement declares; T has its variables. `image` is there for its size, which driver/symbols.rs reads.
template <class T> struct shared_place {
    static char image[sizeof(T)];
    static const size_t offset;
    RUNTIME static T& here() { return *(T*)(own_block()->launch.memory + offset); }
};
template <class T> char shared_place<T>::image[sizeof(T)];
template <class T> const size_t shared_place<T>::offset = take_shared(image, sizeof(T), alignof(T));
// Memory of dynamic size follows.
RUNTIME size_t dynamic_offset() { return (static_shared_bytes + 1023) / 1024 * 1024; }
RUNTIME char* dynamic() { return own_block()->launch.memory + dynamic_offset(); }

// -------------------------------------------------------------------------------------------------------- its fibers

// Says which thread of a kernel has used a wrong address.
RUNTIME void report_fault(int signal, siginfo_t* fault, void* context) {
    ::signal(signal, SIG_DFL);
    if (failed) failed();
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

RUNTIME unsigned char* dynamic_of(const launch& l) { return (unsigned char*)l.memory + dynamic_offset(); }
// The bytes behind the block's shared memory that show whether a kernel writes there.
RUNTIME size_t end_of_dynamic(const launch& l) {
    const size_t wanted = l.shared_bytes + 4096;
    return wanted < MOST_DYNAMIC_BYTES ? wanted : MOST_DYNAMIC_BYTES;
}

RUNTIME void leave_at_access() { leave_for(PASSES); }

RUNTIME block* begin(const launch& l) {
    struct sigaction action {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    block& b = *new block{};
    b.launch = l;
    b.threads = b.alive = l.block.x * l.block.y * l.block.z;
    b.vote = true;
    b.fibers = new fiber[b.threads]{};
    b.warps = (warp*)calloc((b.threads + 31) / 32, sizeof(warp));
    // Lanes that the last warp does not have.
    if (b.threads % 32) b.warps[b.threads / 32].over = ~0u << b.threads % 32;
    if (dynamic_offset() + MOST_DYNAMIC_BYTES > BLOCK_BYTES) fail("a program declares too much shared memory");
    memset(dynamic_of(l), 0xCD, end_of_dynamic(l));
    if (l.of_cluster) __atomic_store_n(&l.of_cluster->anchors[l.cluster_rank], l.memory, __ATOMIC_RELEASE);
    if (l.turn) {
        l.turn->leave = leave_at_access;
        failed = l.turn->failed;
    }
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
    return &b;
}

// Runs a fiber until it leaves.
RUNTIME void resume(block& b, fiber& f) {
    current = &f;
    if (CHECKED) *b.launch.running = f.number;
    emulator_switch(&b.scheduler, f.stack_pointer);
}

RUNTIME void end(block& b) {
    for (unsigned t = 0; t < b.threads; ++t) {
        free(b.fibers[t].small.begun.items);
        free(b.fibers[t].bulk.begun.items);
    }
    if (b.loads.len) fail("a block has ended before its bulk loads");
    for (size_t at = b.launch.shared_bytes; at < end_of_dynamic(b.launch); ++at)
        if (dynamic_of(b.launch)[at] != 0xCD) fail("a kernel writes more dynamic shared memory than its launch has");
    free(b.loads.items);
    free(b.warps);
    delete[] b.fibers;
    delete &b;
    current_block = nullptr;
}

// Runs a block that has this thread of the operating system to itself.
RUNTIME void run(const launch& l) {
    block& b = *begin(l);
    current_block = &b;
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
            ++switches;
            resume(b, f);
        }
        rests = b.progress || b.looks * 3 < switches ? 0 : rests + 1;
        if (rests == 0) __atomic_store_n(&l.watch->moves, l.watch->moves + 1, __ATOMIC_RELAXED);
        __atomic_store_n(&l.watch->looks_at, b.looks_at, __ATOMIC_RELAXED);
        __atomic_store_n(&l.watch->pc, b.looks_pc, __ATOMIC_RELAXED);
        __atomic_store_n(&l.watch->rests, rests, __ATOMIC_RELAXED);
        if (const timespec pause{0, 10000l << (rests / 8 < 6 ? rests / 8 : 6)}; rests > 4) nanosleep(&pause, nullptr);
        else if (rests) sched_yield();
    }
    end(b);
}

// For the scheduler of all blocks, which has one thread of the operating system: schedule/fibers.rs.
#define ENTRY extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
ENTRY block* emulator_begin(const launch* l) { return begin(*l); }
ENTRY void emulator_resume(block* b, unsigned number) {
    current_block = b;
    b->launch.turn->woken_count = 0;
    resume(*b, b->fibers[number]);
}
ENTRY void emulator_end(block* b) { end(*b); }

