//! What was decided about a graph, for [`check`](crate::check()) and for a runtime.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    analysis::Analysis,
    build::attributes_of,
    error::LoweringError,
    graph::{Graph, Op},
    hash::HashMap,
    ids::ValueId,
    lowered::Rewrite,
    numerics::Numerics,
    text::operation,
    types::Type,
};

/// What was decided about a graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decisions {
    /// The version of this form.
    pub version: u32,
    /// The SHA-256 of the JSON of the graph before.
    pub graph: String,
    /// How much may be rounded otherwise.
    pub numerics: Numerics,
    /// The rewrites.
    pub rewrites: Vec<Rewrite>,
    /// Every call of the graph after, in order.
    pub calls: Vec<PlannedCall>,
    /// Memory that peers can reach.
    pub slots: Vec<Slot>,
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
    /// What all ranks of the group must agree on: the operation with its constants, and the dtypes, shapes and slots of its
    /// operands. It leaves out what may differ by rank: tokens, whether the call is in place, and the rows of an uneven exchange.
    pub signature: String,
    /// What it is predicted to take, in nanoseconds.
    pub nanoseconds: u64,
}

/// When a call's results may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// In stream order: the next operation of the stream may use them.
    Stream,
    /// After the wait for the call's token.
    Wait,
}

impl PlannedCall {
    /// When the call's results may be used.
    pub fn completion(&self) -> Completion {
        match self.choice {
            Choice::Fused | Choice::Sync | Choice::Registered => Completion::Stream,
            Choice::Async => Completion::Wait,
        }
    }
}

/// How a call is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// In stream order, together with the operations behind the sum.
    Fused,
    /// In stream order.
    Sync,
    /// In stream order, on memory that peers reach.
    Registered,
    /// On a stream of its own, until a wait: as the framework makes it.
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

impl Decisions {
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
            LoweringError::unexpected(at, error, "decisions")
        })
    }

    /// The decisions as JSON. Equal decisions have equal texts.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain values with names")
    }

    /// The SHA-256 of a group's calls, which the ranks of the group compare: the names, the ways and the
    /// [signatures](PlannedCall::signature) of its calls, in order. Calls of other groups do not count, because they may differ
    /// between ranks of this one.
    pub fn digest(&self, group: &str) -> String {
        let mut hash = Sha256::new();
        for PlannedCall { op, choice, covers, signature, .. } in self.calls_of(group) {
            hash.update(format!("{op} {choice:?} {covers:?} {signature}\n"));
        }
        hex(hash)
    }

    /// The calls of a group, in order.
    pub fn calls_of(&self, group: &str) -> impl Iterator<Item = &PlannedCall> {
        self.calls.iter().filter(move |call| call.group == group)
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

/// What the [signatures](PlannedCall::signature) of a graph's calls follow from.
pub(crate) struct Signatures<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    slots: HashMap<&'g str, &'g Slot>,
}

impl<'g> Signatures<'g> {
    pub(crate) fn new(graph: &'g Graph, analysis: &'g Analysis, slots: &'g [Slot]) -> Self {
        Self { graph, analysis, slots: slots.iter().map(|slot| (slot.value.as_str(), slot)).collect() }
    }

    pub(crate) fn of(&self, op: &Op) -> String {
        let is_uneven = op.kind.coll().is_some_and(|coll| coll.sends.is_some() || coll.receives.is_some());
        let operands: Vec<String> = op.args.iter().map(|value| self.operand(*value, is_uneven)).collect();
        let mut attributes = attributes_of(&op.kind);
        let differs = ["group", "token", "in_place", "sends", "receives"];
        attributes.retain(|key, _| !differs.contains(&key.as_str()));
        operation(&attributes, &operands.join(", "))
    }

    fn operand(&self, value: ValueId, is_uneven: bool) -> String {
        let Type { dtype, shape, .. } = self.graph.ty(value);
        let rows = if is_uneven { 1 } else { 0 };
        let sizes = shape.iter().enumerate();
        let sizes = sizes.map(|(dim, size)| if dim < rows { "_".to_owned() } else { size.to_string() });
        let text = format!("{dtype}[{}]", sizes.collect::<Vec<_>>().join(","));
        let root = self.analysis.root(value).map(|root| self.graph.name(root));
        match root.and_then(|root| self.slots.get(root)) {
            Some(Slot { offset, bytes, .. }) => format!("{text} in {bytes} bytes at {offset}"),
            None => text,
        }
    }
}

/// The SHA-256 of a graph's JSON.
pub(crate) fn digest(graph: &Graph) -> String {
    hex(Sha256::new_with_prefix(graph.to_json()))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
