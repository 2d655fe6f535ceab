//! Mixed collectives: a sum over tensor parallel ranks and a gather or scatter over data parallel ranks, in one call.
//!
//! A [`MixedLayout`] puts ranks into `dp` groups of `tp` ranks. On one node, rank `r` is tensor parallel rank `r mod tp` of group `r / tp`; a
//! group that is on several nodes has neighbours on each.
//! Attention that runs data parallel beside an MLP that runs tensor parallel needs two operations for each layer. Group `d` has
//! block `d` of the tokens:
//!
//! | operation | input of a rank of group `d` | output of a rank of group `d` |
//! | --- | --- | --- |
//! | all-reduce + all-gather | its part of block `d` | every block, each the sum over its group |
//! | reduce-scatter + all-reduce | its part of every block | block `d`, the sum over all ranks |
//!
//! Each operation is the other one reversed: some ranks *contribute* to a block, the block belongs to a *group*, and some ranks
//! *receive* it.
//!
//! | mode | all-reduce + all-gather | reduce-scatter + all-reduce |
//! | --- | --- | --- |
//! | [`Waits`](MixedMode::Waits), one hop | every rank reduces every block | every rank reduces the block of its group |
//! | [`Bytes1`](MixedMode::Bytes1), two hops | a group divides its block among its ranks, which send the sums to all ranks | the same, and the sums go to the group |
//! | [`Composed`](MixedMode::Composed) | `all_reduce` in the group, then `all_gather` | `reduce_scatter` between the groups, then `all_reduce` |
//!
//! On the host a layout may have several nodes, which must be those of the ranks. Then `Waits` sends a node the contributions that its ranks
//! receive. In [`Bytes1`](MixedMode::Bytes1) the ranks of a node add up among themselves first, and every receiver combines the sums of the nodes. In
//! [`Bytes2`](MixedMode::Bytes2) the ranks at one place of their nodes, a rail, divide these sums, and the results are gathered.
//!
//! Sums accumulate in f32 (f64 for f64, wrapping i64 for integers), in ascending rank order within each node and then in the order of the nodes, and
//! are rounded once. So all modes but `Composed` give the same bits on every rank that shares an output, for every way to cut the tokens into
//! batches. `Composed` rounds a reduce-scatter + all-reduce twice.
//!
//! Blocks need not be equally long: [`MixedCall::counts`] has the length of each.
//!
//! `call` has the call and its validation, `flow` who contributes and receives, `handler` the public type for host memory, `host` its algorithms,
//! `between` and `division` those between nodes, and `choice` the tables; `cuda` and kernels.cuh have the same for GPUs of one node, and `rails` for
//! those of several.

mod between;
mod call;
mod choice;
mod cuda;
mod division;
mod flow;
mod handler;
mod host;
mod rails;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

use antiphon_fabric::Operation;
pub use antiphon_topology::{MixedLayout, MixedOp};

pub use call::MixedCall;
pub use cuda::CudaMixedHandler;
#[cfg(test)]
pub(crate) use cuda::Mixing;
pub use handler::MixedHandler;
pub use rails::CudaMixedNodes;

use crate::all_reduce::Algorithm;

/// How a mixed collective is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MixedMode {
    /// One hop, with the fewest waits: a rank sends all that a receiver needs, and every receiver reduces.
    Waits = 1,
    /// Two hops, with fewer bytes: each rank of a group reduces a part, and the parts are gathered. Between nodes, the ranks of a node add
    /// up a part each, and every receiver combines the sums of the nodes. For layouts that share tensors inside nodes.
    Bytes1 = 2,
    /// Two collectives, one after the other.
    Composed = 3,
    /// Three hops, with the fewest bytes between nodes: the ranks of a node add up a part each, each rank of a rail combines a part of
    /// the sums of the nodes, and the results are gathered. For layouts that share tensors between nodes, on the host.
    Bytes2 = 4,
}

impl MixedMode {
    /// All modes, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Waits, Self::Bytes1, Self::Composed, Self::Bytes2];

