//! A call of a mixed operation, and its validation.

use std::ops::Range;

use antiphon_fabric::{Communicator, FabricError, Nodes, Operation, Signature};
use antiphon_operation::Call;

use super::{MixedLayout, MixedMode, MixedOp, operation_of};
use crate::{
    ReduceOp,
    arguments::{Input, Output, has_count, reducible, same_dtype},
    error::{CollectiveError, Result},
};

/// A call: the operation, and the choices on which ranks agree. All ranks pass an equal one.
#[derive(Debug, Clone, Copy)]
pub struct MixedCall<'a> {
    /// One of the layout's [`valid_ops`](MixedLayout::valid_ops).
    pub op: MixedOp,
    /// One of [`MixedHandler::valid_modes`](super::MixedHandler::valid_modes); `None` stands for the fastest of the modes that give the same bits.
    pub mode: Option<MixedMode>,
    /// The elements of every group's block, 0 allowed; `None` stands for blocks of equal length. Not for an all-reduce.
    pub counts: Option<&'a [usize]>,
}

impl From<MixedOp> for MixedCall<'_> {
    /// The operation with blocks of equal length in the fastest mode.
    fn from(op: MixedOp) -> Self {
        Self { op, mode: None, counts: None }
    }
}

impl<'a> MixedCall<'a> {
    /// The same call in this mode.
    pub fn mode(self, mode: impl Into<Option<MixedMode>>) -> Self {
        Self { mode: mode.into(), ..self }
    }

    /// The same call with blocks of these lengths, in elements, one for each group.
    pub fn counts<'b>(self, counts: impl Into<Option<&'b [usize]>>) -> MixedCall<'b> {
        MixedCall { op: self.op, mode: self.mode, counts: counts.into() }
    }
}

/// The plain collective that a call is where no tensors are parallel: it only gathers, or only scatters.
pub(crate) fn plain_call<'a>(call: &MixedCall<'a>) -> Call<'a> {
    let (even, uneven) = match call.op {
        MixedOp::AllGather => (Operation::AllGather, Operation::AllGatherV),
        _ => (Operation::ReduceScatter, Operation::ReduceScatterV),
    };
    call.counts.map_or(Call::new(even), |counts| Call::new(uneven).with_counts(counts))
}

/// The lengths of the groups' blocks, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks<'a> {
    /// Each of `groups` blocks has `count` elements.
    Even { count: usize, groups: usize },
    /// One for each group.
    Uneven(&'a [usize]),
}

impl Blocks<'_> {
    /// The length of a group's block.
    pub(crate) fn len(&self, group: usize) -> usize {
        match *self {
            Self::Even { count, .. } => count,
            Self::Uneven(counts) => counts[group],
        }
    }

    /// Where a group's block begins in a row of all blocks.
    pub(crate) fn start(&self, group: usize) -> usize {
        match *self {
            Self::Even { count, .. } => count * group,
            Self::Uneven(counts) => counts[..group].iter().sum(),
        }
    }

    /// The length of a row; one that overflows is longer than any tensor.
    pub(crate) fn total(&self) -> usize {
        match *self {
            Self::Even { count, groups } => count.saturating_mul(groups),
            Self::Uneven(counts) => counts.iter().copied().fold(0, usize::saturating_add),
        }
    }

    /// The range of a group's block that lies in this part of the longest block.
    pub(crate) fn clip(&self, group: usize, part: &Range<usize>) -> Range<usize> {
        let len = self.len(group);
        part.start.min(len)..part.end.min(len)
    }

    /// The length of the longest block.
    pub(crate) fn longest(&self) -> usize {
        match *self {
            Self::Even { count, .. } => count,
            Self::Uneven(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }
}

/// A mixed operation on checked tensors.
pub(crate) struct CheckedMixedCall<'a> {
    pub(crate) operation: Operation,
    /// Whether the output is the row of all blocks; else the input is.
    pub(crate) gathers: bool,
    pub(crate) blocks: Blocks<'a>,
    pub(crate) input: Input,
    pub(crate) output: Output,
    /// Says which layout, and which lengths of blocks.
    detail: u32,
}

