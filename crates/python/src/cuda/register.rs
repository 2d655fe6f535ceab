//! Memory that all-reduces and plans on GPUs need not stage.

use std::sync::Arc;

use antiphon::{
    device::cuda::DevicePointer,
    fabric::{CudaArena, FabricError, Queue, RegisteredMemory},
    session::{Session, SessionError},
    tensor::Device,
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    error::Result,
    operand::{Operand, Tensor, Usage},
    symmetric::SymmetricBuffer,
};

/// Memory that can be registered.
pub(crate) enum Registrable {
    /// Symmetric memory, on this GPU.
    Buffer(Py<SymmetricBuffer>, u32),
    /// An array of another library, on this GPU.
    Array(Tensor, u32),
}

impl Registrable {
    pub(crate) fn new(memory: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(buffer) = memory.cast::<SymmetricBuffer>() {
            let device = buffer.get().device().ok_or_else(|| on_host(Device::Host))?;
            return Ok(Self::Buffer(buffer.clone().unbind(), device));
        }
        let tensor = Operand::import_span(memory, "the memory to register", Usage::Call(None))?.tensor;
        let device = tensor.device.cuda_ordinal().ok_or_else(|| on_host(tensor.device))?;
        Ok(Self::Array(tensor, device))
    }

    /// Refuses a buffer of another communicator.
    pub(crate) fn check_owner(&self, queue: &Arc<Queue>) -> Result<()> {
        match self {
            Self::Buffer(buffer, _) => buffer.get().check_owner(queue),
            Self::Array(..) => Ok(()),
        }
    }

    fn device(&self) -> u32 {
        match self {
            Self::Buffer(_, device) | Self::Array(_, device) => *device,
        }
    }

    /// Registers it with every rank; the ranks do it together.
    pub(crate) fn register(&self, session: &Session) -> Result<(), SessionError> {
        session.register(self.device(), |comm, context| match self {
            Self::Buffer(buffer, _) => Ok(arena(buffer)?.into()),
            Self::Array(tensor, _) => {
                RegisteredMemory::new(comm, context, address(tensor), tensor.bytes() as u64)
            }
        })
    }

    /// Takes it back.
    pub(crate) fn unregister(&self, session: &Session) -> Result<(), SessionError> {
        session.unregister(self.device(), |rank| match self {
            Self::Buffer(buffer, _) => Ok(arena(buffer)?.pointer(rank)),
            Self::Array(tensor, _) => Ok(address(tensor)),
        })
    }
}

fn address(tensor: &Tensor) -> DevicePointer {
    DevicePointer(tensor.data.addr() as u64)
}

fn arena(buffer: &Py<SymmetricBuffer>) -> Result<Arc<CudaArena>, FabricError> {
    buffer.get().arena().ok_or_else(|| FabricError::invalid("the buffer has been freed"))
}

fn on_host(device: Device) -> PyErr {
    PyValueError::new_err(format!(
        "the memory to register is on {device}, not on CUDA: on the host, arrays in symmetric memory are reduced where they lie without it"
    ))
}
