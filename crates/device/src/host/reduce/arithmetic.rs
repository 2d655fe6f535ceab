//! The definition of the arithmetic: widening, combining and rounding.

use antiphon_tensor::{Element, bf16, f16, round};

/// In which type the elements `T` accumulate, and how they get there and back.
pub(super) trait Domain<T> {
    type Accumulator: Copy + Default;
    fn widen(element: T) -> Self::Accumulator;
    /// The mean's division.
    fn divide(sum: Self::Accumulator, count: usize) -> Self::Accumulator;
    /// The one rounding; a NaN becomes the canonical one.
    fn narrow(accumulator: Self::Accumulator) -> T;
}

/// Accumulation in f32: f32, f16, bf16.
pub(super) struct InF32;
/// Accumulation in f64: f64.
pub(super) struct InF64;
/// Accumulation in wrapping i64: the mean of integers.
pub(super) struct InI64;
/// Accumulation in the wrapping type itself: the other operators on integers.
pub(super) struct Native;

macro_rules! in_f32 {
    ($($t:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Domain<$t> for InF32 {
            type Accumulator = f32;
            #[inline(always)]
            fn widen(element: $t) -> f32 {
                $widen(element)
            }
            #[inline(always)]
            fn divide(sum: f32, count: usize) -> f32 {
                sum / count as f32
            }
            #[inline(always)]
            fn narrow(accumulator: f32) -> $t {
                $narrow(accumulator)
            }
        }
    )*};
}

in_f32! {
    f32, |x: f32| x, round::canonical_f32;
    f16, |x: f16| round::f16_to_f32(x.to_bits()), |x| f16::from_bits(round::f32_to_f16(x));
    bf16, |x: bf16| round::bf16_to_f32(x.to_bits()), |x| bf16::from_bits(round::f32_to_bf16(x));
}

impl Domain<f64> for InF64 {
    type Accumulator = f64;
    #[inline(always)]
    fn widen(element: f64) -> f64 {
        element
    }
    #[inline(always)]
    fn divide(sum: f64, count: usize) -> f64 {
        sum / count as f64
    }
    #[inline(always)]
    fn narrow(accumulator: f64) -> f64 {
        round::canonical_f64(accumulator)
    }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Domain<$t> for InI64 {
            type Accumulator = i64;
            #[inline(always)]
            fn widen(element: $t) -> i64 {
                element as i64
            }
            #[inline(always)]
            fn divide(sum: i64, count: usize) -> i64 {
                sum / count as i64
            }
            #[inline(always)]
            fn narrow(accumulator: i64) -> $t {
                accumulator as $t
            }
        }

        impl Domain<$t> for Native {
            type Accumulator = $t;
            #[inline(always)]
            fn widen(element: $t) -> $t {
                element
            }
            #[inline(always)]
            fn divide(_: $t, _: usize) -> $t {
                unreachable!("the mean of integers accumulates in i64")
            }
            #[inline(always)]
            fn narrow(accumulator: $t) -> $t {
                accumulator
            }
        }
    )*};
}

integers!(i64, i32, i8, u8);

/// A binary operator on accumulators.
pub(super) trait Combine<A> {
    fn combine(left: A, right: A) -> A;
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct Band;
pub(super) struct Bor;
pub(super) struct Bxor;

macro_rules! combine_integers {
    ($($t:ty),*) => {$(
        impl Combine<$t> for Sum {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.wrapping_add(right) }
        }
        impl Combine<$t> for Prod {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.wrapping_mul(right) }
        }
        impl Combine<$t> for Min {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.min(right) }
        }
        impl Combine<$t> for Max {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left.max(right) }
        }
        impl Combine<$t> for Band {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left & right }
        }
        impl Combine<$t> for Bor {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left | right }
        }
        impl Combine<$t> for Bxor {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left ^ right }
        }
    )*};
}

combine_integers!(i64, i32, i8, u8);

macro_rules! combine_floats {
    ($($t:ty),*) => {$(
        impl Combine<$t> for Sum {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left + right }
        }
        impl Combine<$t> for Prod {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t { left * right }
        }
        // IEEE 754-2019 minimum and maximum: a NaN on either side wins, and −0 < +0. Equal values differ at most in
        // the sign of zero, which the bits decide.
        impl Combine<$t> for Min {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                let equal = <$t>::from_bits(left.to_bits() | right.to_bits());
                let ordered = if left < right { left } else if left > right { right } else { equal };
                if left.is_nan() | right.is_nan() { <$t>::NAN } else { ordered }
            }
        }
        impl Combine<$t> for Max {
            #[inline(always)]
            fn combine(left: $t, right: $t) -> $t {
                let equal = <$t>::from_bits(left.to_bits() & right.to_bits());
                let ordered = if left > right { left } else if left < right { right } else { equal };
                if left.is_nan() | right.is_nan() { <$t>::NAN } else { ordered }
            }
        }
    )*};
}

combine_floats!(f32, f64);

/// Reads an element at any alignment.
///
/// # Safety
/// `pointer` is valid for reads of element `index`.
#[inline(always)]
pub(super) unsafe fn read<T: Element>(pointer: *const u8, index: usize) -> T {
    // SAFETY: passed on to the caller.
    unsafe { pointer.cast::<T>().add(index).read_unaligned() }
}
