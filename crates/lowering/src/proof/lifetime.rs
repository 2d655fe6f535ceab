//! When a storage is in use, for the proof.

use crate::{analysis::Analysis, faults::Fault, graph::Graph, ids::StoreId, op::Kind};

/// The first operation that touches a storage, and the last: the wait, if that is for a collective that reads it.
pub(super) fn lifetime(graph: &Graph, analysis: &Analysis, store: StoreId) -> Option<(usize, usize)> {
    let storage = &analysis.stores[store.index()];
    let first = analysis.def[storage.root.index()]?.0.index();
    let mut last = first;
    for value in analysis.values(store) {
        for user in analysis.uses(*value) {
            last = last.max(user.index());
            for out in graph.op(*user).outs.iter().filter(|_| !Fault::ProofEndsAtStart.is_present()) {
                let waits = analysis.uses(*out).iter().filter(|wait| {
                    matches!(graph.op(**wait).kind, Kind::Wait { .. })
                        && matches!(graph.op(*user).kind, Kind::Start { .. })
                });
                last = waits.map(|wait| wait.index()).fold(last, usize::max);
            }
            if Fault::ProofEndsAtFirstUse.is_present() {
                return Some((first, last));
            }
        }
        last = last.max(analysis.def[value.index()]?.0.index());
    }
    match () {
        () if Fault::ProofBeginsLate.is_present() => Some((first + 1, last)),
        () if Fault::ProofNeverEnds.is_present() => Some((first, graph.ops.len() - 1)),
        () => Some((first, last)),
    }
}
