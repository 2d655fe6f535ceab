//! Operations of a mixed layout. The size is that of the larger buffer of a rank.

use std::str::FromStr;

use antiphon::{
    collectives::{
        CollectiveError,
        mixed::{MixedCall, MixedLayout, MixedMode, MixedOp, operation_of},
    },
    device::ReduceOp,
    operation::Operation,
};

use super::{Args, case::Segment};

/// A layout of one node: `dp` groups of `tp` tensor parallel ranks each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub(super) tp: usize,
    pub(super) dp: usize,
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
    pub(super) fn ranks(self) -> usize {
        self.tp * self.dp
    }

    pub(super) fn layout(self, rank: usize) -> MixedLayout {
        let layout = MixedLayout::builder(self.ranks(), rank).local_tp(self.tp).build();
        layout.expect("the ranks are a multiple of tp")
    }

    /// The operations of the layout.
    pub(super) fn all(self) -> impl Iterator<Item = Mixed> {
        self.layout(0).valid_ops().iter().map(move |&op| Mixed { op, shape: self })
    }
}

/// An operation of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixed {
    pub(super) op: MixedOp,
    pub(super) shape: Shape,
}

impl Mixed {
    pub(super) fn operation(self) -> Operation {
        operation_of(self.op)
    }

    pub(super) fn call(self, mode: Option<MixedMode>) -> MixedCall<'static> {
        MixedCall::from(self.op).mode(mode)
    }

    /// The rows: as it is chosen, and each mode.
    pub(super) fn modes(self) -> impl Iterator<Item = Option<MixedMode>> {
        let modes = MixedMode::valid_in(&self.shape.layout(0));
        [None].into_iter().chain(modes.iter().copied().map(Some))
    }

    /// The mode's name in the table.
    pub(super) fn name(
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
    pub(super) fn gathers(self) -> bool {
        matches!(self.op, MixedOp::AllGather | MixedOp::AllReduceAllGather)
    }

    /// The elements of a group's block, if the larger buffer has `whole` elements.
    pub(super) fn block(self, whole: usize) -> usize {
        if self.op == MixedOp::AllReduce { whole } else { (whole / self.shape.dp).max(1) }
    }

    /// Elements of input and output.
    pub(super) fn counts(self, block: usize) -> (usize, usize) {
        let row = block * self.shape.dp;
        match self.op {
            MixedOp::AllReduce => (block, block),
            _ if self.gathers() => (block, row),
            _ => (row, block),
        }
    }

    /// Where a rank's output comes from.
    pub(super) fn segments(self, rank: usize, block: usize) -> Vec<Segment> {
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

/// An argument that does not suit a mixed layout.
pub(super) fn refuse(args: &Args) -> Result<(), String> {
    let Shape { tp, dp } = args.layout;
    if let Some(ranks) = args.ranks.filter(|&ranks| ranks != args.layout.ranks()) {
        return Err(format!("--ranks {ranks}, but a --layout of {tp}x{dp} has {}", args.layout.ranks()));
    }
    match args.op {
        ReduceOp::Sum => Ok(()),
        op => Err(format!("--op {} is not for mixed, which sums", op.name())),
    }
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
