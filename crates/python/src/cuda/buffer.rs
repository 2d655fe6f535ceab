//! Symmetric memory on GPUs as Python sees it.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use antiphon::device::sync::Mutex;
use antiphon::{
    device::{DeviceError, cuda::Context},
    fabric::{CudaArena, FabricError, Queue},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{error::Result, fork::Process};

#[doc = stub!("CudaBuffer")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct CudaBuffer {
    /// Absent when freed.
    arena: Mutex<Option<Arc<CudaArena>>>,
    owner: Weak<Queue>,
    process: Process,
    world_size: usize,
    device: u32,
    num_bytes: usize,
}

impl CudaBuffer {
    /// All ranks of the queue make it together.
    pub(crate) fn new(
        queue: &Arc<Queue>,
        context: &Context,
        num_bytes: usize,
    ) -> std::result::Result<Self, FabricError> {
        let arena = queue.run(|comm| CudaArena::new(comm, context, num_bytes.max(1), 0))?;
        Ok(Self {
            arena: Mutex::new(Some(Arc::new(arena))),
            owner: Arc::downgrade(queue),
            process: Process::current(),
            world_size: queue.messenger().world_size(),
            device: context.device().ordinal(),
            num_bytes,
        })
    }

    /// Refuses a communicator that has not made it, or a buffer that has been freed.
    pub(crate) fn check_owner(&self, queue: &Arc<Queue>) -> Result<()> {
        if !std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(queue)) {
            return Err(PyValueError::new_err("the buffer belongs to another communicator").into());
        }
        self.arena().is_some().then_some(()).ok_or_else(|| freed().into())
    }

    /// Gives the memory back when the work of every rank's device is over.
    pub(crate) fn free(&self, queue: &Queue) -> std::result::Result<(), FabricError> {
        queue.run(|comm| {
            self.shared()?.context().synchronize().map_err(DeviceError::from)?;
            comm.barrier()?;
            drop(self.arena().take());
            comm.barrier()
        })
    }

    /// The memory, to be kept beyond the buffer.
    pub(crate) fn shared(&self) -> std::result::Result<Arc<CudaArena>, FabricError> {
        self.arena().clone().ok_or_else(|| FabricError::invalid("the buffer has been freed"))
    }

    fn arena(&self) -> MutexGuard<'_, Option<Arc<CudaArena>>> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn freed() -> PyErr {
    PyValueError::new_err("the buffer has been freed")
}

#[pymethods]
impl CudaBuffer {
    fn __len__(&self) -> usize {
        self.num_bytes
    }

    #[doc = stub!("CudaBuffer.device")]
    #[getter]
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    #[doc = stub!("CudaBuffer.pointer")]
    fn pointer(&self, rank: usize) -> Result<u64> {
        self.process.check(|| "buffer".to_owned())?;
        if rank >= self.world_size {
            let text = format!("rank {rank} is not below the world size {}", self.world_size);
            return Err(PyValueError::new_err(text).into());
        }
        Ok(self.arena().as_ref().ok_or_else(freed)?.pointer(rank).0)
    }

    fn __repr__(&self) -> String {
        let Self { num_bytes, device, world_size, .. } = self;
        format!(
            "<antiphon.CudaBuffer: {num_bytes} bytes on cuda:{device}, and on each of {world_size} ranks>"
        )
    }
}
