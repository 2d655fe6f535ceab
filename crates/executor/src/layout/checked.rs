//! What is checked of a plan when it is loaded, before any memory is taken for it.

use antiphon_fabric::Communicator;
use antiphon_plan::{Access, Block, BufferType, ChannelId, ChannelType, OpKind, Plan, Rank};
use sha2::{Digest, Sha256};

use super::{
    PacketKind, Ports,
    placement::{Move, Placements},
};
use crate::{ExecutorError, error::Result};

/// More chunks than any sensible plan has; sums of them cannot overflow.
const MOST_CHUNKS: u64 = 1 << 31;

/// More accesses of all ranks than any sensible plan has. A short file may have many: an operation on a switch channel is
/// one on each of its members.
const MOST_ACCESSES: usize = 1 << 23;

/// Where chunks are placed in one kind of calls, and what this rank copies.
pub(crate) struct Mode {
    pub(crate) placements: Placements,
    pub(crate) loads: Vec<Move>,
    pub(crate) stores: Vec<Move>,
    /// Whether any chunk of any rank may have to be staged.
    pub(crate) may_stage: bool,
    /// Whether there are chunks of the input, and of the output, that are not staged if they are where peers reach them.
    pub(crate) shares: [bool; 2],
}

/// A plan that fits a communicator, whose operations stay within its buffers.
pub(crate) struct Checked {
    /// For calls on two tensors, and for calls in place if these are possible.
    pub(crate) modes: [Option<Mode>; 2],
    /// The scratch chunks of the rank that has most.
    pub(crate) scratch_chunks: u64,
    pub(crate) uses_packets: bool,
    /// Of the plan and of how it is executed.
    pub(crate) digest: [u8; 32],
}

impl Checked {
    /// Checks a plan that is executed with packets of a kind, for chunks of up to some bytes, with so much scratch.
    ///
    /// # Errors
    /// [`ExecutorError::Plan`], [`WorldSize`](ExecutorError::WorldSize), [`Buffers`](ExecutorError::Buffers) and
    /// [`Operation`](ExecutorError::Operation).
    pub(crate) fn new(
        comm: &Communicator,
        plan: &Plan,
        packets: PacketKind,
        largest_chunk: Option<u64>,
        most_scratch: usize,
    ) -> Result<Self> {
        Self::of_rank(comm.rank(), comm.world_size(), plan, packets, largest_chunk, most_scratch)
    }

    /// Checks a plan for one of as many ranks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of_rank(
        rank: usize,
        world_size: usize,
        plan: &Plan,
        packets: PacketKind,
        largest_chunk: Option<u64>,
        most_scratch: usize,
    ) -> Result<Self> {
        plan.check()?;
        let ranks = plan.num_ranks();
        let name = || plan.name.clone().unwrap_or_default();
        if ranks != world_size {
            return Err(ExecutorError::WorldSize { plan: name(), ranks, world_size });
        }
        check_buffers(plan).map_err(|what| ExecutorError::Buffers { plan: name(), what })?;
        let uses_packets = check_ranges(plan)?;
        let rank = Rank(rank as u32);
        let mode = |in_place| {
            let placements = Placements::new(plan, in_place);
            Mode {
                loads: placements.loads(rank),
                stores: placements.stores(rank),
                may_stage: placements.may_stage(),
                shares: placements.shares(),
                placements,
            }
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
        digest.update([packets as u8]);
        digest.update(largest_chunk.unwrap_or(u64::MAX).to_le_bytes());
        digest.update(most_scratch.to_le_bytes());
        let digest = digest.finalize().into();
        let modes = [Some(apart), together.then(|| mode(true))];
        let scratch_chunks = plan.gpus.iter().map(|gpu| gpu.scratch_chunks).max().unwrap_or(0);
        Ok(Self { modes, scratch_chunks, uses_packets, digest })
    }

    /// The same, executed with these ports.
    pub(crate) fn with_ports(mut self, ports: Ports) -> Self {
        if ports != Ports::default() {
            self.digest =
                Sha256::new().chain_update(self.digest).chain_update(ports.name()).finalize().into();
        }
        self
    }

    /// Checks that all ranks load the same plan, to be executed in the same way. All ranks call it together.
    ///
    /// # Errors
    /// [`ExecutorError::PlansDiffer`]
    pub(crate) fn same_everywhere(&self, comm: &Communicator, plan: &Plan) -> Result<()> {
        let all = comm.exchange_bytes(&self.digest)?;
        match all.iter().position(|theirs| **theirs != self.digest) {
            None => Ok(()),
            Some(peer) => Err(ExecutorError::PlansDiffer {
                plan: plan.name.clone().unwrap_or_default(),
                rank: comm.rank(),
                peer,
                mine: hex(&self.digest),
                theirs: hex(&all[peer]),
            }),
        }
    }

    /// The calls in place of a plan of this name.
    ///
    /// # Errors
    /// [`ExecutorError::Buffers`] if there are none.
    pub(crate) fn in_place(&self, name: &str) -> Result<&Mode> {
        self.modes[1].as_ref().ok_or_else(|| ExecutorError::Buffers {
            plan: name.to_owned(),
            what: "the parts of all ranks do not make a whole, so it cannot work in place".into(),
        })
    }

    /// The beginning of the digest, which calls carry.
    pub(crate) fn short_digest(&self) -> u32 {
        u32::from_be_bytes([0, 1, 2, 3].map(|at| self.digest[at]))
    }
}

/// The memory channels of a rank, then its port channels: in the order of their counts.
pub(crate) fn channels(plan: &Plan, rank: usize) -> impl Iterator<Item = (ChannelType, ChannelId, Rank)> {
    let of = move |channel_type| {
        let peers = plan.gpus[rank].peers(channel_type).iter().enumerate();
        peers.map(move |(id, &peer)| (channel_type, ChannelId(id as u32), peer))
    };
    of(ChannelType::Memory).chain(of(ChannelType::Port))
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

/// The beginning of a digest.
fn hex(digest: &[u8]) -> String {
    digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}
