//! The arithmetic that the formats of eight and four bits share.

use crate::round::{F32_INFINITY, F32_NAN};

/// A float format of a sign, some exponent bits and some fraction bits, whose subnormals have exponent 0 and whose
/// codes, without the sign, are in the order of their values.
///
/// The functions are constants in all but name: with the format known, each compiles to a few selects, so that a
/// loop over them becomes SIMD code.
pub(crate) struct Format {
    /// The number of fraction bits, at least 1.
    pub(crate) fraction: u32,
    /// The bias: the exponent's code minus the exponent.
    pub(crate) bias: u32,
    /// The sign's place in a code.
    pub(crate) sign: u32,
    /// The code of the largest finite value.
    pub(crate) max: u32,
    /// Whether the code after [`max`](Format::max) is infinity. It is a NaN otherwise, or there is none.
    pub(crate) infinity: bool,
    /// The code that a NaN becomes.
    pub(crate) nan: u32,
}

impl Format {
    /// How many of an f32's fraction bits a code does not have.
    const fn dropped(&self) -> u32 {
        23 - self.fraction
    }

    /// The f32 bits of the smallest normal value.
    const fn smallest_normal(&self) -> u32 {
        (127 + 1 - self.bias) << 23
    }

    /// The f32 bits of a normal value minus its code, shifted to the f32 places.
    const fn rebias(&self) -> u32 {
        (127 - self.bias) << 23
    }

    /// Narrows to the nearest code, ties to even. What rounds to more than the largest finite value becomes that
    /// value if `saturate`, and the code after it otherwise. NaN becomes [`nan`](Format::nan), without a sign.
    #[inline(always)]
    pub(crate) const fn encode(&self, value: f32, saturate: bool) -> u8 {
        let bits = value.to_bits();
        let sign = (bits >> 31) << self.sign;
        let magnitude = bits & 0x7FFF_FFFF;

        // Adding just under half a unit, or half if the kept part is odd, carries exactly when rounding is upwards.
        // Wraps only where `subnormal` is taken instead.
        let odd = (magnitude >> self.dropped()) & 1;
        let half = (1 << (self.dropped() - 1)) - 1 + odd;
        let normal = magnitude.wrapping_sub(self.rebias()).wrapping_add(half) >> self.dropped();
        // Adding the number whose unit in the last place is the smallest subnormal rounds to a multiple of that, and
        // leaves their number in the fraction.
        let anchor = self.smallest_normal() + (self.dropped() << 23);
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits().wrapping_sub(anchor);

        let unbounded = if magnitude < self.smallest_normal() { subnormal } else { normal };
        let limit = if saturate { self.max } else { self.max + 1 };
        let bounded = if unbounded < limit { unbounded } else { limit };
        let nan = magnitude > F32_INFINITY;
        (if nan { self.nan } else { sign | bounded }) as u8
    }

    /// Widens a code, exactly; every NaN becomes the canonical one.
    #[inline(always)]
    pub(crate) const fn decode(&self, code: u8) -> f32 {
        let sign = ((code as u32 >> self.sign) & 1) << 31;
        let code = code as u32 & ((1 << self.sign) - 1);
        let magnitude = code << self.dropped();

        let normal = magnitude + self.rebias();
        // A subnormal's fraction under the smallest normal's exponent is too large by exactly that normal.
        let smallest = self.smallest_normal();
        let subnormal = (f32::from_bits(magnitude + smallest) - f32::from_bits(smallest)).to_bits();

        let finite = if code >> self.fraction == 0 { subnormal } else { normal };
        let special = if self.infinity && code == self.max + 1 { sign | F32_INFINITY } else { F32_NAN };
        f32::from_bits(if code <= self.max { sign | finite } else { special })
    }
}

/// The methods that all formats have, written once.
macro_rules! small_float_methods {
    ($name:ident, $format:expr, $mask:literal) => {
        impl $name {
            /// The number with this code.
            #[inline]
            pub const fn from_bits(code: u8) -> Self {
                Self(code & $mask)
            }

            /// The code.
            #[inline]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The value, exactly; NaN becomes the canonical NaN (see [`round`](crate::round)).
            #[inline]
            pub const fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }

            /// The nearest finite value: as [`from_f32`](Self::from_f32), in one rounding since widening is exact.
            #[inline]
            pub const fn from_f16(value: crate::f16) -> Self {
                Self::from_f32(crate::round::f16_to_f32(value.to_bits()))
            }

            /// The nearest finite value: as [`from_f32`](Self::from_f32), in one rounding since widening is exact.
            #[inline]
            pub const fn from_bf16(value: crate::bf16) -> Self {
                Self::from_f32(crate::round::bf16_to_f32(value.to_bits()))
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> f32 {
                value.to_f32()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.to_f32()).finish()
            }
        }

        impl std::fmt::Display for $name {
            /// Writes the value as an `f32` is written.
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}
pub(crate) use small_float_methods;
