//! FP8 with a scale for each group of a token's elements.

use super::blocks::Blocks;
use super::fp8::{MAX, restore, scale_down, scale_up};
use super::{Source, amax_of_numbers};
use crate::{PackedScales, TensorError, UE8M0};

/// How the scale of a group follows from its largest magnitude, and the codes from the scale.
///
/// The two rules agree up to the last bit of f32 and differ in the smallest scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupRule {
    /// `y = max(amax / 448, 1e-10)`; codes of `x / y`. What the per-token-group patterns of FlashInfer 0.6.18's
    /// `trtllm_allreduce_fusion` do, and vLLM's `per_token_group_quant_fp8`.
    FlashInfer,
    /// `a = max(amax, 1e-4)`, `y = a · (1/448)`; codes of `x · (448 / a)`. What DeepEP's low-latency dispatch does.
    DeepEp,
}

impl GroupRule {
    /// The scale of a group and the f32 factor by which its elements are multiplied, before any rounding to a power
    /// of two. The factor is not used by [`FlashInfer`](GroupRule::FlashInfer), which divides.
    fn scale(self, amax: f32) -> (f32, f32) {
        match self {
            GroupRule::FlashInfer => ((amax / MAX).max(1e-10), f32::NAN),
            GroupRule::DeepEp => {
                let amax = amax.max(1e-4);
                (amax * (1.0 / MAX), MAX / amax)
            }
        }
    }
}

/// FP8 quantisation of a matrix of tokens in groups of neighbouring elements, each with a scale of its own.
///
/// Codes are E4M3, rounded to nearest even and saturated to ±448, one byte each in the order of the elements. Scales
/// are dequantisation scales, in one of two forms:
///
/// * [`quantize`](Fp8Groups::quantize) stores them as f32, row-major, one for each group;
/// * [`quantize_packed`](Fp8Groups::quantize_packed) rounds each up to a power of two first, quantises with that, and
///   stores it as [`UE8M0`] where [`PackedScales`] says. A group with an infinity has the scale NaN.
///
/// ```
/// use antiphon_tensor::quantize::{Fp8Groups, GroupRule};
///
/// // 3 tokens of 256 elements in groups of 128.
/// let groups = Fp8Groups::new(3, 256, 128, GroupRule::FlashInfer)?;
/// let x = vec![3.0_f32; 3 * 256];
/// let mut codes = vec![0; x.len()];
/// let mut scales = vec![0; groups.packed_scales().size()];
/// groups.quantize_packed(&x, &mut codes, &mut scales)?;
/// assert_eq!(scales[groups.packed_scales().offset(2, 1)?], 127 - 7); // 3 / 448 rounds up to 2⁻⁷
/// assert_eq!(codes[0], 0x7C); // 384
///
/// let mut values = vec![0.0; x.len()];
/// groups.dequantize_packed(&codes, &scales, &mut values)?;
/// assert_eq!(values, x);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Groups {
    blocks: Blocks,
    packed: PackedScales,
    rule: GroupRule,
}

impl Fp8Groups {
    /// A matrix of `tokens` rows of `hidden` elements, in groups of `group`; 128 is usual.
    ///
    /// # Errors
    ///
    /// [`TensorError::BlockSize`] unless `group` divides `hidden`, and [`TensorError::ShapeOverflow`].
    pub fn new(tokens: usize, hidden: usize, group: usize, rule: GroupRule) -> Result<Self, TensorError> {
        let blocks = Blocks::new(tokens, hidden, group)?;
        Ok(Self { blocks, packed: PackedScales::new(tokens, blocks.per_row())?, rule })
    }

    /// The number of f32 scales: tokens × (hidden / group).
    pub fn scale_count(&self) -> usize {
        self.blocks.rows * self.blocks.per_row()
    }

    /// Where packed scales are, and how many bytes they take.
    pub fn packed_scales(&self) -> PackedScales {
        self.packed
    }

