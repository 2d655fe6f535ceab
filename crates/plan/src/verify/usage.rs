//! What a plan has and does not use.

use crate::ids::{ChannelId, SemaphoreId};
use crate::op::{BufferType, ChannelType, OpKind};
use crate::plan::{Gpu, Plan};
use crate::resolve::Block;

use super::finding::{Finding, Kind};

/// Scratch, channels and semaphores that nobody uses.
pub(super) fn unused(plan: &Plan) -> Vec<Finding> {
    let mut kinds = Vec::new();
    scratch(plan, &mut kinds);
    for gpu in &plan.gpus {
        channels(gpu, &mut kinds);
        semaphores(gpu, &mut kinds);
    }
    kinds.into_iter().map(|kind| Finding::new(plan, kind, Vec::new())).collect()
}

fn each_op<'p>(ops: impl IntoIterator<Item = &'p crate::Op>, mut each: impl FnMut(&'p OpKind)) {
    for op in ops {
        match &op.kind {
            OpKind::Pipeline(pipeline) => pipeline.ops.iter().for_each(|op| each(&op.kind)),
            kind => each(kind),
        }
    }
}

fn scratch(plan: &Plan, kinds: &mut Vec<Kind>) {
    let mut ends = vec![0; plan.gpus.len()];
    for block in Block::all(plan) {
        each_op(&block.get().ops, |op| {
            block.accesses(op, |access| {
                if access.buffer == BufferType::Scratch {
                    let end = &mut ends[access.rank.index()];
                    *end = access.chunks.end.max(*end);
                }
            });
        });
    }
    for (gpu, end) in plan.gpus.iter().zip(ends) {
        if end < gpu.scratch_chunks {
            let (rank, chunks) = (gpu.id, gpu.scratch_chunks);
            kinds.push(Kind::UnusedScratch { rank, unused: chunks - end, chunks });
        }
    }
}

fn channels(gpu: &Gpu, kinds: &mut Vec<Kind>) {
    for channel_type in [ChannelType::Memory, ChannelType::Port, ChannelType::Switch] {
        let there = match channel_type {
            ChannelType::Switch => gpu.switches().count(),
            of => gpu.peers(of).len(),
        };
        let mut used = vec![false; there];
        let refs = gpu.threadblocks.iter().flat_map(|block| &block.channels);
        for refs in refs.filter(|refs| refs.channel_type == channel_type) {
            refs.channel_ids.iter().for_each(|id| used[id.index()] = true);
        }
        let unused = used.iter().enumerate().filter(|(_, used)| !**used);
        kinds.extend(unused.map(|(channel, _)| Kind::UnusedChannel {
            rank: gpu.id,
            channel_type,
            channel: ChannelId(channel as u32),
        }));
    }
}

fn semaphores(gpu: &Gpu, kinds: &mut Vec<Kind>) {
    let mut used = vec![false; gpu.semaphores.len()];
    each_op(gpu.threadblocks.iter().flat_map(|block| &block.ops), |op| {
        if let OpKind::Semaphore(op) = op {
            op.semaphores.iter().for_each(|id| used[id.index()] = true);
        }
    });
    let unused = used.iter().enumerate().filter(|(_, used)| !**used);
    kinds.extend(unused.map(|(semaphore, _)| Kind::UnusedSemaphore {
        rank: gpu.id,
        semaphore: SemaphoreId(semaphore as u32),
    }));
}
