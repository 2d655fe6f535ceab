//! A call that has nothing to hide behind is made in stream order, and its wait goes.
//!
//! Applies to the start of a collective of one tensor that one operation waits for, where a call in stream order is
//! predicted to end earlier than the wait for one beside it. What goes is found by its token: another collective of the same
//! memory keeps its wait.

use super::{Flight, context::Context, flight};
use crate::{
    costs::{Call, Costs, size_of},
    decisions::Choice,
    graph::{Graph, Names},
    hash::HashMap,
    ids::{OpId, ValueId},
    lowered::Rewrite,
    op::{Coll, Kind},
};

pub(super) fn apply(cx: &mut Context<'_>) {
    let analysis = cx.analysis();
    let until = computed_until(cx.costs, &cx.graph);
    let mut by = HashMap::default();
    for index in 0..cx.graph.ops.len() {
        let start = OpId::from(index);
        let Some((found, coll)) = flight(&cx.graph, &analysis, start) else { continue };
        if !cx.is_ours(&coll.group) || !is_served(cx, start, &coll) {
            continue;
        }
        // A wait for several serves others too.
        let wait = cx.graph.op(found.wait);
        if wait.args.len() != 1 {
            continue;
        }
        let op = cx.graph.op(start);
        let bytes = size_of(&cx.graph, cx.graph.ty(op.args[0]));
        let hidden = until[found.wait.index()].saturating_sub(until[index + 1]);
        let ranks = cx.graph.group(&coll.group).map_or(1, |group| group.size);
        let call = Call { bytes, ranks, hidden, ..Call::default() };
        let [beside, inline] = [Choice::Async, Choice::Sync].map(|choice| cx.costs.time(choice, &call));
        let name = op.name.clone();
        if cx.costs.choose(&call) == Choice::Async {
            cx.refuse(
                "sync",
                &name,
                format!("{hidden} ns of computation run beside it: {beside} ns together, {inline} ns one after the other"),
            );
            continue;
        }
        let text = format!("{name} is made in stream order, predicted at {inline} ns instead of {beside} ns");
        let covered = cx.covered(&name);
        cx.rewrites.push(Rewrite { rule: "sync".into(), ops: covered.clone(), text, bound: None });
        let result = make_sync(&mut cx.graph, &mut cx.names, &found, coll);
        cx.covers.insert(cx.graph.op(start).name.clone(), covered);
        by.insert(found.ready, result);
    }
    remove_waits(&mut cx.graph, &by);
}

/// The graph in which the collective of a start is complete in stream order. Its wait goes, which is found by the start's
/// token; waits of other collectives of the same memory stay.
///
/// # Errors
/// The operation is no start of one tensor for which one wait waits alone.
pub fn elide(graph: &Graph, start: OpId) -> Result<Graph, String> {
    let refused = || format!("{} is no start of one tensor with a wait of its own", graph.op(start).name);
    let (found, coll) = flight(graph, &graph.analyse(), start).ok_or_else(refused)?;
    if graph.op(found.wait).args.len() != 1 {
        return Err(refused());
    }
    let (mut graph, mut names) = (graph.clone(), graph.names());
    let result = make_sync(&mut graph, &mut names, &found, coll);
    remove_waits(&mut graph, &HashMap::from_iter([(found.ready, result)]));
    Ok(graph)
}

/// Puts a call in stream order into the place of a start, and takes the operands from its wait. The call's result is new.
fn make_sync(graph: &mut Graph, names: &mut Names, found: &Flight, coll: Coll) -> ValueId {
    let name = names.fresh(&format!("{}_sync", graph.op(found.start).name));
    let ty = graph.ty(found.ready).clone();
    let result = graph.add_value(names, &format!("{name}_result"), ty);
    let op = &mut graph.ops[found.start.index()];
    (op.name, op.kind, op.outs) = (name, Kind::Sync { coll }, vec![result]);
    let wait = &mut graph.ops[found.wait.index()];
    (wait.kind, wait.args, wait.outs) = (Kind::Wait { tokens: Vec::new() }, Vec::new(), Vec::new());
    result
}

/// Removes waits without tokens, and puts new results where their results were used.
fn remove_waits(graph: &mut Graph, by: &HashMap<ValueId, ValueId>) {
    graph.ops.retain(|op| !matches!(&op.kind, Kind::Wait { tokens } if tokens.is_empty()));
    graph.substitute(by);
}

/// For each place of a graph, the nanoseconds that the computing stream is busy before.
pub(super) fn computed_until(costs: &Costs, graph: &Graph) -> Vec<u64> {
    let mut until = vec![0u64];
    for op in &graph.ops {
        let time = if matches!(op.kind, Kind::Start { .. }) { 0 } else { costs.op(graph, op) };
        until.push(until[until.len() - 1].saturating_add(time));
    }
    until
}

/// Whether a runtime has such a call in stream order: collectives of numbers, in parts whose sizes are known.
fn is_served(cx: &Context<'_>, start: OpId, coll: &crate::Coll) -> bool {
    let ty = cx.graph.ty(cx.graph.op(start).args[0]);
    let mut rows = coll.sends.iter().chain(&coll.receives).flatten();
    let is_split =
        coll.sends.is_some() == coll.receives.is_some() && rows.all(|rows| rows.as_constant().is_some());
    ty.dtype.number().is_some() && is_split
}
