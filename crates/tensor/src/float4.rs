//! The float of four bits.

use crate::small_float::{Format, small_float_methods};

const E2M1_FORMAT: Format =
    Format { fraction: 1, bias: 1, sign: 3, max: 0x7, infinity: false, nan: E2M1::MAX.0 as u32 };

/// A float of a sign, 2 exponent bits and 1 fraction bit: the elements of NVFP4 and MXFP4.
///
/// The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and every code is finite: there is neither infinity nor NaN, so
/// a block that holds a NaN says so in its scale (see [`quantize`](crate::quantize)). Named `float4_e2m1fn` in
/// PyTorch, `e2m1` in PTX, and FP4 in the *OCP Microscaling Formats (MX) Specification* 1.0, whose section 5.3.3
/// defines it.
///
/// Two fill a byte, the first in the low four bits: [`pack`](E2M1::pack), [`unpack`](E2M1::unpack). Equality is of
/// codes: 0.0 and −0.0 are different. There is no [`DType`](crate::DType) for it: a tensor of pairs is one of
/// [`U8`](crate::DType::U8).
///
/// ```
/// use antiphon_tensor::E2M1;
///
/// let [low, high] = [1.6, -5.0].map(E2M1::from_f32);
/// assert_eq!((low.to_f32(), high.to_f32()), (1.5, -4.0)); // -5 is a tie: to the even code
/// assert_eq!(E2M1::pack(low, high), 0xE3);
/// assert_eq!(E2M1::unpack(0xE3), (low, high));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct E2M1(u8);

// `from_bits` drops the upper four bits of a byte.
small_float_methods!(E2M1, E2M1_FORMAT, 0x0F);

impl E2M1 {
    /// The largest value, 6.
    pub const MAX: E2M1 = E2M1(0x7);
    /// The smallest positive normal value, 1.
    pub const MIN_POSITIVE: E2M1 = E2M1(0x2);
    /// The smallest positive value, 0.5.
    pub const MIN_POSITIVE_SUBNORMAL: E2M1 = E2M1(0x1);

    /// The nearest value, ties to the even code: up to 0.25 it is 0, below 0.75 it is 0.5, up to 1.25 it is 1, below
    /// 1.75 it is 1.5, up to 2.5 it is 2, below 3.5 it is 3, up to 5 it is 4, and 6 from there to infinity. NaN, for
    /// which the format has nothing, becomes +6. All as `cvt.rn.satfinite.e2m1x2.f32` of the PTX ISA.
    #[inline]
    pub const fn from_f32(value: f32) -> Self {
        Self(E2M1_FORMAT.encode(value, true))
    }

    /// The byte of two elements, the first in the low four bits.
    #[inline]
    pub const fn pack(first: E2M1, second: E2M1) -> u8 {
        first.0 | second.0 << 4
    }

    /// The two elements of a byte, the first from the low four bits.
    #[inline]
    pub const fn unpack(pair: u8) -> (E2M1, E2M1) {
        (E2M1(pair & 0x0F), E2M1(pair >> 4))
    }
}