    /// The modes of a layout: [`Composed`](Self::Composed), the last, where there are two collectives, [`Bytes1`](Self::Bytes1) where the
    /// ranks of a node share tensors, and [`Bytes2`](Self::Bytes2) where nodes do.
    pub fn valid_in(layout: &MixedLayout) -> &'static [Self] {
        use MixedMode::{Bytes1, Bytes2, Composed, Waits};
        match (layout.use_local_tp(), layout.use_inter_tp(), layout.use_dp()) {
            (true, true, true) => &[Waits, Bytes1, Bytes2, Composed],
            (true, true, false) => &[Waits, Bytes1, Bytes2],
            (true, false, true) => &[Waits, Bytes1, Composed],
            (true, false, false) => &[Waits, Bytes1],
            (false, true, true) => &[Waits, Bytes2, Composed],
            (false, true, false) => &[Waits, Bytes2],
            (false, false, _) => &[Waits],
        }
    }

    /// The modes of a layout that give the same bits, of which one is chosen where the caller names none.
    fn fused_in(layout: &MixedLayout) -> &'static [Self] {
        match Self::valid_in(layout) {
            [fused @ .., Self::Composed] => fused,
            fused => fused,
        }
    }

    /// The name, as tables and errors write it.
    pub fn name(self) -> &'static str {
        let name = Operation::AllReduceAllGather.row().algorithm(self as u8);
        name.expect("the row of a mixed operation has every mode's name")
    }

    /// The algorithm that an all-reduce of all ranks runs by in this mode.
    fn of_all_reduce(self) -> Algorithm {
        if self == Self::Waits { Algorithm::OneShot } else { Algorithm::TwoShot }
    }
}

impl std::fmt::Display for MixedMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The operation of the table that a mixed operation is.
pub fn operation_of(op: MixedOp) -> Operation {
    match op {
        MixedOp::AllReduce => Operation::AllReduce,
        MixedOp::AllGather => Operation::AllGather,
        MixedOp::ReduceScatter => Operation::ReduceScatter,
        MixedOp::AllReduceAllGather => Operation::AllReduceAllGather,
        MixedOp::ReduceScatterAllReduce => Operation::ReduceScatterAllReduce,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_those_that_the_layout_has_a_use_for() {
        use MixedMode::{Bytes1, Bytes2, Composed, Waits};
        let modes = |local: [usize; 2], inter: [usize; 2]| {
            let world_size = local.into_iter().chain(inter).product();
            let layout = MixedLayout::builder(world_size, 0)
                .local_size(local[0] * local[1])
                .local_tp(local[0])
                .inter_tp(inter[0])
                .build()
                .unwrap();
            let (valid, fused) = (MixedMode::valid_in(&layout), MixedMode::fused_in(&layout));
            assert!(valid.starts_with(fused) && !fused.contains(&Composed));
            assert!(valid[fused.len()..].iter().all(|&mode| mode == Composed));
            valid
        };
        assert_eq!(modes([2, 2], [1, 1]), [Waits, Bytes1, Composed]);
        assert_eq!(modes([4, 1], [1, 1]), [Waits, Bytes1]);
        assert_eq!(modes([1, 4], [1, 1]), [Waits]);
        assert_eq!(modes([2, 1], [1, 2]), [Waits, Bytes1, Composed]);
        assert_eq!(modes([2, 2], [2, 1]), [Waits, Bytes1, Bytes2, Composed]);
        assert_eq!(modes([2, 1], [2, 1]), [Waits, Bytes1, Bytes2]);
        assert_eq!(modes([1, 2], [2, 1]), [Waits, Bytes2, Composed]);
        assert_eq!(modes([1, 1], [2, 2]), [Waits, Bytes2, Composed]);
        assert_eq!(modes([1, 1], [3, 1]), [Waits, Bytes2]);
        assert_eq!(modes([1, 2], [1, 2]), [Waits]);
    }

    #[test]
    fn rows_name_every_mode() {
        for operation in [Operation::AllReduceAllGather, Operation::ReduceScatterAllReduce] {
            let names = MixedMode::ALL.map(|mode| operation.row().algorithm(mode as u8));
            assert_eq!(names, ["waits", "bytes1", "composed", "bytes2"].map(Some));
        }
    }
}
