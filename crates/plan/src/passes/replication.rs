//! Instances of thread blocks, each with its part of every chunk.

use crate::error::PlanError;
use crate::ids::{BarrierId, ChannelId, Rank, SemaphoreId};
use crate::op::{Op, OpKind};
use crate::plan::{Gpu, GpuChannels, Plan, ThreadBlock};

/// Far beyond what a GPU can hold, so that a slip of the pen is an error and not an exhausted memory.
const MAX_INSTANCES: u32 = 1 << 16;
/// The same for the thread blocks of a rank.
const MAX_THREAD_BLOCKS: usize = 1 << 20;

/// How instances divide the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReplicationPolicy {
    /// A chunk becomes as many as there are instances, side by side; each takes one.
    #[default]
    Interleaved,
    /// Chunks are not divided. Only for plans that touch none.
    None,
}

/// Makes `instances` of every thread block, with channels, semaphores and barriers of its own each.
///
/// Buffers have `instances` times as many chunks. Instance `i` of block `b` is block `b × instances + i`; what it names `v`
/// becomes `v × instances + i` (channels, semaphores, barriers), and of chunks `v .. v + size` it takes
/// `v × instances + i × size`, as many.
///
/// # Errors
/// [`PlanError::Replication`] if there are too many instances or thread blocks, or if a number has no room in its type;
/// [`PlanError::Undivided`] if an operation touches chunks under [`ReplicationPolicy::None`].
pub fn replicate(mut plan: Plan, instances: u32, policy: ReplicationPolicy) -> Result<Plan> {
    for gpu in &mut plan.gpus {
        let spread = Spread { rank: gpu.id, instances, policy };
        if instances > MAX_INSTANCES {
            return Err(spread.wrong(format!("there can be {MAX_INSTANCES} at most")));
        }
        spread.gpu(gpu)?;
    }
    Ok(plan)
}

type Result<T> = std::result::Result<T, PlanError>;

/// The new numbers of one rank's objects.
struct Spread {
    rank: Rank,
    instances: u32,
    policy: ReplicationPolicy,
}

impl Spread {
    fn wrong(&self, what: String) -> PlanError {
        PlanError::Replication { rank: self.rank, instances: self.instances, what }
    }

    fn too_many(&self, what: &str, count: u64) -> PlanError {
        self.wrong(format!("too many {what}: {count} as it is"))
    }

    fn gpu(&self, gpu: &mut Gpu) -> Result<()> {
        for chunks in [&mut gpu.input_chunks, &mut gpu.output_chunks, &mut gpu.scratch_chunks] {
            *chunks =
                chunks.checked_mul(self.instances.into()).ok_or_else(|| self.too_many("chunks", *chunks))?;
        }
        let count = gpu.threadblocks.len();
        if count.saturating_mul(self.instances as usize) > MAX_THREAD_BLOCKS {
            return Err(
                self.wrong(format!("{count} thread blocks each would be more than {MAX_THREAD_BLOCKS}"))
            );
        }
        for entry in &mut gpu.channels {
            if let GpuChannels::Peers { connected_to, .. } = entry {
                *connected_to = self.repeated(connected_to);
            }
        }
        // Entries of switch channels stand behind those of the others.
        let peers =
            gpu.channels.iter().take_while(|entry| matches!(entry, GpuChannels::Peers { .. })).count();
        let switches = gpu.channels.split_off(peers);
        gpu.channels.extend(self.repeated(&switches));
        gpu.semaphores = self.repeated(&gpu.semaphores);
        let Some(last) = self.instances.checked_sub(1) else {
            gpu.threadblocks.clear();
            return Ok(());
        };
        let blocks = std::mem::take(&mut gpu.threadblocks);
        gpu.threadblocks.reserve(count * self.instances as usize);
        for block in blocks {
            for instance in 0..last {
                gpu.threadblocks.push(self.block(block.clone(), instance)?);
            }
            // The block itself, since copies are most of the pass's time.
            gpu.threadblocks.push(self.block(block, last)?);
        }
        Ok(())
    }

