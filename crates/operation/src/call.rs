//! An operation with its arguments.

use std::{borrow::Cow, ops::Range};

use crate::{Extent, Indivisible, Layout, Operation, ReduceOp, Root, WrongCount, layout::total};

/// An operation with all its arguments except the tensors. Arguments that the operation's row does not use are ignored.
///
/// ```
/// use antiphon_operation::{Call, Operation, ReduceOp};
///
/// let call = Call::new(Operation::Reduce).with_op(ReduceOp::Max).with_root(2);
/// // Rank 2 of 4 passes an input and an output of 7 elements.
/// assert_eq!(call.check(2, 4, Some(7), Some(7)), Ok(7));
/// // Another rank needs no output.
/// assert_eq!(call.check(0, 4, Some(7), None), Ok(7));
///
/// let call = Call::new(Operation::AllGatherV).with_counts(&[3, 0, 5]);
/// assert_eq!(call.output_shape(&[3, 7168], 0, 3).unwrap(), [8, 7168]); // counts of rows
/// assert_eq!(call.check(0, 3, Some(3), Some(8)), Ok(8));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call<'a> {
    /// The operation.
    pub operation: Operation,
    /// The operator that combines elements; by default the sum.
    pub op: ReduceOp,
    /// The root, for operations that have one; by default 0.
    pub root: usize,
    /// The elements of each rank's part; where input and output both have parts, of the input's.
    pub counts: Cow<'a, [usize]>,
    /// Where input and output both have parts, the elements of each part of the output.
    pub receives: Cow<'a, [usize]>,
    /// The number that the row gives to an algorithm; 0 leaves the choice to the library.
    pub algorithm: u8,
}

