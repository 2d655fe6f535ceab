//! What is decided of a graph: rewrites, refusals, how each call is made, what lies in symmetric memory.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    analysis::Analysis,
    decisions::{Choice, Decisions},
    error::Finding,
    graph::{Graph, Op},
    ids::ValueId,
    op::Kind,
    types::{Class, CommReq},
};

/// The result of [`lower`](crate::lower()).
#[derive(Debug, Clone, PartialEq)]
pub struct Lowered {
    /// The rewritten graph; the original, if the rewritten one was not proved.
    pub graph: Graph,
    /// What was decided.
    pub decisions: Decisions,
    /// The decisions with their reasons, as text.
    pub report: Report,
}

/// The rewrites, the refusals, and the predicted gain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What was rewritten.
    pub rewrites: Vec<Rewrite>,
    /// The rewrites that were not made, with their reasons.
    pub refusals: Vec<Refusal>,
    /// Why the graph is unchanged, if it is invalid or was not proved.
    pub findings: Vec<Finding>,
    /// Calls of groups, before and after.
    pub calls: [usize; 2],
    /// Predicted times in nanoseconds, before and after.
    pub nanoseconds: [u64; 2],
    /// The bytes of symmetric memory.
    pub comm_bytes: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "unchanged: {finding}")?;
        }
        for Rewrite { rule, ops, text, bound } in &self.rewrites {
            write!(f, "{rule}: {text} ({})", ops.join(", "))?;
            match bound {
                Some(bound) => writeln!(f, "; {bound}")?,
                None => writeln!(f)?,
            }
        }
        for Refusal { rule, op, reason } in &self.refusals {
            writeln!(f, "not {rule}: {op}: {reason}")?;
        }
        let [before, after] = self.calls;
        let [slow, fast] = self.nanoseconds.map(|ns| ns as f64 / 1000.0);
        write!(f, "{before} calls became {after}; {slow:.1} µs are predicted to become {fast:.1} µs; ")?;
        write!(f, "{} bytes of symmetric memory", self.comm_bytes)
    }
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
    /// The bound of the difference of results; none if they are equal.
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

/// What slots begin at multiples of, in bytes.
pub const ALIGNMENT: u64 = 256;

/// The way in which an operation makes its call.
pub(crate) fn choice(graph: &Graph, analysis: &Analysis, op: &Op) -> Choice {
    let is_registered = || op.args.iter().any(|arg| comm(graph, analysis, *arg).is_some());
    match &op.kind {
        Kind::Fused { .. } => Choice::Fused,
        Kind::Sync { .. } if is_registered() => Choice::Registered,
        Kind::Sync { .. } => Choice::Sync,
        _ => Choice::Async,
    }
}

/// Whether a value's storage is memory of communication.
pub(crate) fn comm<'g>(
    graph: &'g Graph,
    analysis: &Analysis,
    value: ValueId,
) -> Option<(ValueId, &'g CommReq)> {
    let root = analysis.root(value)?;
    match &graph.value(root).class {
        Class::Comm(req) => Some((root, req)),
        _ => None,
    }
}
