//! A CUDA driver, an NVRTC, an nvJitLink and an NVSHMEM without a GPU, for tests: `make emulated` runs the GPU tests on any machine with an
//! x86-64 processor and g++.
//!
//! The library exports the functions of libcuda, libnvrtc, libnvJitLink and libnvshmem_host that Antiphon calls. g++ compiles the kernels, with the files of `device/` in
//! front, for the processor. A block of a kernel is a thread of the operating system, and its threads are fibers; with
//! `ANTIPHON_EMULATOR_SCHEDULE` all blocks are on one thread. All blocks for which
//! their GPUs have room run at the same time. Device memory is memory of the process, and a file descriptor hands it to other processes.
//!
//! The emulator shows waits that never end, wrong addresses, copies that are read too early, memory that is reused too early, missing
//! barriers within a block, circles of waits for room, and wrong bits. It does not show speed. The processor orders memory
//! strongly, so what follows from a missing fence is not seen; with `ANTIPHON_EMULATOR_RACES` the missing fence itself is.
//!
//! | variable | effect |
//! | --- | --- |
//! | `ANTIPHON_EMULATOR_GPUS` | the number of GPUs, 4 without it |
//! | `ANTIPHON_EMULATOR_MULTIPROCESSORS` | the multiprocessors of each, 132 without it |
//! | `ANTIPHON_EMULATOR_CAPABILITY` | the compute capability of each, 9.0 without it. The room of a multiprocessor stays that of 9.0 |
//! | `ANTIPHON_EMULATOR_ROOM` | `shared`: the grids of a GPU share its multiprocessors and queues |
//! | `ANTIPHON_EMULATOR_REACH` | `all`: the PEs of NVSHMEM reach each other by loads and stores also where their `ANTIPHON_NODE`s differ |
//! | `ANTIPHON_EMULATOR_REGISTERS` | `most`: a thread has as many as `__launch_bounds__` leaves it, and not 32 |
//! | `ANTIPHON_EMULATOR_SEED` | the threads of a block run in another order for each number, in ascending order without it; other streams share a queue; and where races are checked stores come late; puts of NVSHMEM come in another order |
//! | `ANTIPHON_EMULATOR_SCHEDULE` | one scheduler has all threads of all GPUs, and switches by this seed: docs/design/emulator.md |
//! | `ANTIPHON_EMULATOR_REPLAY` | a record of such a run, which is repeated |
//! | `ANTIPHON_EMULATOR_RACES` | `first` or `all` races are reported: docs/design/emulator.md |
//! | `ANTIPHON_EMULATOR_MUTANT` | `FILE:LINE:FROM=>TO` changes a line of the kernels, as `make mutants` does |
//! | `ANTIPHON_EMULATOR_KEEP` | the compiled programs stay in the folder for temporary files, and so does the record of a schedule, whose line is printed |
//! | `ANTIPHON_EMULATOR_COUNTS` | a file, to which a process appends the number of its grids when it ends |

#![allow(clippy::disallowed_types)] // not part of the library, nor of its models under loom
#![allow(missing_docs, non_snake_case)] // the names and the documentation are CUDA's

mod circle;
mod counts;
mod driver;
mod event;
mod execution;
mod graph;
mod kernel;
mod memory;
mod mutant;
mod nvjitlink;
mod nvrtc;
mod nvshmem;
mod ptx;
mod queue;
mod races;
mod room;
mod schedule;
mod stream;

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

/// The driver's codes.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(u32);

impl Code {
    const OK: Self = Self(0);
    const INVALID_VALUE: Self = Self(1);
    const OUT_OF_MEMORY: Self = Self(2);
    const INVALID_DEVICE: Self = Self(101);
    const INVALID_IMAGE: Self = Self(200);
    const INVALID_HANDLE: Self = Self(400);
    const ILLEGAL_STATE: Self = Self(401);
    const NOT_FOUND: Self = Self(500);
    const NOT_READY: Self = Self(600);
    const LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    const COOPERATIVE_LAUNCH_TOO_LARGE: Self = Self(720);
    const NOT_SUPPORTED: Self = Self(801);
    const CAPTURE_UNSUPPORTED: Self = Self(900);
    const CAPTURE_MERGE: Self = Self(902);
    const CAPTURE_UNMATCHED: Self = Self(903);
    const CAPTURE_UNJOINED: Self = Self(904);
    const CAPTURE_ISOLATION: Self = Self(905);
    const CAPTURED_EVENT: Self = Self(907);
}

/// The seed of the schedule, or what `ANTIPHON_EMULATOR_SEED` says, 0 without it.
fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        let given = || std::env::var("ANTIPHON_EMULATOR_SEED").ok().and_then(|seed| seed.parse().ok());
        schedule::seed().or_else(given).unwrap_or(0)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner())
}
