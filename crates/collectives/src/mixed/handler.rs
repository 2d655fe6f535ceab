//! The mixed collectives on host memory.

use std::cell::OnceCell;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{Communicator, FabricError, Operation, Written};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use super::{
    MixedCall, MixedLayout, MixedMode, MixedOp,
    between::Between,
    call::{
        CheckedMixedCall, agree_on_layout, check_call, check_nodes, check_op, check_rank, own_block,
        plain_call,
    },
    choice::Tables,
    flow::Flow,
    host, operation_of,
};
#[cfg(doc)]
use crate::CollectiveError;
use crate::{
    ReduceOp,
    all_reduce::{self, Algorithm, AllReduceOptions},
    arguments::{Input, Output},
    collectives::call_checked,
    error::Result,
};

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
    pub(super) layout: MixedLayout,
    pub(super) tables: Tables,
    groups: OnceCell<Groups>,
    /// The node of each rank of a group, counted from the group's first.
    nodes_of_group: Vec<u32>,
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
    /// [`FabricError::InvalidArgument`] for a layout of another rank, world or nodes than the communicator's, and for one of one rank; on all ranks
    /// where a rank has such a layout, or their layouts differ. As an object exchange, in which ranks see whether all have the same tables in their
    /// caches.
    pub fn new(comm: &Communicator, layout: MixedLayout) -> Result<Self> {
        let checked = check_rank(&layout, comm.rank(), comm.world_size());
        agree_on_layout(comm, &layout, checked.and_then(|()| check_nodes(&layout, &comm.nodes())))?;
        let tables = Tables::load(comm, &layout)?;
        let nodes_of_group = (0..layout.tp_size()).map(|place| (place / layout.local_tp_size()) as u32);
        Ok(Self { layout, tables, groups: OnceCell::new(), nodes_of_group: nodes_of_group.collect() })
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
        MixedMode::valid_in(&self.layout)
    }

    /// The mode of a call that names no mode, for blocks of `bytes` bytes. For an all-reduce, all ranks make the first call of this
    /// function together.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] for an operation that is not valid; as [`all_reduce::algorithm_for`].
    pub fn select(&self, comm: &Communicator, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        check_op(&self.layout, op)?;
        match op {
            MixedOp::AllReduce => match all_reduce::algorithm_for(comm, bytes)? {
                Algorithm::OneShot => Ok(MixedMode::Waits),
                Algorithm::TwoShot => Ok(self.two_shot()),
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

    /// The mode that stands for an all-reduce's two-shot.
    fn two_shot(&self) -> MixedMode {
        if self.layout.use_inter() { MixedMode::Bytes2 } else { MixedMode::Bytes1 }
    }

    fn run_checked(
        &self,
        comm: &Communicator,
        call: &MixedCall<'_>,
        input: Input,
        output: Output,
    ) -> Result<()> {
        check_call(&self.layout, call, self.valid_modes())?;
        match (call.op, call.mode) {
            // Which an all-reduce has no algorithm for.
            (MixedOp::AllReduce, Some(mode @ MixedMode::Bytes1)) if self.layout.use_inter() => {
                self.carry_out(comm, mode, &CheckedMixedCall::new(&self.layout, call, input, output)?)
            }
            (MixedOp::AllReduce, mode) => {
                let algorithm = AllReduceOptions::from(mode.map(MixedMode::of_all_reduce));
                let call = Call::new(Operation::AllReduce).with_algorithm(algorithm.number());
                call_checked(comm, &call, input, output)
            }
            (MixedOp::AllGather | MixedOp::ReduceScatter, _) => {
                call_checked(comm, &plain_call(call), input, output)
            }
            (MixedOp::AllReduceAllGather | MixedOp::ReduceScatterAllReduce, mode) => {
                let checked = CheckedMixedCall::new(&self.layout, call, input, output)?;
                let mode = mode.unwrap_or_else(|| self.tables.choose(checked.operation, checked.bytes()));
                self.carry_out(comm, mode, &checked)
            }
        }
    }

    fn carry_out(&self, comm: &Communicator, mode: MixedMode, call: &CheckedMixedCall<'_>) -> Result<()> {
        let signature = &call.signature(mode as u8);
        let flow = &Flow::new(&self.layout, call, comm.several_nodes(), &self.nodes_of_group);
        let reducer = &Reducer::new(call.input.dtype, ReduceOp::Sum);
        // SAFETY: every rank runs the mode that the signature names, for the layout and the lengths that it has a digest of.
        let mut rounds = unsafe { comm.rounds()? };
        // Where all contributors to a block are on one node, a sum is whole when its node has added it up.
        let is_whole = !self.layout.use_inter() || (call.gathers && !self.layout.use_inter_tp());
        let between = |by_rail| Between { flow, reducer, signature, by_rail };
        match mode {
            MixedMode::Waits => Ok(host::one_hop(&mut rounds, signature, flow, reducer)?),
            MixedMode::Bytes1 if is_whole => Ok(host::two_hops(&mut rounds, signature, flow, reducer)?),
            MixedMode::Bytes1 => Ok(between(false).run(&mut rounds)?),
            MixedMode::Bytes2 => Ok(between(true).run(&mut rounds)?),
            MixedMode::Composed => {
                rounds.exchange(signature, Written::nothing(0))?; // ranks that disagree find out here, where all of them are
                drop(rounds);
                self.composed(comm, call)
            }
        }
    }

    fn composed(&self, comm: &Communicator, call: &CheckedMixedCall<'_>) -> Result<()> {
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
