//! The operations on host memory, as methods of a communicator.

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

/// Defines a named operation of [`Collectives`].
macro_rules! on_host {
    ([$($doc:tt)*] $name:ident<$($lifetime:lifetime),+>($($parameter:ident: $type:ty),+)
        $make:ident($call:expr, $($tensor:expr),+)) => {
        $($doc)*
        #[inline]
        fn $name<$($lifetime),+>(&self, $($parameter: $type),+) -> Result<()> {
            self.$make(&$call, $($tensor),+)
        }
    };
}

/// The collective operations of a [`Communicator`], on tensors in host memory. `send`, `recv` and `barrier` are methods of its own.
/// [`StreamCollectives`](crate::StreamCollectives) has the same operations for GPUs.
///
/// `W` is the world size. All ranks pass the same dtype, counts, operator and root. An operation that is called
/// `…_in_place` takes one buffer for input and output.
///
/// Tensors are contiguous, of any shape: each method says how many elements they have. Input and output have one dtype:
/// any, where elements only move; numbers where they are reduced, and integers for [`Band`](ReduceOp::Band),
/// [`Bor`](ReduceOp::Bor) and [`Bxor`](ReduceOp::Bxor).
///
/// A backend implements [`call`](Self::call), [`call_in_place`](Self::call_in_place) and
/// [`all_reduce_fused`](Self::all_reduce_fused); every other method makes one of these calls.
///
/// ```
/// use antiphon_collectives::{CollectiveError, Collectives, ReduceOp};
/// use antiphon_fabric::LocalWorld;
///
/// let results = LocalWorld::run(2, |comm| {
///     let (mut row, mut block) = ([0; 4], [0; 2]);
///     comm.all_gather(&[comm.rank() as i32; 2], &mut row)?;
///     comm.reduce_scatter(&row, &mut block, ReduceOp::Sum)?;
///     comm.broadcast(&mut row[..1], 1)?; // a part of a tensor
///     Ok::<_, CollectiveError>((row, block))
/// });
/// assert_eq!(results[1].as_ref().unwrap(), &([0, 0, 1, 1], [2, 2]));
/// ```
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

    /// A sum with what a transformer layer does with it: residual, RMS norm, quantisation. See [`fusion`](crate::fusion).
    fn all_reduce_fused(&self, call: FusedAllReduce<Operand<'_>>) -> Result<()>;

    named_operations!(on_host);
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

    fn all_reduce_fused(&self, call: FusedAllReduce<Operand<'_>>) -> Result<()> {
        fusion::run(self, Validated::new(Device::Host, &call)?)
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
