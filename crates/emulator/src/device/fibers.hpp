// Fibers, and where they meet and wait.

// ------------------------------------------------------------------------------------------------------------ fibers

// `pc` is that of a copy to shared memory, which reads when it is complete.
struct copy { char* to; const char* from; size_t bytes; char* taken; unsigned number; size_t pc; };
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
    RUNTIME void begin(void* to, const void* from, size_t bytes, unsigned number, size_t pc = 0) {
        begun.push(copy{(char*)to, (const char*)from, bytes, nullptr, number, pc});
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
            if (check && c.pc) check->copied(c.from, c.bytes, c.pc, c.number);
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
    // The places it has looked at since it has done something else, of which the last are kept; and the looks at new ones.
    watched looks[MOST_LOOKS];
    unsigned looks_count, looks_next;
    unsigned idle;
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
RUNTIME void leave_for(why reason) {
    current_block->launch.turn->why = reason;
    leave();
}
// A place where the scheduler may switch.
RUNTIME void point() {
    pace* p = current_block->launch.pace;
    if (p && --p->left <= 0) leave_for(PASSES);
}
// The thread has done other than look.
RUNTIME void moved(bool works = true) {
    current_block->progress = true;
    if (pace* p = current_block->launch.pace) {
        ++p->moves;
        p->works += works;
        current->idle = current->looks_count = current->looks_next = 0;
    }
}
// Memory is written there, which somebody may wait for. What plain stores write is found later.
RUNTIME void wrote(const volatile void* at, size_t bytes) {
    pace* p = current_block->launch.pace;
    if (!p) return;
    const size_t first = (uintptr_t)at >> 4, last = ((uintptr_t)at + bytes - 1) >> 4;
    for (size_t granule = first; granule <= last && granule < first + 256; ++granule) ++p->writes[granule & 255];
}
RUNTIME void leave_to_wait(why reason, const volatile void* at, unsigned count) {
    turn& t = *current_block->launch.turn;
    t.looks = current->looks;
    t.looks_count = count;
    t.at = at;
    t.pc = current->pc;
    leave_for(reason);
}
// For loops that wait, of which nobody knows for what.
RUNTIME void look() {
    ++current_block->looks;
    if (!current_block->launch.pace) return leave();
    current->idle = 0;
    leave_to_wait(SPINS, nullptr, 0);
}
constexpr unsigned IDLE = 256;
RUNTIME bool is_as_seen(const watched& w) { return memcmp((const void*)w.at, w.seen, w.bytes) == 0; }
// For loads of what others write. Whoever sees the same again waits until one of the places has changed that it has looked at.
RUNTIME void look_at(const volatile void* at, unsigned bytes) {
    current_block->looks_at = (size_t)at;
    current_block->looks_pc = current->pc;
    if (!current_block->launch.pace) return look();
    fiber& f = *current;
    for (unsigned l = 0; l < f.looks_count; ++l) {
        if (f.looks[l].at != at || f.looks[l].bytes != bytes) continue;
        if (!is_as_seen(f.looks[l])) return point();
        leave_to_wait(LOOKS, at, f.looks_count);
        // It may never look again at what has changed, and then does not wait for it again.
        unsigned kept = 0;
        for (unsigned l = 0; l < f.looks_count; ++l)
            if (is_as_seen(f.looks[l])) f.looks[kept++] = f.looks[l];
        f.looks_count = f.looks_next = kept;
        return;
    }
    if (++f.idle > IDLE) return look();
    point();
}
RUNTIME void saw(const volatile void* at, unsigned bytes, const void* value) {
    if (!current_block->launch.pace) return;
    fiber& f = *current;
    unsigned l = 0;
    while (l < f.looks_count && (f.looks[l].at != at || f.looks[l].bytes != bytes)) ++l;
    if (l == f.looks_count) {
        l = f.looks_next++ % MOST_LOOKS;
        if (f.looks_count < MOST_LOOKS) f.looks_count = l + 1;
    }
    f.looks[l].at = at;
    f.looks[l].bytes = bytes;
    memcpy(f.looks[l].seen, value, bytes);
}
RUNTIME void sleep_while(const volatile unsigned& word, unsigned value) {
    while (word == value) {
        current->asleep_on = &word;
        current->asleep_at = value;
        if (current_block->launch.turn) leave_for(&word == &current_block->generation ? SLEEPS_IN_BLOCK : SLEEPS_IN_WARP);
        else leave();
    }
}
RUNTIME void wake(block& b, fiber& f, const volatile unsigned& word) {
    turn* t = b.launch.turn;
    if (!t || f.asleep_on != &word) return;
    f.asleep_on = nullptr;
    t->woken[t->woken_count++] = f.number;
}

RUNTIME void end_barrier_if_all_arrived(block& b) {
    if (b.arrived == 0 || b.arrived < b.alive) return;
    if (check) check->block_barrier();
    b.arrived = 0;
    b.votes[b.generation & 1] = b.vote;
    b.vote = true;
    b.generation = b.generation + 1;
    if (b.launch.turn) {
        moved();
        for (unsigned t = 0; t < b.threads; ++t) wake(b, b.fibers[t], b.generation);
    }
}
RUNTIME bool barrier(bool vote) {
    point();
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
    block& b = *current_block;
    if (!b.launch.turn) return;
    for (unsigned left = m.arrived; left; left &= left - 1) wake(b, b.fibers[warp * 32 + __builtin_ctz(left)], m.complete);
}
// Deposits this lane's value, and returns when all lanes of the mask have; `leave_meeting` follows.
RUNTIME meeting& meet(unsigned mask, unsigned long long value, bool orders = false) {
    point();
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
    if (check)
        for (size_t at = 0; at < me.bulk.begun.len; ++at) {
            const copy& c = me.bulk.begun.items[at];
            if (c.bytes && !c.taken) check->end_shared(c.from, c.bytes);
        }
    me.small.wait_all();
    me.bulk.wait_all();
    me.over = true;
    if (check) check->end_thread();
    moved();
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
    if (b.launch.turn) leave_for(ENDS);
    else leave();
    fail("a thread goes on after its end");
}

