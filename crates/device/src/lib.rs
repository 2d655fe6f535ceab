//! # antiphon-device: memory and execution on one machine
//!
//! The crates above work with *ranks*; this crate works with one machine. It has memory that several processes can map,
//! waits that leave the core to other threads, the detection of a process's death, and the loops of the arithmetic.
//!
//! | module | content |
//! | --- | --- |
//! | [`host::memory`] | anonymous shared memory (memfd): no name in any file system, freed with its last user |
//! | [`host::wait`] | waiting in three steps: spin, yield, sleep on a shared futex; always against a deadline |
//! | [`host::process`] | watching a process by pidfd, so that waits end when a peer is killed |
//! | [`host::cpu`] | the cores that this process may use, and their widest vector instructions |
//! | [`host::reduce`] | the element-wise reduction of any number of sources, vectorised, in one fixed order |
//! | [`cuda`] | the GPUs: the driver opened at run time, memory for peers, kernels compiled at run time, launches |
//! | [`library`] | libraries that are opened at run time, and where they are looked for |
//! | [`sync`] | the atomics of all crates, which are loom's under `cfg(loom)`; the lock of all crates, which tests count |
//!
//! ## The rule of the arithmetic
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
//! assert!(sum[1] == 0.0 && sum[1].is_sign_negative()); // −0.0 + −0.0 = −0.0: the sum does not start from +0
//! assert_eq!(sum[2].to_bits(), 0x7FC0_0000);
//! ```

#[cfg(not(loom))]
pub mod cuda;
pub mod error;
pub mod host;
#[cfg(not(loom))]
pub mod library;
pub mod sync;

pub use antiphon_operation::{ReduceOp, UnknownReduceOp};
pub use error::DeviceError;
