//! # antiphon-collectives: the collective operations
//!
//! The trait [`Collectives`] gives a [`Communicator`] its collective operations, and [`StreamCollectives`] has the same operations
//! between GPUs. Tensors are slices, vectors or
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
//! every NaN result is the canonical NaN. So all ranks get the same bits, from every algorithm and every division of the data.
//!
//! ## Calls that do not match
//!
//! Every packet contains the signature of its call. When one rank calls `all_reduce` of 7 elements and another `all_reduce` of
//! 8, or `broadcast`, every rank gets an error that shows both calls. Collectives synchronise: a call returns on a rank only
//! after all ranks have begun it.
//!
//! ## Modules
//!
//! [`all_reduce`] explains its algorithms and the choice among them. [`fusion`] fuses an all-reduce with the steps that follow
//! it. [`mixed`] combines collectives of tensor and data parallel groups in one call. [`gather_scatter`] has all other
//! operations. [`hierarchical`] explains how reductions go between nodes.

mod algorithm_table;
pub mod all_reduce;
mod arguments;
mod chunked;
mod collectives;
pub mod cuda;
pub mod error;
pub mod fusion;
pub mod gather_scatter;
pub mod hierarchical;
pub mod mixed;
pub mod nccl;
mod non_blocking;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

pub use antiphon_device::ReduceOp;
pub use antiphon_fabric::Communicator;
pub use antiphon_operation::Call;

pub use algorithm_table::AlgorithmTable;
pub use collectives::{Collectives, StreamCollectives};
pub use error::{CollectiveError, Result};
pub use non_blocking::NonBlocking;
