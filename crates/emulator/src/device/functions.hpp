} // namespace emulator

extern "C" __attribute__((visibility("default"))) const emulator::kernel* emulator_kernels() { return emulator::kernels; }
#ifdef ANTIPHON_EMULATOR_CHECKED
extern "C" {
__attribute__((visibility("hidden"))) void (*antiphon_hook)(const void* at, size_t pc, unsigned what) = [](const void*, size_t, unsigned) {};
}
#endif
extern "C" __attribute__((visibility("default"))) void emulator_check(const emulator::checks* c) {
    emulator::check = c;
#ifdef ANTIPHON_EMULATOR_CHECKED
    antiphon_hook = c->weak;
#endif
}
extern "C" __attribute__((visibility("default"))) void emulator_run(const emulator::launch* l) { emulator::run(*l); }

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define threadIdx (emulator::me()->index)
#define blockIdx (emulator::own_block()->launch.index)
#define blockDim (emulator::own_block()->launch.block)
#define gridDim (emulator::own_block()->launch.grid)

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
    emulator::leave_meeting(emulator::meet(mask, 0, true));
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
template <class T> RUNTIME unsigned emulator_match(unsigned mask, T value) {
    emulator::meeting& m = emulator::meet(mask, emulator::bits(value));
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l) result |= m.arrived >> l & 1 && m.values[l] == emulator::bits(value) ? 1u << l : 0;
    emulator::leave_meeting(m);
    return result;
}
template <class T> EMULATED unsigned __match_any_sync(unsigned mask, T value) {
    emulator::other_threads run;
    return emulator_match(mask, value);
}
template <class F> RUNTIME unsigned emulator_reduce(unsigned mask, unsigned value, F f) {
    emulator::meeting& m = emulator::meet(mask, value);
    bool any = false;
    unsigned result = 0;
    for (unsigned l = 0; l < 32; ++l)
        if (m.arrived >> l & 1) result = any ? f(result, (unsigned)m.values[l]) : (unsigned)m.values[l], any = true;
    emulator::leave_meeting(m);
    return result;
}
EMULATED unsigned __reduce_or_sync(unsigned mask, unsigned v) { emulator::other_threads run; return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a | b; }); }
EMULATED unsigned __reduce_and_sync(unsigned mask, unsigned v) { emulator::other_threads run; return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a & b; }); }
EMULATED unsigned __reduce_add_sync(unsigned mask, unsigned v) { emulator::other_threads run; return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a + b; }); }
EMULATED unsigned __reduce_max_sync(unsigned mask, unsigned v) { emulator::other_threads run; return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; }); }
EMULATED unsigned __reduce_min_sync(unsigned mask, unsigned v) { emulator::other_threads run; return emulator_reduce(mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; }); }

template <class T> EMULATED T __ldg(const T* p) {
    emulator::other_threads run;
    return emulator::load<T>(p, emulator::CONSTANT);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i); return r; }
inline size_t __cvta_generic_to_shared(const void* p) { return emulator::address(p); }
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
inline float rsqrtf(float x) { return 1 / __builtin_sqrtf(x); }
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
EMULATED void __threadfence_block() {
    emulator::other_threads run;
    emulator::fence(emulator::SEQUENTIAL | emulator::CTA);
}
EMULATED void __threadfence() {
    emulator::other_threads run;
    emulator::fence(emulator::SEQUENTIAL | emulator::GPU);
}
EMULATED void __threadfence_system() {
    emulator::other_threads run;
    emulator::fence(emulator::SEQUENTIAL | emulator::SYSTEM);
}
inline void __trap() { emulator::fail("a kernel has trapped"); }

// Relaxed, and at the GPU's scope.
#define ANTIPHON_ATOMIC(name, operation)                                                                            \
    template <class T, class V> EMULATED T name(T* p, V value) {                                                    \
        emulator::other_threads run;                                                                                \
        return emulator::fetch_##operation<T>(p, (T)value, emulator::STRONG | emulator::GPU);                       \
    }                                                                                                               \
    template <class T, class V> EMULATED T name##_system(T* p, V value) {                                           \
        emulator::other_threads run;                                                                                \
        return emulator::fetch_##operation<T>(p, (T)value, emulator::STRONG | emulator::SYSTEM);                    \
    }
ANTIPHON_ATOMIC(atomicAdd, add)
ANTIPHON_ATOMIC(atomicSub, sub)
ANTIPHON_ATOMIC(atomicOr, or)
ANTIPHON_ATOMIC(atomicAnd, and)
ANTIPHON_ATOMIC(atomicXor, xor)
ANTIPHON_ATOMIC(atomicExch, exch)
ANTIPHON_ATOMIC(atomicMax, max)
ANTIPHON_ATOMIC(atomicMin, min)
#undef ANTIPHON_ATOMIC
template <class T, class V> EMULATED T atomicCAS(T* p, V expected, V value) {
    emulator::other_threads run;
    return emulator::fetch_cas<T>(p, (T)expected, (T)value, emulator::STRONG | emulator::GPU);
}

template <class A, class B> inline auto min(A a, B b) -> decltype(A() + B()) { return b < a ? b : a; }
template <class A, class B> inline auto max(A a, B b) -> decltype(A() + B()) { return a < b ? b : a; }

#ifdef ANTIPHON_EMULATOR_CHECKED
// What g++ calls ahead of each access with -fsanitize=thread. The second argument is where the access is.
#define ANTIPHON_HOOK(name, what)                                                                                   \
    asm(".globl __tsan_" name "\n__tsan_" name ":\nmovq (%rsp), %rsi\nmovl $" what ", %edx\n"                       \
        "movq antiphon_hook(%rip), %rax\njmp *%rax\n");
#define ANTIPHON_HOOKS(size)                                                                                        \
    ANTIPHON_HOOK("read" size, "0x100+" size)                                                                       \
    ANTIPHON_HOOK("write" size, "0x200+" size)                                                                      \
    ANTIPHON_HOOK("volatile_read" size, "0x30500+" size)                                                            \
    ANTIPHON_HOOK("volatile_write" size, "0x30600+" size)                                                           \
    ANTIPHON_HOOK("unaligned_read" size, "0x100+" size)                                                             \
    ANTIPHON_HOOK("unaligned_write" size, "0x200+" size)                                                            \
    ANTIPHON_HOOK("unaligned_volatile_read" size, "0x30500+" size)                                                  \
    ANTIPHON_HOOK("unaligned_volatile_write" size, "0x30600+" size)
ANTIPHON_HOOKS("1")
ANTIPHON_HOOKS("2")
ANTIPHON_HOOKS("4")
ANTIPHON_HOOKS("8")
ANTIPHON_HOOKS("16")
// The bytes of a range are the second argument.
#define ANTIPHON_RANGE(name, what)                                                                                  \
    asm(".globl __tsan_" name "_range\n__tsan_" name "_range:\nmovl %esi, %edx\norl $" what ", %edx\nmovq (%rsp), %rsi\n" \
        "movq antiphon_hook(%rip), %rax\njmp *%rax\n");
ANTIPHON_RANGE("read", "0x100")
ANTIPHON_RANGE("write", "0x200")
asm(".globl __tsan_func_entry, __tsan_func_exit, __tsan_init\n__tsan_func_entry:\n__tsan_func_exit:\n__tsan_init:\nret\n");
#endif
