#![forbid(unsafe_code)]
//! The operations between ranks, independent of their implementation.
//!
//! [`Operation`] is a table with a [`Row`] for each operation. The row determines the texts of errors, the check of a
//! call's tensors, the shape of an output that the caller did not give, and the buffers and the bandwidth of a benchmark.
//! A [`Call`] is an operation with its arguments except the tensors. A [`Layout`] lists the elements of a tensor that go to,
//! or come from, each rank.
//!
//! ```
//! use antiphon_operation::{Operation, ReduceOp};
//!
//! let operation = Operation::ReduceScatter;
//! assert_eq!((operation.name(), operation.row().reduces), ("reduce_scatter", true));
//! // A rank of 4 passes a row of 4 blocks, and gets one block.
//! assert_eq!(operation.block(12, 3, 4), Ok(3));
//! assert_eq!(operation.output_shape(&[12, 7168], 4).unwrap(), [3, 7168]);
//! assert_eq!("avg".parse(), Ok(ReduceOp::Avg));
//! ```

mod call;
mod layout;
mod named;
mod operation;
mod reduce_op;
mod row;
mod shapes;

pub use call::{Call, WrongCall, digest};
pub use layout::Layout;
pub use operation::Operation;
pub use reduce_op::{ReduceOp, UnknownReduceOp};
pub use row::{BusFactor, Count, Detail, Extent, InPlace, Root, Row};
pub use shapes::{Indivisible, WrongCount};