    /// Quantises with f32 scales.
    ///
    /// # Errors
    ///
    /// [`TensorError::BufferLength`] unless `x` and `codes` have tokens × hidden entries and `scales` has
    /// [`scale_count`](Fp8Groups::scale_count).
    pub fn quantize<T: Source>(
        &self,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<(), TensorError> {
        self.check(x.len(), codes.len())?;
        TensorError::check_length("scales", self.scale_count(), scales.len())?;
        let group = self.blocks.block;
        for ((x, codes), scale) in x.chunks_exact(group).zip(codes.chunks_exact_mut(group)).zip(scales) {
            let factor;
            (*scale, factor) = self.rule.scale(amax_of_numbers(x));
            match self.rule {
                GroupRule::FlashInfer => scale_down(x, *scale, codes),
                GroupRule::DeepEp => scale_up(x, factor, codes),
            }
        }
        Ok(())
    }

    /// The values of codes with f32 scales, `code · scale` in f32.
    ///
    /// # Errors
    ///
    /// As [`quantize`](Fp8Groups::quantize).
    pub fn dequantize(&self, codes: &[u8], scales: &[f32], values: &mut [f32]) -> Result<(), TensorError> {
        self.check(values.len(), codes.len())?;
        TensorError::check_length("scales", self.scale_count(), scales.len())?;
        let group = self.blocks.block;
        for ((codes, values), &scale) in
            codes.chunks_exact(group).zip(values.chunks_exact_mut(group)).zip(scales)
        {
            restore(codes, scale, values);
        }
        Ok(())
    }

    /// Quantises with scales that are rounded up to powers of two, packed. Writes padding as 0.
    ///
    /// The codes are those of `x / y` for both rules, since dividing by a power of two and multiplying by its inverse
    /// are the same.
    ///
    /// # Errors
    ///
    /// [`TensorError::BufferLength`] unless `x` and `codes` have tokens × hidden entries and `scales` has the
    /// [`size`](PackedScales::size) of [`packed_scales`](Fp8Groups::packed_scales).
    pub fn quantize_packed<T: Source>(
        &self,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), TensorError> {
        self.check(x.len(), codes.len())?;
        TensorError::check_length("packed scales", self.packed.size(), scales.len())?;
        scales.fill(0);
        let hidden = self.blocks.columns.max(1);
        for (token, (x, codes)) in x.chunks_exact(hidden).zip(codes.chunks_exact_mut(hidden)).enumerate() {
            self.pack_token(token, x, codes, scales);
        }
        Ok(())
    }

    /// [`quantize_packed`](Fp8Groups::quantize_packed) of one token: `x` and `codes` are its own, `scales` those of
    /// all tokens. Padding is left alone.
    ///
    /// # Errors
    ///
    /// [`TensorError::IndexOutOfBounds`] for a token that there is not, and [`TensorError::BufferLength`].
    pub fn quantize_packed_token<T: Source>(
        &self,
        token: usize,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), TensorError> {
        self.blocks.check_row(token)?;
        TensorError::check_length("elements", self.blocks.columns, x.len())?;
        TensorError::check_length("codes", self.blocks.columns, codes.len())?;
        TensorError::check_length("packed scales", self.packed.size(), scales.len())?;
        self.pack_token(token, x, codes, scales);
        Ok(())
    }

    /// The values of codes with packed scales, `code · scale` in f32.
    ///
    /// # Errors
    ///
    /// As [`quantize_packed`](Fp8Groups::quantize_packed).
    pub fn dequantize_packed(
        &self,
        codes: &[u8],
        scales: &[u8],
        values: &mut [f32],
    ) -> Result<(), TensorError> {
        self.check(values.len(), codes.len())?;
        TensorError::check_length("packed scales", self.packed.size(), scales.len())?;
        let group = self.blocks.block;
        let groups = codes.chunks_exact(group).zip(values.chunks_exact_mut(group));
        for ((codes, values), (_, _, offset)) in groups.zip(self.packed.iter()) {
            restore(codes, UE8M0::from_bits(scales[offset]).to_f32(), values);
        }
        Ok(())
    }

    /// Quantises the groups of one token, whose lengths are right.
    fn pack_token<T: Source>(&self, token: usize, x: &[T], codes: &mut [u8], scales: &mut [u8]) {
        let group = self.blocks.block;
        for (index, (x, codes)) in x.chunks_exact(group).zip(codes.chunks_exact_mut(group)).enumerate() {
            let (exact, _) = self.rule.scale(amax_of_numbers(x));
            // Both rules keep the scale far above the subnormals, so that the exponent field is the whole of it.
            let exponent = (exact.to_bits() + 0x7F_FFFF) >> 23;
            scales[self.packed.at(token, index)] = exponent as u8;
            scale_down(x, f32::from_bits(exponent << 23), codes);
        }
    }

    /// Refuses buffers of other lengths than the matrix has.
    fn check(&self, elements: usize, codes: usize) -> Result<(), TensorError> {
        TensorError::check_length("elements", self.blocks.elements(), elements)?;
        TensorError::check_length("codes", self.blocks.elements(), codes)
    }
}
