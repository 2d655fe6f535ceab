//! The shapes of a call's tensors, which follow from the row.

use crate::{Extent, Operation};

/// A tensor's number of elements does not suit the call's other tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: the {which} has {actual} elements, expected {expected} ({rule})")]
pub struct WrongCount {
    /// The operation.
    pub operation: Operation,
    /// Which tensor: `input`, `output` or, of both in one, `buffer`.
    pub which: &'static str,
    /// How many elements it has.
    pub actual: usize,
    /// How many it should have.
    pub expected: usize,
    /// The rule with its numbers.
    pub rule: String,
}

/// The first dimension of a shape cannot be divided among the ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{rows} rows (of shape {shape:?}) cannot be divided among {world_size} ranks")]
pub struct Indivisible {
    /// The first dimension; a scalar has one row.
    pub rows: usize,
    /// The shape.
    pub shape: Vec<usize>,
    /// How many ranks there are.
    pub world_size: usize,
}

impl Extent {
    /// The elements of a tensor whose blocks have `block` elements; `None` where no rule says that, or if there are more
    /// than any tensor can have.
    #[inline]
    pub fn elements(self, block: usize, world_size: usize) -> Option<usize> {
        match self {
            Self::Nothing => Some(0),
            Self::Block => Some(block),
            Self::Row => block.checked_mul(world_size),
            Self::Part | Self::Parts | Self::Planned => None,
        }
    }
}

impl Operation {
    /// Checks the numbers of elements of a call's input and output, and gives those of a block.
    ///
    /// Operations without blocks take any numbers, and have no block: 0. [`Call::check`](crate::Call::check) checks the lengths
    /// of parts.
    ///
    /// # Errors
    /// [`WrongCount`]: the output must suit the input, and a row beside a block the block.
    #[inline]
    pub fn block(self, input: usize, output: usize, world_size: usize) -> Result<usize, WrongCount> {
        let row = self.row();
        let blocks = |block: usize| Extent::Row.elements(block, world_size);
        match (row.input, row.output) {
            (Extent::Block, Extent::Block) => self.same(input, output).map(|()| input),
            (Extent::Row, Extent::Row) => {
                let block = self.part("input", input, world_size)?;
                self.same(input, output).map(|()| block)
            }
            (Extent::Block, Extent::Row) if Some(output) == blocks(input) => Ok(input),
            (Extent::Block, Extent::Row) => Err(self.no_row("output", output, input, world_size)),
            (Extent::Row, Extent::Block) if Some(input) == blocks(output) => Ok(output),
            (Extent::Row, Extent::Block) => Err(self.no_row("input", input, output, world_size)),
            _ => Ok(0),
        }
    }

    /// The elements of a block of a row of `count` elements, which is the call's `which` tensor.
    ///
    /// # Errors
    /// [`WrongCount`] if the row does not fall into a block for each rank.
    #[inline]
    pub fn part(self, which: &'static str, count: usize, world_size: usize) -> Result<usize, WrongCount> {
        let block = count / world_size;
        let expected = block * world_size;
        if count == expected {
            return Ok(block);
        }
        let rule = format!("a multiple of the world size {world_size}");
        Err(WrongCount { operation: self, which, actual: count, expected, rule })
    }

    #[inline]
    fn same(self, input: usize, output: usize) -> Result<(), WrongCount> {
        if output == input {
            return Ok(());
        }
        let rule = "as many as the input".to_owned();
        Err(WrongCount { operation: self, which: "output", actual: output, expected: input, rule })
    }

    #[cold]
    fn no_row(self, which: &'static str, actual: usize, block: usize, world_size: usize) -> WrongCount {
        let expected = block.saturating_mul(world_size);
        let rule = format!("{world_size} ranks × {block} elements");
        WrongCount { operation: self, which, actual, expected, rule }
    }

