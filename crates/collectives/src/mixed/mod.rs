//! Mixed collectives: a sum over tensor parallel ranks and a gather or scatter over data parallel ranks, in one call.
//!
//! A [`MixedLayout`] puts ranks into `dp` groups of `tp` ranks: rank `r` is tensor parallel rank `r mod tp` of group `r / tp`.
//! Attention that runs data parallel beside an MLP that runs tensor parallel needs two operations for each layer. Group `d` has
//! block `d` of the tokens:
//!
//! | operation | input of a rank of group `d` | output of a rank of group `d` |
//! | --- | --- | --- |
//! | all-reduce + all-gather | its part of block `d` | every block, each the sum over its group |
//! | reduce-scatter + all-reduce | its part of every block | block `d`, the sum over all ranks |
//!
//! Both are one picture with the arrows reversed: some ranks *contribute* to a block, its *group* is where it belongs, and some
//! ranks *receive* it.
//!
//! | mode | all-reduce + all-gather | reduce-scatter + all-reduce |
//! | --- | --- | --- |
//! | [`Waits`](MixedMode::Waits), one hop | every rank reduces every block | every rank reduces the block of its group |
//! | [`Bytes1`](MixedMode::Bytes1), two hops | a group divides its block among its ranks, who hand the sums to all | the same, and the sums go to the group |
//! | [`Composed`](MixedMode::Composed) | `all_reduce` in the group, then `all_gather` | `reduce_scatter` between the groups, then `all_reduce` |
//!
//! Sums accumulate in f32 (f64 for f64, wrapping i64 for integers) in ascending rank order and are rounded once, so the first two
//! modes give the same bits on every rank that shares an output, for every way to cut the tokens into batches. `Composed` rounds a
//! reduce-scatter + all-reduce twice.
//!
//! Blocks need not be equally long: [`MixedCall::counts`] has the length of each.

mod choice;
mod cuda;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

use std::cell::OnceCell;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{Communicator, FabricError, Operation, Signature};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};
pub use antiphon_topology::{MixedLayout, MixedOp};

pub use cuda::CudaMixedHandler;
#[cfg(test)]
pub(crate) use cuda::Mixing;

use crate::{
    ReduceOp,
    all_reduce::{self, Algorithm},
    arguments::{Input, Output, has_count, reducible, same_dtype},
    error::{CollectiveError, Result},
    gather_scatter,
};

/// How a mixed collective is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MixedMode {
    /// One hop, with the fewest waits: a rank sends all that a receiver needs, and every receiver reduces.
    Waits = 1,
    /// Two hops, with the fewest bytes: each rank of a group reduces a part, and the parts are gathered.
    Bytes1 = 2,
    /// Two collectives, one after the other.
    Composed = 3,
}

impl MixedMode {
    /// All modes, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Waits, Self::Bytes1, Self::Composed];
    /// The modes that give the same bits, of which one is chosen where the caller names none.
    const FUSED: [Self; 2] = [Self::Waits, Self::Bytes1];

    /// The name, as tables and errors write it.
    pub fn name(self) -> &'static str {
        let name = Operation::AllReduceAllGather.row().algorithm(self as u8);
        name.expect("the row of a mixed operation has every mode's name")
    }

    /// The algorithm that an all-reduce of all ranks runs by in this mode.
    fn of_all_reduce(self) -> Algorithm {
        if self == Self::Waits { Algorithm::OneShot } else { Algorithm::TwoShot }
    }
}

impl std::fmt::Display for MixedMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The operation of the table that a mixed operation is.
pub fn operation_of(op: MixedOp) -> Operation {
    match op {
        MixedOp::AllReduce => Operation::AllReduce,
        MixedOp::AllGather => Operation::AllGather,
        MixedOp::ReduceScatter => Operation::ReduceScatter,
        MixedOp::AllReduceAllGather => Operation::AllReduceAllGather,
        MixedOp::ReduceScatterAllReduce => Operation::ReduceScatterAllReduce,
    }
}

