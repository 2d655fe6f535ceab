//! # antiphon-collectives: what ranks do together
//!
//! [`Collectives`] gives a [`Communicator`] its collective operations. Tensors are slices, vectors or
//! [`TensorView`](antiphon_tensor::TensorView)s of host memory, of any dtype, any length and any alignment, but
//! contiguous.
//!
//! ```
//! use antiphon_collectives::{Collectives, CollectiveError, ReduceOp};
//! use antiphon_fabric::LocalWorld;
//!
//! let sums = LocalWorld::run(4, |comm| {
//!     let mine = vec![comm.rank() as f32; 1000];
//!     let mut sum = vec![0.0f32; 1000];
//!     comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
//!     Ok::<_, CollectiveError>(sum[999])
//! });
//! assert_eq!(sums[3].as_ref().unwrap(), &6.0);
//! ```
//!
//! ## The same bits everywhere
//!
//! A reduction accumulates in f32 (f64 for f64, wrapping i64 for integers) in ascending rank order and rounds once;
//! a NaN result is the canonical one. So every rank gets the same bits, from every algorithm, however the data is cut.
//!
//! ## Calls that do not match
//!
//! Each rank says with every packet what it is doing. When one calls `all_reduce` of 7 elements and another of 8, or
//! `broadcast`, every rank gets an error that shows both calls. Collectives synchronise: none returns on any rank before
//! all ranks have begun it.
//!
//! ## Reading on
//!
//! [`all_reduce`] tells of the algorithms and how one is chosen, [`fusion`] of what can be done with a sum in the same call,
//! [`mixed`] what goes through groups of tensor and data parallel ranks at once, [`gather_scatter`] of all the others.

mod algorithm_table;
pub mod all_reduce;
mod arguments;
mod chunked;
mod collectives;
pub mod cuda;
pub mod error;
pub mod fusion;
pub mod gather_scatter;
pub mod mixed;
pub mod nccl;
mod non_blocking;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

pub use antiphon_device::ReduceOp;
pub use antiphon_fabric::Communicator;
pub use antiphon_operation::Call;

pub use algorithm_table::AlgorithmTable;
pub use collectives::Collectives;
pub use error::{CollectiveError, Result};
pub use non_blocking::NonBlocking;
