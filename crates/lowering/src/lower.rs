//! The rewriting of a graph: the rules propose, and the proof decides.

use crate::{
    costs::Costs,
    decisions::{Decisions, PlannedCall, Signatures, Slot},
    error::Finding,
    graph::Graph,
    lowered::{Lowered, Refusal, Report, choice},
    options::{Options, World},
    proof::check::prove,
    rules::{self, context::Context},
    verify::verify,
};

/// Rewrites a graph into a faster one that computes the same, or returns it unchanged.
///
/// The result depends on the arguments alone: equal arguments, equal bytes. [`check`](crate::check()) has proved it.
pub fn lower(graph: &Graph, world: &World, costs: &Costs, options: &Options) -> Lowered {
    let unchanged = |findings: Vec<Finding>, refusals: Vec<Refusal>| {
        let mut decisions = Decisions::new(graph, options.numerics);
        decisions.calls = calls(graph, costs, &[], |op| vec![op.to_owned()]);
        let report = report(graph, graph, &decisions, costs, refusals, findings);
        Lowered { graph: graph.clone(), decisions, report }
    };
    let findings = verify(graph);
    if !findings.is_empty() {
        return unchanged(findings, Vec::new());
    }
    let mut cx = Context::new(graph, world, costs, options);
    rules::apply(&mut cx, graph);
    let mut decisions = Decisions::new(graph, options.numerics);
    decisions.slots = rules::realize::place(&cx.graph);
    decisions.calls = calls(&cx.graph, costs, &decisions.slots, |op| cx.covered(op));
    decisions.rewrites = cx.rewrites;
    let findings = prove(graph, &decisions, &cx.graph);
    if !findings.is_empty() {
        return unchanged(findings, cx.refusals);
    }
    let report = report(graph, &cx.graph, &decisions, costs, cx.refusals, Vec::new());
    Lowered { graph: cx.graph, decisions, report }
}

fn report(
    before: &Graph,
    after: &Graph,
    decisions: &Decisions,
    costs: &Costs,
    refusals: Vec<Refusal>,
    findings: Vec<Finding>,
) -> Report {
    let count = |graph: &Graph| graph.ops.iter().filter(|op| op.kind.communicates()).count();
    Report {
        rewrites: decisions.rewrites.clone(),
        refusals,
        findings,
        calls: [count(before), count(after)],
        nanoseconds: [costs.predict(before), costs.predict(after)],
        comm_bytes: decisions.peak_bytes(),
    }
}

/// How each call of a graph is made.
fn calls(
    graph: &Graph,
    costs: &Costs,
    slots: &[Slot],
    covered: impl Fn(&str) -> Vec<String>,
) -> Vec<PlannedCall> {
    let analysis = graph.analyse();
    let signatures = Signatures::new(graph, &analysis, slots);
    let call = |op: &crate::Op| {
        let group = op.kind.group()?.to_owned();
        let (choice, signature) = (choice(graph, &analysis, op), signatures.of(op));
        let (op, covers, nanoseconds) = (op.name.clone(), covered(&op.name), costs.op(graph, op));
        Some(PlannedCall { op, group, choice, covers, signature, nanoseconds })
    };
    graph.ops.iter().filter_map(call).collect()
}
