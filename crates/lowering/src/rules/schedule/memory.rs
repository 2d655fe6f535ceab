//! The memory that an order of operations takes.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::{
    analysis::Analysis,
    costs::size_of,
    graph::{Graph, Op},
    op::ResultMemory,
};

/// The most operations that are looked at for one whose results fit.
const MAX_LOOKS: usize = 16;

/// The bytes of storages that have been allocated and are still used.
pub(super) struct Memory<'a> {
    analysis: &'a Analysis,
    live: u64,
    bytes: Vec<u64>,
    /// For each storage, how many uses of its values are to come. The caller's storages and outputs never end.
    uses: Vec<u32>,
}

impl<'a> Memory<'a> {
    pub(super) fn of(graph: &Graph, analysis: &'a Analysis) -> Self {
        let bytes = analysis.stores.iter().map(|store| size_of(graph, graph.ty(store.root))).collect();
        let mut uses = vec![0; analysis.stores.len()];
        for arg in graph.ops.iter().flat_map(|op| &op.args).chain(&graph.outputs) {
            if let Some(store) = analysis.store[arg.index()] {
                uses[store.index()] += 1;
            }
        }
        Self { analysis, live: 0, bytes, uses }
    }

    /// What an operation allocates.
    fn allocated(&self, op: &Op) -> u64 {
        let fresh = |index: &usize| matches!(op.kind.result_memory(*index), ResultMemory::Fresh);
        let outs =
            (0..op.outs.len()).filter(fresh).filter_map(|index| self.analysis.store[op.outs[index].index()]);
        outs.fold(0, |sum, store| sum.saturating_add(self.bytes[store.index()]))
    }

    pub(super) fn run(&mut self, op: &Op) {
        self.live = self.live.saturating_add(self.allocated(op));
        for store in op.args.iter().filter_map(|arg| self.analysis.store[arg.index()]) {
            self.uses[store.index()] -= 1;
            if self.uses[store.index()] == 0 {
                self.live = self.live.saturating_sub(self.bytes[store.index()]);
            }
        }
    }

    /// The first of the operations whose results fit into the budget; the first of all where there is no choice.
    pub(super) fn pop(
        &self,
        graph: &Graph,
        ready: &mut BinaryHeap<(u64, Reverse<u32>)>,
        budget: u64,
        must: bool,
    ) -> Option<u32> {
        let mut passed = Vec::new();
        let mut found = None;
        while let Some(next) = ready.pop() {
            let (_, Reverse(place)) = next;
            if self.live.saturating_add(self.allocated(&graph.ops[place as usize])) <= budget {
                found = Some(place);
                break;
            }
            passed.push(next);
            if passed.len() == MAX_LOOKS {
                break;
            }
        }
        if found.is_none() && must && !passed.is_empty() {
            found = Some(passed.remove(0).1.0);
        }
        ready.extend(passed);
        found
    }
}

/// The most bytes that are live at once, if the operations run in this order.
pub(super) fn peak<'g>(graph: &Graph, analysis: &Analysis, ops: impl Iterator<Item = &'g Op>) -> u64 {
    let mut memory = Memory::of(graph, analysis);
    ops.fold(0, |peak, op| {
        let during = memory.live.saturating_add(memory.allocated(op));
        memory.run(op);
        peak.max(during)
    })
}
