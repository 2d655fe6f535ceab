//! The element types, as Rust types.

use std::fmt::Debug;

use crate::{DType, bf16, f16, round};

/// A Rust type whose values are the elements of a tensor.
///
/// Implemented for `f64`, `f32`, [`f16`](struct@f16), [`bf16`], `i64`, `i32`, `i8` and `u8`.
///
/// The half types have methods `from_f64` and `to_f64` of their own, which come first wherever the type is named:
/// `bf16::from_f64` drops the low bits of its argument before it rounds. Write `<bf16 as Element>::from_f64`, and the
/// same for an alias such as that of [`with_dtype!`](crate::with_dtype). A type parameter always means this trait.
///
/// ```
/// use antiphon_tensor::{Element, bf16};
///
/// let above_midpoint = 1.0 + 1.0 / 256.0 + 1e-12;
/// assert_eq!(<bf16 as Element>::from_f64(above_midpoint).to_bits(), 0x3F81);
/// assert_eq!(bf16::from_f64(above_midpoint).to_bits(), 0x3F80); // not ours, and not the nearest
/// ```
///
/// # Safety
///
/// Views reinterpret memory by these promises:
///
/// * `size_of::<Self>() == DTYPE.size()`, and the bytes mean what `DTYPE` says, in the machine's own byte order;
/// * there is no padding, and every bit pattern is a valid value.
pub unsafe trait Element: Copy + Send + Sync + 'static + Debug + PartialEq + Default {
    /// The run-time name of this type.
    const DTYPE: DType;

    /// The value as `f64`: exact for every type but `i64`, which rounds to nearest even beyond 2⁵³.
    fn to_f64(self) -> f64;

    /// The nearest value of this type.
    ///
    /// Floats round once, to nearest with ties to even, straight from `f64`; NaN becomes the type's canonical NaN
    /// (see [`round`]). Integers truncate towards zero and saturate; NaN becomes 0.
    fn from_f64(value: f64) -> Self;
}

/// Implements [`Element`] with one expression for each direction.
macro_rules! element {
    ($type:ty, $dtype:ident, |$value:ident| $to:expr, |$wide:ident| $from:expr) => {
        const _: () = assert!(size_of::<$type>() == DType::$dtype.size());

        // SAFETY: a primitive number, or a transparent wrapper of a u16: no padding, every bit pattern valid, and
        // the size is asserted above.
        unsafe impl Element for $type {
            const DTYPE: DType = DType::$dtype;

            #[inline]
            fn to_f64(self) -> f64 {
                let $value = self;
                $to
            }

            #[inline]
            fn from_f64($wide: f64) -> Self {
                $from
            }
        }
    };
}

element!(f64, F64, |value| value, |wide| round::canonical_f64(wide));
element!(f32, F32, |value| f64::from(value), |wide| round::canonical_f32(wide as f32));
element!(f16, F16, |value| f64::from(round::f16_to_f32(value.to_bits())), |wide| {
    f16::from_bits(round::f64_to_f16(wide))
});
element!(bf16, BF16, |value| f64::from(round::bf16_to_f32(value.to_bits())), |wide| {
    bf16::from_bits(round::f64_to_bf16(wide))
});
element!(i64, I64, |value| value as f64, |wide| wide as i64);
element!(i32, I32, |value| f64::from(value), |wide| wide as i32);
element!(i8, I8, |value| f64::from(value), |wide| wide as i8);
element!(u8, U8, |value| f64::from(value), |wide| wide as u8);

/// Evaluates an expression with a type alias bound to the Rust type of a [`DType`] value, which must be
/// [numeric](DType::is_numeric): it panics for others.
///
/// The expression is compiled once for each type, in place: `?`, `return` and borrows work as in a `match`. Being an
/// alias, `T` finds a type's own methods before those of [`Element`](crate::Element): say `<T as Element>::from_f64`.
///
/// ```
/// use antiphon_tensor::{DType, Element, with_dtype};
///
/// fn bytes(dtype: DType, count: usize) -> usize {
///     with_dtype!(dtype, T => count * size_of::<T>())
/// }
///
/// assert_eq!(bytes(DType::BF16, 3), 6);
/// assert_eq!(with_dtype!(DType::I8, T => <T as Element>::from_f64(300.0).to_f64()), 127.0);
/// ```
#[macro_export]
macro_rules! with_dtype {
    (@arm $T:ident = $type:ty => $body:expr) => {{
        #[allow(dead_code)]
        type $T = $type;
        $body
    }};
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => $crate::with_dtype!(@arm $T = f64 => $body),
            $crate::DType::F32 => $crate::with_dtype!(@arm $T = f32 => $body),
            $crate::DType::F16 => $crate::with_dtype!(@arm $T = $crate::f16 => $body),
            $crate::DType::BF16 => $crate::with_dtype!(@arm $T = $crate::bf16 => $body),
            $crate::DType::I64 => $crate::with_dtype!(@arm $T = i64 => $body),
            $crate::DType::I32 => $crate::with_dtype!(@arm $T = i32 => $body),
            $crate::DType::I8 => $crate::with_dtype!(@arm $T = i8 => $body),
            $crate::DType::U8 => $crate::with_dtype!(@arm $T = u8 => $body),
            other => ::core::panic!("{} is stored only: see DType::is_numeric", other),
        }
    };
}
