//! Whether all that a plan names exists.

use antiphon_operation::ReduceOp;

use crate::error::PlanError;
use crate::ids::{ChannelIndex, Rank, ThreadBlockId};
use crate::op::{ChannelType, GroupShare, NotifyKind, OpKind, REDUCE_OPS, RemoteChunk};
use crate::place::Place;
use crate::plan::{Gpu, GpuChannels, Plan, ThreadBlock};

impl Plan {
    /// Checks that every number names something that exists, that no chunk range overflows, and that only
    /// [`REDUCE_OPS`] reduce: after that no reader of
    /// the plan can be led outside it. What the plan does is not looked at.
    ///
    /// # Errors
    /// [`PlanError::Malformed`] or [`PlanError::Operation`], the first one in the plan's order.
    pub fn check(&self) -> Result<(), PlanError> {
        if self.buffer_alignment == 0 {
            return Err(PlanError::Malformed { what: "buffer_alignment is 0".into() });
        }
        (self.gpus.iter().enumerate()).try_for_each(|(rank, gpu)| gpu_of(self, Rank(rank as u32), gpu))
    }
}

fn gpu_of(plan: &Plan, rank: Rank, gpu: &Gpu) -> Result<(), PlanError> {
    let ranks = plan.gpus.len();
    let malformed = |what: String| PlanError::Malformed { what: format!("rank {rank}: {what}") };
    if gpu.id != rank {
        return Err(malformed(format!("is called {}", gpu.id)));
    }
    let exists = |of: &str, other: Rank| match other.index() < ranks {
        true => Ok(()),
        false => Err(malformed(format!("{of} names rank {other} of {ranks}"))),
    };
    for (at, entry) in gpu.channels.iter().enumerate() {
        match entry {
            GpuChannels::Peers { channel_type, connected_to } => {
                connected_to.iter().try_for_each(|&peer| exists("a channel", peer))?;
                let same = |other: &GpuChannels| matches!(other, GpuChannels::Peers { channel_type: of, .. } if of == channel_type);
                if *channel_type == ChannelType::Switch || gpu.channels[..at].iter().any(same) {
                    return Err(malformed(format!(
                        "has a second or misplaced list of {channel_type:?} channels"
                    )));
                }
            }
            GpuChannels::Switch { rank_groups, .. } => {
                let [ranks] = &rank_groups[..] else {
                    return Err(malformed(format!(
                        "a switch channel has {} groups, not one",
                        rank_groups.len()
                    )));
                };
                ranks.iter().try_for_each(|&member| exists("a switch channel", member))?;
            }
        }
    }
    for remote in &gpu.remote_buffers {
        exists("a remote buffer", remote.rank)?;
    }
    for (at, block) in gpu.threadblocks.iter().enumerate() {
        if block.id as usize != at {
            return Err(malformed(format!("thread block {at} is called {}", block.id)));
        }
        block_refs(gpu, block).map_err(|what| malformed(format!("thread block {at}: {what}")))?;
        let scope = Scope { ranks, gpu, block };
        for (op, outer) in block.ops.iter().enumerate() {
            let mut place = Place { rank, threadblock: ThreadBlockId(at as u32), op: op as u32, inner: None };
            let wrong = |place, kind: &OpKind, what| PlanError::Operation {
                place,
                what: format!("{}: {what}", kind.name()),
            };
            scope.op(&outer.kind).map_err(|what| wrong(place, &outer.kind, what))?;
            let OpKind::Pipeline(pipeline) = &outer.kind else { continue };
            for (inner, op) in pipeline.ops.iter().enumerate() {
                place.inner = Some(inner as u32);
                if matches!(op.kind, OpKind::Pipeline(_)) {
                    return Err(wrong(place, &op.kind, "stands in a pipeline".into()));
                }
                scope.op(&op.kind).map_err(|what| wrong(place, &op.kind, what))?;
            }
        }
    }
    Ok(())
}

