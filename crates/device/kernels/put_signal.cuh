// What kernels call of NVSHMEM's device library, with which a program is linked that includes this. NVSHMEM's own headers take NVRTC
// seconds, and need type traits that it does not have. The declaration is that of version 3.4.5, and no stable interface, so
// other versions are refused.

enum threadgroup_t { nvshmemi_threadgroup_thread = 0, nvshmemi_threadgroup_warp = 1, nvshmemi_threadgroup_block = 3 };
enum nvshmemi_amo_t { NVSHMEMI_AMO_SIGNAL_SET = 9, NVSHMEMI_AMO_SIGNAL_ADD = 10 };

// Copies bytes to the symmetric address `to` on another rank, and then changes the word `signal` there. All threads of the SCOPE call it
// together. `is_nbi`: it returns before the source may be changed. Not for a rank whose memory this one reaches.
template <threadgroup_t SCOPE>
extern __device__ void nvshmemi_transfer_put_signal(void* to, void* from, size_t bytes, void* signal, unsigned long value,
                                                    nvshmemi_amo_t change, int pe, bool is_nbi);

// Behind a wait for a signal, before the data is read: what came before the signal is seen.
extern __device__ void nvshmemi_transfer_syncapi_update_mem();
