//! The geometry that block formats share.

use crate::{TensorError, shape::too_large};

/// A row-major matrix whose rows are cut into blocks of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) block: usize,
}

impl Blocks {
    /// A matrix that blocks fill exactly and whose elements can be counted.
    pub(super) fn new(rows: usize, columns: usize, block: usize) -> Result<Self, TensorError> {
        if block == 0 || !columns.is_multiple_of(block) {
            return Err(TensorError::BlockSize { columns, block });
        }
        match rows.checked_mul(columns) {
            Some(_) => Ok(Self { rows, columns, block }),
            None => Err(too_large(&[rows, columns], 1)),
        }
    }

    /// The number of elements.
    pub(super) fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// The blocks of a row.
    pub(super) fn per_row(&self) -> usize {
        self.columns / self.block
    }

    /// Refuses a row that the matrix does not have.
    pub(super) fn check_row(&self, row: usize) -> Result<(), TensorError> {
        if row < self.rows {
            return Ok(());
        }
        Err(TensorError::IndexOutOfBounds { index: vec![row, 0], shape: vec![self.rows, self.columns] })
    }
}
