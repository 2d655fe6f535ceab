//! The scale that is nothing but an exponent.

use std::fmt;

use crate::round::{F32_INFINITY, F32_NAN};

/// A power of two, 2⁻¹²⁷ to 2¹²⁷: the scale of the MX formats and of packed FP8 scales.
///
/// The code is the exponent plus 127, which for all but code 0 is the exponent field of an f32; code 255 is NaN.
/// There is no sign, no zero and no infinity. Named `float8_e8m0fnu` in PyTorch, `ue8m0` in PTX, and E8M0 in the
/// *OCP Microscaling Formats (MX) Specification* 1.0, whose section 5.4.1 defines it.
///
/// A scale is rounded *up* when it is computed from a block's largest magnitude, so that this magnitude, divided by
/// it, stays within the element format: [`from_f32_up`](UE8M0::from_f32_up), which everything in
/// [`quantize`](crate::quantize) rounds like. [`from_f32_nearest`](UE8M0::from_f32_nearest) converts a scale that
/// another library has computed, as a cast in a tensor framework does.
///
/// ```
/// use antiphon_tensor::UE8M0;
///
/// assert_eq!(UE8M0::from_f32_up(4.0).to_f32(), 4.0);
/// assert_eq!(UE8M0::from_f32_up(4.1).to_f32(), 8.0);
/// assert_eq!(UE8M0::from_f32_nearest(4.1).to_f32(), 4.0);
/// assert_eq!(UE8M0::from_f32_up(4.1).to_bits(), 127 + 3);
/// assert_eq!(UE8M0::from_f32_up(4.1).recip().to_f32(), 0.125);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct UE8M0(u8);

impl UE8M0 {
    /// The smallest value, 2⁻¹²⁷.
    pub const MIN: UE8M0 = UE8M0(0);
    /// One.
    pub const ONE: UE8M0 = UE8M0(127);
    /// The largest value, 2¹²⁷.
    pub const MAX: UE8M0 = UE8M0(254);
    /// The only NaN.
    pub const NAN: UE8M0 = UE8M0(255);

    /// The scale with this code.
    #[inline]
    pub const fn from_bits(code: u8) -> Self {
        Self(code)
    }

    /// The code.
    #[inline]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Whether this is [`NAN`](UE8M0::NAN).
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 == Self::NAN.0
    }

    /// The value, exactly. 2⁻¹²⁷ is subnormal as an f32.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        let normal = (self.0 as u32) << 23;
        let finite = if self.0 == 0 { 1 << 22 } else { normal };
        f32::from_bits(if self.is_nan() { F32_NAN } else { finite })
    }

    /// One divided by it, exactly: the exponents' range is symmetric. NaN stays NaN.
    #[inline]
    pub const fn recip(self) -> UE8M0 {
        UE8M0(if self.is_nan() { Self::NAN.0 } else { 254 - self.0 })
    }

    /// The smallest power of two that is not below the magnitude of `value`. Zero becomes 2⁻¹²⁷, and what is beyond
    /// 2¹²⁷, infinity too, becomes 2¹²⁷; the sign is dropped and NaN is NaN. All as `__nv_cvt_float_to_e8m0` of CUDA's
    /// `cuda_fp8.h` with `cudaRoundPosInf` and `__NV_SATFINITE`, which is PTX's `cvt.rp.satfinite.ue8m0x2.f32`.
    #[inline]
    pub const fn from_f32_up(value: f32) -> Self {
        let magnitude = value.to_bits() & 0x7FFF_FFFF;
        // The exponent field, and one more if anything follows it.
        let above = (magnitude + 0x7F_FFFF) >> 23;
        let bounded = if above < Self::MAX.0 as u32 { above } else { Self::MAX.0 as u32 };
        let code = if magnitude <= Self::MIN.to_f32().to_bits() { 0 } else { bounded };
        Self(if magnitude > F32_INFINITY { Self::NAN.0 } else { code as u8 })
    }

    /// The power of two nearest to the magnitude of `value`; halfway between two it is the larger. Zero becomes
    /// 2⁻¹²⁷, what is nearer to 2¹²⁸ than to 2¹²⁷ becomes NaN, and so do infinity and NaN; the sign is dropped.
    ///
    /// A cast in PyTorch agrees except strictly between 2⁻¹²⁷ and 1.5·2⁻¹²⁷, where it gives 2⁻¹²⁶.
    #[inline]
    pub const fn from_f32_nearest(value: f32) -> Self {
        let magnitude = value.to_bits() & 0x7FFF_FFFF;
        // Half the distance to the next power of two, which below the normal numbers is half as far.
        let half = if magnitude < 1 << 23 { 1 << 21 } else { 1 << 22 };
        let code = (magnitude + half) >> 23;
        Self(if code < Self::NAN.0 as u32 { code as u8 } else { Self::NAN.0 })
    }
}

impl Default for UE8M0 {
    /// One: the scale that changes nothing.
    fn default() -> Self {
        Self::ONE
    }
}

impl From<UE8M0> for f32 {
    fn from(scale: UE8M0) -> f32 {
        scale.to_f32()
    }
}

impl fmt::Debug for UE8M0 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UE8M0").field(&self.to_f32()).finish()
    }
}

impl fmt::Display for UE8M0 {
    /// Writes the value as an `f32` is written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.to_f32(), f)
    }
}
