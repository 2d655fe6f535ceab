//! The operations, as methods of a communicator.

#[cfg(not(loom))]
mod cuda;

use antiphon_fabric::{Communicator, FabricError, Operation};
use antiphon_operation::Call;
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use crate::{
    ReduceOp,
    all_reduce::{self, AllReduceOptions},
    arguments::{CheckedCall, Input, Output},
    error::Result,
    fusion::{self, FusedAllReduce, Operand, Validated},
    gather_scatter,
};

/// The collective operations of a [`Communicator`]. `send`, `recv` and `barrier` are methods of its own.
///
/// `W` is the world size. All ranks pass the same dtype, counts, operator and root. An operation that is called
/// `…_in_place` takes one buffer for input and output.
///
/// # Errors
/// Every operation returns [`CollectiveError`](crate::CollectiveError): arguments that make no sense are found before
/// anything happens; [`Fabric`](crate::CollectiveError::Fabric) holds what went wrong between the ranks, after which
/// the communicator is unusable. A rank whose arguments are refused takes no part: if the others' are not, they wait for
/// it until it calls something else, leaves, or the deadline passes.
pub trait Collectives {
    /// Any of the operations below, as a value. A rank need not pass a tensor that is the root's alone.
    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()>;

    /// [`call`](Self::call) with one buffer for input and output, where the operation allows that.
    fn call_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()>;