impl<'a> CheckedMixedCall<'a> {
    /// Checks tensors and lengths of an operation, which for those that are not fused means as one of the two fused ones.
    pub(crate) fn new(
        layout: &MixedLayout,
        call: &MixedCall<'a>,
        input: Input,
        output: Output,
    ) -> Result<Self> {
        let operation = operation_of(call.op);
        let gathers = !matches!(operation, Operation::ReduceScatterAllReduce | Operation::ReduceScatter);
        same_dtype(operation, &input, &output)?;
        if operation != Operation::AllGather {
            reducible(operation, input.dtype, ReduceOp::Sum)?;
        }
        let groups = layout.dp_size();
        let block = if gathers { input.count } else { output.count };
        let blocks = match call.counts {
            None => Blocks::Even { count: block, groups },
            Some(counts) if counts.len() == groups => Blocks::Uneven(counts),
            Some(counts) => {
                let expected = format!("one for each of dp_size {groups}, not {}", counts.len());
                return Err(CollectiveError::Refused {
                    operation: operation.name(),
                    which: "counts",
                    expected,
                });
            }
        };
        let group = layout.dp_rank();
        let rule = || match blocks {
            Blocks::Even { count, groups } => format!("dp_size {groups} × {count} elements"),
            Blocks::Uneven(counts) => format!("dp_rank {group} of the counts {counts:?}"),
        };
        let (of_input, of_output) = match gathers {
            true => (blocks.len(group), blocks.total()),
            false => (blocks.total(), blocks.len(group)),
        };
        has_count(operation, "input", input.count, of_input, rule)?;
        has_count(operation, "output", output.count, of_output, rule)?;
        let checked = Self { operation, gathers, blocks, input, output, detail: digest(layout, call.counts) };
        checked.refuse_overlap(layout)?;
        Ok(checked)
    }

    /// The one tensor may be the rank's own block in the other; otherwise they are apart.
    fn refuse_overlap(&self, layout: &MixedLayout) -> Result<()> {
        let size = self.input.dtype.size();
        let range = |at: usize, count: usize| at..at.saturating_add(count * size);
        let (input, output) = (self.input.data.addr(), self.output.data.addr());
        let (from, to) = (range(input, self.input.count), range(output, self.output.count));
        let own = self.blocks.start(layout.dp_rank()) * size;
        let is_own = if self.gathers { input == output + own } else { output == input + own };
        if from.is_empty() || to.is_empty() || from.end <= to.start || to.end <= from.start || is_own {
            return Ok(());
        }
        let expected =
            format!("apart from the input or its block {}, not overlap it otherwise", layout.dp_rank());
        Err(CollectiveError::Refused { operation: self.operation.name(), which: "output", expected })
    }

    /// What ranks agree on in this mode.
    pub(crate) fn signature(&self, mode: u8) -> Signature {
        let (algorithm, detail) = match self.operation {
            Operation::AllReduce => (SUMS_OF_NODES, 0),
            _ => (mode, self.detail),
        };
        let count = match self.blocks {
            Blocks::Even { count, .. } => count,
            Blocks::Uneven(_) => self.blocks.total(),
        };
        Signature {
            dtype: Some(self.input.dtype),
            reduce: Some(ReduceOp::Sum),
            algorithm,
            detail,
            count: count as u64,
            ..Signature::new(self.operation)
        }
    }

    /// The bytes by which a mode is chosen: those of the longest block.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.longest() * self.input.dtype.size()
    }
}

/// The number of the algorithm that an all-reduce runs by in [`MixedMode::Bytes1`] between nodes.
const SUMS_OF_NODES: u8 = 0x43;