/// The lists through which a block's operations name channels and buffers.
fn block_refs(gpu: &Gpu, block: &ThreadBlock) -> Result<(), String> {
    for (at, refs) in block.channels.iter().enumerate() {
        let there = match refs.channel_type {
            ChannelType::Switch => gpu.switches().count(),
            of => gpu.peers(of).len(),
        };
        if block.channels[..at].iter().any(|other| other.channel_type == refs.channel_type) {
            return Err(format!("lists {:?} channels twice", refs.channel_type));
        }
        if let Some(id) = refs.channel_ids.iter().find(|id| id.index() >= there) {
            return Err(format!("names {:?} channel {id} of {there}", refs.channel_type));
        }
    }
    for (at, refs) in block.remote_buffer_refs.iter().enumerate() {
        let (of, there) = (refs.access_channel_type, gpu.remote_buffers.len());
        if block.remote_buffer_refs[..at].iter().any(|other| other.access_channel_type == of) {
            return Err(format!("lists remote buffers of {of:?} channels twice"));
        }
        if let Some(id) = refs.remote_buffer_ids.iter().find(|id| id.index() >= there) {
            return Err(format!("names remote buffer {id} of {there}"));
        }
    }
    Ok(())
}

/// An object that an operation can name.
struct Scope<'a> {
    ranks: usize,
    gpu: &'a Gpu,
    block: &'a ThreadBlock,
}

