//! Loading a plan: once, on all ranks together.

use antiphon_fabric::{ArenaOffsets, Communicator, Operation, Signature};
use antiphon_plan::{BufferType, Plan, Rank, Wiring, verify::VerifiedPlan};
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use super::{
    addresses::ChunkAddresses,
    machine::{Channel, Machine},
    memory::{SyncArea, Workspace},
};
use crate::{
    arguments::Arguments,
    error::Result,
    layout::{Base, Checked, PacketKind, Program, channels},
};

/// How a plan is executed; the same on all ranks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The form of packets.
    pub packets: PacketKind,
}

/// A plan that is ready to run on a communicator; see [the crate's page](crate).
pub struct LoadedPlan {
    pub(super) plan: Plan,
    pub(super) name: String,
    pub(super) digest: u32,
    pub(super) rank: usize,
    pub(super) packets: PacketKind,
    /// Bytes of the largest chunk that the plan may be run with; if none, of any.
    pub(super) largest_chunk: Option<u64>,
    /// Whether the plan computes with elements.
    pub(super) reduces: bool,
    pub(super) wiring: Wiring,
    pub(super) checked: Checked,
    pub(super) machine: Machine,
    pub(super) sync: SyncArea,
    /// None if it is shared with other plans.
    pub(super) workspace: Option<Workspace>,
    pub(super) programs: Vec<(Key, Program)>,
    /// The addresses of every rank's chunks in the present launch, by [`slot`](crate::layout::slot).
    pub(super) addresses: Vec<ChunkAddresses>,
    /// The arena offsets of every rank's tensors in the present call.
    pub(super) offsets: Vec<ArenaOffsets<2>>,
}

// SAFETY: the addresses are used within a call only.
unsafe impl Send for LoadedPlan {}

/// The sizes for which a program is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    /// Bytes of a chunk.
    pub(super) chunk: usize,
    /// Whether it is a part of the tensors' chunks.
    pub(super) sliced: bool,
    /// Bytes of an element.
    pub(super) element: usize,
    pub(super) in_place: bool,
}

impl std::fmt::Debug for LoadedPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoadedPlan {{ name: {:?}, digest: {:08x} }}", self.name, self.digest)
    }
}

impl LoadedPlan {
    /// Makes a plan ready that has been proved. All ranks load the same plan, with the same options, at the same place
    /// among their calls.
    ///
    /// # Errors
    /// On all ranks, whose communicator stays usable: [`ExecutorError::Plan`](crate::ExecutorError::Plan) if [`Plan::check`] refuses it,
    /// [`WorldSize`](crate::ExecutorError::WorldSize), [`Buffers`](crate::ExecutorError::Buffers),
    /// [`Operation`](crate::ExecutorError::Operation) if it leaves a buffer, [`PlansDiffer`](crate::ExecutorError::PlansDiffer), and
    /// [`Fabric`](crate::ExecutorError::Fabric) when there is no memory, or the ranks share none.
    pub fn load(comm: &Communicator, plan: &VerifiedPlan, options: Options) -> Result<Self> {
        Self::load_up_to(comm, plan.plan().clone(), options, plan.report().largest_chunk)
    }

    /// [`load`](Self::load) for plans that are known to be right without a proof. Whatever the plan says, nothing outside
    /// its buffers is touched, and nothing waits beyond the deadline.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Safety
    /// The plan has no races: what one rank writes, no other rank touches without order between them.
    pub unsafe fn load_unproved(comm: &Communicator, plan: Plan, options: Options) -> Result<Self> {
        Self::load_up_to(comm, plan, options, None)
    }

    /// Loads a plan that is right for chunks of up to some bytes, or of any number.
    fn load_up_to(
        comm: &Communicator,
        plan: Plan,
        options: Options,
        largest_chunk: Option<u64>,
    ) -> Result<Self> {
        let call = Signature::new(Operation::LoadPlan);
        comm.as_part_of(&call, || Self::load_together(comm, plan, options, largest_chunk))
    }

    fn load_together(
        comm: &Communicator,
        plan: Plan,
        options: Options,
        largest_chunk: Option<u64>,
    ) -> Result<Self> {
        comm.check_one_node("a plan")?;
        let checked = Checked::new(comm, &plan, options.packets, largest_chunk, usize::MAX);
        let checked = comm.agree("cannot load its plan", checked)?;
        checked.same_everywhere(comm, &plan)?;
        let rank = comm.rank();
        let most_channels =
            (0..comm.world_size()).map(|rank| channels(&plan, rank).count()).max().unwrap_or(0);
        let sync = SyncArea::new(comm, most_channels)?;
        let semaphores = plan.gpus[rank].semaphores.iter().map(|semaphore| semaphore.init_value).collect();
        Ok(Self {
            name: plan.name.clone().unwrap_or_default(),
            digest: checked.short_digest(),
            rank,
            packets: options.packets,
            largest_chunk,
            reduces: plan.reduces(),
            wiring: Wiring::new(&plan),
            checked,
            machine: Machine::new(channels(&plan, rank).map(Channel::new).collect(), semaphores),
            sync,
            workspace: (!plan.reuse_resources).then(Workspace::default),
            programs: Vec::new(),
            addresses: vec![ChunkAddresses::UNUSED; comm.world_size() * Base::COUNT],
            offsets: vec![ArenaOffsets::default(); comm.world_size()],
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Does what the plan says to an input and an output: contiguous tensors of one dtype on the host, apart from each
    /// other. All ranks call it together, with tensors of the same sizes. A plan that only moves elements takes every dtype, one that
    /// reduces only those of [`DType::NUMERIC`](antiphon_tensor::DType::NUMERIC).
    ///
    /// # Errors
    /// See [`ExecutorError`](crate::ExecutorError). Tensors that do not fit are refused before anything happens.
    pub fn execute<'i, 'o>(
        &mut self,
        comm: &Communicator,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let call = Arguments::apart(Device::Host, &input, &mut output)?;
        self.run(comm, &call)
    }

    /// [`execute`](Self::execute) with one buffer for input and output. If one is larger, the buffer is that one, and
    /// the other is this rank's own part of it.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`Buffers`](crate::ExecutorError::Buffers) if neither is a whole number of times the other.
    pub fn execute_in_place<'o>(
        &mut self,
        comm: &Communicator,
        buffer: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let mode = self.checked.in_place(&self.name)?;
        let chunks = self.plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
        let shift = |buffer| mode.placements.shift(Rank(self.rank as u32), buffer);
        let shifts = [shift(BufferType::Input), shift(BufferType::Output)];
        let call = Arguments::together(Device::Host, &mut buffer.into(), chunks, shifts)?;
        self.run(comm, &call)
    }

    /// Gives the plan's symmetric memory back. All ranks call it together. (A plan that is dropped keeps its memory until
    /// the communicator ends.)
    ///
    /// # Errors
    /// As [`Communicator::free`].
    pub fn free(self, comm: &Communicator) -> Result<()> {
        comm.free(self.sync.into_buffer())?;
        Ok(self.workspace.map_or(Ok(()), |workspace| workspace.free(comm))?)
    }
}
