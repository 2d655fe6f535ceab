//! Rows of f32, and how elements get in and out of them. Plain loops that the compiler vectorises: every function is
//! inlined into one that is compiled for the machine. Tensors may begin anywhere.

use antiphon_tensor::{
    bf16, f16,
    quantize::Source,
    round::{canonical_f32, f32_to_bf16, f32_to_f16},
};

/// An element with the one rounding that ends a computation in f32.
pub(super) trait Float: Source {
    /// The nearest value, ties to even; NaN becomes the canonical one.
    fn narrow(value: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        canonical_f32(value)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_bits(f32_to_f16(value))
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_bits(f32_to_bf16(value))
    }
}

/// `T(value)`, in f32 again.
#[inline(always)]
pub(super) fn rounded<T: Float>(value: f32) -> f32 {
    T::narrow(value).widen()
}

/// Element `index` of a tensor.
///
/// # Safety
/// The tensor is valid for reads of it.
#[inline(always)]
pub(super) unsafe fn element<T: Float>(tensor: *const u8, index: usize) -> f32 {
    // SAFETY: passed on.
    unsafe { tensor.cast::<T>().add(index).read_unaligned() }.widen()
}

/// One f32.
///
/// # Safety
/// The tensor is valid for reads of it.
#[inline(always)]
pub(super) unsafe fn number(tensor: *const u8, index: usize) -> f32 {
    // SAFETY: passed on.
    unsafe { tensor.cast::<f32>().add(index).read_unaligned() }
}

/// Each `x` becomes what `combine` makes of it and the element of a tensor.
///
/// # Safety
/// The tensor is valid for reads of a row.
#[inline(always)]
pub(super) unsafe fn combine<T: Float>(x: &mut [f32], tensor: *const u8, combine: impl Fn(f32, f32) -> f32) {
    for (i, x) in x.iter_mut().enumerate() {
        // SAFETY: passed on.
        *x = combine(*x, unsafe { element::<T>(tensor, i) });
    }
}

/// Rounds each `x` to T.
#[inline(always)]
pub(super) fn round<T: Float>(x: &mut [f32]) {
    for x in x {
        *x = rounded::<T>(*x);
    }
}

/// Writes a row, rounding.
///
/// # Safety
/// The tensor is valid for writes of a row.
#[inline(always)]
pub(super) unsafe fn store<T: Float>(x: &[f32], tensor: *mut u8) {
    for (i, &x) in x.iter().enumerate() {
        // SAFETY: passed on.
        unsafe { tensor.cast::<T>().add(i).write_unaligned(T::narrow(x)) };
    }
}

/// Vectors, or slices, that are added like the lanes of a warp.
const LANES: usize = 32;

/// `1 / √(Σ x² / n + eps)`, with the sum in the order that mod.rs tells: that of a GPU's threads, however many there are.
#[inline(always)]
pub(super) fn rms<T: Float>(x: &[f32], eps: f32) -> f32 {
    let vector = 16 / size_of::<T>();
    let squares = |x: &[f32]| x[1..].iter().fold(x[0] * x[0], |sum, x| sum + x * x);
    let slice = |x: &[f32]| add_like_a_warp(x.chunks_exact(vector).map(squares));
    let groups =
        x.chunks(LANES * LANES * vector).map(|x| add_like_a_warp(x.chunks(LANES * vector).map(slice)));
    let sum = groups.reduce(|sum, group| sum + group).unwrap_or(0.0);
    1.0 / (sum * (1.0 / x.len() as f32) + eps).sqrt()
}

/// Those 16 apart, then those 8 apart and so on; 0 where there are fewer.
#[inline(always)]
fn add_like_a_warp(numbers: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0; LANES];
    lanes.iter_mut().zip(numbers).for_each(|(lane, number)| *lane = number);
    for distance in [16, 8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(distance);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
    }
    lanes[0]
}

/// `x · w · rms` for each, with `w = weight_bias + weight`, or 1 without a weight. With `round_before_weight` it is `T(x · rms) · w`.
///
/// # Safety
/// The weight is null or valid for reads of a row.
#[inline(always)]
pub(super) unsafe fn scale<T: Float>(
    x: &mut [f32],
    weight: Option<*mut u8>,
    weight_bias: f32,
    round_before_weight: bool,
    rms: f32,
) {
    let Some(weight) = weight else {
        x.iter_mut().for_each(|x| *x *= rms);
        return;
    };
    // SAFETY: passed on.
    unsafe {
        match round_before_weight {
            false => combine::<T>(x, weight, |x, weight| x * (weight_bias + weight) * rms),
            true => combine::<T>(x, weight, |x, weight| rounded::<T>(x * rms) * (weight_bias + weight)),
        }
    }
}
