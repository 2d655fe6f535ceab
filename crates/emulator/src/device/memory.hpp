// ----------------------------------------------------------------------------------------------------------- kernels

struct kernel {
    const void* address;
    void (*call)(void**);
    const size_t* sizes;
    size_t parameters;
    const char* name;
    unsigned bounds[2]; // of __launch_bounds__, 0 without them
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
    registration(const char* name, unsigned threads = 0, unsigned blocks = 0) {
        static const size_t sizes[] = {sizeof(A)..., 0};
        entry = kernel{(const void*)FUNCTION, call, sizes, sizeof...(A), name, {threads, blocks}, kernels};
        kernels = &entry;
    }
};

// ------------------------------------------------------------------------------------------------------ instructions

RUNTIME uint32_t address(const void* p) {
    const ptrdiff_t offset = (const char*)p - current_block->launch.memory;
    if (offset < 0 || offset > (ptrdiff_t)BLOCK_BYTES) fail("an address is not of shared memory");
    return (uint32_t)offset;
}
RUNTIME char* shared(uint32_t address) { return current_block->launch.memory + (int32_t)address; }
// An address of the cluster's shared memory has the rank of its block, plus one, in the upper byte; one of the own block's
// memory has 0 or 255 there.
RUNTIME uint32_t address_in_block(uint32_t address, unsigned rank) {
    if (rank >= current_block->launch.cluster_size) fail("there is no such block in the cluster");
    return ((uint32_t)((int32_t)address + (1 << 20)) & 0xFFFFFF) | (rank + 1) << 24;
}
RUNTIME char* shared_of_cluster(uint32_t address) {
    const unsigned of = address >> 24;
    if (of == 0 || of == 255) return shared(address);
    cluster* c = current_block->launch.of_cluster;
    const int32_t offset = (int32_t)(address & 0xFFFFFF) - (1 << 20);
    if (!c) return current_block->launch.memory + offset;
    char* there;
    while (!(there = __atomic_load_n(&c->anchors[of - 1], __ATOMIC_ACQUIRE))) look();
    return there + offset;
}

// What an access is; races/access.rs has the same numbers. Without STRONG it is weak, and in the low byte stand its bytes.
constexpr unsigned READ = 1 << 8, WRITE = 1 << 9, STRONG = 1 << 10, ACQUIRE = 1 << 11, RELEASE = 1 << 12, CONSTANT = 1 << 13;
constexpr unsigned SEQUENTIAL = 1 << 18; // of a fence
constexpr unsigned CTA = 0 << 16, CLUSTER = 1 << 16, GPU = 2 << 16, SYSTEM = 3 << 16;
constexpr unsigned OF_GLOBAL = 1, OF_SHARED = 2;

struct access {
    void* entered;
    RUNTIME access(const volatile void* at, unsigned bytes, unsigned what, unsigned unit = 0)
        : entered(check ? check->enter((const void*)at, current->pc, what, bytes, unit) : nullptr) {}
    RUNTIME ~access() { if (entered) check->leave(entered); }
};

template <class T, unsigned N> struct alignas(sizeof(T) * N) vector { T of[N]; };
// 16 bytes that are one value, where a vector's elements are one each.
struct alignas(16) whole { uint32_t of[4]; };
template <class T> constexpr unsigned UNIT = sizeof(T);
template <class T, unsigned N> constexpr unsigned UNIT<vector<T, N>> = sizeof(T);

template <size_t BYTES> struct bits_of;
template <> struct bits_of<1> { typedef uint8_t type; };
template <> struct bits_of<2> { typedef uint16_t type; };
template <> struct bits_of<4> { typedef uint32_t type; };
template <> struct bits_of<8> { typedef uint64_t type; };

