//! The result that a collective must have.

use antiphon_operation::ReduceOp;
use serde::{Deserialize, Serialize};

use super::finding::Kind;
use crate::ids::Rank;
use crate::op::{OpKind, reduce_op};
use crate::plan::Plan;

/// Most ranks of a collective.
const RANKS: u64 = 2048;

/// Where chunks come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The rank that has the input.
    pub rank: Rank,
    /// Its first chunk.
    pub index: u64,
}

/// Chunks `index .. index + size` of a rank's output are those of some inputs, reduced if there are several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    /// The rank that has the output.
    pub rank: Rank,
    /// Its first chunk.
    pub index: u64,
    /// How many chunks.
    pub size: u64,
    /// The contributions that they hold.
    pub from: Vec<Source>,
    /// How it is reduced.
    #[serde(default = "sum", deserialize_with = "reduce_op")]
    pub op: ReduceOp,
}

fn sum() -> ReduceOp {
    ReduceOp::Sum
}

/// The required content of the outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// This; outputs that are not named may hold anything.
    Table(Vec<Expected>),
    /// Each output, if it is written, holds the whole input of one other rank, and some output is written.
    SendReceive,
}

impl Expectation {
    /// What a plan's collective must deliver; nothing is known of collectives of other names than `allgather`,
    /// `allreduce`, `reducescatter`, `alltoall` and `sendrecv`. A reduction is the one that the plan's operations name.
    ///
    /// # Errors
    /// [`Kind::NoSize`] if the buffers' chunks are not those of the collective.
    pub(super) fn of(plan: &Plan) -> Result<Option<Self>, Kind> {
        let ranks = plan.num_ranks() as u64;
        if ranks > RANKS {
            return Err(Kind::TooLarge { what: "ranks", limit: RANKS });
        }
        let op = reduction(plan);
        let all = || (0..ranks).map(|rank| Rank(rank as u32));
        let row = |rank, index, size, from: Vec<Source>| Expected { rank, index, size, from, op };
        let from_all = |index| all().map(|rank| Source { rank, index }).collect::<Vec<_>>();
        let mut rows = Vec::new();
        for gpu in &plan.gpus {
            let (input, output) = (gpu.input_chunks, gpu.output_chunks);
            let (rank, number) = (gpu.id, u64::from(gpu.id.0));
            let fits = match plan.collective.as_str() {
                "allreduce" => {
                    rows.push(row(rank, 0, output, from_all(0)));
                    input == output
                }
                "allgather" => {
                    rows.extend(all().map(|from| {
                        let at = u64::from(from.0).saturating_mul(input);
                        row(rank, at, input, vec![Source { rank: from, index: 0 }])
                    }));
                    input.checked_mul(ranks) == Some(output)
                }
                "reducescatter" => {
                    rows.push(row(rank, 0, output, from_all(number.saturating_mul(output))));
                    output.checked_mul(ranks) == Some(input)
                }
                "alltoall" => {
                    let part = input / ranks;
                    rows.extend(all().map(|from| {
                        let at = u64::from(from.0) * part;
                        row(rank, at, part, vec![Source { rank: from, index: number * part }])
                    }));
                    input == output && input.is_multiple_of(ranks)
                }
                "sendrecv" => input == output,
                _ => return Ok(None),
            };
            let same = |chunks, first: fn(&crate::plan::Gpu) -> u64| chunks == first(&plan.gpus[0]);
            if !fits || !same(input, |gpu| gpu.input_chunks) || !same(output, |gpu| gpu.output_chunks) {
                let collective = &plan.collective;
                return Err(Kind::NoSize {
                    why: format!(
                        "rank {rank} has {input} chunks of input and {output} of output, which is no {collective} of {ranks} \
                         ranks"
                    ),
                });
            }
        }
        Ok(Some(match plan.collective.as_str() {
            "sendrecv" => Expectation::SendReceive,
            _ => Expectation::Table(rows),
        }))
    }

    /// Whether everything that it names exists.
    pub(super) fn check(&self, plan: &Plan) -> Result<(), Kind> {
        let Expectation::Table(rows) = self else { return Ok(()) };
        for row in rows {
            let within = |rank: Rank, index: u64, chunks: fn(&crate::plan::Gpu) -> u64| {
                let there = plan.gpus.get(rank.index()).map(chunks);
                index.checked_add(row.size).is_some_and(|end| there.is_some_and(|there| end <= there))
            };
            let fits = within(row.rank, row.index, |gpu| gpu.output_chunks)
                && row.from.iter().all(|from| within(from.rank, from.index, |gpu| gpu.input_chunks));
            if !fits || row.from.is_empty() {
                let (rank, index, size) = (row.rank, row.index, row.size);
                return Err(Kind::NoSize {
                    why: format!(
                        "the expectation of {size} chunks from {index} of rank {rank}'s output names what does not exist"
                    ),
                });
            }
        }
        Ok(())
    }
}

/// The first reduction that a plan names; a sum, if there is none.
fn reduction(plan: &Plan) -> ReduceOp {
    let op = |kind: &OpKind| match kind {
        OpKind::Reduce(reduce) => Some(reduce.op),
        OpKind::SwitchReduce(reduce) => Some(reduce.op),
        OpKind::SwitchReduceBroadcast(reduce) => Some(reduce.op),
        _ => None,
    };
    let ops = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    let mut found = ops.flat_map(|outer| match &outer.kind {
        OpKind::Pipeline(pipeline) => pipeline.ops.iter().find_map(|inner| op(&inner.kind)),
        kind => op(kind),
    });
    found.next().unwrap_or(ReduceOp::Sum)
}