/// Arguments that make no sense together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WrongCall {
    /// There is no such root.
    #[error("root rank {root} is not below the world size {world_size}")]
    Root {
        /// The root.
        root: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// A rank lacks a tensor.
    #[error("{operation}: rank {rank} must pass an {which}")]
    Missing {
        /// The operation.
        operation: Operation,
        /// Which tensor: `input` or `output`.
        which: &'static str,
        /// The rank.
        rank: usize,
    },
    /// There is not one count for each rank.
    #[error("{operation}: {actual} {which} for {world_size} ranks")]
    Counts {
        /// The operation.
        operation: Operation,
        /// Which list: `counts`, `send counts` or `receive counts`.
        which: &'static str,
        /// How many there are.
        actual: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// A tensor has a wrong number of elements.
    #[error(transparent)]
    Count(#[from] WrongCount),
}

impl<'a> Call<'a> {
    /// An operation with the usual arguments.
    #[inline]
    pub const fn new(operation: Operation) -> Self {
        let none = Cow::Borrowed(&[] as &[usize]);
        Self {
            operation,
            op: ReduceOp::Sum,
            root: 0,
            counts: none,
            receives: Cow::Borrowed(&[]),
            algorithm: 0,
        }
    }

    /// The same call with this operator.
    #[inline]
    pub fn with_op(self, op: ReduceOp) -> Self {
        Self { op, ..self }
    }

    /// With this root.
    #[inline]
    pub fn with_root(self, root: usize) -> Self {
        Self { root, ..self }
    }

    /// Sets the number of elements of each part.
    #[inline]
    pub fn with_counts(self, counts: impl Into<Cow<'a, [usize]>>) -> Self {
        Self { counts: counts.into(), ..self }
    }

    /// Sets the number of elements of each part in the output.
    #[inline]
    pub fn with_receives(self, receives: impl Into<Cow<'a, [usize]>>) -> Self {
        Self { receives: receives.into(), ..self }
    }

    /// The same call with the algorithm of this number.
    #[inline]
    pub fn with_algorithm(self, algorithm: u8) -> Self {
        Self { algorithm, ..self }
    }

    /// Whether this rank must pass an input.
    #[inline]
    pub fn needs_input(&self, rank: usize) -> bool {
        let row = self.operation.row();
        row.input != Extent::Nothing && (row.root != Some(Root::Gives) || rank == self.root)
    }

    /// Whether this rank must pass an output.
    #[inline]
    pub fn needs_output(&self, rank: usize) -> bool {
        let row = self.operation.row();
        row.output != Extent::Nothing && (row.root != Some(Root::Gets) || rank == self.root)
    }

    /// Whether input and output each have parts, with lengths of their own.
    #[inline]
    fn has_two_lists(&self) -> bool {
        let row = self.operation.row();
        (row.input, row.output) == (Extent::Parts, Extent::Parts)
    }

    /// Whether the operation takes counts.
    #[inline]
    fn has_counts(&self) -> bool {
        let row = self.operation.row();
        [row.input, row.output].contains(&Extent::Parts)
    }

    /// Checks the call on one rank, given the number of elements of the rank's tensors. A tensor that the rank need not pass may be
    /// absent, and is not looked at.
    ///
    /// Gives what all ranks must agree on: the elements of a block, or of all parts together. Where each rank knows its own parts
    /// alone there is no such number: 0.
    ///
    /// # Errors
    /// [`WrongCall`]
    #[inline]
    pub fn check(
        &self,
        rank: usize,
        world_size: usize,
        input: Option<usize>,
        output: Option<usize>,
    ) -> Result<usize, WrongCall> {
        let (operation, row) = (self.operation, self.operation.row());
        if row.root.is_some() && self.root >= world_size {
            return Err(WrongCall::Root { root: self.root, world_size });
        }
        let missing = |which| WrongCall::Missing { operation, which, rank };
        if self.needs_input(rank) && input.is_none() {
            return Err(missing("input"));
        }
        if self.needs_output(rank) && output.is_none() {
            return Err(missing("output"));
        }
        if self.has_counts() {
            return self.check_parts(rank, world_size, input, output);
        }
        let input = input.filter(|_| self.needs_input(rank));
        let output = output.filter(|_| self.needs_output(rank));
        Ok(match (input, output) {
            (Some(input), Some(output)) => operation.block(input, output, world_size)?,
            (Some(only), None) | (None, Some(only)) => only, // of an operation with a root: a block
            (None, None) => 0,
        })
    }

    #[cold]
    fn check_parts(
        &self,
        rank: usize,
        world_size: usize,
        input: Option<usize>,
        output: Option<usize>,
    ) -> Result<usize, WrongCall> {
        let (operation, row) = (self.operation, self.operation.row());
        self.check_counts(world_size)?;
        let tensors = [("input", row.input, input), ("output", row.output, output)];
        for ((which, extent, actual), (list, counts)) in tensors.into_iter().zip(self.lists()) {
            let expected = if extent == Extent::Part { counts[rank] } else { total(counts) };
            let actual = actual.unwrap_or(expected);
            // A sum that overflows is no number that a tensor could have.
            if actual != expected || expected == usize::MAX {
                let rule = match extent {
                    Extent::Part => format!("the count of rank {rank}"),
                    _ => format!("the sum of the {list}"),
                };
                return Err(WrongCount { operation, which, actual, expected, rule }.into());
            }
        }
        Ok(if self.has_two_lists() { 0 } else { total(&self.counts) })
    }

    /// The counts of the input's parts and of the output's, with their names.
    fn lists(&self) -> [(&'static str, &[usize]); 2] {
        match self.has_two_lists() {
            true => [("send counts", &self.counts), ("receive counts", &self.receives)],
            false => [("counts", &self.counts); 2],
        }
    }

    fn check_counts(&self, world_size: usize) -> Result<(), WrongCall> {
        let wrong = self.lists().into_iter().find(|(_, counts)| counts.len() != world_size);
        wrong.map_or(Ok(()), |(which, counts)| {
            Err(WrongCall::Counts { operation: self.operation, which, actual: counts.len(), world_size })
        })
    }

    /// The elements of a rank's own block or part of a tensor that has one for each rank, and has `count` elements: where the
    /// rank's other tensor lies in place ([`InPlace::InputBlock`](crate::InPlace::InputBlock) and
    /// [`OutputBlock`](crate::InPlace::OutputBlock)).
    ///
    /// # Errors
    /// [`WrongCall`] if the tensor does not fall into such pieces.
    pub fn own_piece(&self, count: usize, rank: usize, world_size: usize) -> Result<Range<usize>, WrongCall> {
        let operation = self.operation;
        if !self.has_counts() {
            let block = operation.part("buffer", count, world_size)?;
            return Ok(rank * block..(rank + 1) * block);
        }
        self.check_counts(world_size)?;
        let (list, counts) = self.lists()[0];
        let expected = total(counts);
        if count != expected {
            let rule = format!("the sum of the {list}");
            return Err(WrongCount { operation, which: "buffer", actual: count, expected, rule }.into());
        }
        let start = total(&counts[..rank]);
        Ok(start..start + counts[rank])
    }

    /// The word that lets ranks which disagree find out: the root, a digest of the counts, or 0.
    #[inline]
    pub fn detail(&self) -> u32 {
        match self.operation.row().root {
            Some(_) => self.root as u32,
            None if self.has_counts() && !self.has_two_lists() => digest(&self.counts),
            None => 0,
        }
    }

    /// The elements of a rank's input that go to each rank, where a block has `block` elements.
    #[inline]
    pub fn input_layout(&self, block: usize, rank: usize, world_size: usize) -> Layout<'_> {
        Layout { extent: self.operation.row().input, block, counts: &self.counts, rank, world_size }
    }

    /// The elements of a rank's output that come from each rank, where a block has `block` elements.
    #[inline]
    pub fn output_layout(&self, block: usize, rank: usize, world_size: usize) -> Layout<'_> {
        let counts = if self.has_two_lists() { &self.receives } else { &self.counts };
        Layout { extent: self.operation.row().output, block, counts, rank, world_size }
    }

    /// The shape of a rank's output for an input of this shape. The first dimension has the rows of a block, a row of blocks, a
    /// part or all parts, of which the counts count the rows here. A scalar is one row.
    ///
    /// # Errors
    /// [`Indivisible`]
    pub fn output_shape(
        &self,
        input: &[usize],
        rank: usize,
        world_size: usize,
    ) -> Result<Vec<usize>, Indivisible> {
        if !self.has_counts() {
            return self.operation.output_shape(input, world_size);
        }
        let output = self.output_layout(0, rank, world_size);
        let rows = match output.extent {
            Extent::Part => output.counts.get(rank).copied().unwrap_or(0),
            _ => total(output.counts),
        };
        Ok([&[rows], input.get(1..).unwrap_or_default()].concat())
    }

    /// Converts counts of rows, which have `elements` elements each, into counts of elements, and leaves the rest of the call.
    pub fn in_rows_of(self, elements: usize) -> Call<'static> {
        let scaled = |rows: Cow<'_, [usize]>| -> Cow<'static, [usize]> {
            rows.iter().map(|rows| rows.saturating_mul(elements)).collect()
        };
        Call { counts: scaled(self.counts), receives: scaled(self.receives), ..Call::new(self.operation) }
            .with_op(self.op)
            .with_root(self.root)
            .with_algorithm(self.algorithm)
    }
}

