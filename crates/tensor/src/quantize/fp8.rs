//! FP8 with one scale for a tensor or for a token.

use super::{Source, amax_of_numbers};
use crate::{E4M3, TensorError};

/// The largest E4M3 value.
pub(super) const MAX: f32 = E4M3::MAX.to_f32();

/// The smallest scale of a token: the smallest positive E4M3 value over the largest, so that a token of zeros has a
/// scale to be divided by.
const MIN_TOKEN_SCALE: f32 = E4M3::MIN_POSITIVE_SUBNORMAL.to_f32() / MAX;

/// Quantises to E4M3 with a scale that is known beforehand.
///
/// Each code is that of `x · (1 / scale)`, an f32 division and an f32 product, rounded to nearest even and saturated
/// to ±448. `scale` is the *dequantisation* scale, such as amax / 448 of a calibration run; it may be negative, and is
/// not checked. This is `kARResidualRMSNormFP8Quant` of FlashInfer 0.6.18's `trtllm_allreduce_fusion`.
///
/// ```
/// use antiphon_tensor::quantize::{fp8_static, fp8_static_inverse};
///
/// let (mut codes, mut values) = ([0; 3], [0.0; 3]);
/// fp8_static(&[1.0_f32, -3.0, 1e6], 0.5, &mut codes)?;
/// fp8_static_inverse(&codes, 0.5, &mut values)?;
/// assert_eq!(values, [1.0, -3.0, 224.0]);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
///
/// # Errors
///
/// [`TensorError::BufferLength`] unless there is one code for each element.
pub fn fp8_static<T: Source>(x: &[T], scale: f32, codes: &mut [u8]) -> Result<(), TensorError> {
    TensorError::check_length("codes", x.len(), codes.len())?;
    scale_up(x, 1.0 / scale, codes);
    Ok(())
}

/// The values of E4M3 codes under one scale: `code · scale` in f32, the inverse of [`fp8_static`].
///
/// # Errors
///
/// [`TensorError::BufferLength`] unless there is one value for each code.
pub fn fp8_static_inverse(codes: &[u8], scale: f32, values: &mut [f32]) -> Result<(), TensorError> {
    TensorError::check_length("values", codes.len(), values.len())?;
    restore(codes, scale, values);
    Ok(())
}

/// How the scale of a token follows from its largest magnitude. The two rules differ in the last bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TokenRule {
    /// `amax / 448`: what FlashInfer's kernels do.
    #[default]
    Quotient,
    /// `amax · (1/448)`, where 1/448 is rounded to f32: what torch computes on GPUs for `amax / 448`.
    Reciprocal,
}

impl TokenRule {
    fn scale(self, amax: f32) -> f32 {
        let scale = match self {
            TokenRule::Quotient => amax / MAX,
            TokenRule::Reciprocal => amax * (1.0 / MAX),
        };
        scale.max(MIN_TOKEN_SCALE)
    }
}

/// Quantises each row of `columns` elements to E4M3 with a scale of its own.
///
/// A row's scale is the one that `rule` gives, and at least (1/512) / 448, where 1/512 is the smallest positive E4M3
/// value; each code is that of `x / scale`, an f32 division, rounded to nearest even and saturated to ±448. `scales`
/// gets one dequantisation scale for each row. With [`TokenRule::Quotient`] this is
/// `kARResidualRMSNormDynamicFP8Quant` of FlashInfer 0.6.18's `trtllm_allreduce_fusion`.
///
/// # Errors
///
/// [`TensorError::BlockSize`] if the elements do not divide into rows, and [`TensorError::BufferLength`] unless there
/// are one code for each element and one scale for each row.
pub fn fp8_tokens<T: Source>(
    x: &[T],
    columns: usize,
    rule: TokenRule,
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<(), TensorError> {
    check_rows(x.len(), columns, scales.len())?;
    TensorError::check_length("codes", x.len(), codes.len())?;
    for ((x, codes), scale) in x.chunks_exact(columns).zip(codes.chunks_exact_mut(columns)).zip(scales) {
        *scale = rule.scale(amax_of_numbers(x));
        scale_down(x, *scale, codes);
    }
    Ok(())
}

/// The values of E4M3 codes with a scale for each row of `columns`: `code · scale` in f32, the inverse of
/// [`fp8_tokens`].
///
/// # Errors
///
/// As [`fp8_tokens`], with values for elements.
pub fn fp8_tokens_inverse(
    codes: &[u8],
    columns: usize,
    scales: &[f32],
    values: &mut [f32],
) -> Result<(), TensorError> {
    check_rows(codes.len(), columns, scales.len())?;
    TensorError::check_length("values", codes.len(), values.len())?;
    for ((codes, values), &scale) in
        codes.chunks_exact(columns).zip(values.chunks_exact_mut(columns)).zip(scales)
    {
        restore(codes, scale, values);
    }
    Ok(())
}

/// Refuses elements that do not form rows, or another number of scales than of rows.
fn check_rows(elements: usize, columns: usize, scales: usize) -> Result<(), TensorError> {
    if columns == 0 || !elements.is_multiple_of(columns) {
        return Err(TensorError::BlockSize { columns: elements, block: columns });
    }
    TensorError::check_length("scales", elements / columns, scales)
}

/// The codes of `x · factor`.
pub(super) fn scale_up<T: Source>(x: &[T], factor: f32, codes: &mut [u8]) {
    for (code, value) in codes.iter_mut().zip(x) {
        *code = E4M3::from_f32(value.widen() * factor).to_bits();
    }
}

/// The codes of `x / divisor`. Saturation makes a clamp to ±448 before it superfluous.
pub(super) fn scale_down<T: Source>(x: &[T], divisor: f32, codes: &mut [u8]) {
    for (code, value) in codes.iter_mut().zip(x) {
        *code = E4M3::from_f32(value.widen() / divisor).to_bits();
    }
}

/// The values `code · scale`.
pub(super) fn restore(codes: &[u8], scale: f32, values: &mut [f32]) {
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = E4M3::from_bits(code).to_f32() * scale;
    }
}
