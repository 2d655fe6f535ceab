//! Loading a plan: once, on all ranks together.

use antiphon_fabric::{ArenaOffsets, Communicator, Operation, Signature};
use antiphon_plan::{
    Access, Block, BufferType, ChannelId, ChannelType, OpKind, Plan, Rank, Wiring, verify::VerifiedPlan,
};
use antiphon_tensor::{TensorView, TensorViewMut};
use sha2::{Digest, Sha256};

use super::{
    addresses::ChunkAddresses,
    arguments::Arguments,
    machine::{Channel, Machine},
    memory::{SyncArea, Workspace},
    packet::PacketKind,
    placement::{Base, Move, Placements},
    program::Program,
};
use crate::{ExecutorError, error::Result};

/// More chunks than any sensible plan has; sums of them cannot overflow.
const MOST_CHUNKS: u64 = 1 << 31;

/// More accesses of all ranks than any sensible plan has. A short file may have many: an operation on a switch channel is
/// one on each of its members.
const MOST_ACCESSES: usize = 1 << 23;

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
    pub(super) wiring: Wiring,
    /// For calls on two tensors, and for calls in place if these are possible.
    pub(super) modes: [Option<Mode>; 2],
    /// The scratch chunks of the rank that has most.
    pub(super) scratch_chunks: u64,
    pub(super) uses_packets: bool,
    pub(super) machine: Machine,
    pub(super) sync: SyncArea,
    /// None if it is shared with other plans.
    pub(super) workspace: Option<Workspace>,
    pub(super) programs: Vec<(Key, Program)>,
    /// The addresses of every rank's chunks in the present launch, by [`slot`](super::program::slot).
    pub(super) addresses: Vec<ChunkAddresses>,
    /// The arena offsets of every rank's tensors in the present call.
    pub(super) offsets: Vec<ArenaOffsets<2>>,
}

// SAFETY: the addresses are used within a call only.
unsafe impl Send for LoadedPlan {}

/// Where chunks are placed in one kind of calls, and what this rank copies.
pub(super) struct Mode {
    pub(super) placements: Placements,
    pub(super) loads: Vec<Move>,
    pub(super) stores: Vec<Move>,
    /// Whether any chunk of any rank may have to be staged.
    pub(super) may_stage: bool,
}

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

/// The part of a loaded plan that needs no other rank.
struct Prepared {
    modes: [Option<Mode>; 2],
    channels: Vec<Channel>,
    uses_packets: bool,
    digest: [u8; 32],
}

