//! The order in which a communicator adds up.

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{Communicator, Nodes};
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use super::Reduce;

/// A reduction of the contributions of ranks in the order of their communicator: that of the ranks, where all of them are on one
/// node; else the ranks of each node in that order, and then the nodes' results in the order of the nodes' first ranks.
pub(crate) struct InOrder {
    pub(crate) reducer: Reducer,
    pub(crate) nodes: Option<Nodes>,
}

impl InOrder {
    #[inline]
    pub(crate) fn new(comm: &Communicator, dtype: DType, op: ReduceOp) -> Self {
        Self { reducer: Reducer::new(dtype, op), nodes: comm.several_nodes().cloned() }
    }
}

impl Reduce for InOrder {
    #[inline]
    unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize) {
        // SAFETY: passed on.
        unsafe {
            match &self.nodes {
                None => self.reducer.run(destination, sources, count),
                Some(nodes) => self.reducer.run_by_node(destination, sources, nodes.of_ranks(), count),
            }
        }
    }

    fn sum_size(&self) -> usize {
        self.reducer.accumulator_size()
    }

    unsafe fn accumulate(&self, sums: *mut u8, sources: &[*const u8], count: usize) {
        // SAFETY: passed on.
        unsafe { self.reducer.accumulate(sums, sources, count) }
    }

    unsafe fn conclude(&self, destination: *mut u8, sums: &[*const u8], count: usize) {
        let ranks = self.nodes.as_ref().map_or(sums.len(), Nodes::world_size);
        // SAFETY: passed on.
        unsafe { self.reducer.conclude(destination, sums, ranks, count) }
    }
}