    /// `output[i] = op over all ranks of input[i]`, on every rank; both of `n` elements.
    fn all_reduce<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
    ) -> Result<()>;

    /// [`all_reduce`](Self::all_reduce) where the result replaces the input.
    fn all_reduce_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, op: ReduceOp) -> Result<()>;

    /// [`all_reduce`](Self::all_reduce) as the options say, by a given [`Algorithm`](crate::all_reduce::Algorithm) for one;
    /// they are the same on all ranks.
    fn all_reduce_with<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        options: impl Into<AllReduceOptions>,
    ) -> Result<()>;

    /// A sum with what a transformer layer does with it: residual, RMS norm, quantisation. See [`fusion`](crate::fusion).
    fn all_reduce_fused(&self, call: FusedAllReduce<Operand<'_>>) -> Result<()>;

    /// The inputs of all ranks, one after the other: `n` elements in, `W·n` out.
    fn all_gather<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()>;

    /// [`all_gather`](Self::all_gather) where each rank's input is its own block of the `W·n` elements.
    fn all_gather_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>) -> Result<()>;

    /// Rank `r` gets the reduction of all ranks' `r`-th blocks: `W·n` elements in, `n` out.
    fn reduce_scatter<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
    ) -> Result<()>;

    /// [`reduce_scatter`](Self::reduce_scatter) where the result replaces this rank's own block of the `W·n`
    /// elements; the other blocks keep their values.
    fn reduce_scatter_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, op: ReduceOp) -> Result<()>;

    /// Block `r` of the input goes to rank `r`, whose block comes to the same place of the output: `W·n` elements in,
    /// as many out.
    fn all_to_all<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()>;

    /// [`all_to_all`](Self::all_to_all) where the blocks that come replace those that go.
    fn all_to_all_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>) -> Result<()>;

    /// [`all_to_all`](Self::all_to_all) with blocks of uneven lengths: `sends[r]` elements go to rank `r`,
    /// `receives[r]` come from it, packed in rank order. Counts that do not match are an error on every rank
    /// ([`SplitsDisagree`](crate::CollectiveError::SplitsDisagree)) that leaves the communicator usable.
    fn all_to_all_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        sends: &[usize],
        output: impl Into<TensorViewMut<'o>>,
        receives: &[usize],
    ) -> Result<()>;

    /// [`all_gather`](Self::all_gather) with parts of uneven lengths: `counts[r]` elements come from rank `r`, to every rank.
    /// All ranks pass the same counts.
    fn all_gather_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        counts: &[usize],
    ) -> Result<()>;

    /// [`reduce_scatter`](Self::reduce_scatter) with parts of uneven lengths: rank `r` gets the reduction of `counts[r]`
    /// elements of every rank. All ranks pass the same counts.
    fn reduce_scatter_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()>;

    /// Every rank's buffer gets the root's content.
    fn broadcast<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, root: usize) -> Result<()>;

    /// Every rank's output gets the root's input; the other ranks pass `None`, or any input.
    fn broadcast_from<'i, 'o>(
        &self,
        input: Option<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()>;

    /// The root's output becomes the reduction of all inputs; the others pass `None`, or anything.
    fn reduce<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: Option<TensorViewMut<'o>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()>;

    /// [`reduce`](Self::reduce) where the result replaces the root's input; the other buffers keep their values.
    fn reduce_in_place<'o>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()>;

    /// The root gets the inputs of all ranks, one after the other: `n` elements in, `W·n` out.
    fn gather<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: Option<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()>;

    /// Rank `r` gets the `r`-th block of the root's input: `W·n` elements in, `n` out.
    fn scatter<'i, 'o>(
        &self,
        input: Option<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()>;
}

impl Collectives for Communicator {
    #[inline]
    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        mut output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        if call.operation == Operation::Barrier {
            return Ok(self.barrier()?);
        }
        let ranks = (self.rank(), self.world_size());
        run(self, &CheckedCall::of_tensors(Device::Host, call, ranks, input.as_ref(), output.as_mut())?)
    }

    #[inline]
    fn call_in_place(&self, call: &Call<'_>, mut buffer: TensorViewMut<'_>) -> Result<()> {
        let ranks = (self.rank(), self.world_size());
        run(self, &CheckedCall::of_buffer(Device::Host, call, ranks, &mut buffer)?)
    }

    #[inline]
    fn all_reduce<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.all_reduce_with(input, output, op, AllReduceOptions::default())
    }

    #[inline]
    fn all_reduce_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, op: ReduceOp) -> Result<()> {
        self.call_in_place(&Call::new(Operation::AllReduce).with_op(op), buffer.into())
    }

    #[inline]
    fn all_reduce_with<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        options: impl Into<AllReduceOptions>,
    ) -> Result<()> {
        let call = Call::new(Operation::AllReduce).with_op(op).with_algorithm(options.into().number());
        self.call(&call, Some(input.into()), Some(output.into()))
    }

    fn all_reduce_fused(&self, call: FusedAllReduce<Operand<'_>>) -> Result<()> {
        fusion::run(self, Validated::new(Device::Host, &call)?)
    }

    fn all_gather<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        self.call(&Call::new(Operation::AllGather), Some(input.into()), Some(output.into()))
    }

    fn all_gather_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>) -> Result<()> {
        self.call_in_place(&Call::new(Operation::AllGather), buffer.into())
    }

    fn reduce_scatter<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::new(Operation::ReduceScatter).with_op(op);
        self.call(&call, Some(input.into()), Some(output.into()))
    }

    fn reduce_scatter_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, op: ReduceOp) -> Result<()> {
        self.call_in_place(&Call::new(Operation::ReduceScatter).with_op(op), buffer.into())
    }

    fn all_to_all<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        self.call(&Call::new(Operation::AllToAll), Some(input.into()), Some(output.into()))
    }

    fn all_to_all_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>) -> Result<()> {
        self.call_in_place(&Call::new(Operation::AllToAll), buffer.into())
    }

    fn all_to_all_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        sends: &[usize],
        output: impl Into<TensorViewMut<'o>>,
        receives: &[usize],
    ) -> Result<()> {
        let call = Call::new(Operation::AllToAllV).with_counts(sends).with_receives(receives);
        self.call(&call, Some(input.into()), Some(output.into()))
    }

    fn all_gather_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        counts: &[usize],
    ) -> Result<()> {
        let call = Call::new(Operation::AllGatherV).with_counts(counts);
        self.call(&call, Some(input.into()), Some(output.into()))
    }

    fn reduce_scatter_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::new(Operation::ReduceScatterV).with_counts(counts).with_op(op);
        self.call(&call, Some(input.into()), Some(output.into()))
    }

    fn broadcast<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, root: usize) -> Result<()> {
        self.call_in_place(&Call::new(Operation::Broadcast).with_root(root), buffer.into())
    }

    fn broadcast_from<'i, 'o>(
        &self,
        input: Option<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()> {
        self.call(&Call::new(Operation::Broadcast).with_root(root), input, Some(output.into()))
    }

    fn reduce<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: Option<TensorViewMut<'o>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let call = Call::new(Operation::Reduce).with_op(op).with_root(root);
        self.call(&call, Some(input.into()), output)
    }

    fn reduce_in_place<'o>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let call = Call::new(Operation::Reduce).with_op(op).with_root(root);
        self.call_in_place(&call, buffer.into())
    }

    fn gather<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: Option<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()> {
        self.call(&Call::new(Operation::Gather).with_root(root), Some(input.into()), output)
    }

    fn scatter<'i, 'o>(
        &self,
        input: Option<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()> {
        self.call(&Call::new(Operation::Scatter).with_root(root), input, Some(output.into()))
    }
}

/// Checks a call of tensors that were checked alone, and carries it out on host memory.
pub(crate) fn call_checked(comm: &Communicator, call: &Call<'_>, input: Input, output: Output) -> Result<()> {
    run(comm, &CheckedCall::new(call, (comm.rank(), comm.world_size()), Some(input), Some(output))?)
}

/// Carries out a call on host memory.
fn run(comm: &Communicator, call: &CheckedCall<'_>) -> Result<()> {
    match call.signature.operation {
        Operation::AllReduce => all_reduce::run(comm, call),
        operation if !operation.is_call() => {
            let text = format!("{operation} is no call with one input and one output");
            Err(FabricError::invalid(text).into())
        }
        _ => gather_scatter::run(comm, call),
    }
}
