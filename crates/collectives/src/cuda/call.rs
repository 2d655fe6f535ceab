//! The operations between GPUs, by our kernels.

use antiphon_device::cuda::{DevicePointer, StreamRef, memory};
use antiphon_fabric::{FabricError, Operation};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use super::CudaCollectives;
use crate::{
    StreamCollectives,
    all_reduce::{self, Algorithm, AllReduceOptions},
    arguments::CheckedCall,
    error::Result,
    fusion::{self, FusedAllReduce, Operand, Validated},
    gather_scatter::cuda as gather_scatter,
};

impl StreamCollectives for CudaCollectives {
    unsafe fn call(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if call.operation == Operation::Barrier {
            return self.wait_for_all(stream);
        }
        let checked = CheckedCall::in_stream(self.serves(), call, self.ranks(), input, output)?;
        // SAFETY: passed on.
        unsafe { self.carry_out(&checked, stream) }
    }

    unsafe fn call_in_place(
        &self,
        call: &Call<'_>,
        buffer: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let checked = CheckedCall::of_buffer(self.serves(), call, self.ranks(), buffer)?;
        // SAFETY: passed on.
        unsafe { self.carry_out(&checked, stream) }
    }

    unsafe fn all_reduce_fused<'s>(
        &self,
        call: FusedAllReduce<Operand<'_>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Validated::new(self.serves(), &call)?;
        // SAFETY: passed on.
        unsafe { fusion::gpu::run(&self.tenant, &self.table, call, stream.into()) }
    }
}

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

    /// The barrier, in the order of the stream.
    fn wait_for_all(&self, stream: StreamRef<'_>) -> Result<()> {
        match self.world_size() {
            1 => Ok(self.tenant.check_ready()?),
            _ => gather_scatter::barrier(&self.tenant, stream),
        }
    }

    /// # Safety
    /// As [`call`](StreamCollectives::call).
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
    /// As [`call`](StreamCollectives::call).
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
    /// As [`call`](StreamCollectives::call).
    unsafe fn alone(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        self.tenant.check_ready()?;
        // SAFETY: passed on.
        unsafe { self.copy(call, stream) }
    }

    /// Copies the input to the output, if this rank has both and they lie at different places.
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call); the call was checked, so that both have as many elements.
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
