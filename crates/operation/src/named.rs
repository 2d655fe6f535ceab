//! The calls of the operations that tensors take part in, by name.

use std::borrow::Cow;

use crate::{Call, Operation, ReduceOp};

/// Calls with the arguments that each operation has. All ranks pass the same, except to [`all_to_all_v`](Self::all_to_all_v).
///
/// ```
/// use antiphon_operation::{Call, Operation, ReduceOp};
///
/// let call = Call::reduce(ReduceOp::Max, 2);
/// assert_eq!(call, Call::new(Operation::Reduce).with_op(ReduceOp::Max).with_root(2));
/// assert_eq!(*Call::all_gather_v(&[3, 0, 5]).counts, [3, 0, 5]);
/// ```
impl<'a> Call<'a> {
    /// Every rank gets the reduction of all inputs.
    #[inline]
    pub fn all_reduce(op: ReduceOp) -> Self {
        Self::new(Operation::AllReduce).with_op(op)
    }

    /// Every rank gets all inputs, in the order of the ranks.
    #[inline]
    pub fn all_gather() -> Self {
        Self::new(Operation::AllGather)
    }

    /// Each rank gets the reduction of its block of all inputs.
    #[inline]
    pub fn reduce_scatter(op: ReduceOp) -> Self {
        Self::new(Operation::ReduceScatter).with_op(op)
    }

    /// Each rank gets its block of every input.
    #[inline]
    pub fn all_to_all() -> Self {
        Self::new(Operation::AllToAll)
    }

    /// `sends[r]` elements go to rank `r`, and `receives[r]` come from it.
    #[inline]
    pub fn all_to_all_v(sends: impl Into<Cow<'a, [usize]>>, receives: impl Into<Cow<'a, [usize]>>) -> Self {
        Self::new(Operation::AllToAllV).with_counts(sends).with_receives(receives)
    }

    /// Every rank gets all inputs, of which rank `r`'s has `counts[r]` elements.
    #[inline]
    pub fn all_gather_v(counts: impl Into<Cow<'a, [usize]>>) -> Self {
        Self::new(Operation::AllGatherV).with_counts(counts)
    }

    /// Rank `r` gets the reduction of its `counts[r]` elements of all inputs.
    #[inline]
    pub fn reduce_scatter_v(counts: impl Into<Cow<'a, [usize]>>, op: ReduceOp) -> Self {
        Self::new(Operation::ReduceScatterV).with_counts(counts).with_op(op)
    }

    /// Every rank gets the root's tensor.
    #[inline]
    pub fn broadcast(root: usize) -> Self {
        Self::new(Operation::Broadcast).with_root(root)
    }

    /// The root gets the reduction of all inputs.
    #[inline]
    pub fn reduce(op: ReduceOp, root: usize) -> Self {
        Self::new(Operation::Reduce).with_op(op).with_root(root)
    }

    /// The root gets all inputs, in the order of the ranks.
    #[inline]
    pub fn gather(root: usize) -> Self {
        Self::new(Operation::Gather).with_root(root)
    }

    /// Each rank gets its block of the root's input.
    #[inline]
    pub fn scatter(root: usize) -> Self {
        Self::new(Operation::Scatter).with_root(root)
    }
}
