//! What was decided about a graph: what [`check`](crate::check()) needs to be told, and a runtime.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{error::LoweringError, graph::Graph, lower::Numerics};

/// What was decided about a graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The version of this form.
    pub version: u32,
    /// The SHA-256 of the JSON of the graph before.
    pub graph: String,
    /// How much may be rounded otherwise.
    pub numerics: Numerics,
    /// What was rewritten.
    pub rewrites: Vec<Rewrite>,
    /// Every call of the graph after, in order.
    pub calls: Vec<PlannedCall>,
    /// Memory that peers can reach.
    pub slots: Vec<Slot>,
}

/// A rewrite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rewrite {
    /// The rule.
    pub rule: String,
    /// The operations of the graph before that it is about; first the calls.
    pub ops: Vec<String>,
    /// What it did, in words.
    pub text: String,
    /// By how much results may differ; nothing if they do not.
    pub bound: Option<String>,
}

/// Why something was not rewritten.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// The rule.
    pub rule: String,
    /// The call.
    pub op: String,
    /// Why, with the numbers.
    pub reason: String,
}

/// A call of the graph after.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedCall {
    /// The operation.
    pub op: String,
    /// The group.
    pub group: String,
    /// How it is made.
    pub choice: Choice,
    /// The calls of the graph before that it stands for.
    pub covers: Vec<String>,
    /// What it is predicted to take, in nanoseconds.
    pub nanoseconds: u64,
}

/// How a call is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// With what follows the sum, in stream order.
    Fused,
    /// In stream order.
    Sync,
    /// In stream order, on memory that peers reach.
    Registered,
    /// On a stream of its own, until it is waited for: as the framework has it.
    Async,
}

/// Bytes of a heap that a storage has, at the same offset on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slot {
    /// The value that brings the storage.
    pub value: String,
    /// The heap.
    pub domain: String,
    /// Where it begins.
    pub offset: u64,
    /// How many bytes it has.
    pub bytes: u64,
    /// The operation that first writes it.
    pub first: String,
    /// The operation after which nobody uses it, on any rank.
    pub last: String,
}

impl Plan {
    /// The version of the form that this crate writes.
    pub const VERSION: u32 = 1;

    pub(crate) fn new(graph: &Graph, numerics: Numerics) -> Self {
        let (rewrites, calls, slots) = Default::default();
        Self { version: Self::VERSION, graph: digest(graph), numerics, rewrites, calls, slots }
    }

    /// Reads what [`to_json`](Self::to_json) writes.
    ///
    /// # Errors
    /// Where in the text, what was found there and what was wanted.
    pub fn from_json(text: &[u8]) -> Result<Self, LoweringError> {
        crate::build::check_length(text)?;
        serde_json::from_slice(text).map_err(|error| {
            let at = format!("line {} column {}", error.line(), error.column());
            LoweringError::unexpected(at, error, "a plan")
        })
    }

    /// The plan as JSON. Equal plans have equal texts.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain values with names")
    }

    /// A number that plans share that make the same calls in the same order: what ranks compare.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for PlannedCall { op, group, choice, covers, .. } in &self.calls {
            hash.update(format!("{op} {group} {choice:?} {covers:?}\n"));
        }
        hex(hash)
    }

    /// The most bytes that slots reach to, over all heaps together.
    pub fn peak_bytes(&self) -> u64 {
        let mut domains: Vec<(&str, u64)> = Vec::new();
        for slot in &self.slots {
            let end = slot.offset.saturating_add(slot.bytes);
            match domains.iter_mut().find(|(domain, _)| *domain == slot.domain) {
                Some((_, peak)) => *peak = end.max(*peak),
                None => domains.push((&slot.domain, end)),
            }
        }
        domains.iter().fold(0, |sum, (_, peak)| sum.saturating_add(*peak))
    }
}

/// The SHA-256 of a graph's JSON.
pub(crate) fn digest(graph: &Graph) -> String {
    hex(Sha256::new_with_prefix(graph.to_json()))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
