//! Operations of a mixed layout. The size is that of the larger buffer of a rank.

use std::{fmt, str::FromStr};

use antiphon::{
    collectives::{
        CollectiveError, Communicator,
        mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, operation_of},
    },
    device::ReduceOp,
    operation::Operation,
    tensor::Element,
    topology::MixedGroup,
};

use super::Plain;
use crate::{
    Result, Settings,
    case::{Case, Segment},
};

/// What the operations are.
pub(crate) const ABOUT: &str = "Sums in groups of tensor parallel ranks with a gather or a scatter between them, of a --layout, in \
     every mode";

/// A layout: tensor parallel ranks × data parallel ranks of a node, and the same of nodes if there are several. It is written as `2x4`, or
/// `1x2,2x1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    local: [usize; 2],
    inter: [usize; 2],
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pair = |text: &str| {
            let (tp, dp) = text.split_once('x')?;
            let sizes = [tp.parse().ok()?, dp.parse().ok()?];
            sizes.iter().all(|size| (1..=64).contains(size)).then_some(sizes)
        };
        let (local, inter) = text.split_once(',').unwrap_or((text, "1x1"));
        match pair(local).zip(pair(inter)) {
            Some((local, inter)) if [local, inter] != [[1; 2]; 2] => Ok(Self { local, inter }),
            _ => Err(format!(
                "{text:?} is no layout of two ranks or more, such as 2x2, or 1x2,2x1 of two nodes"
            )),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.local[0], self.local[1])?;
        match self.inter {
            [1, 1] => Ok(()),
            [tp, dp] => write!(f, ",{tp}x{dp}"),
        }
    }
}

impl Shape {
    pub(crate) const fn one_node(tp: usize, dp: usize) -> Self {
        Self { local: [tp, dp], inter: [1, 1] }
    }

    pub(crate) fn ranks(self) -> usize {
        self.local.into_iter().chain(self.inter).product()
    }

    pub(crate) fn groups(self) -> usize {
        self.local[1] * self.inter[1]
    }

    pub(crate) fn layout(self, rank: usize) -> MixedLayout {
        let layout = MixedLayout::builder(self.ranks(), rank).local_size(self.local.into_iter().product());
        let layout = layout.local_tp(self.local[0]).inter_tp(self.inter[0]).build();
        layout.expect("the ranks are a multiple of each size")
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
        if self.op == MixedOp::AllReduce { whole } else { (whole / self.shape.groups()).max(1) }
    }

    /// Elements of input and output.
    pub(crate) fn counts(self, block: usize) -> (usize, usize) {
        let row = block * self.shape.groups();
        match self.op {
            MixedOp::AllReduce => (block, block),
            _ if self.gathers() => (block, row),
            _ => (row, block),
        }
    }

    /// Where a rank's output comes from.
    pub(crate) fn segments(self, rank: usize, block: usize) -> Vec<Segment> {
        let layout = self.shape.layout(rank);
        if self.gathers() {
            let of_group =
                |(group, sources)| Segment { output: group * block..(group + 1) * block, sources, start: 0 };
            return layout.groups(MixedGroup::Tp).into_iter().enumerate().map(of_group).collect();
        }
        let start = if self.op == MixedOp::AllReduce { 0 } else { layout.dp_rank() * block };
        vec![Segment { output: 0..block, sources: (0..self.shape.ranks()).collect(), start }]
    }
}

/// Refuses what does not suit a mixed layout.
pub(crate) fn refuse(settings: &Settings) -> Result<(), String> {
    let shape = settings.layout;
    if let Some(ranks) = settings.ranks.filter(|&ranks| ranks != shape.ranks()) {
        return Err(format!("--ranks {ranks}, but a --layout of {shape} has {}", shape.ranks()));
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
        assert_eq!("2x4".parse(), Ok(Shape::one_node(2, 4)));
        for text in ["2x4", "1x2,2x1", "1x1,1x2"] {
            assert_eq!(text.parse::<Shape>().unwrap().to_string(), text);
        }
        for text in
            ["1x1", "0x4", "4", "2x", "axb", "65x1", "-1x2", "1x1,1x1", "2x2,2", "2x2,0x1", "2x2,1x1,1x1"]
        {
            let error = text.parse::<Shape>().unwrap_err();
            assert!(error.contains("is no layout of two ranks or more"), "{error}");
        }
    }

    #[test]
    fn segments_are_sums_of_groups_or_of_all_ranks() {
        let shape = Shape::one_node(2, 3);
        let [gather, scatter] =
            [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce].map(|op| Mixed { op, shape });
        let of = |mixed: Mixed, rank| {
            let found = mixed.segments(rank, mixed.block(15));
            found.into_iter().map(|s| (s.output, s.sources, s.start)).collect::<Vec<_>>()
        };
        let groups = [(0..5, vec![0, 1], 0), (5..10, vec![2, 3], 0), (10..15, vec![4, 5], 0)];
        assert_eq!(of(gather, 5), groups);
        assert_eq!(of(scatter, 5), [(0..5, (0..6).collect(), 10)]);
        assert_eq!((gather.counts(5), scatter.counts(5)), ((5, 15), (15, 5)));
        let shape = "2x1,2x2".parse().unwrap();
        let gather = Mixed { op: MixedOp::AllReduceAllGather, shape };
        assert_eq!(of(gather, 0), [(0..7, vec![0, 1, 2, 3], 0), (7..14, vec![4, 5, 6, 7], 0)]);
        let gather = Mixed { shape: "1x2,2x1".parse().unwrap(), ..gather };
        assert_eq!(of(gather, 0), [(0..7, vec![0, 2], 0), (7..14, vec![1, 3], 0)]);
    }
}
