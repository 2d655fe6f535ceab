//! The two floats of eight bits that training and inference use.

use crate::round::F32_NAN;
use crate::small_float::{Format, small_float_methods};

const E4M3_FORMAT: Format =
    Format { fraction: 3, bias: 7, sign: 7, max: 0x7E, infinity: false, nan: E4M3::NAN.0 as u32 };

const E5M2_FORMAT: Format =
    Format { fraction: 2, bias: 15, sign: 7, max: 0x7B, infinity: true, nan: E5M2::NAN.0 as u32 };

/// A float of a sign, 4 exponent bits and 3 fraction bits: the format of weights and activations.
///
/// Finite values reach ±448, without infinities: only the codes 0x7F and 0xFF are special, and both are NaN. Normal
/// values begin at 2⁻⁶ and subnormal ones are multiples of 2⁻⁹. Named `float8_e4m3fn` in PyTorch, `e4m3` in PTX, and
/// E4M3 in the *OCP 8-bit Floating Point Specification (OFP8)* 1.0, whose table 1 defines it.
///
/// Equality is of codes: 0.0 and −0.0 are different and a NaN equals itself. Compare values by
/// [`to_f32`](E4M3::to_f32). There is no [`DType`](crate::DType) for it: a tensor of codes is one of
/// [`U8`](crate::DType::U8).
///
/// ```
/// use antiphon_tensor::E4M3;
///
/// assert_eq!(E4M3::from_f32(1.0).to_bits(), 0x38);
/// assert_eq!(E4M3::from_f32(1.0625).to_f32(), 1.0); // halfway between 1 and 1.125: to the even code
/// assert_eq!(E4M3::from_f32(1e9), E4M3::MAX); // what a quantising kernel wants
/// assert!(E4M3::from_f32_nonsaturating(1e9).is_nan()); // what a cast in PyTorch does
/// assert_eq!(E4M3::from_f32(f32::NAN), E4M3::NAN);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct E4M3(u8);

small_float_methods!(E4M3, E4M3_FORMAT, 0xFF);

impl E4M3 {
    /// The largest finite value, 448.
    pub const MAX: E4M3 = E4M3(0x7E);
    /// The smallest positive normal value, 2⁻⁶.
    pub const MIN_POSITIVE: E4M3 = E4M3(0x08);
    /// The smallest positive value, 2⁻⁹.
    pub const MIN_POSITIVE_SUBNORMAL: E4M3 = E4M3(0x01);
    /// The NaN that every NaN becomes. 0xFF is one too.
    pub const NAN: E4M3 = E4M3(0x7F);

    /// The nearest finite value, ties to the even code. What is beyond ±448, infinity too, becomes ±448, and NaN
    /// becomes [`NAN`](E4M3::NAN): OFP8's saturating mode, and `cvt.rn.satfinite.e4m3x2.f32` of the PTX ISA.
    #[inline]
    pub const fn from_f32(value: f32) -> Self {
        Self(E4M3_FORMAT.encode(value, true))
    }

    /// The nearest value, where what rounds to more than 448 has none and becomes NaN with its sign, 0x7F or 0xFF:
    /// OFP8's non-saturating mode. 464, halfway to the 480 that the code 0x7F would stand for, still becomes 448.
    #[inline]
    pub const fn from_f32_nonsaturating(value: f32) -> Self {
        Self(E4M3_FORMAT.encode(value, false))
    }

    /// Whether this is one of the two NaN codes.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7F == 0x7F
    }
}

/// A float of a sign, 5 exponent bits and 2 fraction bits: the format of gradients.
///
/// Finite values reach ±57344, normal ones begin at 2⁻¹⁴ and subnormal ones are multiples of 2⁻¹⁶. Infinity and NaN
/// are as IEEE 754 has them: it is the upper half of an f16. Named `float8_e5m2` in PyTorch, `e5m2` in PTX, and E5M2
/// in the *OCP 8-bit Floating Point Specification (OFP8)* 1.0, whose table 1 defines it.
///
/// Equality is of codes and there is no [`DType`](crate::DType), as for [`E4M3`].
///
/// ```
/// use antiphon_tensor::E5M2;
///
/// assert_eq!(E5M2::from_f32(-1.0).to_bits(), 0xBC);
/// assert_eq!(E5M2::from_f32(f32::INFINITY), E5M2::MAX);
/// assert_eq!(E5M2::from_f32_nonsaturating(f32::INFINITY), E5M2::INFINITY);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct E5M2(u8);

small_float_methods!(E5M2, E5M2_FORMAT, 0xFF);

impl E5M2 {
    /// The largest finite value, 57344.
    pub const MAX: E5M2 = E5M2(0x7B);
    /// The smallest positive normal value, 2⁻¹⁴.
    pub const MIN_POSITIVE: E5M2 = E5M2(0x04);
    /// The smallest positive value, 2⁻¹⁶.
    pub const MIN_POSITIVE_SUBNORMAL: E5M2 = E5M2(0x01);
    /// Infinity.
    pub const INFINITY: E5M2 = E5M2(0x7C);
    /// The NaN that every NaN becomes. 0x7D, 0x7E and the same with a sign are NaN too.
    pub const NAN: E5M2 = E5M2(0x7F);

    /// The nearest finite value, ties to the even code. What is beyond ±57344, infinity too, becomes ±57344, and NaN
    /// becomes [`NAN`](E5M2::NAN): OFP8's saturating mode, and `cvt.rn.satfinite.e5m2x2.f32` of the PTX ISA.
    #[inline]
    pub const fn from_f32(value: f32) -> Self {
        Self(E5M2_FORMAT.encode(value, true))
    }

    /// The nearest value as IEEE 754 rounds: from 61440, halfway to the next power of two, it is infinity.
    #[inline]
    pub const fn from_f32_nonsaturating(value: f32) -> Self {
        Self(E5M2_FORMAT.encode(value, false))
    }

    /// Whether this is one of the six NaN codes.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7F > Self::INFINITY.0
    }

    /// Whether this is neither infinite nor NaN.
    #[inline]
    pub const fn is_finite(self) -> bool {
        self.0 & 0x7F < Self::INFINITY.0
    }
}

const _: () = assert!(E4M3::NAN.to_f32().to_bits() == F32_NAN && E5M2::NAN.to_f32().to_bits() == F32_NAN);
