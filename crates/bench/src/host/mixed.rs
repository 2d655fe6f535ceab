//! Operations of a mixed layout. The size is that of the larger buffer of a rank.

use std::str::FromStr;

use antiphon::{
    collectives::{
        CollectiveError, Communicator,
        mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, operation_of},
    },
    device::ReduceOp,
    operation::Operation,
    tensor::Element,
};

use super::Plain;
use crate::{
    Result, Settings,
    case::{Case, Segment},
};

/// What the operations are.
pub(crate) const ABOUT: &str = "Sums in groups of tensor parallel ranks with a gather or a scatter between them, of a --layout, in \
     every mode";

/// A layout of one node: groups of tensor parallel ranks. It is written as `2x4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Ranks of a group.
    pub(crate) tp: usize,
    /// Groups.
    pub(crate) dp: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('x').and_then(|(tp, dp)| Some((tp.parse().ok()?, dp.parse().ok()?)));
        match numbers {
            Some((tp @ 1..=64, dp @ 1..=64)) if tp * dp > 1 => Ok(Self { tp, dp }),
            _ => Err(format!("{text:?} is no layout of two ranks or more, such as 2x2")),
        }
    }
}

impl Shape {
    pub(crate) fn ranks(self) -> usize {
        self.tp * self.dp
    }

    pub(crate) fn layout(self, rank: usize) -> MixedLayout {
        let layout = MixedLayout::builder(self.ranks(), rank).local_tp(self.tp).build();
        layout.expect("the ranks are a multiple of tp")
    }

    /// The operations of the layout.
    pub(crate) fn all(self) -> impl Iterator<Item = Mixed> {
        self.layout(0).valid_ops().iter().map(move |&op| Mixed { op, shape: self })
    }
}

/// An operation of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixed {
    pub(crate) op: MixedOp,
    pub(crate) shape: Shape,
}

impl Mixed {
    pub(crate) fn operation(self) -> Operation {
        operation_of(self.op)
    }

    pub(crate) fn call(self, mode: Option<MixedMode>) -> MixedCall<'static> {
        MixedCall::from(self.op).mode(mode)
    }

    /// The rows: as it is chosen, and each mode.
    pub(crate) fn modes(self) -> impl Iterator<Item = Option<MixedMode>> {
        let modes = MixedMode::valid_in(&self.shape.layout(0));
        [None].into_iter().chain(modes.iter().copied().map(Some))
    }

    /// The mode's name in the table.
    pub(crate) fn name(
        self,
        mode: Option<MixedMode>,
        select: impl FnOnce() -> Result<MixedMode, CollectiveError>,
    ) -> Result<String, CollectiveError> {
        Ok(match mode {
            Some(mode) => mode.name().to_owned(),
            None => format!("auto={}", select()?),
        })
    }

    /// Whether the output is the row of all blocks.
    pub(crate) fn gathers(self) -> bool {
        matches!(self.op, MixedOp::AllGather | MixedOp::AllReduceAllGather)
    }

    /// The elements of a group's block, if the larger buffer has `whole` elements.
    pub(crate) fn block(self, whole: usize) -> usize {
        if self.op == MixedOp::AllReduce { whole } else { (whole / self.shape.dp).max(1) }
    }

    /// Elements of input and output.
    pub(crate) fn counts(self, block: usize) -> (usize, usize) {
        let row = block * self.shape.dp;
        match self.op {
            MixedOp::AllReduce => (block, block),
            _ if self.gathers() => (block, row),
            _ => (row, block),
        }
    }

    /// Where a rank's output comes from.
    pub(crate) fn segments(self, rank: usize, block: usize) -> Vec<Segment> {
        let Shape { tp, dp } = self.shape;
        if self.gathers() {
            let of_group = |group: usize| Segment {
                output: group * block..(group + 1) * block,
                sources: group * tp..(group + 1) * tp,
                start: 0,
            };
            return (0..dp).map(of_group).collect();
        }
        let start = if self.op == MixedOp::AllReduce { 0 } else { rank / tp * block };
        vec![Segment { output: 0..block, sources: 0..self.shape.ranks(), start }]
    }
}

/// Refuses what does not suit a mixed layout.
pub(crate) fn refuse(settings: &Settings) -> Result<(), String> {
    let shape @ Shape { tp, dp } = settings.layout;
    if let Some(ranks) = settings.ranks.filter(|&ranks| ranks != shape.ranks()) {
        return Err(format!("--ranks {ranks}, but a --layout of {tp}x{dp} has {}", shape.ranks()));
    }
    match settings.op {
        ReduceOp::Sum => Ok(()),
        op => Err(format!("--op {} is not for mixed, which sums", op.name())),
    }
}

/// The contender of a case.
pub(super) fn contender<'a, T: Element>(
    comm: &'a Communicator,
    mixed: Mixed,
    case: Case,
    symmetric: bool,
) -> Result<Plain<'a, T>> {
    let handler = MixedHandler::new(comm, mixed.shape.layout(comm.rank()))?;
    let block = case.ordered_counts(comm).0 * T::DTYPE.size();
    let chosen = mixed.name(case.mode, || handler.select(comm, mixed.op, block));
    let call = move |comm: &Communicator, input: &[T], output: &mut [T]| {
        Ok(handler.run(comm, mixed.call(case.mode), input, output)?)
    };
    Plain::new(comm, case, symmetric, chosen?, call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_two_numbers_of_two_ranks_at_least() {
        assert_eq!("2x4".parse(), Ok(Shape { tp: 2, dp: 4 }));
        for text in ["1x1", "0x4", "4", "2x", "axb", "65x1", "-1x2"] {
            let error = text.parse::<Shape>().unwrap_err();
            assert!(error.contains("is no layout of two ranks or more"), "{error}");
        }
    }

    #[test]
    fn segments_are_sums_of_groups_or_of_all_ranks() {
        let shape = Shape { tp: 2, dp: 3 };
        let [gather, scatter] =
            [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce].map(|op| Mixed { op, shape });
        let of = |mixed: Mixed, rank| {
            let found = mixed.segments(rank, mixed.block(15));
            found.into_iter().map(|s| (s.output, s.sources, s.start)).collect::<Vec<_>>()
        };
        assert_eq!(of(gather, 5), [(0..5, 0..2, 0), (5..10, 2..4, 0), (10..15, 4..6, 0)]);
        assert_eq!(of(scatter, 5), [(0..5, 0..6, 10)]);
        assert_eq!((gather.counts(5), scatter.counts(5)), ((5, 15), (15, 5)));
    }
}
