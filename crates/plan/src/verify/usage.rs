//! The unused resources of a plan.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{ChannelId, Rank, SemaphoreId};
use crate::op::{BufferType, ChannelType, GroupShare, OpKind};
use crate::plan::{Gpu, Plan};
use crate::resolve::{Access, Block, Mode};

use super::finding::{Finding, Kind, Region};

/// Unused scratch, channels and semaphores, and incomplete groups.
pub(super) fn unused(plan: &Plan) -> Vec<Finding> {
    let mut kinds = Vec::new();
    scratch(plan, &mut kinds);
    groups(plan, &mut kinds);
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

/// What scratch could do without at its end: one finding for all ranks, which often leave out the same. Gaps before it are
/// usual, such as a rank's place for what it would send to itself.
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
    let mut unused: BTreeMap<(u64, u64), Vec<Rank>> = BTreeMap::new();
    for (gpu, end) in plan.gpus.iter().zip(ends) {
        if end < gpu.scratch_chunks {
            unused.entry((end, gpu.scratch_chunks)).or_default().push(gpu.id);
        }
    }
    if !unused.is_empty() {
        let chunks = unused.into_iter().map(|((start, end), ranks)| (start..end, ranks)).collect();
        kinds.push(Kind::UnusedScratch { chunks });
    }
}

/// A group's members each do the same, so that whatever one of them writes, all do.
fn groups(plan: &Plan, kinds: &mut Vec<Kind>) {
    let mut members: BTreeMap<_, BTreeSet<u32>> = BTreeMap::new();
    for block in Block::all(plan) {
        each_op(&block.get().ops, |op| {
            block.accesses(op, |Access { rank, buffer, chunks, mode, packets, group }| {
                if let (Mode::Write, Some(GroupShare { tb_id, tbg_size })) = (mode, group) {
                    let key = (block.rank(), rank, buffer, packets, chunks.start, chunks.end, tbg_size);
                    members.entry(key).or_default().insert(tb_id);
                }
            });
        });
    }
    for ((_, rank, buffer, packets, start, end, size), members) in members {
        if members.len() < size as usize {
            let region = Region { rank, buffer, packets, chunks: start as f64..end as f64 };
            kinds.push(Kind::Group { region, size, present: members.len() });
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
