//! FP4 in blocks: NVFP4 and MXFP4.

use super::blocks::Blocks;
use super::{Source, amax_or_nan};
use crate::{E2M1, E4M3, ScaleGrid, ScaleLayout, TensorError, UE8M0};

/// The largest E2M1 value.
const MAX: f32 = E2M1::MAX.to_f32();

/// FP4 in blocks of 16 with [`E4M3`] scales, and one f32 scale for the whole tensor.
///
/// With the tensor's *encoding* scale `S`, such as 448 · 6 / amax of the tensor, a block becomes
///
/// ```text
/// sf     = E4M3( S · (amax / 6) )          the block's scale byte, saturated to ±448
/// factor = S / sf, or 0 if sf is ±0
/// code   = E2M1( x · factor )              saturated to ±6, element 2i in the low four bits of byte i
/// value  = code · sf / S                   when dequantised
/// ```
///
/// in f32, each operation rounded once. `S` is not checked: if it is negative so are the scales, and if it is 0 the
/// values are NaN. This is `kARResidualRMSNormFP4Quant` of FlashInfer 0.6.18's `trtllm_allreduce_fusion`, which
/// multiplies by the f32 nearest to 1/6 instead of dividing by 6 (and, in its other kernels, by approximate
/// reciprocals): its scale can be another one where `S · (amax / 6)` is within an ulp of halfway between two E4M3
/// values.
///
/// ```
/// use antiphon_tensor::{E4M3, ScaleLayout, quantize::NvFp4};
///
/// let x: Vec<f32> = (0..32).map(|i| i as f32).collect();
/// let format = NvFp4::new(1, 32, ScaleLayout::Linear)?;
/// let mut codes = vec![0; format.code_bytes()];
/// let mut scales = vec![0; format.scale_grid().size()];
/// format.quantize(&x, 1.0, &mut codes, &mut scales)?;
/// assert_eq!(scales.iter().map(|&s| E4M3::from_bits(s).to_f32()).collect::<Vec<_>>(), [2.5, 5.0]);
///
/// let mut values = vec![0.0; 32];
/// format.dequantize(&codes, &scales, 1.0, &mut values)?;
/// assert_eq!(values[12..18], [10.0, 15.0, 15.0, 15.0, 15.0, 15.0]);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvFp4 {
    matrix: Matrix,
}

impl NvFp4 {
    /// The number of elements that share a scale.
    pub const BLOCK: usize = 16;

    /// A matrix of `rows` by `columns` elements with its scales in a layout.
    ///
    /// # Errors
    ///
    /// [`TensorError::BlockSize`] unless 16 divides `columns`, and [`TensorError::ShapeOverflow`].
    pub fn new(rows: usize, columns: usize, layout: ScaleLayout) -> Result<Self, TensorError> {
        Matrix::new(rows, columns, Self::BLOCK, layout).map(|matrix| Self { matrix })
    }

    /// The number of code bytes: half the elements.
    pub fn code_bytes(&self) -> usize {
        self.matrix.code_bytes()
    }

    /// Where the scales are, and how many bytes they take.
    pub fn scale_grid(&self) -> ScaleGrid {
        self.matrix.grid
    }

    /// Quantises a row-major matrix with the encoding scale `scale`. Writes padding as 0.
    ///
    /// # Errors
    ///
    /// [`TensorError::BufferLength`] unless `x` has rows × columns elements, `codes` has [`code_bytes`](NvFp4::code_bytes)
    /// and `scales` has the [`size`](ScaleGrid::size) of [`scale_grid`](NvFp4::scale_grid).
    pub fn quantize<T: Source>(
        &self,
        x: &[T],
        scale: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), TensorError> {
        self.matrix.quantize(x, codes, scales, |amax| Self::block(amax, scale))
    }

    /// [`quantize`](NvFp4::quantize) of one row: `x` and `codes` are its own, `scales` those of all rows. Padding is
    /// left alone.
    ///
    /// # Errors
    ///
    /// [`TensorError::IndexOutOfBounds`] for a row that there is not, and [`TensorError::BufferLength`].
    pub fn quantize_row<T: Source>(
        &self,
        row: usize,
        x: &[T],
        scale: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), TensorError> {
        self.matrix.quantize_row(row, x, codes, scales, |amax| Self::block(amax, scale))
    }

