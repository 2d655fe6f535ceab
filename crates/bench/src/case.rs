//! The cases that are measured.

use std::ops::Range;

use antiphon::{
    collectives::{Communicator, all_reduce::AllReduceOptions, mixed::MixedMode},
    device::ReduceOp,
    operation::{Call, Extent, Operation, Root},
    tensor::DType,
};

use crate::host::{engine, mixed::Mixed, moe};

/// A collective that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// An operation of the table. A message goes from rank 0 to rank 1 and back.
    Of(Operation),
    /// An operation of a mixed layout.
    Mixed(Mixed),
    /// The floor of any all-reduce: every rank reads its input and writes its output, all at once.
    Memory,
    /// The engine between machines: a message between two ranks.
    Engine,
}

impl Collective {
    /// The one with algorithms to choose from.
    pub const ALL_REDUCE: Self = Self::Of(Operation::AllReduce);
    /// A tensor from rank 0 to rank 1 and back.
    pub const SEND_RECV: Self = Self::Of(Operation::Message);
    /// Tokens to the ranks of their experts.
    pub const DISPATCH: Self = Self::Of(Operation::Dispatch);
    /// The combine of a mixture of experts.
    pub const COMBINE: Self = Self::Of(Operation::Combine);

    /// Everything that can be measured.
    pub fn all() -> impl Iterator<Item = Self> {
        let calls = Operation::ALL.iter().copied().filter(|operation| operation.is_call());
        calls.map(Self::Of).chain([
            Self::SEND_RECV,
            Self::DISPATCH,
            Self::COMBINE,
            Self::Memory,
            Self::Engine,
        ])
    }

    /// The operation whose row says what is to be known of it; none of the floors.
    pub fn operation(self) -> Option<Operation> {
        match self {
            Self::Of(operation) => Some(operation),
            Self::Mixed(mixed) => Some(mixed.operation()),
            Self::Memory | Self::Engine => None,
        }
    }

    /// The name in tables, as the Rust method is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::SEND_RECV => "send_recv",
            Self::Of(operation) => operation.name(),
            Self::Mixed(mixed) => mixed.operation().name(),
            Self::Memory => "memory",
            Self::Engine => "engine",
        }
    }

    /// What it is, where the name does not say that.
    pub(crate) fn about(self) -> Option<&'static str> {
        Some(match self {
            Self::SEND_RECV => "A tensor from rank 0 to rank 1 and back",
            Self::DISPATCH => moe::ABOUT_DISPATCH,
            Self::COMBINE => moe::ABOUT_COMBINE,
            Self::Memory => {
                "The floor of any all-reduce: every rank reads its input and writes its output, all at once"
            }
            Self::Engine => engine::ABOUT,
            _ => return None,
        })
    }

    /// Whether an operator is applied.
    pub fn reduces(self) -> bool {
        self.operation().is_some_and(|operation| operation.row().reduces)
    }

    /// Whether it is of a mixture of experts, which `moe` measures.
    pub(crate) fn is_of_experts(self) -> bool {
        matches!(self, Self::DISPATCH | Self::COMBINE)
    }

    /// The factor from its algorithm bandwidth to its bus bandwidth.
    pub(crate) fn bus_factor(self, ranks: usize) -> Option<f64> {
        self.operation().and_then(|operation| operation.row().bus_factor.among(ranks))
    }
}

/// One row of the table to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) collective: Collective,
    /// The size of the larger buffer of a rank.
    pub(crate) bytes: u64,
    /// How an all-reduce is done.
    pub(crate) how: AllReduceOptions,
    /// The mode of a mixed operation.
    pub(crate) mode: Option<MixedMode>,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Into how many tensors the bytes are cut, each with a call of its own.
    pub(crate) tensors: usize,
}

/// Where rank 0 is the one that gives or gets.
pub(crate) const ROOT: usize = 0;

/// Elements of a rank's output, and where they come from.
pub(crate) struct Segment {
    pub(crate) output: Range<usize>,
    /// The ranks that give them: of a reduction those whose sum they are, else one.
    pub(crate) sources: Vec<usize>,
    /// Where they begin in the inputs of these.
    pub(crate) start: usize,
}

impl Case {
    /// Elements of a block: the larger buffer has as many as fit in the bytes, at least one per block.
    fn block(&self, world_size: usize) -> usize {
        let whole = (self.bytes as usize / self.dtype.size()).max(1);
        if let Collective::Mixed(mixed) = self.collective {
            return mixed.block(whole);
        }
        let row = self.collective.operation().map(Operation::row);
        if row.is_none_or(|row| (row.input, row.output) == (Extent::Block, Extent::Block)) {
            return whole;
        }
        (whole / world_size / self.tensors).max(1) * self.tensors
    }

