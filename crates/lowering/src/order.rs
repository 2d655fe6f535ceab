//! Orders of operations.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::{
    analysis::Analysis,
    graph::Graph,
    lists::Lists,
    op::{Kind, ResultMemory},
};

/// An operation, and one that has to come after it, by their places.
pub(crate) type Edge = (u32, u32);

/// What has to come before what in any order that means the same: definitions before uses, calls and effects in their order,
/// and accesses of storages that are written in theirs.
pub(crate) fn needs(graph: &Graph, analysis: &Analysis) -> Vec<Edge> {
    let mut edges = Vec::with_capacity(3 * graph.ops.len());
    let (mut last_call, mut last_effect) = (None, None);
    // For each storage that is written: the last write, and the reads since.
    let mut writes: Vec<(Option<u32>, Vec<u32>)> = vec![Default::default(); analysis.stores.len()];
    for (place, op) in (0u32..).zip(&graph.ops) {
        let defined = op.args.iter().filter_map(|arg| analysis.def[arg.index()]);
        edges.extend(defined.map(|(before, _)| (before.0, place)));
        if op.kind.communicates() {
            edges.extend(last_call.replace(place).map(|before| (before, place)));
        }
        if matches!(op.kind, Kind::Opaque { effect: true, .. }) {
            edges.extend(last_effect.replace(place).map(|before| (before, place)));
        }
        // A wait stands for the end of its starts, which read their operands until then.
        let is_wait = matches!(op.kind, Kind::Wait { .. });
        let starts = op.args.iter().filter(|_| is_wait).filter_map(|arg| analysis.op_of(graph, *arg));
        for arg in op.args.iter().chain(starts.flat_map(|start| &start.args)) {
            let Some(store) = analysis.store[arg.index()] else { continue };
            if analysis.stores[store.index()].written {
                let (write, reads) = &mut writes[store.index()];
                edges.extend(write.map(|before| (before, place)));
                reads.push(place);
            }
        }
        for (out, value) in op.outs.iter().enumerate() {
            let store = analysis.store[value.index()];
            if let (ResultMemory::Write(_), Some(store)) = (op.kind.result_memory(out), store) {
                let (write, reads) = &mut writes[store.index()];
                edges.extend(reads.drain(..).filter(|read| *read != place).map(|before| (before, place)));
                *write = Some(place);
            }
        }
    }
    edges
}

/// The items in an order that keeps all edges, and is otherwise the given one.
///
/// # Errors
/// The items as they were, and the indices of those that would have to come before themselves.
pub(crate) fn stable<T>(items: Vec<T>, edges: &[Edge]) -> Result<Vec<T>, (Vec<T>, Vec<usize>)> {
    let after = Lists::of(items.len(), edges);
    let mut open = vec![0u32; items.len()];
    edges.iter().for_each(|(_, later)| open[*later as usize] += 1);
    let mut ready: BinaryHeap<Reverse<u32>> =
        (0..items.len() as u32).filter(|&i| open[i as usize] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(items.len());
    while let Some(Reverse(next)) = ready.pop() {
        order.push(next);
        for &later in after.get(next as usize) {
            open[later as usize] -= 1;
            if open[later as usize] == 0 {
                ready.push(Reverse(later));
            }
        }
    }
    if order.len() < items.len() {
        let stuck = (0..items.len()).filter(|&index| open[index] > 0).collect();
        return Err((items, stuck));
    }
    let mut items: Vec<Option<T>> = items.into_iter().map(Some).collect();
    Ok(order.into_iter().map(|index| items[index as usize].take().expect("each index once")).collect())
}