/// What is called: the operation, and what else ranks agree on. All ranks pass an equal one.
#[derive(Debug, Clone, Copy)]
pub struct MixedCall<'a> {
    /// One of the layout's [`valid_ops`](MixedLayout::valid_ops).
    pub op: MixedOp,
    /// One of [`MixedHandler::valid_modes`]; `None` stands for the fastest of the modes that give the same bits.
    pub mode: Option<MixedMode>,
    /// The elements of every group's block, 0 allowed; `None` stands for blocks of equal length. Only for the two fused operations.
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

/// The lengths of the groups' blocks, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks<'a> {
    /// Each of so many.
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

    /// The length of the longest block.
    pub(crate) fn longest(&self) -> usize {
        match *self {
            Self::Even { count, .. } => count,
            Self::Uneven(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }
}

/// A mixed operation on checked tensors.
pub(crate) struct Checked<'a> {
    pub(crate) operation: Operation,
    /// Whether the output is the row of all blocks; else the input is.
    pub(crate) gathers: bool,
    pub(crate) blocks: Blocks<'a>,
    pub(crate) input: Input,
    pub(crate) output: Output,
    /// Says which layout, and which lengths of blocks.
    detail: u32,
}

impl<'a> Checked<'a> {
    /// Checks tensors and lengths of one of the two fused operations.
    pub(crate) fn new(
        layout: &MixedLayout,
        call: &MixedCall<'a>,
        input: Input,
        output: Output,
    ) -> Result<Self> {
        let operation = operation_of(call.op);
        let gathers = operation == Operation::AllReduceAllGather;
        same_dtype(operation, &input, &output)?;
        reducible(operation, input.dtype, ReduceOp::Sum)?;
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
        let count = match self.blocks {
            Blocks::Even { count, .. } => count,
            Blocks::Uneven(_) => self.blocks.total(),
        };
        Signature {
            dtype: Some(self.input.dtype),
            reduce: Some(ReduceOp::Sum),
            algorithm: mode,
            detail: self.detail,
            count: count as u64,
            ..Signature::new(self.operation)
        }
    }

    /// The bytes by which a mode is chosen: those of the longest block.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.longest() * self.input.dtype.size()
    }
}

