//! Whether a fused call is predicted to be faster than a call and the operations behind it.

use std::collections::BinaryHeap;

use super::super::{Flight, sync::computed_until};
use crate::{
    analysis::Analysis,
    costs::{Call, Costs, size_of},
    decisions::Choice,
    graph::Graph,
    hash::HashSet,
    ids::{OpId, ValueId},
};

/// The prices of calls of one graph.
pub(super) struct Prices<'c> {
    costs: &'c Costs,
    /// For each place of the graph, the nanoseconds that the computing stream is busy before.
    until: Vec<u64>,
}

impl<'c> Prices<'c> {
    pub(super) fn of(costs: &'c Costs, graph: &Graph) -> Self {
        Self { costs, until: computed_until(costs, graph) }
    }

    /// Whether a fused call pays that has these operands and gives the values that it replaces. The error says which way of
    /// making the call is predicted to be faster.
    pub(super) fn check(
        &self,
        graph: &Graph,
        analysis: &Analysis,
        (flight, group): (&Flight, &str),
        operands: &[ValueId],
        replaced: &[ValueId],
    ) -> Result<(), String> {
        let bytes = size_of(graph, graph.ty(operands[0]));
        let ranks = graph.group(group).map_or(1, |group| group.size);
        let hidden = self.until[flight.wait.index()].saturating_sub(self.until[flight.start.index() + 1]);
        let gone = gone(graph, analysis, operands, replaced);
        let epilogue = Some(self.costs.kernel(crossing(graph, analysis, &gone)));
        let call = Call { bytes, ranks, hidden, epilogue, registrable: false };
        let way = match self.costs.choose(&call) {
            Choice::Async => format!("a call beside {hidden} ns of computation"),
            Choice::Sync | Choice::Registered => "a call in stream order".to_owned(),
            Choice::Fused => return Ok(()),
        };
        let [fused, apart] =
            [Choice::Fused, self.costs.choose(&call)].map(|choice| self.costs.time(choice, &call));
        Err(format!("one call is predicted at {fused} ns, {way} and the operations behind it at {apart} ns"))
    }
}

/// The operations that nobody needs any more if a call that has these operands gives the values that it replaces.
fn gone(graph: &Graph, analysis: &Analysis, operands: &[ValueId], replaced: &[ValueId]) -> HashSet<OpId> {
    let op_of = |value: &ValueId| analysis.def[value.index()].map(|(op, _)| op);
    let (mut gone, mut open) =
        (HashSet::default(), replaced.iter().filter_map(op_of).collect::<BinaryHeap<_>>());
    // The last operation comes first, so that all users of a result have been looked at before the result.
    while let Some(id) = open.pop() {
        let op = graph.op(id);
        let is_unused = |out: &ValueId| {
            let is_left = analysis.is_output[out.index()]
                || analysis.uses(*out).iter().any(|user| !gone.contains(user));
            !operands.contains(out) && (replaced.contains(out) || !is_left)
        };
        if !op.kind.has_effect() && op.outs.iter().all(is_unused) && gone.insert(id) {
            open.extend(op.args.iter().filter_map(op_of));
        }
    }
    gone
}

/// The bytes that these operations read and write if they are one kernel: its operands and its results, each once.
fn crossing(graph: &Graph, analysis: &Analysis, ops: &HashSet<OpId>) -> u64 {
    let is_of_these = |value: &ValueId| analysis.def[value.index()].is_some_and(|(op, _)| ops.contains(&op));
    let mut values: HashSet<ValueId> = HashSet::default();
    for op in ops.iter().map(|id| graph.op(*id)) {
        let is_result = |out: &&ValueId| {
            analysis.is_output[out.index()] || analysis.uses(**out).iter().any(|user| !ops.contains(user))
        };
        values.extend(op.args.iter().filter(|arg| !is_of_these(arg)));
        values.extend(op.outs.iter().filter(is_result));
    }
    values.iter().fold(0, |sum, value| sum.saturating_add(size_of(graph, graph.ty(*value))))
}
