//! What is done ahead of calls: memory is registered, and kernels are loaded.

use antiphon_device::cuda::DevicePointer;
use antiphon_fabric::{Communicator, Operation, RegisteredMemory};
use antiphon_tensor::DType;

use super::CudaCollectives;
#[cfg(doc)]
use crate::CollectiveError;
use crate::{
    ReduceOp,
    all_reduce::{Algorithm, Reducing, Registered},
    arguments::reduction,
    error::Result,
    fusion::{self, FusedAllReduce, Operand, Validated},
};
#[cfg(doc)]
use antiphon_fabric::FabricError;

impl CudaCollectives {
    /// The algorithm that [`all_reduce`](crate::StreamCollectives::all_reduce) takes for a tensor of `bytes` bytes.
    pub fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.table.algorithm(bytes)
    }

    /// Lets [registered](crate::all_reduce::AllReduceOptions::registered) all-reduces use some memory. All ranks register the same memories in the
    /// same order. They are kept until they are [taken back](Self::unregister), or these collectives are dropped.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for memory of another number of ranks or of another device.
    pub fn register(&self, memory: RegisteredMemory) -> Result<()> {
        let Self { registry, tenant, .. } = self;
        Ok(registry.borrow_mut().register(tenant.world_size(), tenant.context(), memory)?)
    }

    /// Gives registered memory back, when the work of every rank's device is over. All ranks call it together, each with the
    /// address of its own.
    ///
    /// # Errors
    /// On every rank: [`FabricError::InvalidArgument`] for an address at which no registered memory begins, and when ranks name
    /// different memory; [`FabricError::Device`] for what went wrong in earlier work; as [`Communicator::barrier`].
    pub fn unregister(&self, comm: &Communicator, address: DevicePointer) -> Result<()> {
        Ok(self.registry.borrow_mut().unregister(comm, self.tenant.context(), address)?)
    }

    /// Compiles and loads the kernels that reduce a dtype by an operator, so that no call has to; once memory is
    /// [registered](Self::register), those for that too. From the cache on disk it takes some milliseconds, else about a
    /// second. Not while a stream is being captured.
    ///
    /// # Errors
    /// [`CollectiveError::NotNumeric`] for dtypes other than f32, f16 and bf16; [`FabricError::Device`].
    pub fn prepare(&self, dtype: DType, op: ReduceOp) -> Result<()> {
        let reduction = reduction(Operation::AllReduce, dtype, op)?;
        if self.world_size() == 1 {
            return Ok(());
        }
        self.tenant.load(Reducing(reduction))?;
        if !self.registry.borrow().is_empty() {
            self.tenant.load(Registered(reduction))?;
        }
        Ok(())
    }

    /// Compiles and loads the program of calls like this one, of as many tokens, so that no call has to. From the cache on disk
    /// it takes some milliseconds, else about a third of a second. Not while a stream is being captured. Nothing is computed.
    ///
    /// # Errors
    /// As [`all_reduce_fused`](crate::StreamCollectives::all_reduce_fused).
    pub fn prepare_fused(&self, call: &FusedAllReduce<Operand<'_>>) -> Result<()> {
        fusion::gpu::prepare(&self.tenant, &self.table, &Validated::new(self.serves(), call)?)
    }
}
