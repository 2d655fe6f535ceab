//! The bounds on a simulation's time and memory, for any plan.

use super::cluster::Cluster;
use super::cost;
use super::error::SimulateError;
use super::resources::Links;
use crate::extent::Extent;
use crate::op::{Op, OpKind, Pipeline};
use crate::place::Place;
use crate::plan::Plan;
use crate::resolve::Block;

/// Operations and accesses that any plan may have played, however short it is. Each takes some 200 bytes with its span, its
/// arrows and its place on the critical path, so these take 256 MiB at most, and about a second.
pub const STEPS: u64 = 1 << 20;
/// How many more there may be for each operation that the plan's text holds.
const STEPS_PER_OPERATION: u64 = 4;
/// How often a flow's share of its links is computed at most; a million take about a tenth of a second. Flows that share
/// links get their rates together, each time one of them comes or goes, so this grows with the square of the flows. The
/// library's plan for 256 GPUs needs 27,000.
pub(super) const SHARES: u64 = 1 << 24;
/// Bytes from a buffer's start: enough for any memory, and safe to calculate with.
const FAR: u64 = 1 << 60;
/// Network cards of all nodes together.
const CARDS: u64 = 1 << 16;

/// The chunks of a message.
pub(super) fn chunks(plan: &Plan) -> u64 {
    let (input, output) = plan.gpus.first().map_or((0, 0), |gpu| (gpu.input_chunks, gpu.output_chunks));
    if (plan.collective == "allgather" && output > 0) || input == 0 { output } else { input }
}

/// Where chunks begin for a message, which is the output of `allgather`, else the input.
pub(super) fn extent(plan: &Plan, message_bytes: u64) -> Result<Extent, SimulateError> {
    let (input, output) = plan.gpus.first().map_or((0, 0), |gpu| (gpu.input_chunks, gpu.output_chunks));
    let count = chunks(plan);
    let whole = |of: u64| match count {
        0 => 0,
        // What does not divide evenly is refused below, with the reason.
        _ if of == count => message_bytes.min(FAR),
        _ => (message_bytes.min(FAR) / count).saturating_mul(of),
    };
    Ok(Extent::new(plan, whole(input), whole(output))?)
}

/// Whether the plan fits the cluster, its chunks 64 bits, and its operations the time.
pub(super) fn length(plan: &Plan, cluster: &Cluster, extent: &Extent) -> Result<(), SimulateError> {
    let ranks = plan.num_ranks();
    let cards = u64::from(cluster.nodes) * u64::from(cluster.nics_per_node);
    if ranks as u64 > cluster.gpus() {
        return Err(SimulateError::Ranks { ranks, cluster: cluster.name.clone(), gpus: cluster.gpus() });
    }
    if cards > CARDS {
        return Err(SimulateError::Cards { cluster: cluster.name.clone(), cards, limit: CARDS });
    }
    let links = &Links::new(cluster, ranks);
    let operations: usize =
        Block::all(plan).map(|block| block.get().ops.iter().map(written).sum::<usize>()).sum();
    let limit = STEPS + STEPS_PER_OPERATION * operations as u64;
    let mut steps = 0u64;
    for block in Block::all(plan) {
        for (at, op) in block.get().ops.iter().enumerate() {
            let (turns, inner, is_pipeline) = match &op.kind {
                OpKind::Pipeline(pipeline) => (turns(pipeline, extent), &pipeline.ops[..], true),
                _ => (1, std::slice::from_ref(op), false),
            };
            for (inner_at, op) in inner.iter().enumerate() {
                let place = block.place(at, is_pipeline.then_some(inner_at));
                cost::reachable(links, cluster, block, place, &op.kind)?;
                let cost = 1 + accesses(block, place, &op.kind, extent)?;
                steps = steps.saturating_add(cost.saturating_mul(turns.max(1)));
                if steps > limit {
                    return Err(SimulateError::TooLong { steps, limit });
                }
            }
        }
    }
    Ok(())
}

/// How many operations stand in the text of one.
fn written(op: &Op) -> usize {
    match &op.kind {
        OpKind::Pipeline(pipeline) => 1 + pipeline.ops.len(),
        _ => 1,
    }
}

/// How often a pipeline turns.
pub(super) fn turns(pipeline: &Pipeline, extent: &Extent) -> u64 {
    pipeline.num_chunks.saturating_mul(extent.chunk()).div_ceil(pipeline.unit_size)
}

fn accesses(block: Block<'_>, place: Place, op: &OpKind, extent: &Extent) -> Result<u64, SimulateError> {
    let (mut count, mut beyond) = (0, None);
    block.accesses(op, |access| {
        count += 1;
        if extent.bytes(&access.chunks).is_none_or(|bytes| bytes.end > FAR) {
            beyond.get_or_insert(access.chunks);
        }
    });
    match beyond {
        None => Ok(count),
        Some(chunks) => {
            Err(SimulateError::Beyond { place, first: chunks.start, end: chunks.end, chunk: extent.chunk() })
        }
    }
}