/// What differs, as a rule, for ranks whose layouts or lengths of blocks differ; never 0.
fn digest(layout: &MixedLayout, counts: Option<&[usize]>) -> u32 {
    let sizes = [layout.tp_size(), layout.dp_size()];
    let words = sizes.into_iter().chain(counts.into_iter().flatten().map(|count| count + 1));
    let mix = |sum: u64, word: usize| {
        let mixed = (sum ^ word as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    };
    (words.fold(0, mix) >> 32) as u32 | 1
}

/// The mixed collectives of a layout, on a communicator of all its ranks. All ranks make the same calls in the same order.
///
/// ```
/// use antiphon_collectives::{CollectiveError, mixed::{MixedHandler, MixedLayout, MixedOp}};
/// use antiphon_fabric::LocalWorld;
///
/// // Two groups of two tensor parallel ranks.
/// let outputs = LocalWorld::run(4, |comm| {
///     let mixed = MixedHandler::new(&comm, MixedLayout::builder(4, comm.rank()).local_tp(2).build().unwrap())?;
///     let mut gathered = [0f32; 2];
///     mixed.run(&comm, MixedOp::AllReduceAllGather, &[comm.rank() as f32], &mut gathered)?;
///     Ok::<_, CollectiveError>(gathered)
/// });
/// assert_eq!(outputs[3].as_ref().unwrap(), &[0.0 + 1.0, 2.0 + 3.0]);
/// ```
pub struct MixedHandler {
    layout: MixedLayout,
    tables: choice::Tables,
    groups: OnceCell<Groups>,
}

/// The communicators that [`MixedMode::Composed`] goes through.
struct Groups {
    tp: Communicator,
    dp: Communicator,
}

impl MixedHandler {
    /// The handler of a layout. All ranks call it together.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for a layout of another rank or world than the communicator's, of one rank, or of several
    /// nodes, and on all ranks where their layouts differ; as an object exchange, in which ranks see whether all have the same tables in their caches.
    pub fn new(comm: &Communicator, layout: MixedLayout) -> Result<Self> {
        check_layout(&layout, comm.rank(), comm.world_size())?;
        agree_on_layout(comm, &layout)?;
        let tables = choice::Tables::load(comm, &layout)?;
        Ok(Self { layout, tables, groups: OnceCell::new() })
    }

    /// The layout.
    pub fn layout(&self) -> &MixedLayout {
        &self.layout
    }

    /// The operations that [`run`](Self::run) takes.
    pub fn valid_ops(&self) -> &'static [MixedOp] {
        self.layout.valid_ops()
    }

    /// The modes that [`run`](Self::run) takes.
    pub fn valid_modes(&self) -> &'static [MixedMode] {
        valid_modes(&self.layout)
    }

    /// The mode that a call without one runs in, for blocks of so many bytes. For an all-reduce, all ranks call it together once.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] for an operation that is not valid; as [`all_reduce::algorithm_for`].
    pub fn select(&self, comm: &Communicator, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        check_op(&self.layout, op)?;
        match op {
            MixedOp::AllReduce => match all_reduce::algorithm_for(comm, bytes)? {
                Algorithm::OneShot => Ok(MixedMode::Waits),
                Algorithm::TwoShot => Ok(MixedMode::Bytes1),
            },
            MixedOp::AllGather | MixedOp::ReduceScatter => Ok(MixedMode::Waits),
            MixedOp::AllReduceAllGather | MixedOp::ReduceScatterAllReduce => {
                Ok(self.tables.choose(operation_of(op), bytes))
            }
        }
    }

    /// Runs a call: the table of this module's page says what goes in and what comes out. An all-reduce has `n` elements in and out;
    /// a block and a row of blocks are those of [`all_gather`](crate::Collectives::all_gather) and
    /// [`reduce_scatter`](crate::Collectives::reduce_scatter), of every dtype that is reduced. The input may be the rank's own block
    /// of the output, or the output that of the input.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] for an operation or a mode that is not valid in the layout, for counts that are not one for each
    /// group, and for tensors that overlap; as [`Collectives`](crate::Collectives). Ranks whose layouts, lengths of blocks, operations
    /// or modes differ get [`FabricError::Mismatch`].
    pub fn run<'a, 'i, 'o>(
        &self,
        comm: &Communicator,
        call: impl Into<MixedCall<'a>>,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let (call, input, mut output) = (call.into(), input.into(), output.into());
        let operation = operation_of(call.op);
        let (input, output) = (Input::new(operation, &input)?, Output::new(operation, &mut output)?);
        self.run_checked(comm, &call, input, output)
    }

    /// [`run`](Self::run) in one buffer, which is the larger of the two tensors: the smaller is the block of the rank's own group in it
    /// (of its own rank, in an all-gather or a reduce-scatter; an all-reduce has the buffer for both).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_in_place<'a, 'o>(
        &self,
        comm: &Communicator,
        call: impl Into<MixedCall<'a>>,
        buffer: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let call = call.into();
        let operation = operation_of(call.op);
        let row = Output::new(operation, &mut buffer.into())?;
        if call.op == MixedOp::AllReduce {
            return self.run_checked(comm, &call, row.as_input(), row);
        }
        let own = own_block(&self.layout, &call, &row)?;
        match call.op {
            MixedOp::AllGather | MixedOp::AllReduceAllGather => {
                self.run_checked(comm, &call, own.as_input(), row)
            }
            _ => self.run_checked(comm, &call, row.as_input(), own),
        }
    }

    fn run_checked(
        &self,
        comm: &Communicator,
        call: &MixedCall<'_>,
        input: Input,
        output: Output,
    ) -> Result<()> {
        check_call(&self.layout, call, self.valid_modes())?;
        match call.op {
            MixedOp::AllReduce => {
                let algorithm = call.mode.map(MixedMode::of_all_reduce);
                all_reduce::run(comm, input, output, ReduceOp::Sum, algorithm.into())
            }
            MixedOp::AllGather => {
                gather_scatter::call(comm, &Call::new(Operation::AllGather), Some(input), Some(output))
            }
            MixedOp::ReduceScatter => {
                gather_scatter::call(comm, &Call::new(Operation::ReduceScatter), Some(input), Some(output))
            }
            MixedOp::AllReduceAllGather | MixedOp::ReduceScatterAllReduce => {
                let checked = Checked::new(&self.layout, call, input, output)?;
                let mode =
                    call.mode.unwrap_or_else(|| self.tables.choose(checked.operation, checked.bytes()));
                self.carry_out(comm, mode, &checked)
            }
        }
    }

    fn carry_out(&self, comm: &Communicator, mode: MixedMode, call: &Checked<'_>) -> Result<()> {
        let signature = call.signature(mode as u8);
        let flow = host::Flow::new(&self.layout, call);
        let reducer = Reducer::new(call.input.dtype, ReduceOp::Sum);
        // SAFETY: every rank runs the mode that the signature names, for the layout and the lengths that it has a digest of.
        let mut rounds = unsafe { comm.rounds()? };
        match mode {
            MixedMode::Waits => Ok(host::one_hop(&mut rounds, &signature, &flow, &reducer)?),
            MixedMode::Bytes1 => Ok(host::two_hops(&mut rounds, &signature, &flow, &reducer)?),
            MixedMode::Composed => {
                rounds.exchange(&signature)?; // ranks that disagree find out here, where all of them are
                drop(rounds);
                self.composed(comm, call)
            }
        }
    }

    fn composed(&self, comm: &Communicator, call: &Checked<'_>) -> Result<()> {
        if self.groups.get().is_none() {
            let group = |color: usize| {
                let group = comm.split(Some(color as u64), 0)?;
                Ok::<_, FabricError>(group.expect("a rank that has a colour is in a group"))
            };
            let groups = Groups { tp: group(self.layout.dp_rank())?, dp: group(self.layout.tp_rank())? };
            self.groups.get_or_init(|| groups);
        }
        let groups = self.groups.get().expect("made above");
        host::composed(&groups.tp, &groups.dp, &self.layout, call)
    }
}