/// A digest of a list of counts, which almost always differs for different lists: FNV-1a. It is never 0, which stands for no digest.
pub fn digest(counts: &[usize]) -> u32 {
    let bytes = counts.iter().flat_map(|&count| (count as u64).to_le_bytes());
    bytes.fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(outcome: Result<usize, WrongCall>) -> String {
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn only_the_root_needs_what_it_gives_or_gets() {
        let scatter = Call::new(Operation::Scatter).with_root(1);
        assert_eq!(scatter.check(1, 3, Some(12), Some(4)), Ok(4));
        // The input of another rank is ignored.
        assert_eq!(scatter.check(0, 3, Some(999), Some(4)), Ok(4));
        assert_eq!(text(scatter.check(1, 3, None, Some(4))), "scatter: rank 1 must pass an input");
        let gather = Call::new(Operation::Gather).with_root(1);
        assert_eq!(gather.check(0, 3, Some(4), None), Ok(4));
        assert_eq!(text(gather.check(1, 3, Some(4), None)), "gather: rank 1 must pass an output");
        let expected = "root rank 3 is not below the world size 3";
        assert_eq!(text(gather.with_root(3).check(1, 3, Some(4), None)), expected);
        let all = Call::new(Operation::AllGather);
        assert_eq!(text(all.check(0, 3, None, Some(4))), "all_gather: rank 0 must pass an input");
    }

    #[test]
    fn parts_have_the_lengths_of_the_list() {
        let counts = [3, 0, 5];
        let gather = Call::new(Operation::AllGatherV).with_counts(&counts);
        let scatter = Call::new(Operation::ReduceScatterV).with_counts(&counts);
        for (rank, &own) in counts.iter().enumerate() {
            assert_eq!(gather.check(rank, 3, Some(own), Some(8)), Ok(8));
            assert_eq!(scatter.check(rank, 3, Some(8), Some(own)), Ok(8));
        }
        let expected = "all_gather_v: the input has 4 elements, expected 3 (the count of rank 0)";
        assert_eq!(text(gather.check(0, 3, Some(4), Some(8))), expected);
        let expected = "reduce_scatter_v: the input has 7 elements, expected 8 (the sum of the counts)";
        assert_eq!(text(scatter.check(0, 3, Some(7), Some(3))), expected);
        assert_eq!(text(gather.check(0, 4, Some(3), Some(8))), "all_gather_v: 3 counts for 4 ranks");
    }

    #[test]
    fn input_and_output_of_uneven_blocks_have_a_list_each() {
        let call = Call::new(Operation::AllToAllV).with_counts(&[1, 2]).with_receives(&[4, 0]);
        assert_eq!(call.check(0, 2, Some(3), Some(4)), Ok(0));
        let expected = "all_to_all_v: the output has 3 elements, expected 4 (the sum of the receive counts)";
        assert_eq!(text(call.check(0, 2, Some(3), Some(3))), expected);
        let short = call.clone().with_receives(&[4]);
        assert_eq!(text(short.check(0, 2, Some(3), Some(4))), "all_to_all_v: 1 receive counts for 2 ranks");
        assert_eq!((call.input_layout(0, 0, 2).piece(1), call.output_layout(0, 0, 2).piece(0)), (1..3, 0..4));
    }

    #[test]
    fn a_ranks_own_piece_is_where_it_works_in_place() {
        let gather = Call::new(Operation::AllGather);
        assert_eq!(gather.own_piece(12, 1, 3), Ok(4..8));
        let uneven = Call::new(Operation::AllGatherV).with_counts(&[3, 0, 5]);
        assert_eq!((uneven.own_piece(8, 1, 3), uneven.own_piece(8, 2, 3)), (Ok(3..3), Ok(3..8)));
        let text = uneven.own_piece(9, 1, 3).unwrap_err().to_string();
        assert_eq!(text, "all_gather_v: the buffer has 9 elements, expected 8 (the sum of the counts)");
        assert!(uneven.own_piece(8, 3, 4).is_err());
    }

    #[test]
    fn counts_whose_sum_overflows_are_refused() {
        let counts = [usize::MAX, 5]; // 4 modulo 2^64
        let gather = Call::new(Operation::AllGatherV).with_counts(&counts);
        assert!(gather.check(1, 2, Some(5), Some(4)).is_err());
        assert!(gather.check(1, 2, Some(5), None).is_err());
    }

    #[test]
    fn ranks_that_list_other_counts_find_out() {
        let detail = |counts: &[usize]| Call::new(Operation::AllGatherV).with_counts(counts).detail();
        assert_ne!(detail(&[3, 5]), detail(&[5, 3]));
        assert_ne!(detail(&[3, 5]), 0);
        // Each rank has lists of its own there.
        assert_eq!(Call::new(Operation::AllToAllV).with_counts(&[3, 5]).with_receives(&[1, 1]).detail(), 0);
        assert_eq!(Call::new(Operation::Reduce).with_root(3).detail(), 3);
    }

    #[test]
    fn counts_of_rows_give_the_shape_and_become_counts_of_elements() {
        let call = Call::new(Operation::ReduceScatterV).with_counts(vec![3, 5]).with_op(ReduceOp::Max);
        assert_eq!(call.output_shape(&[8, 7], 1, 2).unwrap(), [5, 7]);
        let elements = call.in_rows_of(7);
        assert_eq!((&*elements.counts, elements.op), (&[21, 35][..], ReduceOp::Max));
        let rooted = Call::new(Operation::Scatter).with_root(1).in_rows_of(7);
        assert_eq!((rooted.root, rooted.output_shape(&[6], 0, 3).unwrap()), (1, vec![2]));
    }
}