    /// The shape of the output for an input of this shape, whose first dimension counts the rows of a block, or of a row of
    /// blocks. A scalar is one row. Operations without blocks keep the shape; see
    /// [`Call::output_shape`](crate::Call::output_shape).
    ///
    /// # Errors
    /// [`Indivisible`]
    pub fn output_shape(self, input: &[usize], world_size: usize) -> Result<Vec<usize>, Indivisible> {
        let (&rows, rest) = input.split_first().unwrap_or((&1, &[]));
        let rows = match (self.row().input, self.row().output) {
            (Extent::Block, Extent::Row) => rows.saturating_mul(world_size),
            (Extent::Row, Extent::Block) if rows % world_size == 0 => rows / world_size,
            (Extent::Row, Extent::Block) => {
                return Err(Indivisible { rows, shape: input.to_vec(), world_size });
            }
            _ => return Ok(input.to_vec()),
        };
        Ok([&[rows], rest].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(outcome: Result<usize, WrongCount>) -> String {
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn a_block_in_and_a_block_out_are_equally_long() {
        for operation in [Operation::AllReduce, Operation::Reduce, Operation::Broadcast] {
            assert_eq!(operation.block(7, 7, 4), Ok(7));
        }
        let expected = "reduce: the output has 6 elements, expected 7 (as many as the input)";
        assert_eq!(text(Operation::Reduce.block(7, 6, 4)), expected);
    }

    #[test]
    fn a_row_has_a_block_for_each_rank() {
        assert_eq!(Operation::AllGather.block(3, 12, 4), Ok(3));
        assert_eq!(Operation::Scatter.block(12, 3, 4), Ok(3));
        let expected = "gather: the output has 11 elements, expected 12 (4 ranks × 3 elements)";
        assert_eq!(text(Operation::Gather.block(3, 11, 4)), expected);
        let expected = "reduce_scatter: the input has 13 elements, expected 12 (4 ranks × 3 elements)";
        assert_eq!(text(Operation::ReduceScatter.block(13, 3, 4)), expected);
        let huge = usize::MAX / 2 + 1; // four times that is 0 modulo 2^64
        assert!(Operation::AllGather.block(huge, 0, 4).is_err());
    }

    #[test]
    fn a_row_in_and_a_row_out_are_equally_long_and_made_of_blocks() {
        assert_eq!(Operation::AllToAll.block(12, 12, 4), Ok(3));
        let expected = "all_to_all: the input has 13 elements, expected 12 (a multiple of the world size 4)";
        assert_eq!(text(Operation::AllToAll.block(13, 13, 4)), expected);
        let expected = "all_to_all: the output has 8 elements, expected 12 (as many as the input)";
        assert_eq!(text(Operation::AllToAll.block(12, 8, 4)), expected);
    }

    #[test]
    fn tensors_without_blocks_have_any_lengths() {
        assert_eq!(Operation::AllToAllV.block(13, 5, 4), Ok(0));
    }

    #[test]
    fn rows_are_gathered_and_scattered_along_the_first_dimension() {
        let shape = |operation: Operation, input: &[usize]| operation.output_shape(input, 4);
        assert_eq!(shape(Operation::AllGather, &[3, 5]).unwrap(), [12, 5]);
        assert_eq!(shape(Operation::Gather, &[]).unwrap(), [4]);
        assert_eq!(shape(Operation::ReduceScatter, &[12, 5]).unwrap(), [3, 5]);
        assert_eq!(shape(Operation::AllToAll, &[12, 5]).unwrap(), [12, 5]);
        assert_eq!(shape(Operation::AllReduce, &[]).unwrap(), [0usize; 0]);
        let text = shape(Operation::Scatter, &[6, 5]).unwrap_err().to_string();
        assert_eq!(text, "6 rows (of shape [6, 5]) cannot be divided among 4 ranks");
    }

    #[test]
    fn what_is_checked_is_what_the_shapes_give() {
        for &operation in Operation::ALL {
            for block in [0, 1, 7] {
                let row = operation.row();
                let counts = [row.input, row.output].map(|extent| extent.elements(block, 3));
                if let [Some(input), Some(output)] = counts
                    && row.input != Extent::Nothing
                {
                    assert_eq!(operation.block(input, output, 3), Ok(block), "{operation}");
                    assert_eq!(operation.output_shape(&[input, 2], 3).unwrap(), [output, 2], "{operation}");
                }
            }
        }
    }
}