/// The block of the rank's own group in a row of blocks.
fn own_block(layout: &MixedLayout, call: &MixedCall<'_>, row: &Output) -> Result<Output> {
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

/// All ranks have the same layout, each from its own place.
fn agree_on_layout(comm: &Communicator, layout: &MixedLayout) -> Result<()> {
    let sizes = comm.exchange_objects(&(layout.tp_size(), layout.dp_size()))?;
    let Some(other) = sizes.iter().position(|theirs| *theirs != sizes[0]) else { return Ok(()) };
    let text = |rank: usize| {
        let (tp_size, dp_size) = sizes[rank];
        format!("rank {rank} has tp_size {tp_size} × dp_size {dp_size}")
    };
    Err(FabricError::invalid(format!("layouts differ: {}, {}", text(0), text(other))).into())
}

/// The modes of a layout.
pub(crate) fn valid_modes(layout: &MixedLayout) -> &'static [MixedMode] {
    match (layout.use_tp(), layout.use_dp()) {
        (true, true) => &MixedMode::ALL,
        (true, false) => &MixedMode::FUSED,
        _ => &MixedMode::ALL[..1],
    }
}

/// The layout is that of a communicator's rank, on one node.
pub(crate) fn check_layout(layout: &MixedLayout, rank: usize, world_size: usize) -> Result<()> {
    let invalid = |text: String| Err(FabricError::invalid(text).into());
    let (theirs, inter_size) = ((layout.world_rank(), layout.world_size()), layout.inter_size());
    if theirs != (rank, world_size) {
        return invalid(format!(
            "the layout is of rank {} of {}, the communicator of rank {rank} of {world_size}",
            theirs.0, theirs.1
        ));
    }
    if world_size == 1 {
        return invalid("a mixed layout needs two ranks at least, the world has one".into());
    }
    if inter_size > 1 {
        return invalid(format!(
            "mixed collectives need all ranks on one node, the layout has inter_size {inter_size}"
        ));
    }
    Ok(())
}

