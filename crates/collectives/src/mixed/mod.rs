//! Mixed collectives: a sum over tensor parallel ranks and a gather or scatter over data parallel ranks, in one call.
//!
//! A [`MixedLayout`] puts ranks into `dp` groups of `tp` ranks: rank `r` is tensor parallel rank `r mod tp` of group `r / tp`.
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
//! Sums accumulate in f32 (f64 for f64, wrapping i64 for integers) in ascending rank order and are rounded once, so the first two
//! modes give the same bits on every rank that shares an output, for every way to cut the tokens into batches. `Composed` rounds a
//! reduce-scatter + all-reduce twice.
//!
//! Blocks need not be equally long: [`MixedCall::counts`] has the length of each.
//!
//! `call` has the call and its validation, `handler` the public type for host memory, `host` its algorithms, and `choice` the
//! tables; `cuda` and kernels.cuh have the same for GPUs.

mod call;
mod choice;
mod cuda;
mod handler;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

use antiphon_fabric::Operation;
pub use antiphon_topology::{MixedLayout, MixedOp};

pub use call::MixedCall;
pub use cuda::CudaMixedHandler;
#[cfg(test)]
pub(crate) use cuda::Mixing;
pub use handler::MixedHandler;

use crate::all_reduce::Algorithm;

/// How a mixed collective is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MixedMode {
    /// One hop, with the fewest waits: a rank sends all that a receiver needs, and every receiver reduces.
    Waits = 1,
    /// Two hops, with the fewest bytes: each rank of a group reduces a part, and the parts are gathered.
    Bytes1 = 2,
    /// Two collectives, one after the other.
    Composed = 3,
}

impl MixedMode {
    /// All modes, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Waits, Self::Bytes1, Self::Composed];
    /// The modes that give the same bits, of which one is chosen where the caller names none.
    const FUSED: [Self; 2] = [Self::Waits, Self::Bytes1];

    /// The modes of a layout: [`Composed`](Self::Composed) where there are two collectives, and two hops where groups have several ranks.
    pub fn valid_in(layout: &MixedLayout) -> &'static [Self] {
        match (layout.use_tp(), layout.use_dp()) {
            (true, true) => &Self::ALL,
            (true, false) => &Self::FUSED,
            _ => &Self::ALL[..1],
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
        use MixedMode::{Bytes1, Composed, Waits};
        let modes = |tp: usize, dp: usize| {
            let layout = MixedLayout::builder(tp * dp, 0).local_tp(tp).build().unwrap();
            MixedMode::valid_in(&layout)
        };
        assert_eq!(modes(2, 2), [Waits, Bytes1, Composed]);
        assert_eq!(modes(4, 1), [Waits, Bytes1]);
        assert_eq!(modes(1, 4), [Waits]);
    }
}
