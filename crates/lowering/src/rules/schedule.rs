//! Starts come as early as their operands allow, and waits as late as their results do.
//!
//! Applies where [`Options::overlap`](crate::Options::overlap) asks for it. The calls of a group keep their order. A start is
//! put behind the last operation that it needs, and behind the call before it; a wait before the first that needs it. Where
//! the predicted time would not become less, everything stays.

use crate::{lower::Context, op::Kind, order, plan::Rewrite};

pub(super) fn apply(cx: &mut Context<'_>) {
    if !cx.options.overlap {
        return;
    }
    let before = cx.costs.predict(&cx.graph);
    let ops = cx.graph.ops.clone();
    // Starts are taken as soon as they can, waits as soon as somebody cannot go on without them: the order among the rest
    // stays, so a list with starts first and waits last, sorted, is the schedule.
    let rank = |op: &crate::Op| match op.kind {
        Kind::Input | Kind::Constant => 0,
        Kind::Start { .. } => 1,
        Kind::Wait { .. } => 3,
        _ => 2,
    };
    let mut places: Vec<usize> = (0..ops.len()).collect();
    places.sort_by_key(|place| (rank(&ops[*place]), *place));
    let mut position = vec![0; ops.len()];
    places.iter().enumerate().for_each(|(new, old)| position[*old] = new as u32);
    let needs = order::needs(&cx.graph, &cx.graph.analyse()).into_iter();
    let needs: Vec<order::Edge> = needs.map(|(a, b)| (position[a as usize], position[b as usize])).collect();
    let list = places.iter().map(|place| ops[*place].clone()).collect();
    let Ok(sorted) = order::stable(list, &needs) else { return };
    let mut graph = cx.graph.clone();
    graph.ops = sorted;
    let after = cx.costs.predict(&graph);
    if after < before && crate::verify(&graph).is_empty() {
        let text = format!("{before} ns are predicted to become {after} ns");
        let starts = graph.ops.iter().filter(|op| matches!(op.kind, Kind::Start { .. }));
        let names = starts.map(|op| op.name.clone()).collect();
        cx.rewrites.push(Rewrite { rule: "schedule".into(), ops: names, text, bound: None });
        cx.graph = graph;
    }
}
