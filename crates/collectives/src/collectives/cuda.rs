//! Calls as values, on GPUs.

use antiphon_device::cuda::{DevicePointer, StreamRef, memory};
use antiphon_fabric::{FabricError, Operation};
use antiphon_operation::{Call, InPlace};
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    all_reduce::Algorithm,
    arguments::{CheckedCall, Input, Output},
    cuda::CudaCollectives,
    error::{CollectiveError, Result},
};

impl CudaCollectives {
    /// Whether there are kernels for an operation.
    pub fn has_operation(operation: Operation) -> bool {
        operation.is_call() || operation == Operation::Barrier
    }

    /// Whether an operation is made of messages between all ranks, and so has its place in the orders of sends and receives instead
    /// of the order of the other operations.
    pub fn is_by_messages(operation: Operation) -> bool {
        use Operation::{AllGather, AllToAll, Broadcast};
        operation.is_call()
            && !operation.row().reduces
            && !matches!(operation, AllGather | AllToAll | Broadcast)
    }

    /// Any operation as a value, in the order of the stream. A rank need not pass a tensor that is the root's alone.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`FabricError::InvalidArgument`] for an operation that has no kernels.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn call(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (rank, op) = (self.rank(), call.op);
        let input = input.filter(|_| call.needs_input(rank));
        let output = output.filter(|_| call.needs_output(rank));
        if self.world_size() == 1 {
            // SAFETY: passed on.
            return unsafe { self.alone(call, input, output, stream) };
        }
        // SAFETY: passed on.
        unsafe {
            match (call.operation, input, output) {
                (Operation::Barrier, ..) => self.barrier(stream),
                (Operation::AllReduce, Some(input), Some(output)) => match call.algorithm {
                    0 => self.all_reduce(input, output, op, stream),
                    number => match Algorithm::numbered(number) {
                        Ok(Some(by)) => self.all_reduce_with(input, output, op, by, stream),
                        wrong => match Algorithm::registered(number) {
                            Some(by) => self.all_reduce_registered(input, output, op, by, stream),
                            None => wrong.map(drop),
                        },
                    },
                },
                (Operation::AllGather, Some(input), Some(output)) => self.all_gather(input, output, stream),
                (Operation::ReduceScatter, Some(input), Some(output)) => {
                    self.reduce_scatter(input, output, op, stream)
                }
                (Operation::AllToAll, Some(input), Some(output)) => self.all_to_all(input, output, stream),
                (Operation::Broadcast, input, Some(output)) => {
                    if let Some(input) = input {
                        self.copy(call, input, output, stream)?;
                    }
                    self.broadcast(output, call.root, stream)
                }
                (operation, input, output) if operation.is_call() => {
                    let checked = self.checked(call, input, output)?;
                    match Self::is_by_messages(operation) {
                        true => self.call_by_messages(&checked, stream),
                        false => self.reduce_parts(&checked, stream),
                    }
                }
                (operation, ..) => {
                    Err(FabricError::invalid(format!("there are no kernels for {operation}")).into())
                }
            }
        }
    }

    /// [`call`](Self::call) with one buffer for input and output, where the operation allows that.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn call_in_place(
        &self,
        call: &Call<'_>,
        buffer: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (operation, serves) = (call.operation, self.device());
        let whole = Output::on(serves, operation, buffer)?;
        let own = || -> Result<Output> {
            Ok(whole.elements(call.own_piece(whole.count, self.rank(), self.world_size())?))
        };
        let (from, to) = match operation.row().in_place {
            InPlace::Same => (whole, whole),
            InPlace::InputBlock => (own()?, whole),
            InPlace::OutputBlock => (whole, own()?),
            InPlace::Never => return Err(CollectiveError::not_in_place(operation)),
        };
        // SAFETY: the tensors are parts of the buffer; the rest is passed on.
        unsafe {
            let input = TensorView::from_raw_parts(from.data, from.dtype, &[from.count], None, serves);
            let output = TensorViewMut::from_raw_parts(to.data, to.dtype, &[to.count], None, serves);
            let (input, mut output) = (input.expect("plain"), output.expect("plain"));
            self.call(call, Some(&input), Some(&mut output), stream)
        }
    }

    /// The call with its tensors, checked beside each other.
    pub(crate) fn checked<'c>(
        &self,
        call: &'c Call<'c>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
    ) -> Result<CheckedCall<'c>> {
        let input = input.map(|input| Input::on(self.device(), call.operation, input)).transpose()?;
        let output = output.map(|output| Output::on(self.device(), call.operation, output)).transpose()?;
        CheckedCall::new(call, (self.rank(), self.world_size()), input, output)
    }

    /// What a call does in a world of one rank: it copies.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub(crate) unsafe fn alone(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if call.operation == Operation::Barrier {
            return Ok(self.tenant.check_ready()?);
        }
        // A broadcast without an input has its output for one.
        let Some(output) = output else {
            return Err(CollectiveError::Missing {
                operation: call.operation.name(),
                which: "output",
                rank: 0,
            });
        };
        match input {
            None if call.operation == Operation::Broadcast => Ok(self.tenant.check_ready()?),
            input => {
                let checked = self.checked(call, input, Some(output))?;
                if call.operation.row().reduces {
                    crate::cuda::reduction(call.operation, checked.dtype, call.op)?;
                }
                let (Some(from), Some(to)) = (checked.input, checked.output) else { return Ok(()) };
                // SAFETY: the call was checked: both have as many elements; the rest is passed on.
                unsafe { self.copy_elements(&from, &to, stream) }
            }
        }
    }

    /// Copies a tensor to another of the same length, unless that lies at the same place.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn copy(
        &self,
        call: &Call<'_>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let checked = self.checked(call, Some(input), Some(output))?;
        let (Some(from), Some(to)) = (checked.input, checked.output) else { return Ok(()) };
        // SAFETY: passed on.
        unsafe { self.copy_elements(&from, &to, stream) }
    }

    /// Copies as many elements as both have.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn copy_elements(&self, from: &Input, to: &Output, stream: StreamRef<'_>) -> Result<()> {
        self.tenant.enter(stream)?;
        if from.count == 0 || from.data.addr() == to.data.addr() {
            return Ok(());
        }
        let (at, bytes) = (|address: usize| DevicePointer(address as u64), from.count * from.dtype.size());
        // SAFETY: both have as many elements, and lie apart; the caller answers for the rest.
        Ok(unsafe { memory::copy(stream, at(to.data.addr()), at(from.data.addr()), bytes) }?)
    }
}