// A strong load is for memory that somebody else writes. 16 bytes are whole: one instruction, of a processor that has AVX.
template <class T> RUNTIME T load(const volatile void* at, unsigned what) {
    if ((uintptr_t)at % sizeof(T)) fail("an access is not aligned");
    if (what & STRONG) look_at(at, sizeof(T));
    else point();
    access checked(at, sizeof(T), what | READ, UNIT<T>);
    T value;
    if constexpr (sizeof(T) == 16) {
        __m128i v;
        asm volatile("vmovdqa (%1), %0" : "=x"(v) : "r"(at) : "memory");
        memcpy(&value, &v, 16);
    } else {
        const auto bits = __atomic_load_n((typename bits_of<sizeof(T)>::type*)at, __ATOMIC_ACQUIRE);
        memcpy(&value, &bits, sizeof(T));
    }
    if (!(what & STRONG)) return value;
    // A thread that has not seen the last store does not wait for another one.
    if (!checked.entered || !check->older((const void*)at, &value, sizeof(T))) saw(at, sizeof(T), &value);
    return value;
}
template <class T> RUNTIME void store(volatile void* at, T value, unsigned what) {
    if ((uintptr_t)at % sizeof(T)) fail("an access is not aligned");
    point();
    moved();
    wrote(at, sizeof(T));
    access checked(at, sizeof(T), what | WRITE);
    if ((what & STRONG) && checked.entered && check->is_lost()) return;
    if constexpr (sizeof(T) == 16) {
        __m128i v;
        memcpy(&v, &value, 16);
        asm volatile("vmovdqa %1, (%0)" :: "r"(at), "x"(v) : "memory");
    } else {
        typename bits_of<sizeof(T)>::type bits;
        memcpy(&bits, &value, sizeof(T));
        __atomic_store_n((typename bits_of<sizeof(T)>::type*)at, bits, __ATOMIC_RELEASE);
    }
}
#define ANTIPHON_FETCH(name, result)                                                                                \
    template <class T> RUNTIME T fetch_##name(volatile void* at, T value, unsigned what) {                          \
        point();                                                                                                    \
        moved();                                                                                                    \
        wrote(at, sizeof(T));                                                                                       \
        access checked(at, sizeof(T), what | READ | WRITE);                                                         \
        T old;                                                                                                      \
        __atomic_load((T*)at, &old, __ATOMIC_ACQUIRE);                                                              \
        for (;;) {                                                                                                  \
            T next = result;                                                                                        \
            if (__atomic_compare_exchange((T*)at, &old, &next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return old; \
        }                                                                                                           \
    }
ANTIPHON_FETCH(add, old + value)
ANTIPHON_FETCH(sub, old - value)
ANTIPHON_FETCH(and, old & value)
ANTIPHON_FETCH(or, old | value)
ANTIPHON_FETCH(xor, old ^ value)
ANTIPHON_FETCH(exch, value)
ANTIPHON_FETCH(min, value < old ? value : old)
ANTIPHON_FETCH(max, old < value ? value : old)
#undef ANTIPHON_FETCH
template <class T> RUNTIME T fetch_cas(volatile void* at, T expected, T value, unsigned what) {
    point();
    moved(false);
    wrote(at, sizeof(T));
    access checked(at, sizeof(T), what | READ | WRITE);
    __atomic_compare_exchange((T*)at, &expected, &value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
RUNTIME void fence(unsigned scope) {
    point();
    if (check) check->fence(scope);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
RUNTIME void proxy_fence(unsigned spaces) { point(); if (check) check->proxy_fence(spaces); }
RUNTIME void grid_wait() { if (check) check->grid_wait(); }
RUNTIME void grid_trigger() {}

RUNTIME uint64_t global_timer() {
    if (const pace* p = current_block->launch.pace) {
        if (++current->idle > IDLE) look();
        else point();
        return p->clock;
    }
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

RUNTIME void cluster_arrive(bool orders) {
    block& b = *current_block;
    cluster* c = b.launch.of_cluster;
    if (check && c) check->cluster_arrive(orders);
    if (!c) { current->cluster_generation = b.generation; return; }
    current->cluster_generation = __atomic_load_n(&c->generation, __ATOMIC_ACQUIRE);
    moved();
    if (++b.cluster_arrived < b.threads) return;
    b.cluster_arrived = 0;
    if (__atomic_add_fetch(&c->arrived, 1, __ATOMIC_ACQ_REL) < b.launch.cluster_size) return;
    __atomic_store_n(&c->arrived, 0, __ATOMIC_RELEASE);
    __atomic_add_fetch(&c->generation, 1, __ATOMIC_ACQ_REL);
}
RUNTIME void cluster_wait() {
    cluster* c = current_block->launch.of_cluster;
    if (!c) return (void)barrier(true);
    while (__atomic_load_n(&c->generation, __ATOMIC_ACQUIRE) == current->cluster_generation) look();
    if (check) check->cluster_wait();
    moved();
}
RUNTIME unsigned cluster_size() { return current_block->launch.cluster_size; }
RUNTIME unsigned cluster_rank() { return current_block->launch.cluster_rank; }
RUNTIME unsigned cluster_index() { return current_block->launch.index.x / cluster_size(); }
// The address of the launch's first argument, of which no other launch that runs has one; so the number is good for kernels with arguments.
RUNTIME uint64_t grid_number() { return (uint64_t)current_block->launch.parameters[0]; }
RUNTIME unsigned cluster_count() { return current_block->launch.grid.x / cluster_size(); }

// A barrier of bulk loads: its phase, the arrivals of a phase, those that are missing, and the bytes that are.
struct bulk_barrier { uint8_t phase, count; uint16_t pending; int32_t bytes; };
static_assert(sizeof(bulk_barrier) == 8);
RUNTIME void barrier_init(uint32_t at, unsigned count) {
    bulk_barrier b{0, (uint8_t)count, (uint16_t)count, 0};
    access checked(shared(at), 8, WRITE);
    memcpy(shared(at), &b, 8);
}
RUNTIME void end_phase_if_complete(bulk_barrier& b) {
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.count;
}
RUNTIME void barrier_expect(uint32_t at, uint32_t bytes) {
    bulk_barrier& b = *(bulk_barrier*)shared(at);
    access checked(&b, 8, READ | WRITE | STRONG | CTA);
    if (check) check->barrier_arrive(&b);
    moved();
    if (b.pending == 0) fail("a barrier has more arrivals than were announced");
    b.bytes += bytes;
    --b.pending;
    end_phase_if_complete(b);
}
RUNTIME void check_bulk(const void* p, const void* q, uint32_t bytes) {
    if ((uintptr_t)p % 16 || (uintptr_t)q % 16 || bytes % 16) fail("a bulk copy is not of multiples of 16 bytes");
}
RUNTIME void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    check_bulk(shared(to), from, bytes);
    moved();
    const unsigned number = check ? check->copy(shared(to), from, bytes, current->pc, true) : 0;
    current_block->loads.push({shared(to), (const char*)from, bytes, (unsigned long long*)shared(barrier), current->number, number});
}
RUNTIME bool barrier_try_wait(uint32_t at, uint32_t parity) {
    bulk_barrier& b = *(bulk_barrier*)shared(at);
    list<bulk_copy>& loads = current_block->loads;
    if (b.phase == (parity & 1))
        for (size_t l = 0; l < loads.len; ++l) {
            if ((void*)loads.items[l].barrier != &b) continue;
            const bulk_copy due = loads.items[l];
            memmove(loads.items + l, loads.items + l + 1, (--loads.len - l) * sizeof(bulk_copy));
            memcpy(due.to, due.from, due.bytes);
            wrote(due.to, due.bytes);
            if (check) check->barrier_complete(&b, due.thread, due.number);
            b.bytes -= due.bytes;
            end_phase_if_complete(b);
            break;
        }
    if (b.phase != (parity & 1)) {
        access checked(&b, 8, READ | STRONG | CTA);
        if (check) check->barrier_wait(&b);
        return true;
    }
    look();
    return false;
}
RUNTIME void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    check_bulk(to, shared(from), bytes);
    moved();
    const unsigned number = check ? check->copy(to, shared(from), bytes, current->pc, true) : 0;
    current->bulk.begin(to, shared(from), bytes, number);
}
RUNTIME void small_load(void* to, const void* from, uint32_t bytes) {
    const unsigned number = check ? check->copy(to, from, bytes, current->pc, false) : 0;
    current->small.begin(to, from, bytes, number, current->pc);
}
RUNTIME void wait_copies(copies& of, size_t left, bool only_read, bool ends_group) {
    if (ends_group) of.end_group();
    const unsigned number = of.wait(left, only_read);
    moved();
    if (check) check->copies_done(number, only_read);
}

template <class T> RUNTIME unsigned long long bits(T value) {
    static_assert(sizeof(T) <= 8);
    unsigned long long all = 0;
    memcpy(&all, &value, sizeof(T));
    return all;
}
template <class T> RUNTIME T shuffle(unsigned mask, T value, unsigned source) {
    meeting& m = meet(mask, bits(value));
    T result;
    memcpy(&result, &m.values[source % 32], sizeof(T));
    if (!(m.arrived >> source % 32 & 1)) result = value;
    leave_meeting(m);
    return result;
}
RUNTIME unsigned lane() { return current->number % 32; }
RUNTIME unsigned ballot(unsigned mask, bool value) {
    meeting& m = meet(mask, value);
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l) result |= m.arrived >> l & 1 && m.values[l] ? 1u << l : 0;
    leave_meeting(m);
    return result;
}
RUNTIME unsigned present(unsigned mask) {
    const warp& w = current_block->warps[current->number / 32];
    return mask & ~w.over;
}

