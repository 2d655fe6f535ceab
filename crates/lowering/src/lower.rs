//! The rewriting of a graph: the rules propose, and the proof decides.

use crate::{
    costs::Costs,
    decisions::{Lowered, Refusal, Report, choice},
    error::Finding,
    graph::Graph,
    options::{Options, World},
    plan::{Plan, PlannedCall, Signatures, Slot},
    proof::check::prove,
    rules::{self, context::Context},
    verify::verify,
};

/// Rewrites a graph into a faster one that computes the same, or returns it unchanged.
///
/// The result depends on the arguments alone: equal arguments, equal bytes. [`check`](crate::check()) has proved it.
pub fn lower(graph: &Graph, world: &World, costs: &Costs, options: &Options) -> Lowered {
    let unchanged = |findings: Vec<Finding>, refusals: Vec<Refusal>| {
        let mut plan = Plan::new(graph, options.numerics);
        plan.calls = calls(graph, costs, &[], |op| vec![op.to_owned()]);
        let report = report(graph, graph, &plan, costs, refusals, findings);
        Lowered { graph: graph.clone(), plan, report }
    };
    let findings = verify(graph);
    if !findings.is_empty() {
        return unchanged(findings, Vec::new());
    }
    let mut cx = Context::new(graph, world, costs, options);
    rules::apply(&mut cx, graph);
    let mut plan = Plan::new(graph, options.numerics);
    plan.slots = rules::realize::place(&cx.graph);
    plan.calls = calls(&cx.graph, costs, &plan.slots, |op| cx.covered(op));
    plan.rewrites = cx.rewrites;
    let findings = prove(graph, &plan, &cx.graph);
    if !findings.is_empty() {
        return unchanged(findings, cx.refusals);
    }
    let report = report(graph, &cx.graph, &plan, costs, cx.refusals, Vec::new());
    Lowered { graph: cx.graph, plan, report }
}

fn report(
    before: &Graph,
    after: &Graph,
    plan: &Plan,
    costs: &Costs,
    refusals: Vec<Refusal>,
    findings: Vec<Finding>,
) -> Report {
    let count = |graph: &Graph| graph.ops.iter().filter(|op| op.kind.communicates()).count();
    Report {
        rewrites: plan.rewrites.clone(),
        refusals,
        findings,
        calls: [count(before), count(after)],
        nanoseconds: [costs.predict(before), costs.predict(after)],
        comm_bytes: plan.peak_bytes(),
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
