//! # antiphon-testing: what tests need of a machine, and what calls take of it
//!
//! This crate is for tests of any floor. Some tests need what not every machine has: GPUs, NVRTC, root. Libtest decides before a
//! test runs whether it is ignored, so such a test asks [`need`] (or [`gpus`], [`nvrtc`], [`root`], [`program`], …), and returns
//! if the answer is `None`. Libtest then prints "ok"; the record tells the truth.
//!
//! | variable | effect |
//! | --- | --- |
//! | `ANTIPHON_SKIPPED` | the file to which each answer is appended: `ran` or `skipped`, the need, the test, the reason |
//! | `ANTIPHON_TEST_RANKS_PER_GPU` | how many ranks share a GPU: then fewer GPUs are enough |
//! | `ANTIPHON_REQUIRE` | the needs, by name and separated by commas, without which a test fails rather than skips; `all` is every need |
//!
//! `scripts/skipped.py` counts the records, and compares them with the sets in `tests/skipped/`. The Python tests write the same
//! records (`tests/conftest.py`).
//!
//! ```no_run
//! use antiphon_testing::gpus;
//!
//! // In a test:
//! let Some(driver) = gpus(2) else { return };
//! assert!(driver.device_count().unwrap() >= 2);
//! ```
//!
//! [`Machines`] are two network namespaces with a link between them, in which processes run as on two machines.
//!
//! A [`Backend`](backend::Backend) is where ranks run and where their memory lies. Suites of behaviours are generic over it; a [`Tensor`] of
//! any backend notices a write beside it.
//!
//! [`machine_code`] looks at what the kernels of families are compiled to.
//!
//! [`World`] are ranks that are processes, which [`say`] things to the test; [`kill_each`] kills some of them.
//!
//! [`rotation`] and [`orders`] are for tests of GPUs: a small family of kernels to call beside others, and the orders of calls that run,
//! are captured and are replayed.
//!
//! [`free_port`] is where ranks of a test meet over TCP.
//!
//! [`Taken`] counts the allocations and the locks of calls, so that the documentation's numbers are tested.
#![cfg(not(loom))] // no test of a model needs anything

pub mod backend;
mod found;
mod kills;
pub mod machine_code;
mod machines;
pub mod orders;
mod port;
mod record;
pub mod rotation;
mod taken;
mod tensor;
mod world;

pub use found::{
    device_of, disassembler, gpus, gpus_for, is_emulated, link, nccl, nvjitlink, nvrtc, nvshmem, packages,
    program, ranks_per_gpu, root, sized, workspace,
};
pub use kills::{VICTIMS, kill_each};
pub use machines::Machines;
pub use port::free_port;
pub use record::{Need, need};
pub use taken::{CountingAllocator, Taken, allocations, frees};
pub use tensor::{Alignment, Tensor, UNWRITTEN};
pub use world::{World, pes, role, say, say_error};
