//! Why a plan cannot be simulated.

use std::fmt;

use thiserror::Error;

use crate::error::PlanError;
use crate::ids::Rank;
use crate::place::Place;

/// Why a plan cannot be simulated.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SimulateError {
    /// The plan is malformed, or the message does not fit it.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The cluster's description is no JSON of a cluster.
    #[error("the cluster's description: {0}")]
    Description(String),
    /// Neither a preset nor a file's text.
    #[error(
        "{0:?} is no cluster: write h200xG for 1 to 8 GPUs of a node, h200xG-nodesN for N nodes, or a JSON file's path"
    )]
    NoPreset(String),
    /// A figure of the cluster makes no sense.
    #[error("cluster {cluster:?}: {field} is {value}, not {expected}")]
    Figure {
        /// The cluster.
        cluster: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
        /// The accepted values.
        expected: &'static str,
    },
    /// The plan has more ranks than the cluster has GPUs.
    #[error("the plan has {ranks} ranks, cluster {cluster:?} has {gpus} GPUs")]
    Ranks {
        /// Ranks of the plan.
        ranks: usize,
        /// The cluster.
        cluster: String,
        /// Its GPUs.
        gpus: u64,
    },
    /// The cluster has more network cards than are simulated.
    #[error("cluster {cluster:?} has {cards} network cards, at most {limit} are simulated")]
    Cards {
        /// The cluster.
        cluster: String,
        /// Its cards, on all nodes together.
        cards: u64,
        /// How many there may be.
        limit: u64,
    },
    /// Two ranks have no link of the kind that an operation needs.
    #[error("{place}: no {link} from rank {from} to rank {to}")]
    Unreachable {
        /// The operation.
        place: Place,
        /// The accessing block.
        from: Rank,
        /// The rank that has the memory.
        to: Rank,
        /// What is missing.
        link: &'static str,
    },
    /// Some chunks are farther out than any memory.
    #[error("{place}: chunks {first}..{end} of {chunk} bytes are beyond 2^60 bytes")]
    Beyond {
        /// The operation.
        place: Place,
        /// The first chunk.
        first: u64,
        /// The chunk behind the last.
        end: u64,
        /// Bytes of a chunk.
        chunk: u64,
    },
    /// Pipelines turn too often, or the plan is too large.
    #[error("{steps} operations and accesses are to be played, at most {limit} can be")]
    TooLong {
        /// How many there are.
        steps: u64,
        /// How many there may be.
        limit: u64,
    },
    /// So many flows share links that finding their rates takes too long.
    #[error(
        "flows that share links needed more than {limit} computations of a share, up to {time_ns} ns of the plan's time"
    )]
    TooShared {
        /// How many computations there may be.
        limit: u64,
        /// How far the simulation had come, in ns.
        time_ns: f64,
    },
    /// All that have not ended wait.
    #[error("deadlock after {time_ns} ns: {} of {blocks} thread blocks wait for ever: {}", waiting.len(), List(waiting))]
    Deadlock {
        /// Since when.
        time_ns: f64,
        /// How many thread blocks the plan has.
        blocks: usize,
        /// The waiting blocks, in the plan's order.
        waiting: Vec<Waiting>,
    },
}

/// A thread block that waits, and what for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The operation that does not end.
    pub place: Place,
    /// What is missing.
    pub what: String,
}

/// The first few; a large plan has thousands.
struct List<'a>(&'a [Waiting]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        for (at, waiting) in self.0.iter().take(SHOWN).enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{} waits for {}", waiting.place, waiting.what)?;
        }
        if self.0.len() > SHOWN { write!(f, "; and {} more", self.0.len() - SHOWN) } else { Ok(()) }
    }
}
