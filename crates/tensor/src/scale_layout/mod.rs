//! Where the scale of a block lies among the others.
//!
//! Quantised matrices carry a matrix of scales, one byte for each block of a row, and matrix-multiply instructions
//! want its bytes in an order of their own. [`ScaleLayout`] names the orders that NVIDIA's libraries know for FP4,
//! [`ScaleGrid`] computes addresses in them; [`PackedScales`] is the order for FP8 groups.

mod packed;

pub use packed::PackedScales;

use std::fmt;

use crate::{TensorError, shape::too_large};

/// The order of a matrix of scale bytes.
///
/// FlashInfer has two Python classes of integers for it. `QuantizationSFLayout` is the current one, and
/// [`code`](ScaleLayout::code) is its value. The older `FP4QuantizationSFLayout` had `SWIZZLED` = 0, which is
/// [`Swizzled128x4`](ScaleLayout::Swizzled128x4), and `LINEAR` = 1, a number that now means another layout: integers
/// are read as the current class's, so `LINEAR` is 2. A missing code means 0, which is the [`Default`].
///
/// ```
/// use antiphon_tensor::ScaleLayout;
///
/// assert_eq!(ScaleLayout::from_code(2), Ok(ScaleLayout::Linear));
/// assert_eq!(ScaleLayout::default(), ScaleLayout::Swizzled128x4);
/// assert!(ScaleLayout::from_code(3).is_err());
/// ```
// The discriminants are shared with kernels and Python: never renumber them.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ScaleLayout {
    /// Tiles of 128 rows by 4 columns, 512 bytes each, row-major among themselves; in a tile, rows *m*, *m*+32,
    /// *m*+64 and *m*+96 stand next to each other, 4 bytes each. What the block-scaled instructions of Blackwell
    /// tensor cores read. Rows are padded to a multiple of 128 and columns to one of 4.
    #[default]
    Swizzled128x4 = 0,
    /// Tiles of 8 rows by 4 columns, 32 bytes each, row-major inside and among themselves. For few rows. Rows are
    /// padded to a multiple of 8 and columns to one of 4.
    Swizzled8x4 = 1,
    /// Row-major, without padding.
    Linear = 2,
}

impl ScaleLayout {
    /// Every layout, in the order of [`code`](ScaleLayout::code).
    pub const ALL: &[ScaleLayout] =
        &[ScaleLayout::Swizzled128x4, ScaleLayout::Swizzled8x4, ScaleLayout::Linear];

    /// The integer that stands for it in Python and in kernels.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The layout with this [`code`](ScaleLayout::code).
    ///
    /// # Errors
    ///
    /// [`TensorError::UnknownScaleLayout`] for any other integer.
    pub const fn from_code(code: i64) -> Result<Self, TensorError> {
        match code {
            0 => Ok(ScaleLayout::Swizzled128x4),
            1 => Ok(ScaleLayout::Swizzled8x4),
            2 => Ok(ScaleLayout::Linear),
            _ => Err(TensorError::UnknownScaleLayout { code }),
        }
    }

    /// The name of FlashInfer's constant, such as `SWIZZLED_128x4`.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            ScaleLayout::Swizzled128x4 => "SWIZZLED_128x4",
            ScaleLayout::Swizzled8x4 => "SWIZZLED_8x4",
            ScaleLayout::Linear => "LINEAR",
        }
    }

    /// The rows and columns of a tile.
    const fn tile(self) -> (usize, usize) {
        match self {
            ScaleLayout::Swizzled128x4 => (128, 4),
            ScaleLayout::Swizzled8x4 => (8, 4),
            ScaleLayout::Linear => (1, 1),
        }
    }
}

impl fmt::Display for ScaleLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The bytes of a [`Swizzled128x4`](ScaleLayout::Swizzled128x4) matrix of `total_row` by `total_column` scales: rows
/// rounded up to a multiple of 128 times columns rounded up to one of 4. The columns are those of the *scales*, a
/// row's elements divided by the block size. The name is FlashInfer's.
///
/// ```
/// # use antiphon_tensor::compute_fp4_swizzled_layout_sf_size;
/// assert_eq!(compute_fp4_swizzled_layout_sf_size(1, 7168 / 16)?, 128 * 448);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
///
/// # Errors
///
/// As [`ScaleGrid::new`].
pub fn compute_fp4_swizzled_layout_sf_size(
    total_row: usize,
    total_column: usize,
) -> Result<usize, TensorError> {
    ScaleGrid::new(ScaleLayout::Swizzled128x4, total_row, total_column).map(|grid| grid.size())
}

/// A matrix of scale bytes in a layout: addresses both ways.
///
/// Columns are columns of scales. Bytes of [`size`](ScaleGrid::size) that no scale has are padding; everything in
/// this crate that writes scales writes padding as 0, where other libraries leave what was there.
///
/// ```
/// use antiphon_tensor::{ScaleGrid, ScaleLayout};
///
/// // 200 rows of 96 elements in blocks of 16.
/// let grid = ScaleGrid::new(ScaleLayout::Swizzled128x4, 200, 6)?;
/// assert_eq!(grid.size(), 256 * 8);
/// assert_eq!(grid.offset(33, 5)?, 512 + 16 + 4 + 1);
/// assert_eq!(grid.position(533), Some((33, 5)));
/// assert_eq!(grid.position(534), None); // column 6 is padding
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaleGrid {
    layout: ScaleLayout,
    rows: usize,
    columns: usize,
    /// The tiles that a row of tiles has.
    tiles: usize,
    size: usize,
}