    /// Whether it is one call with a list of tensors.
    pub(crate) fn is_list(&self) -> bool {
        self.tensors > 1
    }

    /// The tensors that a list cuts `count` elements into.
    pub(crate) fn cut(&self, count: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let each = count / self.tensors;
        (0..self.tensors).map(move |index| index * each..(index + 1) * each)
    }

    /// The call of a rank. Parts are as long as blocks on average, the first the shortest and the last the longest.
    pub(crate) fn call(&self, rank: usize, world_size: usize) -> Call<'static> {
        let operation = self.collective.operation().unwrap_or(Operation::Barrier);
        let call = Call::new(operation).with_op(self.op).with_root(ROOT).with_algorithm(self.how.number());
        let (block, row) = (self.block(world_size), operation.row());
        let part = |rank: usize| (block as u128 * 2 * (rank as u128 + 1) / (world_size as u128 + 1)) as usize;
        let parts = || (0..world_size).map(part).collect::<Vec<_>>();
        match (row.input, row.output) {
            (Extent::Parts, Extent::Parts) => {
                call.with_counts(parts()).with_receives(vec![part(rank); world_size])
            }
            (Extent::Parts, _) | (_, Extent::Parts) => call.with_counts(parts()),
            _ => call,
        }
    }

    /// Elements of a rank's input and output.
    pub(crate) fn counts(&self, rank: usize, world_size: usize) -> (usize, usize) {
        if self.collective.is_of_experts() {
            return moe::counts(self, world_size);
        }
        let block = self.block(world_size);
        match self.collective {
            Collective::Memory | Collective::Engine => return (block, block),
            Collective::Mixed(mixed) => return mixed.counts(block),
            Collective::Of(_) => {}
        }
        let call = self.call(rank, world_size);
        let layouts =
            [call.input_layout(block, rank, world_size), call.output_layout(block, rank, world_size)];
        let [input, output] = layouts.map(|layout| layout.elements());
        (input, output)
    }

    /// Elements of the smaller and of the larger of a rank's tensors.
    pub(crate) fn ordered_counts(&self, comm: &Communicator) -> (usize, usize) {
        let (input, output) = self.counts(comm.rank(), comm.world_size());
        (input.min(output), input.max(output))
    }

    /// Where a rank's output comes from.
    pub(crate) fn segments(&self, rank: usize, world_size: usize) -> Vec<Segment> {
        let block = self.block(world_size);
        let copied = |source| vec![Segment { output: 0..block, sources: vec![source], start: 0 }];
        let root = match self.collective {
            Collective::Memory | Collective::Engine => return copied(rank),
            Collective::SEND_RECV => return copied(ROOT),
            Collective::Mixed(mixed) => return mixed.segments(rank, block),
            Collective::Of(operation) => operation.row().root,
        };
        if self.is_list() {
            return self.segments_of_list(rank, world_size);
        }
        let call = self.call(rank, world_size);
        let output = call.output_layout(block, rank, world_size);
        let segment = |sources: Vec<usize>| {
            let source = sources[0];
            let theirs = self.call(source, world_size);
            let start = theirs.input_layout(block, source, world_size).piece(rank).start;
            Segment { output: output.piece(if output.is_divided() { source } else { rank }), sources, start }
        };
        match (self.collective.reduces(), root) {
            (true, _) => vec![segment((0..world_size).collect())],
            (false, Some(Root::Gives)) => vec![segment(vec![ROOT])],
            (false, _) => (0..world_size).map(|source| segment(vec![source])).collect(),
        }
    }

    /// The segments of a list of tensors, one behind the other.
    fn segments_of_list(&self, rank: usize, world_size: usize) -> Vec<Segment> {
        let whole = Self { tensors: 1, ..*self };
        let one = Self {
            bytes: (self.block(world_size) * world_size / self.tensors * self.dtype.size()) as u64,
            ..whole
        };
        let (from, to) = one.counts(rank, world_size);
        let of_tensor = |index: usize| {
            let shifted = move |segment: Segment| Segment {
                output: segment.output.start + index * to..segment.output.end + index * to,
                start: segment.start + index * from,
                ..segment
            };
            one.segments(rank, world_size).into_iter().map(shifted)
        };
        (0..self.tensors).flat_map(of_tensor).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(operations: &[Operation]) -> Vec<Collective> {
        operations.iter().map(|&operation| Collective::Of(operation)).collect()
    }

    #[test]
    fn factors_are_those_of_nccl_tests() {
        use Operation::*;
        assert_eq!(Collective::ALL_REDUCE.bus_factor(4), Some(1.5));
        for collective in of(&[AllGather, ReduceScatter, AllToAll, Gather, Scatter, AllGatherV]) {
            assert_eq!(collective.bus_factor(4), Some(0.75), "{collective:?}");
        }
        for collective in of(&[Broadcast, Reduce, Message]) {
            assert_eq!(collective.bus_factor(4), Some(1.0), "{collective:?}");
        }
        assert_eq!(
            (Collective::ALL_REDUCE.bus_factor(1), Collective::Memory.bus_factor(4)),
            (Some(0.0), None)
        );
    }

    fn case(collective: Collective) -> Case {
        Case {
            collective,
            bytes: 42,
            how: AllReduceOptions::default(),
            mode: None,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            tensors: 1,
        }
    }

    #[test]
    fn the_larger_buffer_has_the_bytes_and_a_row_a_block_for_each_rank() {
        let counts = |operation, world_size| case(Collective::Of(operation)).counts(0, world_size);
        use Operation::*;
        assert_eq!([AllReduce, Message].map(|of| counts(of, 4)), [(10, 10); 2]);
        assert_eq!(case(Collective::Memory).counts(0, 4), (10, 10));
        assert_eq!([AllGather, Gather].map(|of| counts(of, 4)), [(2, 8); 2]);
        assert_eq!([ReduceScatter, Scatter].map(|of| counts(of, 4)), [(8, 2); 2]);
        assert_eq!(counts(AllToAll, 4), (8, 8));
        assert_eq!(counts(AllGather, 100), (1, 100), "at least one element in a block");
    }

    #[test]
    fn parts_grow_from_rank_to_rank() {
        let counts = |operation, rank| case(Collective::Of(operation)).counts(rank, 4);
        assert_eq!([0, 1, 2, 3].map(|rank| counts(Operation::AllGatherV, rank).0), [0, 1, 2, 3]);
        assert_eq!([0, 3].map(|rank| counts(Operation::AllGatherV, rank).1), [6, 6]);
        assert_eq!([0, 3].map(|rank| counts(Operation::AllToAllV, rank)), [(6, 0), (6, 12)]);
    }

    #[test]
    fn a_list_has_its_tensors_one_behind_the_other() {
        // Two tensors with blocks of one element, of three ranks.
        let list = |operation| Case { bytes: 6 * 4, tensors: 2, ..case(Collective::Of(operation)) };
        let segments = |operation| {
            let found = list(operation).segments(1, 3);
            found.into_iter().map(|s| (s.output, s.sources, s.start)).collect::<Vec<_>>()
        };
        let gathered = [0, 1].map(|tensor| [0, 1, 2].map(|rank| (3 * tensor + rank, vec![rank], tensor)));
        let gathered = gathered.as_flattened().iter().cloned();
        let gathered: Vec<_> = gathered.map(|(at, sources, start)| (at..at + 1, sources, start)).collect();
        assert_eq!(segments(Operation::AllGather), gathered);
        assert_eq!(segments(Operation::ReduceScatter), [(0..1, vec![0, 1, 2], 1), (1..2, vec![0, 1, 2], 4)]);
        assert_eq!(list(Operation::AllGather).counts(0, 3), (2, 6));
    }

    #[test]
    fn segments_say_where_each_element_comes_from() {
        let segments = |operation, rank| {
            let found = case(Collective::Of(operation)).segments(rank, 3);
            found.into_iter().map(|s| (s.output, s.sources[0], s.start)).collect::<Vec<_>>()
        };
        use Operation::*;
        assert_eq!(segments(AllGather, 1), [(0..3, 0, 0), (3..6, 1, 0), (6..9, 2, 0)]);
        assert_eq!(segments(AllToAll, 1), [(0..3, 0, 3), (3..6, 1, 3), (6..9, 2, 3)]);
        assert_eq!(segments(Scatter, 2), [(0..3, 0, 6)]);
        assert_eq!(segments(ReduceScatter, 2), [(0..3, 0, 6)]);
        assert_eq!(segments(AllGatherV, 0), [(0..1, 0, 0), (1..4, 1, 0), (4..8, 2, 0)]);
    }
}
