//! Memory that all-reduces on GPUs need not stage.

use antiphon::{
    device::cuda::DevicePointer,
    fabric::{FabricError, Queue, RegisteredMemory},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use super::{CudaBuffer, Gpus, Outcome, ordinal};
use crate::{
    error::Result,
    operand::{Operand, Tensor, Usage},
};

/// What can be registered.
pub(crate) enum Registrable {
    /// Symmetric memory.
    Buffer(Py<CudaBuffer>),
    /// An array that somebody else allocated, on this GPU.
    Array(Tensor, u32),
}

impl Registrable {
    pub(crate) fn new(memory: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(buffer) = memory.cast::<CudaBuffer>() {
            return Ok(Self::Buffer(buffer.clone().unbind()));
        }
        let tensor = Operand::import_span(memory, "the memory to register", Usage::Call(None))?.tensor;
        match ordinal(tensor.device) {
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
        self.with(queue, memory.device(), None, |gpu| {
            let Some(peers) = &gpu.peers else { return Ok(()) };
            let memory = match memory {
                Registrable::Buffer(buffer) => buffer.get().shared()?.into(),
                Registrable::Array(tensor, _) => {
                    let bytes = (tensor.count * tensor.dtype.size()) as u64;
                    let pointer = DevicePointer(tensor.data.addr() as u64);
                    queue.run(|comm| RegisteredMemory::new(comm, &gpu.context, pointer, bytes))?
                }
            };
            peers.register(memory)
        })
    }

    /// Takes it back.
    pub(crate) fn unregister(&self, queue: &Queue, memory: &Registrable) -> Outcome {
        self.with(queue, memory.device(), None, |gpu| {
            let Some(peers) = &gpu.peers else { return Ok(()) };
            let address = match memory {
                Registrable::Buffer(buffer) => buffer.get().shared()?.pointer(peers.rank()).0,
                Registrable::Array(tensor, _) => tensor.data.addr() as u64,
            };
            queue.run(|comm| {
                let done = peers.unregister(comm, DevicePointer(address));
                done.map_err(|error| match error {
                    antiphon::prelude::CollectiveError::Fabric(error) => error,
                    other => FabricError::invalid(other.to_string()),
                })
            })?;
            Ok(())
        })
    }
}
