//! Memory that all-reduces and plans on GPUs need not stage.

use antiphon::{
    device::cuda::DevicePointer,
    fabric::{Communicator, Queue, RegisteredMemory},
};
use antiphon_executor::cuda::CudaPlan;
use pyo3::{exceptions::PyValueError, prelude::*};

use super::{CudaBuffer, Gpu, Gpus, Outcome};
use crate::{
    error::Result,
    operand::{Operand, Tensor, Usage},
};

/// Memory that can be registered.
pub(crate) enum Registrable {
    /// Symmetric memory.
    Buffer(Py<CudaBuffer>),
    /// An array of another library, on this GPU.
    Array(Tensor, u32),
}

impl Registrable {
    pub(crate) fn new(memory: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(buffer) = memory.cast::<CudaBuffer>() {
            return Ok(Self::Buffer(buffer.clone().unbind()));
        }
        let tensor = Operand::import_span(memory, "the memory to register", Usage::Call(None))?.tensor;
        match tensor.device.cuda_ordinal() {
            Some(device) => Ok(Self::Array(tensor, device)),
            None => Err(PyValueError::new_err(format!(
                "the memory to register is on {}, not on CUDA: on the host, arrays of shared buffers are reduced where they lie \
                 without it",
                tensor.device
            ))
            .into()),
        }
    }

    fn device(&self) -> u32 {
        match self {
            Self::Buffer(buffer) => buffer.get().device(),
            Self::Array(_, device) => *device,
        }
    }
}

impl Gpus {
    /// Registers memory with every rank; the ranks do it together.
    pub(crate) fn register(&self, queue: &Queue, memory: &Registrable) -> Outcome {
        self.together(queue, memory.device(), |comm, gpu| {
            comm.check_one_node("register_cuda")?;
            let peers = gpu.engine.nvlink("register_cuda")?;
            let memory: RegisteredMemory = match memory {
                Registrable::Buffer(buffer) => buffer.get().shared()?.into(),
                Registrable::Array(tensor, _) => {
                    let pointer = DevicePointer(tensor.data.addr() as u64);
                    RegisteredMemory::new(comm, &gpu.context, pointer, tensor.bytes() as u64)?
                }
            };
            CudaPlan::register(comm, memory.clone())?;
            peers.register(memory)
        })
    }

    /// Takes it back.
    pub(crate) fn unregister(&self, queue: &Queue, memory: &Registrable) -> Outcome {
        self.together(queue, memory.device(), |comm, gpu| {
            let peers = gpu.engine.nvlink("unregister_cuda")?;
            let address = match memory {
                Registrable::Buffer(buffer) => buffer.get().shared()?.pointer(peers.rank()),
                Registrable::Array(tensor, _) => DevicePointer(tensor.data.addr() as u64),
            };
            CudaPlan::unregister(comm, &gpu.context, address)?;
            peers.unregister(comm, address)
        })
    }

    /// Work that the ranks do together on a device that has been opened. The queue's turn comes before the lock, as where
    /// devices are opened: a thread with the lock waits for no other thread of this process.
    fn together(
        &self,
        queue: &Queue,
        device: u32,
        work: impl FnOnce(&Communicator, &mut Gpu) -> Outcome,
    ) -> Outcome {
        self.with(queue, device, None, |_| Ok(()))?;
        queue.run(|comm| self.with_open(device, |gpu| work(comm, gpu)))
    }
}