    /// The values of codes, row-major; `scale` is what they were quantised with.
    ///
    /// # Errors
    ///
    /// As [`quantize`](NvFp4::quantize).
    pub fn dequantize(
        &self,
        codes: &[u8],
        scales: &[u8],
        scale: f32,
        values: &mut [f32],
    ) -> Result<(), TensorError> {
        self.matrix.dequantize(codes, scales, values, |byte, code| {
            code.to_f32() * E4M3::from_bits(byte).to_f32() / scale
        })
    }

    /// The scale byte of a block and the factor for its elements.
    fn block(amax: f32, scale: f32) -> (u8, f32) {
        let sf = E4M3::from_f32(scale * (amax / MAX));
        let divisor = sf.to_f32();
        (sf.to_bits(), if divisor == 0.0 { 0.0 } else { scale / divisor })
    }
}

/// FP4 in blocks of 32 with [`UE8M0`] scales, the MXFP4 of the *OCP Microscaling Formats (MX) Specification* 1.0.
///
/// A block becomes
///
/// ```text
/// sf    = UE8M0( amax / 6 ), rounded up to a power of two
/// code  = E2M1( x · (1 / sf) )             never beyond ±6, element 2i in the low four bits of byte i
/// value = code · sf                        when dequantised
/// ```
///
/// in f32, as FlashInfer's and NVIDIA's kernels do. The specification leaves the choice of the scale open; the
/// conversion that it sketches takes 2^(⌊log₂ amax⌋ − 2). That is half of ours, and saturates, where amax is between 6
/// and 8 times a power of two, and the same elsewhere.
///
/// ```
/// use antiphon_tensor::{ScaleLayout, UE8M0, quantize::MxFp4};
///
/// let format = MxFp4::new(2, 64, ScaleLayout::Swizzled8x4)?;
/// let x = vec![-7.0_f32; 2 * 64];
/// let mut codes = vec![0; format.code_bytes()];
/// let mut scales = vec![0; format.scale_grid().size()];
/// format.quantize(&x, &mut codes, &mut scales)?;
/// assert_eq!(scales[format.scale_grid().offset(1, 1)?], UE8M0::from_f32_up(2.0).to_bits());
///
/// let mut values = vec![0.0; 2 * 64];
/// format.dequantize(&codes, &scales, &mut values)?;
/// assert_eq!(values[100], -8.0); // -3.5 is halfway between -3 and -4
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MxFp4 {
    matrix: Matrix,
}

impl MxFp4 {
    /// The number of elements that share a scale.
    pub const BLOCK: usize = 32;

    /// A matrix of `rows` by `columns` elements with its scales in a layout.
    ///
    /// # Errors
    ///
    /// [`TensorError::BlockSize`] unless 32 divides `columns`, and [`TensorError::ShapeOverflow`].
    pub fn new(rows: usize, columns: usize, layout: ScaleLayout) -> Result<Self, TensorError> {
        Matrix::new(rows, columns, Self::BLOCK, layout).map(|matrix| Self { matrix })
    }

    /// The number of code bytes: half the elements.
    pub fn code_bytes(&self) -> usize {
        self.matrix.code_bytes()
    }

    /// Where the scales are, and how many bytes they take.
    pub fn scale_grid(&self) -> ScaleGrid {
        self.matrix.grid
    }

    /// Quantises a row-major matrix. Writes padding as 0.
    ///
    /// # Errors
    ///
    /// [`TensorError::BufferLength`] unless `x` has rows × columns elements, `codes` has [`code_bytes`](MxFp4::code_bytes)
    /// and `scales` has the [`size`](ScaleGrid::size) of [`scale_grid`](MxFp4::scale_grid).
    pub fn quantize<T: Source>(
        &self,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), TensorError> {
        self.matrix.quantize(x, codes, scales, Self::block)
    }

    /// [`quantize`](MxFp4::quantize) of one row: `x` and `codes` are its own, `scales` those of all rows. Padding is
    /// left alone.
    ///
    /// # Errors
    ///
    /// [`TensorError::IndexOutOfBounds`] for a row that there is not, and [`TensorError::BufferLength`].
    pub fn quantize_row<T: Source>(
        &self,
        row: usize,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), TensorError> {
        self.matrix.quantize_row(row, x, codes, scales, Self::block)
    }

