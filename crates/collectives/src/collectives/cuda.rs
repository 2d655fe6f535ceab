//! Calls as values, on GPUs.

use antiphon_device::cuda::{DevicePointer, StreamRef, memory};
use antiphon_fabric::{FabricError, Operation};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    all_reduce::{self, Algorithm, AllReduceOptions},
    arguments::CheckedCall,
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

    /// Any operation as a value, in the order of the stream. A rank need not pass a tensor that is the root's alone. A broadcast
    /// without an input takes place in the output.
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
        match (call.operation, input, output) {
            (Operation::Barrier, ..) => self.barrier(stream),
            // SAFETY: passed on.
            (Operation::Broadcast, None, Some(buffer)) => unsafe { self.call_in_place(call, buffer, stream) },
            (_, input, output) => {
                let ranks = (self.rank(), self.world_size());
                let checked = CheckedCall::of_tensors(self.serves(), call, ranks, input, output)?;
                // SAFETY: passed on.
                unsafe { self.carry_out(&checked, stream) }
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
        let ranks = (self.rank(), self.world_size());
        let checked = CheckedCall::of_buffer(self.serves(), call, ranks, buffer)?;
        // SAFETY: passed on.
        unsafe { self.carry_out(&checked, stream) }
    }

    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn carry_out(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        let tenant = &self.tenant;
        if call.signature.reduce.is_some() {
            call.check_reduction()?;
        }
        // SAFETY: passed on.
        unsafe {
            match call.signature.operation {
                operation if !operation.is_call() => {
                    Err(FabricError::invalid(format!("there are no kernels for {operation}")).into())
                }
                _ if self.world_size() == 1 => self.alone(call, stream),
                Operation::AllReduce => self.reduce_all(call, stream),
                Operation::AllGather | Operation::AllToAll => {
                    gather_scatter::move_blocks(tenant, call, stream)
                }
                Operation::ReduceScatter => gather_scatter::reduce_scatter(tenant, call, stream),
                Operation::Broadcast => {
                    self.copy(call, stream)?;
                    gather_scatter::broadcast(tenant, call, stream)
                }
                operation if Self::is_by_messages(operation) => self.call_by_messages(call, stream),
                _ => self.reduce_parts(call, stream),
            }
        }
    }

    /// Carries out an all-reduce, by the algorithm that the call names or the measured tables choose.
    ///
    /// # Safety
    /// As [`all_reduce_with`](Self::all_reduce_with).
    unsafe fn reduce_all(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        let AllReduceOptions { algorithm, registered } = AllReduceOptions::numbered(call.call.algorithm)?;
        let (input, output) = call.addresses();
        let algorithm = algorithm.unwrap_or_else(|| match registered {
            true if input == output => Algorithm::TwoShot,
            true => Algorithm::OneShot,
            false => self.algorithm_for(call.block_bytes()),
        });
        // SAFETY: passed on; registered memory is mapped as long as the registry has it.
        unsafe {
            match registered {
                false => all_reduce::run_staged(&self.tenant, call, algorithm, stream),
                true => {
                    let registry = self.registry.borrow();
                    all_reduce::run_registered(&self.tenant, &registry, call, algorithm, stream)
                }
            }
        }
    }

    /// What a call does in a world of one rank: it copies.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn alone(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        self.tenant.check_ready()?;
        // SAFETY: passed on.
        unsafe { self.copy(call, stream) }
    }

    /// Copies the input to the output, if this rank has both and they lie at different places.
    ///
    /// # Safety
    /// As [`call`](Self::call); the call was checked, so that both have as many elements.
    unsafe fn copy(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        let (Some(from), Some(to)) = (call.input, call.output) else { return Ok(()) };
        if from.count == 0 || from.data.addr() == to.data.addr() {
            return Ok(());
        }
        self.tenant.enter(stream)?;
        let (at, bytes) = (|address: usize| DevicePointer(address as u64), from.count * from.dtype.size());
        // SAFETY: both have as many elements, and lie apart; the caller answers for the rest.
        Ok(unsafe { memory::copy(stream, at(to.data.addr()), at(from.data.addr()), bytes) }?)
    }
}
