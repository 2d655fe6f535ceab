//! Conversions between `f64`, `f32` and the 16-bit floats, with the same bits on every machine.
//!
//! Narrowing rounds once, to nearest with ties to even. Subnormals are kept and what is too large becomes infinity,
//! as IEEE 754 says. The sign of zero is kept. Every NaN becomes the *canonical* NaN of the target, positive and
//! without payload ([`BF16_NAN`], [`F16_NAN`], [`F32_NAN`], [`F64_NAN`]): CPUs propagate an operand's payload, GPUs
//! do not, and a reduction must not depend on which computed it. Widening is exact; a NaN stays some NaN.
//!
//! The functions contain no branches, only selects, so that a loop over them becomes SIMD code for whatever the
//! target has. 16-bit floats travel as their bit patterns.
//!
//! ```
//! use antiphon_tensor::round::{bf16_to_f32, f32_to_bf16, f64_to_bf16};
//!
//! assert_eq!(f32_to_bf16(1.0), 0x3F80);
//! assert_eq!(bf16_to_f32(0x3F80), 1.0);
//! assert_eq!(f32_to_bf16(-f32::NAN), 0x7FC0);
//!
//! // A little above the midpoint of two bf16 values: rounding to f32 first would lose the little.
//! let above = 1.0 + 1.0 / 256.0 + 1e-12;
//! assert_eq!(f32_to_bf16(above as f32), 0x3F80);
//! assert_eq!(f64_to_bf16(above), 0x3F81);
//! ```

/// The bits of the canonical bf16 NaN.
pub const BF16_NAN: u16 = 0x7FC0;
/// The bits of the canonical f16 NaN.
pub const F16_NAN: u16 = 0x7E00;
/// The bits of the canonical f32 NaN.
pub const F32_NAN: u32 = 0x7FC0_0000;
/// The bits of the canonical f64 NaN.
pub const F64_NAN: u64 = 0x7FF8_0000_0000_0000;

/// The bits of f32 infinity: above them, without the sign, is NaN.
pub(crate) const F32_INFINITY: u32 = 0x7F80_0000;

/// The value, or the canonical NaN if it is any NaN.
#[inline]
pub const fn canonical_f32(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(F32_NAN) } else { value }
}

/// The value, or the canonical NaN if it is any NaN.
#[inline]
pub const fn canonical_f64(value: f64) -> f64 {
    if value.is_nan() { f64::from_bits(F64_NAN) } else { value }
}

/// Widens a bf16, exactly.
#[inline]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Narrows to the bits of the nearest bf16, ties to even; NaN becomes [`BF16_NAN`].
#[inline]
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Adding just under half a unit, or half if the kept part is odd, carries exactly when rounding is upwards. The
    // carry runs through the exponent up to infinity as it should. Only a NaN can wrap.
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7FFF + odd) >> 16;
    let nan = bits & 0x7FFF_FFFF > F32_INFINITY;
    (if nan { BF16_NAN as u32 } else { rounded }) as u16
}

/// Widens an f16, exactly.
#[inline]
pub const fn f16_to_f32(bits: u16) -> f32 {
    // One unit of the f32 exponent, and the f32 image of f16's smallest normal number.
    const EXPONENT: u32 = 1 << 23;
    const SMALLEST_NORMAL: u32 = 113 * EXPONENT;

    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = (bits as u32 & 0x7FFF) << 13;
    // The exponent's bias grows by 112; the exponent of infinity and NaN, 31, must become 255 instead of 143.
    let normal = magnitude + 112 * EXPONENT;
    let special = magnitude + 224 * EXPONENT;
    // A subnormal's fraction under the smallest normal's exponent is too large by exactly that normal.
    let subnormal = (f32::from_bits(magnitude + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL)).to_bits();

    let finite = if magnitude < EXPONENT { subnormal } else { normal };
    f32::from_bits(sign | if magnitude < 31 * EXPONENT { finite } else { special })
}

/// Narrows to the bits of the nearest f16, ties to even; NaN becomes [`F16_NAN`].
#[inline]
pub const fn f32_to_f16(value: f32) -> u16 {
    const SMALLEST_NORMAL: u32 = 0x3880_0000; // 2⁻¹⁴
    const HALF: u32 = 0x3F00_0000; // 0.5, whose unit in the last place is f16's smallest subnormal, 2⁻²⁴
    const INFINITY: u32 = 0x7C00;

    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // As for bf16, with the exponent's bias reduced by 112. Wraps only where `subnormal` is taken instead.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    // The addition itself rounds to a multiple of the smallest subnormal, and leaves their number in the fraction.
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(HALF)).to_bits().wrapping_sub(HALF);

    let unbounded = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    let finite = if unbounded < INFINITY { unbounded } else { INFINITY };
    let nan = magnitude > F32_INFINITY;
    (if nan { F16_NAN as u32 } else { sign | finite }) as u16
}

/// Narrows to the bits of the nearest bf16, in one rounding; NaN becomes [`BF16_NAN`].
#[inline]
pub const fn f64_to_bf16(value: f64) -> u16 {
    f32_to_bf16(to_odd(value))
}

/// Narrows to the bits of the nearest f16, in one rounding; NaN becomes [`F16_NAN`].
#[inline]
pub const fn f64_to_f16(value: f64) -> u16 {
    f32_to_f16(to_odd(value))
}

/// Rounds to f32 so that a second rounding, to at least two bits fewer, is as if it were the only one: what is not
/// exact becomes the neighbour with an odd fraction, which is never a midpoint and lies on the right side of one.
/// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".)
#[inline]
const fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = nearest as f64;
    // Below 0 in magnitude is impossible, so a nearest value that is too far out has bits of at least 1.
    let too_far = (back.abs() > value.abs()) as u32;
    let inexact = (back != value) as u32;
    f32::from_bits((nearest.to_bits() - too_far) | inexact)
}