impl LoadedPlan {
    /// Makes a plan ready that has been proved. All ranks load the same plan, with the same options, at the same place
    /// among their calls.
    ///
    /// # Errors
    /// On all ranks, whose communicator stays usable: [`ExecutorError::Plan`] if [`Plan::check`] refuses it,
    /// [`WorldSize`](ExecutorError::WorldSize), [`Buffers`](ExecutorError::Buffers),
    /// [`Operation`](ExecutorError::Operation) if it leaves a buffer, [`PlansDiffer`](ExecutorError::PlansDiffer), and
    /// [`Fabric`](ExecutorError::Fabric) when there is no memory, or the ranks share none.
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
        let prepared = prepare(comm, &plan, options, largest_chunk);
        let prepared = comm.agree("cannot load its plan", prepared)?;
        same_everywhere(comm, &plan, &prepared.digest)?;
        let rank = comm.rank();
        let most_channels = plan.gpus.iter().map(|gpu| channels(&plan, gpu.id).count()).max().unwrap_or(0);
        let sync = SyncArea::new(comm, most_channels)?;
        let semaphores = plan.gpus[rank].semaphores.iter().map(|semaphore| semaphore.init_value).collect();
        Ok(Self {
            name: plan.name.clone().unwrap_or_default(),
            digest: u32::from_be_bytes([0, 1, 2, 3].map(|at| prepared.digest[at])),
            rank,
            packets: options.packets,
            largest_chunk,
            wiring: Wiring::new(&plan),
            modes: prepared.modes,
            scratch_chunks: plan.gpus.iter().map(|gpu| gpu.scratch_chunks).max().unwrap_or(0),
            uses_packets: prepared.uses_packets,
            machine: Machine::new(prepared.channels, semaphores),
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
    /// other. All ranks call it together, with tensors of the same sizes.
    ///
    /// # Errors
    /// See [`ExecutorError`]. Tensors that do not fit are refused before anything happens.
    pub fn execute<'i, 'o>(
        &mut self,
        comm: &Communicator,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let call = Arguments::apart(&input, &mut output)?;
        self.run(comm, &call)
    }

    /// [`execute`](Self::execute) with one buffer for input and output. If one is larger, the buffer is that one, and
    /// the other is this rank's own part of it.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`Buffers`](ExecutorError::Buffers) if neither is a whole number of times the other.
    pub fn execute_in_place<'o>(
        &mut self,
        comm: &Communicator,
        buffer: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let Some(mode) = &self.modes[1] else {
            let what = "the parts of all ranks do not make a whole, so it cannot work in place".into();
            return Err(ExecutorError::Buffers { plan: self.name.clone(), what });
        };
        let chunks = self.plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
        let shift = |buffer| mode.placements.shift(Rank(self.rank as u32), buffer);
        let shifts = [shift(BufferType::Input), shift(BufferType::Output)];
        let call = Arguments::together(&mut buffer.into(), chunks, shifts)?;
        self.run(comm, &call)
    }

    /// Gives the plan's symmetric memory back. All ranks call it together. (A plan that is dropped keeps its memory until
    /// the communicator ends.)
    ///
    /// # Errors
    /// As [`Communicator::free_shared_buffer`].
    pub fn free(self, comm: &Communicator) -> Result<()> {
        comm.free_shared_buffer(self.sync.into_buffer())?;
        Ok(self.workspace.map_or(Ok(()), |workspace| workspace.free(comm))?)
    }
}

fn prepare(
    comm: &Communicator,
    plan: &Plan,
    options: Options,
    largest_chunk: Option<u64>,
) -> Result<Prepared> {
    plan.check()?;
    let (ranks, world_size) = (plan.num_ranks(), comm.world_size());
    let name = || plan.name.clone().unwrap_or_default();
    if ranks != world_size {
        return Err(ExecutorError::WorldSize { plan: name(), ranks, world_size });
    }
    check_buffers(plan).map_err(|what| ExecutorError::Buffers { plan: name(), what })?;
    let uses_packets = check_ranges(plan)?;
    let rank = Rank(comm.rank() as u32);
    let mode = |in_place| {
        let placements = Placements::new(plan, in_place);
        let (loads, stores, may_stage) =
            (placements.loads(rank), placements.stores(rank), placements.may_stage());
        Mode { placements, loads, stores, may_stage }
    };
    let apart = mode(false);
    let together = apart.placements.can_be_in_place(ranks);
    if plan.inplace && !together {
        let gpu = &plan.gpus[0];
        let what = format!(
            "{} chunks of input and {} of output cannot share memory among {ranks} ranks",
            gpu.input_chunks, gpu.output_chunks
        );
        return Err(ExecutorError::Buffers { plan: name(), what });
    }
    let mut digest = Sha256::new();
    digest.update(plan.to_json());
    digest.update([options.packets as u8]);
    digest.update(largest_chunk.unwrap_or(u64::MAX).to_le_bytes());
    let digest = digest.finalize().into();
    let modes = [Some(apart), together.then(|| mode(true))];
    Ok(Prepared { modes, channels: channels(plan, rank).collect(), uses_packets, digest })
}

/// All ranks have the same buffers, and not too many chunks.
fn check_buffers(plan: &Plan) -> std::result::Result<(), String> {
    let Some(first) = plan.gpus.first() else { return Err("it has no ranks".into()) };
    for gpu in &plan.gpus {
        for buffer in [BufferType::Input, BufferType::Output, BufferType::Scratch] {
            let chunks = gpu.chunks(buffer);
            if chunks > MOST_CHUNKS {
                return Err(format!("rank {} has {chunks} chunks of {buffer:?}: too many", gpu.id));
            }
            if chunks != first.chunks(buffer) && buffer != BufferType::Scratch {
                let of_first = first.chunks(buffer);
                return Err(format!("rank {} has {chunks} chunks of {buffer:?}, rank 0 {of_first}", gpu.id));
            }
        }
    }
    Ok(())
}

/// Every access of every rank lies in its buffer, and there are not too many. Returns whether there are packets.
fn check_ranges(plan: &Plan) -> Result<bool> {
    let (mut uses_packets, mut accesses) = (false, 0);
    for block in Block::all(plan) {
        for (at, op) in block.get().ops.iter().enumerate() {
            let mut wrong = None;
            let mut check = |kind: &OpKind, inner| {
                block.accesses(kind, |access: Access| {
                    accesses += 1;
                    uses_packets |= access.packets;
                    let there = plan.gpus[access.rank.index()].chunks(access.buffer);
                    if access.chunks.end > there && wrong.is_none() {
                        let Access { rank, buffer, chunks, .. } = access;
                        let name = kind.name();
                        let what =
                            format!("{name}: chunks {chunks:?} of the {there} of rank {rank}'s {buffer:?}");
                        wrong = Some(ExecutorError::Operation { place: block.place(at, inner), what });
                    }
                });
            };
            check(&op.kind, None);
            if let OpKind::Pipeline(pipeline) = &op.kind {
                (pipeline.ops.iter().enumerate()).for_each(|(inner, op)| check(&op.kind, Some(inner)));
            }
            if accesses > MOST_ACCESSES && wrong.is_none() {
                let what = format!("more than {MOST_ACCESSES} accesses up to here");
                wrong = Some(ExecutorError::Operation { place: block.place(at, None), what });
            }
            if let Some(wrong) = wrong {
                return Err(wrong);
            }
        }
    }
    Ok(uses_packets)
}

/// The memory channels of a rank, then its port channels: in the order of their counts.
fn channels(plan: &Plan, rank: Rank) -> impl Iterator<Item = Channel> {
    let of = move |channel_type| {
        let peers = plan.gpus[rank.index()].peers(channel_type).iter().enumerate();
        peers.map(move |(id, &peer)| Channel {
            channel_type,
            id: ChannelId(id as u32),
            peer,
            sent: 0,
            taken: 0,
        })
    };
    of(ChannelType::Memory).chain(of(ChannelType::Port))
}

fn same_everywhere(comm: &Communicator, plan: &Plan, digest: &[u8; 32]) -> Result<()> {
    let all = comm.exchange_bytes(digest)?;
    match all.iter().position(|theirs| theirs != digest) {
        None => Ok(()),
        Some(peer) => Err(ExecutorError::PlansDiffer {
            plan: plan.name.clone().unwrap_or_default(),
            rank: comm.rank(),
            peer,
            mine: hex(digest),
            theirs: hex(&all[peer]),
        }),
    }
}

/// The beginning of a digest.
fn hex(digest: &[u8]) -> String {
    digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}