impl ScaleGrid {
    /// The addresses of `rows` by `columns` scales.
    ///
    /// # Errors
    ///
    /// [`TensorError::ShapeOverflow`] if the padded size cannot be addressed.
    pub fn new(layout: ScaleLayout, rows: usize, columns: usize) -> Result<Self, TensorError> {
        let (tile_rows, tile_columns) = layout.tile();
        let padded = |extent: usize, tile: usize| extent.checked_next_multiple_of(tile);
        let size = padded(rows, tile_rows)
            .zip(padded(columns, tile_columns))
            .and_then(|(rows, columns)| rows.checked_mul(columns))
            .filter(|&size| size <= isize::MAX as usize)
            .ok_or_else(|| too_large(&[rows, columns], 1))?;
        Ok(Self { layout, rows, columns, tiles: columns.div_ceil(tile_columns), size })
    }

    /// The order of the bytes.
    #[inline]
    pub const fn layout(&self) -> ScaleLayout {
        self.layout
    }

    /// The number of rows, without padding.
    #[inline]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns of scales, without padding.
    #[inline]
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// The number of bytes, padding included.
    #[inline]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The byte that holds the scale of a row and a column.
    ///
    /// # Errors
    ///
    /// [`TensorError::IndexOutOfBounds`] outside the rows and columns.
    pub fn offset(&self, row: usize, column: usize) -> Result<usize, TensorError> {
        if row >= self.rows || column >= self.columns {
            let (index, shape) = (vec![row, column], vec![self.rows, self.columns]);
            return Err(TensorError::IndexOutOfBounds { index, shape });
        }
        Ok(self.at(row, column))
    }

    /// [`offset`](ScaleGrid::offset) of what is known to be inside.
    #[inline]
    pub(crate) const fn at(&self, row: usize, column: usize) -> usize {
        match self.layout {
            ScaleLayout::Swizzled128x4 => {
                let tile = row / 128 * self.tiles + column / 4;
                tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4
            }
            ScaleLayout::Swizzled8x4 => {
                let tile = row / 8 * self.tiles + column / 4;
                tile * 32 + row % 8 * 4 + column % 4
            }
            ScaleLayout::Linear => row * self.columns + column,
        }
    }

    /// The row and column whose scale a byte holds, or `None` for padding and beyond the end.
    pub fn position(&self, offset: usize) -> Option<(usize, usize)> {
        if offset >= self.size {
            return None;
        }
        let (tile_rows, tile_columns) = self.layout.tile();
        let (tile, within) = (offset / (tile_rows * tile_columns), offset % (tile_rows * tile_columns));
        let row_within = match self.layout {
            ScaleLayout::Swizzled128x4 => within % 16 / 4 * 32 + within / 16,
            ScaleLayout::Swizzled8x4 | ScaleLayout::Linear => within / tile_columns,
        };
        let row = tile / self.tiles * tile_rows + row_within;
        let column = tile % self.tiles * tile_columns + within % tile_columns;
        (row < self.rows && column < self.columns).then_some((row, column))
    }

    /// Every scale's row, column and byte, row by row.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let grid = *self;
        let row = move |row| (0..grid.columns).map(move |column| (row, column, grid.at(row, column)));
        (0..self.rows).flat_map(row)
    }

    /// Puts row-major scales into the layout, and zeros into its padding.
    ///
    /// # Errors
    ///
    /// [`TensorError::BufferLength`] unless `linear` has rows × columns bytes and `scales` has
    /// [`size`](ScaleGrid::size).
    pub fn swizzle(&self, linear: &[u8], scales: &mut [u8]) -> Result<(), TensorError> {
        self.check(linear.len(), scales.len())?;
        scales.fill(0);
        for ((_, _, offset), &scale) in self.iter().zip(linear) {
            scales[offset] = scale;
        }
        Ok(())
    }

    /// Takes the scales out of the layout, row-major and without padding.
    ///
    /// # Errors
    ///
    /// As [`swizzle`](ScaleGrid::swizzle).
    pub fn unswizzle(&self, scales: &[u8], linear: &mut [u8]) -> Result<(), TensorError> {
        self.check(linear.len(), scales.len())?;
        for ((_, _, offset), scale) in self.iter().zip(linear) {
            *scale = scales[offset];
        }
        Ok(())
    }

    /// Refuses buffers of other lengths than a row-major and an ordered matrix have.
    fn check(&self, linear: usize, scales: usize) -> Result<(), TensorError> {
        TensorError::check_length("row-major scales", self.rows * self.columns, linear)?;
        TensorError::check_length("scales", self.size, scales)
    }
}
