//! The Python module `antiphon._core`: the bindings of Antiphon's crates.
//!
//! This crate has only conversions and the mapping of errors. The crates below implement the calls. `python/antiphon/` is the
//! package for users; its stub `_core.pyi` documents this module.
//!
//! * `operand` finds the memory of any array: the buffer protocol, DLPack's C exchange API, DLPack.
//! * `arguments` checks the arrays of a call, and makes those that the caller did not give;
//!   `call` is one collective as a value, which can be run at once or started, and `fused` a fused all-reduce.
//! * `communicator`, `handle`, `shared`, `mapping` and `mixed` have the classes; `communicator/plan` has execution plans.
//! * `cuda` enqueues collectives in streams of GPUs; `stream` finds the current stream of torch or CuPy.
//! * `language` has programs of collective algorithms, for `antiphon.language`.
//! * `lowering` has compilers' graphs, for `antiphon.lowering`.
//! * `moe` has mixtures of experts.
//! * `comm` has further functions for `antiphon.comm`.
//! * `error` maps errors to exceptions, `interrupt` ends waits on Ctrl-C, and `fork` detects the use of a parent's objects
//!   in a forked child.

// The macros `stub!` and `keywords!`: docstrings and keywords from `_core.pyi`, see build.rs.
include!(concat!(env!("OUT_DIR"), "/stub.rs"));

mod arguments;
mod array;
mod call;
mod comm;
mod command;
mod communicator;
mod cuda;
mod error;
mod fork;
mod fused;
mod handle;
mod interrupt;
mod language;
mod lowering;
mod mapping;
mod mixed;
mod moe;
mod operand;
mod parallel_info;
mod stream;
mod symmetric;

/// See the crate's page.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    use pyo3::pyfunction;

    #[pymodule_export]
    use crate::{
        call::operations,
        comm::{compute_fp4_swizzled_layout_sf_size, strided_memory},
        command::main,
        communicator::{Communicator, Plan, PlanCollection, launcher_variables},
        error::{AbortedError, PeerLostError},
        fork::after_fork,
        handle::Handle,
        language::{
            BaseBuffer, Channel, Chunk, FinishedPlan, Program, Switch, ThreadBlockGroup, library_names,
            library_plan,
        },
        lowering::{Lowering, spelled},
        mapping::Mapping,
        mixed::MixedHandler,
        moe::{Moe, MoeByExpert, MoeByExpertRoutes, MoeByTokenRoutes, MoeSlotRoutes, MoeSlots},
        parallel_info::ParallelInfo,
        symmetric::{Memory, SymmetricBuffer},
    };

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[doc = stub!("_locks_taken")]
    #[pyfunction]
    fn _locks_taken() -> Option<u64> {
        antiphon::device::sync::locks_taken()
    }
}