    /// The values of codes, row-major.
    ///
    /// # Errors
    ///
    /// As [`quantize`](MxFp4::quantize).
    pub fn dequantize(&self, codes: &[u8], scales: &[u8], values: &mut [f32]) -> Result<(), TensorError> {
        self.matrix
            .dequantize(codes, scales, values, |byte, code| code.to_f32() * UE8M0::from_bits(byte).to_f32())
    }

    /// The scale byte of a block and the factor for its elements.
    fn block(amax: f32) -> (u8, f32) {
        let sf = UE8M0::from_f32_up(amax / MAX);
        (sf.to_bits(), sf.recip().to_f32())
    }
}

/// The common part of the two formats: everything except the scale of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Matrix {
    blocks: Blocks,
    grid: ScaleGrid,
}

impl Matrix {
    fn new(rows: usize, columns: usize, block: usize, layout: ScaleLayout) -> Result<Self, TensorError> {
        let blocks = Blocks::new(rows, columns, block)?;
        Ok(Self { blocks, grid: ScaleGrid::new(layout, rows, blocks.per_row())? })
    }

    fn code_bytes(&self) -> usize {
        self.blocks.elements() / 2
    }

    /// Quantises all rows; `scale_of` gives the scale byte and the factor for a block's amax.
    fn quantize<T: Source>(
        &self,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [u8],
        scale_of: impl Fn(f32) -> (u8, f32),
    ) -> Result<(), TensorError> {
        self.check(x.len(), codes.len(), scales.len())?;
        scales.fill(0);
        let block = self.blocks.block;
        let blocks = x.chunks_exact(block).zip(codes.chunks_exact_mut(block / 2));
        for ((x, codes), (_, _, offset)) in blocks.zip(self.grid.iter()) {
            scales[offset] = quantize_block(x, codes, &scale_of);
        }
        Ok(())
    }

    /// Quantises one row.
    fn quantize_row<T: Source>(
        &self,
        row: usize,
        x: &[T],
        codes: &mut [u8],
        scales: &mut [u8],
        scale_of: impl Fn(f32) -> (u8, f32),
    ) -> Result<(), TensorError> {
        self.blocks.check_row(row)?;
        TensorError::check_length("elements", self.blocks.columns, x.len())?;
        TensorError::check_length("codes", self.blocks.columns / 2, codes.len())?;
        TensorError::check_length("scales", self.grid.size(), scales.len())?;
        let block = self.blocks.block;
        for (column, (x, codes)) in x.chunks_exact(block).zip(codes.chunks_exact_mut(block / 2)).enumerate() {
            scales[self.grid.at(row, column)] = quantize_block(x, codes, &scale_of);
        }
        Ok(())
    }

    /// Restores all rows; `value_of` gives the value of a scale byte and a code.
    fn dequantize(
        &self,
        codes: &[u8],
        scales: &[u8],
        values: &mut [f32],
        value_of: impl Fn(u8, E2M1) -> f32,
    ) -> Result<(), TensorError> {
        self.check(values.len(), codes.len(), scales.len())?;
        let block = self.blocks.block;
        let blocks = codes.chunks_exact(block / 2).zip(values.chunks_exact_mut(block));
        for ((codes, values), (_, _, offset)) in blocks.zip(self.grid.iter()) {
            for (&pair, values) in codes.iter().zip(values.chunks_exact_mut(2)) {
                let (first, second) = E2M1::unpack(pair);
                values[0] = value_of(scales[offset], first);
                values[1] = value_of(scales[offset], second);
            }
        }
        Ok(())
    }

    /// Refuses buffers of other lengths than the matrix has.
    fn check(&self, elements: usize, codes: usize, scales: usize) -> Result<(), TensorError> {
        TensorError::check_length("elements", self.blocks.elements(), elements)?;
        TensorError::check_length("codes", self.code_bytes(), codes)?;
        TensorError::check_length("scales", self.grid.size(), scales)
    }
}

/// Writes the codes of a block and gives its scale byte.
fn quantize_block<T: Source>(x: &[T], codes: &mut [u8], scale_of: impl Fn(f32) -> (u8, f32)) -> u8 {
    let (byte, factor) = scale_of(amax_or_nan(x));
    for (pair, x) in codes.iter_mut().zip(x.chunks_exact(2)) {
        *pair = E2M1::pack(E2M1::from_f32(x[0].widen() * factor), E2M1::from_f32(x[1].widen() * factor));
    }
    byte
}