    fn repeated<T: Clone>(&self, items: &[T]) -> Vec<T> {
        let times = self.instances as usize;
        items.iter().flat_map(|item| std::iter::repeat_n(item, times)).cloned().collect()
    }

    fn block(&self, mut block: ThreadBlock, instance: u32) -> Result<ThreadBlock> {
        block.id = self.id(block.id, instance)?;
        for refs in &mut block.channels {
            for ChannelId(id) in &mut refs.channel_ids {
                *id = self.id(*id, instance)?;
            }
        }
        block.ops.iter_mut().try_for_each(|op| self.op(op, instance))?;
        Ok(block)
    }

    fn id(&self, id: u32, instance: u32) -> Result<u32> {
        let spread = id.checked_mul(self.instances).and_then(|id| id.checked_add(instance));
        spread.ok_or_else(|| self.too_many("numbered things", id.into()))
    }

    fn index(&self, index: &mut u64, size: u64, instance: u32) -> Result<()> {
        if self.policy == ReplicationPolicy::None {
            return Err(PlanError::Undivided { rank: self.rank });
        }
        let share = size.checked_mul(instance.into());
        let spread =
            index.checked_mul(self.instances.into()).zip(share).and_then(|(at, by)| at.checked_add(by));
        *index = spread.ok_or_else(|| self.too_many("chunks", *index))?;
        Ok(())
    }

    fn op(&self, op: &mut Op, instance: u32) -> Result<()> {
        let index = |index: &mut u64, size: u64| self.index(index, size, instance);
        match &mut op.kind {
            OpKind::Nop | OpKind::Notify(_) => Ok(()),
            OpKind::Barrier { barrier: BarrierId(id), .. } => {
                *id = self.id(*id, instance)?;
                Ok(())
            }
            OpKind::Semaphore(op) => op.semaphores.iter_mut().try_for_each(|SemaphoreId(id)| {
                *id = self.id(*id, instance)?;
                Ok(())
            }),
            OpKind::Copy(copy) => {
                index(&mut copy.src.index, copy.src.size)?;
                index(&mut copy.dst.index, copy.dst.size)
            }
            OpKind::Put(put) => {
                put.src.iter_mut().try_for_each(|chunk| index(&mut chunk.index, chunk.size))?;
                put.dst.iter_mut().try_for_each(|chunk| index(&mut chunk.index, chunk.size))
            }
            OpKind::Get(get) => {
                get.src.iter_mut().try_for_each(|chunk| index(&mut chunk.index, chunk.size))?;
                get.dst.iter_mut().try_for_each(|chunk| index(&mut chunk.index, chunk.size))
            }
            OpKind::Reduce(reduce) => {
                let local = reduce.src.iter_mut().chain([&mut reduce.dst]).chain(&mut reduce.packet_dst);
                local.into_iter().try_for_each(|chunk| index(&mut chunk.index, chunk.size))?;
                let mut remote = reduce.remote_src.iter_mut().chain(&mut reduce.remote_dst);
                remote.try_for_each(|chunk| index(&mut chunk.index, chunk.size))
            }
            OpKind::SwitchReduce(op) => {
                index(&mut op.offset, op.size)?;
                index(&mut op.dst.index, op.dst.size)
            }
            OpKind::SwitchBroadcast(op) => {
                index(&mut op.src.index, op.src.size)?;
                index(&mut op.dst.index, op.dst.size)
            }
            OpKind::SwitchReduceBroadcast(op) => {
                index(&mut op.src.index, op.src.size)?;
                index(&mut op.dst.index, op.dst.size)
            }
            OpKind::Pipeline(pipeline) => pipeline.ops.iter_mut().try_for_each(|op| self.op(op, instance)),
        }
    }
}
