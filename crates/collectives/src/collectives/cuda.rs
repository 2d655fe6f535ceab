//! Calls as values, on GPUs.

use antiphon_device::cuda::{DevicePointer, StreamRef, memory};
use antiphon_fabric::{FabricError, Operation};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    all_reduce::AllReduceOptions,
    arguments::{CheckedCall, Input, Output},
    cuda::CudaCollectives,
    error::Result,
    gather_scatter::cuda as gather_scatter,
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
        let (operation, serves, rank) = (call.operation, self.serves(), self.rank());
        if operation == Operation::Barrier {
            return self.barrier(stream);
        }
        // What a rank need not pass is not even looked at.
        let input = input.filter(|_| call.needs_input(rank));
        let output = output.filter(|_| call.needs_output(rank));
        let input = input.map(|input| Input::on(serves, operation, input)).transpose()?;
        let output = output.map(|output| Output::on(serves, operation, output)).transpose()?;
        let input = match operation {
            // A root without an input has its output for one.
            Operation::Broadcast => input.or(output.as_ref().map(Output::as_input)),
            _ => input,
        };
        let checked = CheckedCall::new(call, (rank, self.world_size()), input, output)?;
        // SAFETY: passed on.
        unsafe { self.carry_out(&checked, stream) }
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
        let buffer = Output::on(self.serves(), call.operation, buffer)?;
        let checked = CheckedCall::in_place(call, (self.rank(), self.world_size()), buffer)?;
        // SAFETY: passed on.
        unsafe { self.carry_out(&checked, stream) }
    }

    /// # Safety
    /// As [`call`](Self::call).
    pub(crate) unsafe fn carry_out(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        let (tenant, op) = (&self.tenant, call.call.op);
        if call.signature.reduce.is_some() {
            call.check_reduction()?;
        }
        // SAFETY: passed on.
        unsafe {
            match (call.signature.operation, call.input, call.output) {
                (operation, ..) if !operation.is_call() => {
                    Err(FabricError::invalid(format!("there are no kernels for {operation}")).into())
                }
                _ if self.world_size() == 1 => self.alone(call, stream),
                (Operation::AllReduce, Some(input), Some(output)) => {
                    let options = AllReduceOptions::numbered(call.call.algorithm)?;
                    self.all_reduce_of((input, output), op, options, stream)
                }
                (Operation::AllGather, Some(input), Some(output)) => {
                    gather_scatter::all_gather(tenant, (input, output), stream)
                }
                (Operation::ReduceScatter, Some(input), Some(output)) => {
                    gather_scatter::reduce_scatter(tenant, (input, output), op, stream)
                }
                (Operation::AllToAll, Some(input), Some(output)) => {
                    gather_scatter::all_to_all(tenant, (input, output), stream)
                }
                (Operation::Broadcast, input, Some(output)) => {
                    if let Some(input) = input {
                        self.copy(&input, &output, stream)?;
                    }
                    gather_scatter::broadcast(tenant, output, call.call.root, stream)
                }
                (operation, ..) if Self::is_by_messages(operation) => self.call_by_messages(call, stream),
                _ => self.reduce_parts(call, stream),
            }
        }
    }

    /// What a call does in a world of one rank: it copies.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn alone(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        self.tenant.check_ready()?;
        let (Some(from), Some(to)) = (call.input, call.output) else { return Ok(()) };
        // SAFETY: the call was checked: both have as many elements; the rest is passed on.
        unsafe { self.copy(&from, &to, stream) }
    }

    /// Copies as many elements as both have, unless they lie at one place.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn copy(&self, from: &Input, to: &Output, stream: StreamRef<'_>) -> Result<()> {
        if from.count == 0 || from.data.addr() == to.data.addr() {
            return Ok(());
        }
        self.tenant.enter(stream)?;
        let (at, bytes) = (|address: usize| DevicePointer(address as u64), from.count * from.dtype.size());
        // SAFETY: both have as many elements, and lie apart; the caller answers for the rest.
        Ok(unsafe { memory::copy(stream, at(to.data.addr()), at(from.data.addr()), bytes) }?)
    }
}
