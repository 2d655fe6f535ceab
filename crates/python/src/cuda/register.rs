//! Memory that all-reduces and plans on GPUs need not stage.

use antiphon::{
    device::cuda::DevicePointer,
    fabric::{Queue, RegisteredMemory},
    session::{Session, SessionError},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use super::CudaBuffer;
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

    /// Refuses a buffer of another communicator.
    pub(crate) fn check_owner(&self, queue: &std::sync::Arc<Queue>) -> Result<()> {
        match self {
            Self::Buffer(buffer) => buffer.get().check_owner(queue),
            Self::Array(..) => Ok(()),
        }
    }

    fn device(&self) -> u32 {
        match self {
            Self::Buffer(buffer) => buffer.get().device(),
            Self::Array(_, device) => *device,
        }
    }

    /// Registers it with every rank; the ranks do it together.
    pub(crate) fn register(&self, session: &Session) -> Result<(), SessionError> {
        session.register(self.device(), |comm, context| match self {
            Self::Buffer(buffer) => Ok(buffer.get().shared()?.into()),
            Self::Array(tensor, _) => {
                RegisteredMemory::new(comm, context, address(tensor), tensor.bytes() as u64)
            }
        })
    }

    /// Takes it back.
    pub(crate) fn unregister(&self, session: &Session) -> Result<(), SessionError> {
        session.unregister(self.device(), |rank| match self {
            Self::Buffer(buffer) => Ok(buffer.get().shared()?.pointer(rank)),
            Self::Array(tensor, _) => Ok(address(tensor)),
        })
    }
}

fn address(tensor: &Tensor) -> DevicePointer {
    DevicePointer(tensor.data.addr() as u64)
}
