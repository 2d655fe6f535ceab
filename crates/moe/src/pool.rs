//! Memory of a GPU, which routes take and give back.

use std::sync::{Arc, PoisonError};

use antiphon_device::cuda::{Context, CudaError, DeviceMemory, DevicePointer, relaxed};
use antiphon_device::sync::Mutex;
use antiphon_fabric::gpu::UntilIdle;

/// Memory that no routes have. Calls of one tenant come one after the other, so what routes gave back may be written by the
/// next call, though a kernel along those routes may still be under way.
pub(crate) struct Pool {
    free: UntilIdle<Mutex<Vec<DeviceMemory>>>,
    context: Context,
}

/// Memory that goes back to its pool when it is dropped.
pub(crate) struct Pooled {
    /// Absent while it is dropped.
    memory: Option<DeviceMemory>,
    pool: Arc<Pool>,
}

impl Pool {
    pub(crate) fn new(context: &Context) -> Arc<Self> {
        Arc::new(Self { free: UntilIdle::new(context, Mutex::default()), context: context.clone() })
    }

    /// Takes memory of at least `bytes` bytes.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Result<Pooled, CudaError> {
        let size = bytes.max(4096).next_power_of_two();
        let found = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let index = free.iter().position(|memory| memory.len() == size);
            index.map(|index| free.swap_remove(index))
        };
        // So that a graph may have the call that takes it.
        let allocate = || relaxed(|| DeviceMemory::allocate(&self.context, size))?;
        let memory = found.map_or_else(allocate, Ok)?;
        Ok(Pooled { memory: Some(memory), pool: self.clone() })
    }
}

impl Pooled {
    pub(crate) fn pointer(&self) -> DevicePointer {
        self.memory.as_ref().expect("it is there until it is dropped").pointer()
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(self.memory.take());
    }
}