impl Scope<'_> {
    fn op(&self, op: &OpKind) -> Result<(), String> {
        match op {
            OpKind::Nop => Ok(()),
            OpKind::Barrier { num_threadblocks: 0, .. } => Err("nobody meets at it".into()),
            OpKind::Barrier { .. } => Ok(()),
            OpKind::Notify(notify) => {
                if notify.channel_type == ChannelType::Switch {
                    return Err("switch channels have no signals".into());
                }
                if notify.kind == NotifyKind::Flush && notify.channel_type != ChannelType::Port {
                    return Err("only port channels are flushed".into());
                }
                self.channels(notify.channel_type, &notify.channels)
            }
            OpKind::Semaphore(op) => {
                let there = self.gpu.semaphores.len();
                match op.semaphores.iter().find(|id| id.index() >= there) {
                    Some(id) => Err(format!("names semaphore {id} of {there}")),
                    None => Ok(()),
                }
            }
            OpKind::Copy(copy) => {
                range(copy.src.index, copy.src.size)?;
                range(copy.dst.index, copy.dst.size)?;
                share(copy.group)
            }
            OpKind::Put(put) => {
                let sources = if put.kind == crate::PutKind::ReadPackets { 1 } else { put.dst.len() };
                if put.src.len() != sources {
                    return Err(format!("{} sources for {} destinations", put.src.len(), put.dst.len()));
                }
                put.src.iter().try_for_each(|chunk| range(chunk.index, chunk.size))?;
                self.remote(put.channel_type, &put.dst)?;
                self.channels_of(put.channel_type, &put.channels, put.dst.len())?;
                share(put.group)
            }
            OpKind::Get(get) => {
                if get.src.len() != get.dst.len() {
                    return Err(format!("{} sources for {} destinations", get.src.len(), get.dst.len()));
                }
                get.dst.iter().try_for_each(|chunk| range(chunk.index, chunk.size))?;
                self.remote(get.channel_type, &get.src)?;
                self.channels_of(get.channel_type, &get.channels, get.src.len())?;
                share(get.group)
            }
            OpKind::Reduce(reduce) => {
                if reduce.src.is_empty() {
                    return Err("has no source in its own rank".into());
                }
                let local = reduce.src.iter().chain([&reduce.dst]).chain(&reduce.packet_dst);
                local.into_iter().try_for_each(|chunk| range(chunk.index, chunk.size))?;
                if !reduce.remote_src.is_empty() || !reduce.remote_dst.is_empty() {
                    let Some(channel_type) = reduce.channel_type else {
                        return Err("has no channel_type, but remote chunks".into());
                    };
                    self.remote(channel_type, &reduce.remote_src)?;
                    self.remote(channel_type, &reduce.remote_dst)?;
                }
                reduces(reduce.op)?;
                share(reduce.group)
            }
            OpKind::SwitchReduce(op) => {
                if op.channels.len() != 1 {
                    return Err(format!("names {} switch channels, not one", op.channels.len()));
                }
                reduces(op.op)?;
                self.channels(ChannelType::Switch, &op.channels)?;
                range(op.offset, op.size)?;
                self.rank(op.dst.rank)?;
                range(op.dst.index, op.dst.size)
            }
            OpKind::SwitchBroadcast(op) => {
                self.rank(op.src.rank)?;
                range(op.src.index, op.src.size)?;
                self.channels(ChannelType::Switch, &[op.dst.switch_channel_id])?;
                range(op.dst.index, op.dst.size)
            }
            OpKind::SwitchReduceBroadcast(op) => {
                reduces(op.op)?;
                self.channels(ChannelType::Switch, &[op.src.switch_channel_id, op.dst.switch_channel_id])?;
                range(op.src.index, op.src.size)?;
                range(op.dst.index, op.dst.size)
            }
            OpKind::Pipeline(pipeline) => match pipeline.unit_size {
                0 => Err("unit_size is 0".into()),
                _ => Ok(()),
            },
        }
    }

    fn rank(&self, rank: Rank) -> Result<(), String> {
        match rank.index() < self.ranks {
            true => Ok(()),
            false => Err(format!("names rank {rank} of {}", self.ranks)),
        }
    }

    fn channels(&self, of: ChannelType, ids: &[ChannelIndex]) -> Result<(), String> {
        let refs = self.block.channels.iter().find(|refs| refs.channel_type == of);
        let there = refs.map_or(0, |refs| refs.channel_ids.len());
        match ids.iter().find(|id| id.index() >= there) {
            Some(id) => Err(format!("names {of:?} channel {id} of the {there} of its thread block")),
            None => Ok(()),
        }
    }

    /// A port needs a channel for each of the other end's chunks; of a memory channel the file may not say which.
    fn channels_of(&self, of: ChannelType, ids: &[ChannelIndex], chunks: usize) -> Result<(), String> {
        if ids.len() != chunks && (of == ChannelType::Port || !ids.is_empty()) {
            return Err(format!("{} channels for {chunks} remote chunks", ids.len()));
        }
        self.channels(of, ids)
    }

    fn remote(&self, of: ChannelType, chunks: &[RemoteChunk]) -> Result<(), String> {
        let refs = self.block.remote_buffer_refs.iter().find(|refs| refs.access_channel_type == of);
        let there = refs.map_or(0, |refs| refs.remote_buffer_ids.len());
        chunks.iter().try_for_each(|chunk| {
            if chunk.buffer_id.index() >= there {
                let id = chunk.buffer_id;
                return Err(format!(
                    "names remote buffer {id} of the {there} of its thread block for {of:?} channels"
                ));
            }
            range(chunk.index, chunk.size)
        })
    }
}

fn range(index: u64, size: u64) -> Result<(), String> {
    match index.checked_add(size) {
        Some(_) => Ok(()),
        None => Err(format!("chunks from {index}, {size} of them, are beyond 64 bits")),
    }
}

/// Plans are proved, and executed, for these operators only.
fn reduces(op: ReduceOp) -> Result<(), String> {
    if REDUCE_OPS.contains(&op) {
        return Ok(());
    }
    let known = REDUCE_OPS.map(ReduceOp::name).join(", ");
    Err(format!("reduces by {op}, but plans know {known}"))
}

fn share(group: Option<GroupShare>) -> Result<(), String> {
    match group {
        Some(GroupShare { tb_id, tbg_size }) if tb_id >= tbg_size => {
            Err(format!("is number {tb_id} of a group of {tbg_size} thread blocks"))
        }
        _ => Ok(()),
    }
}
