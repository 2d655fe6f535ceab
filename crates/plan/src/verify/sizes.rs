//! At which sizes a plan is proved, so that it is proved at all.
//!
//! What depends on the size of a chunk is where groups of thread blocks and the turns of pipelines cut it, and how many turns
//! there are; all else is the same at every size. So one size is enough for a plan without them. A group's shares are in the
//! same order at every size, and empty at small ones: one size at which they divide a chunk evenly, one at which they do not
//! and the smallest stand for all. Of a pipeline, the first turn, one in the middle and the last, whole or in part, are all
//! there is; more turns repeat the middle one. What lets a block be ahead of another are the counts that semaphores begin
//! with: the turns that are looked at are more than these.

use std::collections::BTreeSet;

use super::finding::Kind;
use crate::op::{GroupShare, Op, OpKind};
use crate::plan::Plan;

/// Most chunks of a buffer: no memory holds more.
const CHUNKS: u64 = 1 << 36;

/// Most bytes of a chunk at which anything is tried.
const BYTES: u64 = 1 << 26;

/// Most bytes that a buffer may have at these sizes.
const BUFFER: u64 = 1 << 60;

/// Bytes of a chunk, ascending.
///
/// # Errors
/// [`Kind::NoSize`] or [`Kind::TooLarge`]
pub(super) fn of(plan: &Plan) -> Result<Vec<u64>, Kind> {
    let alignment = plan.buffer_alignment;
    let (min, max) = chunk_limits(plan)?;
    let mut sizes = BTreeSet::from([min]);
    let mut add = |bytes: u64| {
        let bytes = (bytes / alignment).max(1).saturating_mul(alignment);
        sizes.insert(bytes.clamp(min, max));
    };
    let blocks = uneven_groups(plan);
    if blocks > 1 {
        add(blocks.saturating_mul(alignment));
        add((blocks + 1).saturating_mul(alignment));
    }
    let turns = 3 + ahead(plan);
    for (unit, chunks) in pipelines(plan) {
        for turn in 0..turns {
            let whole = unit.saturating_mul(turn + 1) / chunks;
            add(whole);
            add((unit.saturating_mul(turn) / chunks).saturating_add(alignment));
        }
    }
    let largest = plan.gpus.iter().flat_map(|gpu| [gpu.input_chunks, gpu.output_chunks, gpu.scratch_chunks]);
    let largest = largest.max().unwrap_or(0);
    if largest > CHUNKS {
        return Err(Kind::TooLarge { what: "chunks of a buffer", limit: CHUNKS });
    }
    // In place, a rank's part begins behind those of all before it.
    let far = largest.saturating_mul(plan.num_ranks() as u64 + 1);
    if alignment > BYTES || far.saturating_mul(*sizes.last().expect("the smallest")) > BUFFER {
        return Err(Kind::TooLarge { what: "bytes of a buffer", limit: BUFFER });
    }
    Ok(sizes.into_iter().collect())
}

/// The smallest and the largest chunk that a message can have.
fn chunk_limits(plan: &Plan) -> Result<(u64, u64), Kind> {
    let (alignment, smallest, largest) =
        (plan.buffer_alignment, plan.min_message_size, plan.max_message_size);
    let chunks = plan.gpus.first().map_or(0, |gpu| match plan.collective.as_str() {
        "allgather" => gpu.output_chunks,
        _ => gpu.input_chunks,
    });
    if chunks == 0 {
        return Ok((alignment, u64::MAX / alignment * alignment));
    }
    let min = smallest.div_ceil(chunks).div_ceil(alignment).max(1).checked_mul(alignment);
    let max = largest / chunks / alignment * alignment;
    match min {
        Some(min) if min <= max => Ok((min, max)),
        _ => Err(Kind::NoSize {
            why: format!(
                "{smallest} to {largest} bytes hold no {chunks} chunks of whole multiples of {alignment} bytes"
            ),
        }),
    }
}

fn ops(plan: &Plan) -> impl Iterator<Item = &Op> {
    plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops)
}

/// The least common multiple of groups that may divide their chunks unevenly, as far as it is small.
fn uneven_groups(plan: &Plan) -> u64 {
    let mut sizes = BTreeSet::new();
    let mut add = |op: &OpKind| {
        let group = match op {
            OpKind::Copy(op) => op.group,
            OpKind::Put(op) => op.group,
            OpKind::Get(op) => op.group,
            OpKind::Reduce(op) => op.group,
            _ => None,
        };
        sizes.extend(group.map(|GroupShare { tbg_size, .. }| u64::from(tbg_size)));
    };
    for op in ops(plan) {
        match &op.kind {
            OpKind::Pipeline(pipeline) => pipeline.ops.iter().for_each(|op| add(&op.kind)),
            kind => add(kind),
        }
    }
    sizes.into_iter().fold(1, |multiple, size| {
        let (mut a, mut b) = (multiple, size);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        (multiple / a.max(1)).saturating_mul(size).min(1 << 12)
    })
}

/// Bytes of each turn, and chunks of all, of all pipelines.
fn pipelines(plan: &Plan) -> BTreeSet<(u64, u64)> {
    let pipelines = ops(plan).filter_map(|op| match &op.kind {
        OpKind::Pipeline(pipeline) if pipeline.num_chunks > 0 => {
            Some((pipeline.unit_size, pipeline.num_chunks))
        }
        _ => None,
    });
    pipelines.collect()
}

/// How far one thread block can be ahead of another because semaphores do not begin at zero.
fn ahead(plan: &Plan) -> u64 {
    let counts = plan.gpus.iter().flat_map(|gpu| &gpu.semaphores).map(|semaphore| semaphore.init_value);
    counts.max().unwrap_or(0).clamp(0, 5) as u64
}
