//! # antiphon-moe: mixtures of experts
//!
//! Experts are spread over ranks: of `E` experts among `R` ranks, rank `r` owns `L = E / R`, from `r · L` on. Each rank has
//! `T` tokens (every rank a number of its own), rows of `H` elements, and each token chooses `K` experts. *Dispatch* brings
//! every token to the ranks of its experts, once to each rank however many of its experts live there. *Combine* brings what
//! those ranks made of it back, and sums it.
//!
//! [`Moe`] does both, in four steps:
//!
//! 1. [`layout()`] counts: which tokens go to which rank, how many tokens each expert gets.
//! 2. [`Moe::notify`] tells all ranks, and gives a [`Handle`]: how many rows come, and from whom.
//! 3. [`Moe::dispatch`] moves the rows, as often as the handle is used.
//! 4. [`Moe::combine`] moves rows back along the same handle, and sums them.
//!
//! ```
//! use antiphon_fabric::LocalWorld;
//! use antiphon_moe::{Combine, Dispatch, Moe, MoeConfig, MoeError, RowFormat, Routing, Tokens, layout};
//! use antiphon_tensor::{DType, TensorView, TensorViewMut};
//!
//! let sums = LocalWorld::run(2, |comm| {
//!     let mut moe = Moe::new(&comm, MoeConfig::default())?;
//!     // Two tokens of 4 elements, each for expert 0 (of rank 0) and expert 3 (of rank 1).
//!     let (x, ids) = ([1f32, 2., 3., 4., 5., 6., 7., 8.], [0i64, 3, 0, 3]);
//!     let layout = layout(&TensorView::new(&ids, &[2, 2])?, 4, 2)?;
//!     let format = RowFormat { hidden: 4, dtype: DType::F32, scales: None };
//!     let handle = moe.notify(&comm, &Routing::of(&layout, format))?;
//!     assert_eq!(handle.rows(), 4); // two of each rank
//!
//!     let mut received = vec![0f32; 4 * handle.rows()];
//!     let shape = [handle.rows(), 4];
//!     let tokens = Tokens::of(TensorView::new(&x, &[2, 4])?);
//!     let rows = Tokens::of(TensorViewMut::new(&mut received, &shape)?);
//!     moe.dispatch(&comm, &handle, Dispatch { tokens, received: rows })?;
//!
//!     let mut sum = vec![0f32; 8];
//!     let output = TensorViewMut::new(&mut sum, &[2, 4])?;
//!     moe.combine(&comm, &handle, Combine::of(TensorView::new(&received, &shape)?, output))?;
//!     Ok::<_, MoeError>(sum)
//! });
//! assert_eq!(sums[1].as_ref().unwrap()[..3], [2.0, 4.0, 6.0]); // each token came back from both ranks
//! ```
//!
//! ## Orders and bits
//!
//! Rows arrive in the order of their source rank, then of their token. Combine starts with the first of the biases and of
//! the rows in rank order, adds the others in that order in f32 (f64 of f64), and rounds once; a NaN is the canonical one; a
//! token that went nowhere, without a bias, is +0. So all bits are the same on every backend, and for any size of the region.
//!
//! ## Memory
//!
//! Rows travel through a *region* of symmetric memory of each rank, of [`MoeConfig::region_bytes`]. What exceeds it goes
//! through its two halves in pieces, so there is no limit on `T`, and nothing ever grows.

pub mod cuda;
mod error;
mod handle;
mod instance;
pub mod layout;
#[cfg(test)]
mod machine_code;
pub mod normal;
mod pool;
mod region;
mod tensors;

pub use error::{MoeError, Result};
pub use handle::{Handle, handle_words};
pub use instance::{Moe, MoeConfig};
pub use layout::{Layout, layout};
pub use normal::{Choices, Combine, Dispatch, Routing, RowFormat, Tokens};
