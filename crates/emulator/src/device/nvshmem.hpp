// What NVSHMEM's device library has, for programs that declare it (crates/device/kernels/put_signal.cuh). It follows the program.

namespace emulator {
// As in nvshmem/mod.rs. Null until the module is initialised.
typedef void (*put_signal)(void* to, const void* from, size_t bytes, void* signal, unsigned long value, unsigned change, int pe, bool is_nbi);
static put_signal put;
} // namespace emulator

extern "C" __attribute__((visibility("default"))) void emulator_puts_by(emulator::put_signal put) { emulator::put = put; }

// One thread of the SCOPE does it, and waits for no other, as NVSHMEM's does where a proxy sends.
template <threadgroup_t SCOPE>
void nvshmemi_transfer_put_signal(void* to, void* from, size_t bytes, void* signal, unsigned long value, nvshmemi_amo_t change, int pe,
                                  bool is_nbi) {
    const unsigned size = SCOPE == nvshmemi_threadgroup_thread ? 1 : SCOPE == nvshmemi_threadgroup_warp ? 32 : 1024;
    if (threadIdx.x % size != 0) return;
    if (!emulator::put) emulator::fail("a kernel puts, and its module was not initialised: nvshmemx_cumodule_init");
    emulator::point();
    emulator::moved();
    emulator::put(to, from, bytes, signal, value, (unsigned)change, pe, is_nbi);
}
template void nvshmemi_transfer_put_signal<nvshmemi_threadgroup_thread>(void*, void*, size_t, void*, unsigned long, nvshmemi_amo_t, int, bool);
template void nvshmemi_transfer_put_signal<nvshmemi_threadgroup_warp>(void*, void*, size_t, void*, unsigned long, nvshmemi_amo_t, int, bool);
template void nvshmemi_transfer_put_signal<nvshmemi_threadgroup_block>(void*, void*, size_t, void*, unsigned long, nvshmemi_amo_t, int, bool);
void nvshmemi_transfer_syncapi_update_mem() { emulator::fence(emulator::SEQUENTIAL | emulator::SYSTEM); }
