#![forbid(unsafe_code)]
//! # Antiphon: the communication layer of LLM training and inference
//!
//! An antiphon is music sung by two choirs in answer to each other. This library moves tensors between ranks in answer
//! to each other: all-reduce and the other collectives, symmetric memory, groups, messages. Ranks are processes of one
//! machine that share memory (or threads, for tests).
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
//! ## Chapters
//!
//! 1. **Meeting.** A [`Communicator`](fabric::Communicator) is a rank's end of a world. It comes from the environment
//!    ([`from_env`](fabric::Communicator::from_env)), from a path, or through a channel you already have
//!    ([`builder`](fabric::Communicator::builder)); [`fabric::rendezvous`] says how ranks find and trust each other.
//! 2. **Collectives.** [`Collectives`](collectives::Collectives) are the operations,
//!    [`NonBlocking`](collectives::NonBlocking) the forms that return a handle;
//!    [`collectives::all_reduce`] explains the algorithms and how one is chosen.
//! 3. **Tensors.** [`tensor`] has the dtypes with their exact conversions, and views of anybody's memory.
//! 4. **Who is where.** [`topology`] computes groups for tensor, pipeline, context and expert parallelism.
//! 5. **Memory that all ranks see.** [`create_shared_buffer`](fabric::Communicator::create_shared_buffer).
//! 6. **Below.** [`device`] holds the shared memory, the waiting, and the vectorised arithmetic; [`tuning`] the tables of
//!    what is fastest.
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
pub use antiphon_fabric as fabric;
pub use antiphon_tensor as tensor;
pub use antiphon_topology as topology;
pub use antiphon_tuning as tuning;

/// What most programs need.
pub mod prelude {
    pub use antiphon_collectives::{CollectiveError, Collectives, NonBlocking, ReduceOp};
    pub use antiphon_fabric::{Communicator, FabricError, LocalWorld, Pending};
    pub use antiphon_tensor::{DType, TensorView, TensorViewMut, bf16, f16};
    pub use antiphon_topology::{Mapping, MixedLayout};
}