fn check_op(layout: &MixedLayout, op: MixedOp) -> Result<()> {
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

/// Operation, mode and counts make sense in the layout.
pub(crate) fn check_call(layout: &MixedLayout, call: &MixedCall<'_>, modes: &[MixedMode]) -> Result<()> {
    check_op(layout, call.op)?;
    let refused = |which, expected: String| {
        Err(CollectiveError::Refused { operation: operation_of(call.op).name(), which, expected })
    };
    if let Some(mode) = call.mode.filter(|mode| !modes.contains(mode)) {
        let names: Vec<_> = modes.iter().map(|mode| mode.name()).collect();
        return refused("mode", format!("one of {}, not {mode}", names.join(", ")));
    }
    if call.counts.is_some() && !layout.use_mixed() {
        return refused("counts", "left out where there is no tensor or no data parallelism".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(tp: usize, dp: usize) -> MixedLayout {
        MixedLayout::builder(tp * dp, 0).local_tp(tp).build().unwrap()
    }

    #[test]
    fn a_digest_says_which_layout_and_which_counts() {
        let digests = [
            digest(&layout(2, 2), None),
            digest(&layout(4, 2), None),
            digest(&layout(2, 4), None),
            digest(&layout(2, 2), Some(&[0, 0])),
            digest(&layout(2, 2), Some(&[1, 3])),
            digest(&layout(2, 2), Some(&[3, 1])),
            digest(&layout(2, 2), Some(&[2, 2])),
        ];
        for (index, digest) in digests.iter().enumerate() {
            assert!(*digest != 0 && !digests[..index].contains(digest), "{digests:x?}");
        }
    }

    #[test]
    fn tensors_overlap_as_own_block_or_not_at_all() {
        let mut row = [0f32; 8];
        let row = Output { data: row.as_mut_ptr().cast(), count: 8, dtype: antiphon_tensor::DType::F32 };
        // SAFETY: the offset lies in the row.
        let at = |index: usize| Output { data: unsafe { row.data.add(index * 4) }, count: 4, ..row };
        let layout = MixedLayout::builder(4, 3).local_tp(2).build().unwrap();
        let gather =
            |index| Checked::new(&layout, &MixedOp::AllReduceAllGather.into(), at(index).as_input(), row);
        let scatter =
            |index| Checked::new(&layout, &MixedOp::ReduceScatterAllReduce.into(), row.as_input(), at(index));
        assert!(gather(4).is_ok() && scatter(4).is_ok(), "the block of group 1");
        for index in [0, 1, 3] {
            for refused in [gather(index).err(), scatter(index).err()] {
                let text = refused.unwrap().to_string();
                assert!(text.contains("apart from the input or its block 1"), "{text}");
            }
        }
    }

    #[test]
    fn modes_are_those_that_the_layout_has_a_use_for() {
        use MixedMode::{Bytes1, Composed, Waits};
        assert_eq!(valid_modes(&layout(2, 2)), [Waits, Bytes1, Composed]);
        assert_eq!(valid_modes(&layout(4, 1)), [Waits, Bytes1]);
        assert_eq!(valid_modes(&layout(1, 4)), [Waits]);
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
