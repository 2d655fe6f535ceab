//! # antiphon-moe: mixtures of experts
//!
//! Experts are distributed over ranks: of `E` experts, each of `R` ranks owns `L = E / R`, and rank `r` owns those from `r · L`
//! on. Each rank has `T` tokens, which are rows of `H` elements; `T` may differ between ranks. Each token chooses `K` experts.
//! *Dispatch* sends every token to the ranks of its experts: once to each rank, even if several of its experts are there.
//! *Combine* sends the results for a token back to its rank, and sums them.
//!
//! [`Moe`] does both, in four steps:
//!
//! 1. [`layout()`] counts: which tokens go to which rank, how many tokens each expert gets.
//! 2. [`Moe::notify`] exchanges the counts, and returns [`ByTokenRoutes`]: how many rows each rank sends to each other rank.
//! 3. [`Moe::dispatch`] moves the rows along these routes. They may be used any number of times.
//! 4. [`Moe::combine`] moves rows back along the same routes, and sums them.
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
//!     let routes = moe.notify(&comm, &Routing::of(&layout, format))?;
//!     assert_eq!(routes.rows(), 4); // two of each rank
//!
//!     let mut received = vec![0f32; 4 * routes.rows()];
//!     let shape = [routes.rows(), 4];
//!     let tokens = Tokens::of(TensorView::new(&x, &[2, 4])?);
//!     let rows = Tokens::of(TensorViewMut::new(&mut received, &shape)?);
//!     moe.dispatch(&comm, &routes, Dispatch { tokens, received: rows })?;
//!
//!     let mut sum = vec![0f32; 8];
//!     let output = TensorViewMut::new(&mut sum, &[2, 4])?;
//!     moe.combine(&comm, &routes, Combine::of(TensorView::new(&received, &shape)?, output))?;
//!     Ok::<_, MoeError>(sum)
//! });
//! assert_eq!(sums[1].as_ref().unwrap()[..3], [2.0, 4.0, 6.0]); // each token came back from both ranks
//! ```
//!
//! ## Three forms
//!
//! A form is named after what arrives at a rank:
//!
//! * [By token](by_token): one row for each token that chose some of the rank's experts, as in the steps above. DeepEP calls it the
//!   normal mode.
//! * [By expert](by_expert): one row for each token and expert, ordered by expert and padded, as grouped matrix products take them:
//!   [`Moe::notify_by_expert`], [`Moe::dispatch_by_expert`], [`Moe::combine_by_expert`]. DeepEP has it as `HybridEPBuffer`. With
//!   [`ByExpertOrder::Tokens`] a rank gets rows by token instead.
//! * [Slots](mod@slots), for decoding: few tokens, which fill a fixed number of slots of each expert, so that no rank waits for
//!   counts: [`Moe::dispatch_to_slots`], [`Moe::combine_from_slots`]. DeepEP calls it the low-latency mode.
//!
//! Every dispatch has *routes*, which say which rank gets which rows from which. A combine takes those of its dispatch:
//! [`ByTokenRoutes`], [`ByExpertRoutes`] or [`SlotRoutes`]. Further dispatches by token and by expert may go along them, too.
//!
//! ## Orders and bits
//!
//! Rows by token are ordered by their source rank, then by their token. The terms of a combined sum are the biases, then the
//! rows in rank order. Combine begins with the first term, adds the others in this order in f32 (f64 for f64), and rounds once.
//! Every NaN result is the canonical NaN. A token without experts and without a bias is +0. So the results have the same bits
//! on every backend, and for every size of the region.
//!
//! ## Memory
//!
//! Rows are sent through each rank's *region* of symmetric memory, of [`MoeConfig::region_bytes`]. Larger data is sent in
//! pieces through the two halves of the region, so `T` is not limited, and no memory grows.

pub mod by_expert;
pub mod by_token;
mod config;
pub mod cuda;
mod error;
mod instance;
pub mod layout;
#[cfg(test)]
mod machine_code;
mod multiprocessors;
mod pool;
mod region;
mod routes;
pub mod slots;
mod tensors;
mod transport;
mod words;

pub use by_expert::{
    ByExpertCapacity, ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRoutes, ByExpertRouting,
    ByExpertTokens,
};
pub use by_token::{Choices, Combine, Dispatch, Routing, RowFormat, Tokens};
pub use config::MoeConfig;
pub use error::{MoeError, Result};
pub use instance::Moe;
pub use layout::{Layout, layout};
pub use multiprocessors::{Movement, Multiprocessors, SmTimes};
pub use routes::{ByTokenRoutes, route_words};
pub use slots::{CombineFormat, ReceivedSlots, SlotCombine, SlotDispatch, SlotFormat, SlotRoutes};
pub use words::RouteWords;
