//! Memory that all-reduces and plans on GPUs need not stage.

use antiphon_device::cuda::{Context, DevicePointer};
use antiphon_executor::cuda::CudaPlan;
use antiphon_fabric::{Communicator, FabricError, RegisteredMemory};

use crate::{Result, Session, gpu::Gpu};

impl Session {
    /// Registers memory with every rank, for all-reduces and plans: what `memory` makes, in the queue's turn. The ranks do it together.
    ///
    /// # Errors
    /// As `memory`, [`RegisteredMemory::new`] for one; [`FabricError::NotImplemented`] on several nodes; as
    /// [`call`](Self::call).
    pub fn register(
        &self,
        device: u32,
        memory: impl FnOnce(&Communicator, &Context) -> Result<RegisteredMemory, FabricError>,
    ) -> Result {
        self.together(device, |comm, gpu| {
            comm.check_one_node("register_cuda")?;
            let peers = gpu.engine.nvlink("register_cuda")?;
            let memory = memory(comm, &gpu.context)?;
            CudaPlan::register(comm, memory.clone())?;
            Ok(peers.register(memory)?)
        })
    }

    /// Takes back the memory that has, on this rank, the address that `address` returns for it. The ranks do it together.
    ///
    /// # Errors
    /// As `address`; as [`CudaPlan::unregister`] and [`call`](Self::call).
    pub fn unregister(
        &self,
        device: u32,
        address: impl FnOnce(usize) -> Result<DevicePointer, FabricError>,
    ) -> Result {
        self.together(device, |comm, gpu| {
            let peers = gpu.engine.nvlink("unregister_cuda")?;
            let address = address(peers.rank())?;
            CudaPlan::unregister(comm, &gpu.context, address)?;
            Ok(peers.unregister(comm, address)?)
        })
    }

    /// Work that the ranks do together on a device. The queue's turn comes before the lock, as where devices are opened: a thread with
    /// the lock waits for no other thread of this process.
    fn together(&self, device: u32, work: impl FnOnce(&Communicator, &mut Gpu) -> Result) -> Result {
        self.collectives.with(device, |_| Ok(()))?;
        self.shared.run(|comm| self.collectives.with_open(device, |gpu| work(comm, gpu)))
    }
}
