//! The operations, as methods of a communicator.

use antiphon_fabric::{Communicator, Operation};
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use crate::{
    ReduceOp,
    all_reduce::{self, AllReduceOptions},
    arguments::{Input, Output},
    error::Result,
    fusion::{self, Checked, FusedAllReduce, Operand},
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

    /// Rank `r` gets the reduction of everybody's `r`-th block: `W·n` elements in, `n` out.
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

    /// Everybody's buffer becomes the root's.
    fn broadcast<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, root: usize) -> Result<()>;

    /// Everybody's output becomes the root's input; the others pass `None`, or anything.
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
    fn all_reduce<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let input = Input::new(Operation::AllReduce, &input)?;
        all_reduce::run(
            self,
            input,
            Output::new(Operation::AllReduce, &mut output)?,
            op,
            AllReduceOptions::default(),
        )
    }

    #[inline]
    fn all_reduce_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, op: ReduceOp) -> Result<()> {
        let buffer = Output::new(Operation::AllReduce, &mut buffer.into())?;
        all_reduce::run(self, buffer.as_input(), buffer, op, AllReduceOptions::default())
    }

    fn all_reduce_with<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        options: impl Into<AllReduceOptions>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let input = Input::new(Operation::AllReduce, &input)?;
        all_reduce::run(self, input, Output::new(Operation::AllReduce, &mut output)?, op, options.into())
    }

    fn all_reduce_fused(&self, call: FusedAllReduce<Operand<'_>>) -> Result<()> {
        fusion::run(self, Checked::new(Device::Host, &call)?)
    }

    fn all_gather<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let input = Input::new(Operation::AllGather, &input)?;
        gather_scatter::all_gather(self, input, Output::new(Operation::AllGather, &mut output)?)
    }

    fn all_gather_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>) -> Result<()> {
        gather_scatter::all_gather_in_place(self, Output::new(Operation::AllGather, &mut buffer.into())?)
    }

    fn reduce_scatter<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let input = Input::new(Operation::ReduceScatter, &input)?;
        gather_scatter::reduce_scatter(self, input, Output::new(Operation::ReduceScatter, &mut output)?, op)
    }

    fn reduce_scatter_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, op: ReduceOp) -> Result<()> {
        let buffer = Output::new(Operation::ReduceScatter, &mut buffer.into())?;
        gather_scatter::reduce_scatter_in_place(self, buffer, op)
    }

    fn all_to_all<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let input = Input::new(Operation::AllToAll, &input)?;
        gather_scatter::all_to_all(self, input, Output::new(Operation::AllToAll, &mut output)?)
    }

    fn all_to_all_in_place<'o>(&self, buffer: impl Into<TensorViewMut<'o>>) -> Result<()> {
        let buffer = Output::new(Operation::AllToAll, &mut buffer.into())?;
        gather_scatter::all_to_all(self, buffer.as_input(), buffer)
    }

    fn all_to_all_v<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        sends: &[usize],
        output: impl Into<TensorViewMut<'o>>,
        receives: &[usize],
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let input = Input::new(Operation::AllToAll, &input)?;
        let output = Output::new(Operation::AllToAll, &mut output)?;
        gather_scatter::all_to_all_v(self, input, sends, output, receives)
    }

    fn broadcast<'o>(&self, buffer: impl Into<TensorViewMut<'o>>, root: usize) -> Result<()> {
        let buffer = Output::new(Operation::Broadcast, &mut buffer.into())?;
        gather_scatter::broadcast(self, Some(buffer.as_input()), buffer, root)
    }

    fn broadcast_from<'i, 'o>(
        &self,
        input: Option<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()> {
        let input = self.if_root(root, input, |input| Input::new(Operation::Broadcast, &input))?;
        let output = Output::new(Operation::Broadcast, &mut output.into())?;
        gather_scatter::broadcast(self, input, output, root)
    }

    fn reduce<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: Option<TensorViewMut<'o>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let input = Input::new(Operation::Reduce, &input.into())?;
        let output = self.if_root(root, output, |mut output| Output::new(Operation::Reduce, &mut output))?;
        gather_scatter::reduce(self, input, output, op, root)
    }

    fn reduce_in_place<'o>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let buffer = Output::new(Operation::Reduce, &mut buffer.into())?;
        gather_scatter::reduce(self, buffer.as_input(), Some(buffer), op, root)
    }

    fn gather<'i, 'o>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: Option<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()> {
        let input = Input::new(Operation::Gather, &input.into())?;
        let output = self.if_root(root, output, |mut output| Output::new(Operation::Gather, &mut output))?;
        gather_scatter::gather(self, input, output, root)
    }

    fn scatter<'i, 'o>(
        &self,
        input: Option<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        root: usize,
    ) -> Result<()> {
        let input = self.if_root(root, input, |input| Input::new(Operation::Scatter, &input))?;
        let output = Output::new(Operation::Scatter, &mut output.into())?;
        gather_scatter::scatter(self, input, output, root)
    }
}

/// Only the root's optional tensor counts; what others pass is not even looked at.
trait IfRoot {
    fn if_root<T, U>(
        &self,
        root: usize,
        tensor: Option<T>,
        check: impl FnOnce(T) -> Result<U>,
    ) -> Result<Option<U>>;
}

impl IfRoot for Communicator {
    fn if_root<T, U>(
        &self,
        root: usize,
        tensor: Option<T>,
        check: impl FnOnce(T) -> Result<U>,
    ) -> Result<Option<U>> {
        tensor.filter(|_| self.rank() == root).map(check).transpose()
    }
}