/// A digest, which almost always differs for ranks whose layouts or lengths of blocks differ; never 0.
fn digest(layout: &MixedLayout, counts: Option<&[usize]>) -> u32 {
    let words = sizes(layout).into_iter().chain(counts.into_iter().flatten().map(|count| count + 1));
    let mix = |sum: u64, word: usize| {
        let mixed = (sum ^ word as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    };
    (words.fold(0, mix) >> 32) as u32 | 1
}

/// The block of the rank's own group in a row of blocks.
pub(super) fn own_block(layout: &MixedLayout, call: &MixedCall<'_>, row: &Output) -> Result<Output> {
    let (group, groups) = (layout.dp_rank(), layout.dp_size());
    let blocks = match call.counts {
        Some(counts) if group < counts.len() => Blocks::Uneven(counts),
        _ => Blocks::Even { count: row.count / groups, groups },
    };
    has_count(operation_of(call.op), "buffer", row.count, blocks.total(), || match blocks {
        Blocks::Even { .. } => format!("a multiple of dp_size {groups}"),
        Blocks::Uneven(counts) => format!("the sum of the counts {counts:?}"),
    })?;
    // SAFETY: the row holds all blocks.
    let data = unsafe { row.data.add(blocks.start(group) * row.dtype.size()) };
    Ok(Output { data, count: blocks.len(group), dtype: row.dtype })
}

/// The sizes that make a layout, in the order of [`SIZES`].
fn sizes(layout: &MixedLayout) -> [usize; 4] {
    [layout.local_tp_size(), layout.inter_tp_size(), layout.local_dp_size(), layout.inter_dp_size()]
}

const SIZES: [&str; 4] = ["local_tp_size", "inter_tp_size", "local_dp_size", "inter_dp_size"];

/// Checks that all ranks have the same layout, each with its own rank, and that no rank has a problem with it: then all fail.
pub(super) fn agree_on_layout(comm: &Communicator, layout: &MixedLayout, mine: Result<()>) -> Result<()> {
    let every = comm.exchange_objects(&(sizes(layout), mine.as_ref().err().map(ToString::to_string)))?;
    if let Some(other) = every.iter().position(|(theirs, _)| *theirs != every[0].0) {
        let text = |rank: usize| {
            let named = SIZES.iter().zip(every[rank].0).map(|(name, size)| format!("{name} {size}"));
            format!("rank {rank} has {}", named.collect::<Vec<_>>().join(" × "))
        };
        let text = format!("layouts differ: {}, {}", text(0), text(other));
        return Err(FabricError::invalid(text).into());
    }
    mine?;
    match every.iter().enumerate().find_map(|(rank, (_, problem))| Some((rank, problem.as_ref()?))) {
        None => Ok(()),
        Some((rank, problem)) => {
            Err(FabricError::invalid(format!("rank {rank} refuses its layout: {problem}")).into())
        }
    }
}

/// Checks that the layout is that of a communicator's rank.
pub(super) fn check_rank(layout: &MixedLayout, rank: usize, world_size: usize) -> Result<()> {
    let theirs = (layout.world_rank(), layout.world_size());
    if theirs != (rank, world_size) {
        let text = format!(
            "the layout is of rank {} of {}, the communicator of rank {rank} of {world_size}",
            theirs.0, theirs.1
        );
        return Err(FabricError::invalid(text).into());
    }
    if world_size == 1 {
        return Err(FabricError::invalid("a mixed layout needs two ranks at least, the world has one").into());
    }
    Ok(())
}

/// Checks that the nodes of the layout are those of a communicator of as many ranks.
pub(super) fn check_nodes(layout: &MixedLayout, nodes: &Nodes) -> Result<()> {
    let (local_size, inter_size) = (layout.local_size(), layout.inter_size());
    let has_node = |(rank, node): (usize, &u32)| *node as usize == rank / local_size;
    if nodes.of_ranks().iter().enumerate().all(has_node) {
        return Ok(());
    }
    let theirs: Vec<_> = (0..nodes.count()).map(|node| format!("{:?}", nodes.ranks(node))).collect();
    let text = format!(
        "the layout has local_size {local_size} and inter_size {inter_size}, the nodes of the communicator have the ranks {}",
        theirs.join(", ")
    );
    Err(FabricError::invalid(text).into())
}

/// Checks that the operation is one of the layout.
pub(super) fn check_op(layout: &MixedLayout, op: MixedOp) -> Result<()> {
    let valid = layout.valid_ops();
    if valid.contains(&op) {
        return Ok(());
    }
    let names: Vec<_> = valid.iter().map(|&op| operation_of(op).name()).collect();
    let expected = format!(
        "one of {}, as tp_size is {} and dp_size is {}",
        names.join(", "),
        layout.tp_size(),
        layout.dp_size()
    );
    Err(CollectiveError::Refused { operation: operation_of(op).name(), which: "operation", expected })
}

/// Checks that operation, mode and counts suit the layout.
pub(super) fn check_call(layout: &MixedLayout, call: &MixedCall<'_>, modes: &[MixedMode]) -> Result<()> {
    check_op(layout, call.op)?;
    let refused = |which, expected: String| {
        Err(CollectiveError::Refused { operation: operation_of(call.op).name(), which, expected })
    };
    if let Some(mode) = call.mode.filter(|mode| !modes.contains(mode)) {
        let names: Vec<_> = modes.iter().map(|mode| mode.name()).collect();
        return refused("mode", format!("one of {}, not {mode}", names.join(", ")));
    }
    if call.counts.is_some() && !layout.use_dp() {
        return refused("counts", "left out where there is no data parallelism".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout([local_tp, inter_tp, local_dp, inter_dp]: [usize; 4]) -> MixedLayout {
        MixedLayout::builder(local_tp * inter_tp * local_dp * inter_dp, 0)
            .local_size(local_tp * local_dp)
            .local_tp(local_tp)
            .inter_tp(inter_tp)
            .build()
            .unwrap()
    }

    #[test]
    fn a_digest_says_which_layout_and_which_counts() {
        let even = [
            [2, 1, 2, 1],
            [1, 2, 2, 1],
            [2, 1, 1, 2],
            [1, 2, 1, 2],
            [4, 1, 2, 1],
            [2, 1, 4, 1],
            [2, 2, 2, 1],
        ];
        let of_rows = |counts: &[usize]| digest(&layout([2, 1, 2, 1]), Some(counts));
        let uneven = [[0, 0], [1, 3], [3, 1], [2, 2]].map(|counts| of_rows(&counts));
        let digests: Vec<u32> =
            even.map(|sizes| digest(&layout(sizes), None)).into_iter().chain(uneven).collect();
        for (index, digest) in digests.iter().enumerate() {
            assert!(*digest != 0 && !digests[..index].contains(digest), "{digests:x?}");
        }
    }

    #[test]
    fn the_nodes_of_a_layout_are_those_of_the_ranks() {
        let refused = |sizes: [usize; 4], names: &[&str]| {
            let nodes = Nodes::named(names.iter().copied());
            check_nodes(&layout(sizes), &nodes).err().map(|error| error.to_string())
        };
        assert_eq!(refused([2, 1, 2, 1], &["", "", "", ""]), None);
        assert_eq!(refused([1, 2, 2, 1], &["a", "a", "b", "b"]), None);
        for (sizes, names, theirs) in [
            ([1, 2, 2, 1], ["", "", "", ""], "[0, 1, 2, 3]"),
            ([2, 1, 2, 1], ["a", "a", "b", "b"], "[0, 1], [2, 3]"),
            ([2, 1, 1, 2], ["a", "b", "a", "b"], "[0, 2], [1, 3]"),
            ([2, 1, 1, 2], ["a", "b", "b", "b"], "[0], [1, 2, 3]"),
        ] {
            let text = refused(sizes, &names).expect("it is refused");
            let [local_size, inter_size] = [sizes[0] * sizes[2], sizes[1] * sizes[3]];
            let ours = format!("local_size {local_size} and inter_size {inter_size}, ");
            assert!(text.contains(&ours) && text.ends_with(&format!("the ranks {theirs}")), "{text}");
        }
    }

    #[test]
    fn tensors_overlap_as_own_block_or_not_at_all() {
        let mut row = [0f32; 8];
        let row = Output { data: row.as_mut_ptr().cast(), count: 8, dtype: antiphon_tensor::DType::F32 };
        // SAFETY: the offset lies in the row.
        let at = |index: usize| Output { data: unsafe { row.data.add(index * 4) }, count: 4, ..row };
        let layout = MixedLayout::builder(4, 3).local_tp(2).build().unwrap();
        let gather = |index| {
            CheckedMixedCall::new(&layout, &MixedOp::AllReduceAllGather.into(), at(index).as_input(), row)
        };
        let scatter = |index| {
            CheckedMixedCall::new(&layout, &MixedOp::ReduceScatterAllReduce.into(), row.as_input(), at(index))
        };
        assert!(gather(4).is_ok() && scatter(4).is_ok(), "the block of group 1");
        for index in [0, 1, 3] {
            for refused in [gather(index).err(), scatter(index).err()] {
                let text = refused.unwrap().to_string();
                assert!(text.contains("apart from the input or its block 1"), "{text}");
            }
        }
    }

    #[test]
    fn blocks_lie_one_after_the_other() {
        let blocks = Blocks::Uneven(&[3, 0, 5]);
        assert_eq!([0, 1, 2].map(|group| (blocks.start(group), blocks.len(group))), [(0, 3), (3, 0), (3, 5)]);
        assert_eq!((blocks.total(), blocks.longest()), (8, 5));
        let blocks = Blocks::Even { count: 4, groups: 3 };
        assert_eq!((blocks.start(2), blocks.len(2), blocks.total(), blocks.longest()), (8, 4, 12, 4));
    }
}
