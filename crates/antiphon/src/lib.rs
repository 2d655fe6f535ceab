#![forbid(unsafe_code)]
//! # Antiphon: the communication layer of LLM training and inference
//!
//! The library moves tensors between ranks: it has all-reduce and the other collectives, symmetric memory, groups and
//! messages. Ranks are processes of one machine that share memory, with or without a GPU each, or threads for tests.
//! (An antiphon is music that two choirs sing in answer to each other.)
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
//! On GPUs the same operations are enqueued in a stream, do not block the host, and may be captured in a graph:
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
//! // SAFETY: no other work uses the memory, which lives until the stream has finished.
//! unsafe { collectives.all_reduce_in_place(gradient, ReduceOp::Avg, &stream) }?;
//! stream.borrow().synchronize()?;
//! collectives.check()?; // reports a lost peer, a deadline or a mismatch, as the next call would
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## Chapters
//!
//! 1. **Joining a world.** A [`Communicator`](fabric::Communicator) connects a rank to its world. It is made from the
//!    environment ([`from_env`](fabric::Communicator::from_env)), from a path, or through a channel of the caller
//!    ([`builder`](fabric::Communicator::builder)); [`fabric::rendezvous`] describes how ranks find and authenticate each other.
//! 2. **Collectives.** [`Collectives`](collectives::Collectives) has the operations on host memory,
//!    [`StreamCollectives`](collectives::StreamCollectives) the same between GPUs, in a stream, and
//!    [`NonBlocking`](collectives::NonBlocking) forms that return a handle. [`collectives::all_reduce`] explains the
//!    algorithms and the choice among them. [`collectives::fusion`] fuses an all-reduce with the steps that follow it:
//!    residual, RMS norm, quantisation, mixtures of experts.
//! 3. **Tensors.** [`tensor`] has the dtypes with their exact conversions, and views of borrowed memory.
//! 4. **Groups.** [`topology`] computes groups for tensor, pipeline, context and expert parallelism.
//! 5. **Memory that all ranks see.** [`symmetric`](fabric::Communicator::symmetric).
//! 6. **GPUs.** [`cuda`] has the collectives between GPUs, their devices, memory and streams. [`nccl`] has the same
//!    collectives through NCCL. [`session`] opens a rank's GPUs once for many threads, and hands out all kinds of calls on them.
//! 7. **Algorithms of your own.** A [`language`] program becomes a [`plan`], which is proved and simulated before the
//!    [`executor`] runs it. The usual algorithms are in its [`library`](language::library).
//! 8. **Mixtures of experts.** [`moe`] sends tokens to the ranks of their experts, and combines the experts' results.
//! 9. **Lower layers.** [`device`] has the shared memory, the waiting, and the vectorised arithmetic; [`operation`] the
//!    table of operations; [`tuning`] the tables of measured times.
//!
//! ## Promises
//!
//! * **Same bits.** Reductions accumulate in f32 (f64 for f64, wrapping i64 for integers) in ascending rank order and
//!   round once: every rank and every algorithm gives the same bits.
//! * **No call hangs.** A lost peer, a mismatched call or a missed deadline is an error that names the rank, the
//!   operation and the observed state. A rank that ends a call after another rank gave up in it fails too; only a rank that
//!   ended it before keeps its result.
//! * **No leftovers.** Shared memory has no name; a killed process leaves no file.
//! * **No overhead on the hot path.** After its first call a collective allocates nothing and takes no lock, on the host and on
//!   GPUs; on another stream than the call before it takes one. A message allocates nothing unless it comes before its receive, and
//!   locks the rank's list of messages at each look. A [`Queue`](fabric::Queue) takes four locks for a call. A call that waits looks
//!   around after each millisecond, which takes a lock and a little memory. Lists of tensors and calls that are started allocate.
//!   Tests count this.

pub use antiphon_collectives as collectives;
pub use antiphon_device as device;
pub use antiphon_executor as executor;
pub use antiphon_fabric as fabric;
pub use antiphon_language as language;
pub use antiphon_moe as moe;
pub use antiphon_operation as operation;
pub use antiphon_plan as plan;
pub use antiphon_session as session;
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
    pub use antiphon_device::cuda::LibraryVersion;
}

/// What most programs need.
pub mod prelude {
    pub use crate::cuda::{self, CudaCollectives};
    pub use antiphon_collectives::{
        CollectiveError, Collectives, NonBlocking, ReduceOp, StreamCollectives, fusion::FusedAllReduce,
    };
    pub use antiphon_fabric::{Communicator, FabricError, LocalWorld, Pending};
    pub use antiphon_tensor::{DType, Device, TensorView, TensorViewMut, bf16, f16};
    pub use antiphon_topology::{Mapping, MixedLayout};
}
