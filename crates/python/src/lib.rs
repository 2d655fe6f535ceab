//! The Python module `antiphon._core`: the crates of Antiphon as Python sees them.
//!
//! Here is conversion and error mapping only. What a call does is in the crates below; how it looks to a user is in
//! `python/antiphon/`, whose stub `_core.pyi` documents this module.
//!
//! * `operand` finds the memory of any array: the buffer protocol, DLPack's C exchange API, DLPack.
//! * `arguments` checks the arrays of a call, and makes those that the caller did not give;
//!   `call` is one collective as a value, which can be run at once or started, and `fused` a fused all-reduce.
//! * `communicator`, `handle`, `shared`, `mapping` and `mixed` are the classes; `communicator/plan` has execution plans.
//! * `cuda` puts collectives into streams of GPUs.
//! * `language` has programs of collective algorithms, for `antiphon.language`.
//! * `lowering` has compilers' graphs, for `antiphon.lowering`.
//! * `moe` has mixtures of experts.
//! * `comm` is what `antiphon.comm` asks for besides.
//! * `error` says which exception an error becomes, `interrupt` how Ctrl-C ends a wait, and `fork` what a
//!   forked child must not use.

// The macro `stub!`: the docstrings of `_core.pyi`, see build.rs.
include!(concat!(env!("OUT_DIR"), "/stub.rs"));

mod arguments;
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
mod shared;

/// See the crate's page.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::{
        call::operations,
        comm::{compute_fp4_swizzled_layout_sf_size, strided_memory},
        command::main,
        communicator::{Communicator, Plan},
        cuda::CudaBuffer,
        error::{AbortedError, PeerLostError},
        fork::after_fork,
        handle::Handle,
        language::{
            BaseBuffer, Channel, Chunk, FinishedPlan, Program, Switch, ThreadBlockGroup, library_names,
            library_plan,
        },
        lowering::{check_lowering, lower},
        mapping::Mapping,
        mixed::{MixedHandler, ParallelInfo},
        moe::{Moe, MoeHandle},
        shared::{Memory, SharedBuffer},
    };

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
