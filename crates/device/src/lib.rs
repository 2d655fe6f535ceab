//! # antiphon-device: one machine's memory and work
//!
//! Everything above this crate speaks of *ranks*; here there are none. This crate knows one machine: memory that
//! several processes can map, how a thread waits without burning a core that another rank needs, how to tell that
//! a process has died, and the loops that do the arithmetic.
//!
//! | module | idea |
//! | --- | --- |
//! | [`host::memory`] | anonymous shared memory (memfd): no name in any file system, gone with its last user |
//! | [`host::wait`] | waiting in three steps: spin, yield, sleep on a shared futex; always against a deadline |
//! | [`host::process`] | watching a process by pidfd, so that a killed peer is noticed and not waited for |
//! | [`host::cpu`] | cores this process may use, and the widest vector instructions they have |
//! | [`host::reduce`] | the element-wise reduction of any number of sources, vectorised, in one fixed order |
//! | [`cuda`] | the GPUs: the driver opened at run time, memory for peers, kernels compiled on the spot, launches |
//! | [`sync`] | the only place that names atomics; loom's stand in under `cfg(loom)` |
//!
//! ## The one rule of arithmetic
//!
//! A reduction accumulates in f32 (f64 for f64, wrapping i64 for integers) in ascending source order and rounds
//! once at the end; a NaN result is the canonical quiet NaN. Results are therefore the same bits for every vector
//! width, every split of the data and every algorithm built on top.
//!
//! ```
//! use antiphon_device::{ReduceOp, host::reduce::reduce};
//!
//! let (a, b) = ([1.0f32, -0.0, f32::NAN], [2.0f32, -0.0, 1.0]);
//! let mut sum = [0f32; 3];
//! reduce(ReduceOp::Sum, &mut sum, &[&a, &b]);
//! assert_eq!(sum[0], 3.0);
//! assert!(sum[1] == 0.0 && sum[1].is_sign_negative()); // −0.0 + −0.0 = −0.0: nothing is added to a neutral zero
//! assert_eq!(sum[2].to_bits(), 0x7FC0_0000);
//! ```

#[cfg(not(loom))]
pub mod cuda;
pub mod error;
pub mod host;
pub mod sync;

pub use antiphon_operation::{ReduceOp, UnknownReduceOp};
pub use error::DeviceError;
