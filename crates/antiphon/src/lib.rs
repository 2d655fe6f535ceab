#![forbid(unsafe_code)]
//! # Antiphon: the communication layer of LLM training and inference
//!
//! An antiphon is music sung by two choirs in answer to each other. This library moves tensors between ranks in answer
//! to each other: all-reduce and the other collectives, symmetric memory, groups, messages. Ranks are processes of one
//! machine that share memory, with or without a GPU each (or threads, for tests).
//!
//! ```
//! use antiphon::prelude::*;
//!
//! // Four ranks as threads; as processes, each would call `Communicator::from_env()` under `antiphon run` or torchrun.
//! let sums = LocalWorld::run(4, |comm| {
//!     let mut gradient = vec![comm.rank() as f32 + 1.0; 1024];
//!     comm.all_reduce_in_place(&mut gradient, ReduceOp::Avg)?;
//!     Ok::<_, CollectiveError>(gradient[0])
//! });
//! assert_eq!(sums[0].as_ref().unwrap(), &2.5);
//! ```
//!
//! On GPUs the same operations go into a stream, wait for nothing on the host, and may be captured in a graph:
//!
//! ```no_run
//! use antiphon::prelude::*;
//!
//! let comm = Communicator::from_env()?; // a process for each GPU
//! let context = cuda::Context::primary(cuda::Driver::load()?.device(comm.rank() as u32)?)?;
//! let (stream, collectives) = (context.stream()?, CudaCollectives::new(&comm, &context)?);
//!
//! let mut memory = cuda::DeviceMemory::allocate(&context, 4 << 20)?;
//! let gradient = memory.view_mut(DType::F32, &[1 << 20])?;
//! // SAFETY: nobody else uses the memory, which lives until the stream is done.
//! unsafe { collectives.all_reduce_in_place(gradient, ReduceOp::Avg, &stream) }?;
//! stream.borrow().synchronize()?;
//! collectives.check()?; // a lost peer, a deadline or a disagreement comes out here, or in the next call
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## Chapters
//!
//! 1. **Meeting.** A [`Communicator`](fabric::Communicator) is a rank's end of a world. It comes from the environment
//!    ([`from_env`](fabric::Communicator::from_env)), from a path, or through a channel you already have
//!    ([`builder`](fabric::Communicator::builder)); [`fabric::rendezvous`] says how ranks find and trust each other.
//! 2. **Collectives.** [`Collectives`](collectives::Collectives) are the operations,
//!    [`NonBlocking`](collectives::NonBlocking) the forms that return a handle;
//!    [`collectives::all_reduce`] explains the algorithms and how one is chosen, [`collectives::fusion`] what can be done
//!    with a sum in the same call: residual, RMS norm, quantisation, mixtures of experts.
//! 3. **Tensors.** [`tensor`] has the dtypes with their exact conversions, and views of anybody's memory.
//! 4. **Who is where.** [`topology`] computes groups for tensor, pipeline, context and expert parallelism.
//! 5. **Memory that all ranks see.** [`create_shared_buffer`](fabric::Communicator::create_shared_buffer).
//! 6. **GPUs.** [`cuda`] has the collectives between them and what it takes to use them, [`nccl`] the same through NCCL.
//! 7. **Algorithms of your own.** A [`language`] program becomes a [`plan`], which is proved and simulated before the
//!    [`executor`] runs it. The usual ones are in its [`library`](language::library).
//! 8. **Mixtures of experts.** [`moe`] brings tokens to the ranks of their experts, and combines what those made of them.
//! 9. **Below.** [`device`] holds the shared memory, the waiting, and the vectorised arithmetic; [`operation`] the table of
//!    what the operations are, [`tuning`] those of what is fastest.
//!
//! ## Promises
//!
//! * **Same bits.** Reductions accumulate in f32 (f64 for f64, wrapping i64 for integers) in ascending rank order and
//!   round once: every rank and every algorithm gives the same bits.
//! * **Nothing hangs for ever.** A lost peer, a mismatched call or a missed deadline is an error that names the rank, the
//!   operation and what was seen.
//! * **Nothing is left behind.** Shared memory has no name; a killed process leaves no file.
//! * **Nothing on the hot path.** After its first call a collective allocates nothing and takes no lock
//!   (messages and the background take one).

pub use antiphon_collectives as collectives;
pub use antiphon_device as device;
pub use antiphon_executor as executor;
pub use antiphon_fabric as fabric;
pub use antiphon_language as language;
pub use antiphon_moe as moe;
pub use antiphon_operation as operation;
pub use antiphon_plan as plan;
pub use antiphon_tensor as tensor;
pub use antiphon_topology as topology;
pub use antiphon_tuning as tuning;

/// GPUs: the collectives between those of the ranks, and what a program needs to use one. [`device::cuda`] has the rest.
pub mod cuda {
    pub use antiphon_collectives::cuda::{
        Algorithm, AllReduceOptions, CudaBuilder, CudaCollectives, MAX_WORLD, OnFailure, tune,
    };
    pub use antiphon_device::cuda::{
        Context, CudaError, DeviceMemory, DevicePointer, Driver, Event, Graph, GraphExec, PinnedMemory,
        Stream, StreamRef,
    };
    pub use antiphon_fabric::{CudaArena, RegisteredMemory};
}

/// The collectives between GPUs through NCCL: the yardstick, and the fallback.
pub mod nccl {
    pub use antiphon_collectives::nccl::NcclCollectives;
    pub use antiphon_device::cuda::NcclVersion;
}

/// What most programs need.
pub mod prelude {
    pub use crate::cuda::{self, CudaCollectives};
    pub use antiphon_collectives::{
        CollectiveError, Collectives, NonBlocking, ReduceOp, fusion::FusedAllReduce,
    };
    pub use antiphon_fabric::{Communicator, FabricError, LocalWorld, Pending};
    pub use antiphon_tensor::{DType, Device, TensorView, TensorViewMut, bf16, f16};
    pub use antiphon_topology::{Mapping, MixedLayout};
}
