//! Quantisation of rows to FP8 and FP4, with the scales that make it reversible.
//!
//! These are the definitions that kernels on every backend are held to, bit by bit: which amax, which clamp, which
//! f32 operations in which order, each rounded once to nearest even and without flushing subnormals to zero.
//! Everything reads [`Source`] elements, whose widening to f32 is exact, and writes into the caller's buffers.
//!
//! | what shares a scale | code | scale | item |
//! | --- | --- | --- | --- |
//! | a tensor, given beforehand | [`E4M3`](crate::E4M3) | f32 | [`fp8_static`], [`fp8_static_inverse`] |
//! | a token | E4M3 | f32 | [`fp8_tokens`], [`fp8_tokens_inverse`] |
//! | a group of a token's elements, such as 128 | E4M3 | f32, or [`UE8M0`](crate::UE8M0) packed | [`Fp8Groups`] |
//! | 16 elements | [`E2M1`](crate::E2M1) | E4M3, and an f32 for the tensor | [`NvFp4`] |
//! | 32 elements | E2M1 | UE8M0 | [`MxFp4`] |
//!
//! ```
//! use antiphon_tensor::quantize::{TokenRule, fp8_tokens, fp8_tokens_inverse};
//!
//! let x = [1.0_f32, -0.5, 0.25, 7.0, 0.0, 0.0, 0.0, 0.0]; // two tokens of four elements
//! let (mut codes, mut scales) = ([0; 8], [0.0; 2]);
//! fp8_tokens(&x, 4, TokenRule::Quotient, &mut codes, &mut scales)?;
//! assert_eq!(scales[0], 7.0 / 448.0);
//! assert_eq!(codes, [0x68, 0xE0, 0x58, 0x7E, 0, 0, 0, 0]);
//!
//! let mut values = [0.0; 8];
//! fp8_tokens_inverse(&codes, 4, &scales, &mut values)?;
//! assert_eq!(values, x); // 64, -32, 16 and 448 are all E4M3 values
//! # Ok::<(), antiphon_tensor::TensorError>(())
//! ```
//!
//! # NaN and infinity
//!
//! No element is ever replaced by an ordinary number unseen, and none changes another's scale without a reason:
//!
//! * E4M3 codes have a NaN: a NaN element becomes one, and the amax is taken over the other elements.
//! * E2M1 codes have none: a NaN element makes the *scale* of its block NaN, and with it every value of the block.
//!   Its codes are then all +6.
//! * An infinite element makes an FP8 scale that is computed from it infinite (as UE8M0: NaN), finite elements become
//!   ±0 and it becomes NaN, by the same arithmetic as always: dequantised, the token or group is NaN throughout. Where
//!   a scale is bounded it saturates instead: to ±448 times a static scale, to ±6 times the largest scale in NVFP4, and
//!   in MXFP4 it comes back as infinity.
//!
//! Other libraries differ here: their `fmaxf`-based clamps turn a NaN into −448, and their FP4 blocks into +6.
//!
//! # Padding
//!
//! Bytes of a scale buffer that belong to no block are written as 0.

mod blocks;
mod fp4;
mod fp8;
mod fp8_groups;

pub use fp4::{MxFp4, NvFp4};
pub use fp8::{TokenRule, fp8_static, fp8_static_inverse, fp8_tokens, fp8_tokens_inverse};
pub use fp8_groups::{Fp8Groups, GroupRule};

use crate::round::{F32_INFINITY, bf16_to_f32, f16_to_f32};
use crate::{Element, bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// The element types that a quantiser reads: `f32`, [`f16`](struct@f16) and [`bf16`].
pub trait Source: Element + sealed::Sealed {
    /// The value as f32, exactly.
    fn widen(self) -> f32;
}

/// Implements [`Source`] with one expression.
macro_rules! source {
    ($type:ty, |$value:ident| $widen:expr) => {
        impl sealed::Sealed for $type {}
        impl Source for $type {
            #[inline]
            fn widen(self) -> f32 {
                let $value = self;
                $widen
            }
        }
    };
}

source!(f32, |value| value);
source!(f16, |value| f16_to_f32(value.to_bits()));
source!(bf16, |value| bf16_to_f32(value.to_bits()));

/// The bits of a magnitude. Ordered as numbers are, with NaN above infinity: a maximum of integers, which unlike one
/// of floats compiles to SIMD code and does not depend on the order.
#[inline]
fn magnitude<T: Source>(value: T) -> u32 {
    value.widen().to_bits() & 0x7FFF_FFFF
}

/// The largest magnitude of the elements that are not NaN, 0 if there are none.
fn amax_of_numbers<T: Source>(x: &[T]) -> f32 {
    let number = |bits: u32| if bits > F32_INFINITY { 0 } else { bits };
    f32::from_bits(x.iter().map(|&value| number(magnitude(value))).fold(0, u32::max))
}

/// The largest magnitude, or a NaN if there is one.
fn amax_or_nan<T: Source>(x: &[T]) -> f32 {
    f32::from_bits(x.iter().map(|&value| magnitude(value)).fold(0, u32::max))
}
