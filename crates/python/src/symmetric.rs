//! Symmetric memory as Python sees it, on the host and on GPUs.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use antiphon::device::sync::Mutex;
use antiphon::{
    device::{
        DeviceError,
        cuda::{Context, Driver},
    },
    fabric::{self, CudaArena, FabricError, Mapped, Queue},
    tensor::{
        Device,
        dlpack::{ElementType, Exported},
    },
};
use pyo3::{
    exceptions::{PyBufferError, PyValueError},
    prelude::*,
    types::{PyCapsule, PyTuple},
};

use crate::{arguments::DTypeName, error::Result, fork::Process};

/// The copies of all ranks.
enum Copies {
    Host(fabric::SymmetricBuffer),
    Cuda(Arc<CudaArena>),
}

#[doc = stub!("SymmetricBuffer")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct SymmetricBuffer {
    /// Absent when freed.
    copies: Mutex<Option<Copies>>,
    owner: Weak<Queue>,
    process: Process,
    rank: usize,
    world_size: usize,
    device: Option<u32>,
    num_bytes: usize,
}

impl SymmetricBuffer {
    /// Made on the host, or on a GPU; all ranks of the queue make it together.
    pub(crate) fn new(
        queue: &Arc<Queue>,
        num_bytes: usize,
        device: Option<u32>,
    ) -> std::result::Result<Self, FabricError> {
        let copies = match device {
            None => Copies::Host(queue.run(|comm| comm.symmetric(num_bytes))?),
            Some(device) => {
                let context = Context::primary(Driver::load()?.device(device)?)?;
                let arena = queue.run(|comm| CudaArena::new(comm, &context, num_bytes.max(1), 0))?;
                Copies::Cuda(Arc::new(arena))
            }
        };
        let (owner, process, ranks) = (Arc::downgrade(queue), Process::current(), queue.messenger());
        let (rank, world_size, copies) = (ranks.rank(), ranks.world_size(), Mutex::new(Some(copies)));
        Ok(Self { copies, owner, process, rank, world_size, device, num_bytes })
    }

    /// Refuses a communicator that has not made it, or a buffer that has been freed.
    pub(crate) fn check_owner(&self, queue: &Arc<Queue>) -> Result<()> {
        if !std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(queue)) {
            return Err(PyValueError::new_err("the buffer belongs to another communicator").into());
        }
        self.lock().is_some().then_some(()).ok_or_else(|| freed().into())
    }

    /// Gives the memory back, on GPUs when the work of every rank's device is over. A call that ends before its turn has come leaves
    /// the buffer as it is.
    pub(crate) fn free(&self, queue: &Queue) -> std::result::Result<(), FabricError> {
        let freed = || FabricError::invalid("the buffer has been freed");
        queue.run(|comm| {
            if self.device.is_some() {
                self.arena().ok_or_else(freed)?.context().synchronize().map_err(DeviceError::from)?;
                comm.barrier()?;
            }
            match self.lock().take().ok_or_else(freed)? {
                Copies::Host(buffer) => comm.free(buffer),
                Copies::Cuda(arena) => {
                    drop(arena);
                    comm.barrier()
                }
            }
        })
    }

    /// Memory on a GPU that has not been freed, to be kept beyond the buffer.
    pub(crate) fn arena(&self) -> Option<Arc<CudaArena>> {
        match &*self.lock() {
            Some(Copies::Cuda(arena)) => Some(arena.clone()),
            _ => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Copies>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `read` makes of the copies, in the process that made the buffer, for a rank that there is.
    fn of_rank<T>(&self, rank: usize, read: impl FnOnce(&Copies) -> T) -> Result<T> {
        if rank >= self.world_size {
            let text = format!("rank {rank} is not below the world size {}", self.world_size);
            return Err(PyValueError::new_err(text).into());
        }
        self.process.check(|| "buffer".to_owned())?;
        Ok(self.lock().as_ref().map(read).ok_or_else(freed)?)
    }
}

fn freed() -> PyErr {
    PyValueError::new_err("the buffer has been freed")
}

#[pymethods]
impl SymmetricBuffer {
    #[doc = stub!("SymmetricBuffer.__len__")]
    fn __len__(&self) -> usize {
        self.num_bytes
    }

    #[doc = stub!("SymmetricBuffer.device")]
    #[getter]
    pub(crate) fn device(&self) -> Option<u32> {
        self.device
    }

    #[doc = stub!("SymmetricBuffer.pointer")]
    fn pointer(&self, rank: usize) -> Result<u64> {
        self.of_rank(rank, |copies| match copies {
            Copies::Host(buffer) => buffer.as_mut_ptr(rank).addr() as u64,
            Copies::Cuda(arena) => arena.pointer(rank).0,
        })
    }

    #[doc = stub!("SymmetricBuffer.memory")]
    #[pyo3(signature = (dtype, shape = None, rank = None))]
    fn memory(&self, dtype: DTypeName, shape: Option<Vec<usize>>, rank: Option<usize>) -> Result<Memory> {
        let element = dtype.element()?;
        let size = element.bytes().ok_or_else(|| {
            PyValueError::new_err(format!("elements of type {element} are not whole bytes"))
        })?;
        let shape = shape.unwrap_or_else(|| vec![self.num_bytes / size]);
        let needed = shape.iter().try_fold(size, |bytes, &n| bytes.checked_mul(n));
        if needed.is_none_or(|needed| needed > self.num_bytes) {
            let text = format!("shape {shape:?} of {element} does not fit {} bytes", self.num_bytes);
            return Err(PyValueError::new_err(text).into());
        }
        let rank = rank.unwrap_or(self.rank);
        let on_host = self.of_rank(rank, |copies| match copies {
            Copies::Host(buffer) => Some((buffer.as_mut_ptr(rank), buffer.keep_mapped())),
            Copies::Cuda(_) => None,
        })?;
        let (data, mapped) = on_host.ok_or_else(|| {
            let text = format!("{} is not on the host: use its pointer({rank})", self.__repr__());
            PyValueError::new_err(text)
        })?;
        Ok(Memory { data, mapped, element, shape })
    }

    fn __repr__(&self) -> String {
        let Self { num_bytes, world_size, .. } = self;
        let place = self.device.map(|device| format!("cuda:{device} and on ")).unwrap_or_default();
        format!("<antiphon.SymmetricBuffer: {num_bytes} bytes on {place}each of {world_size} ranks>")
    }
}

#[doc = stub!("Memory")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct Memory {
    data: *mut u8,
    mapped: Mapped,
    element: ElementType,
    shape: Vec<usize>,
}

// SAFETY: the address leads into memory that `mapped` keeps; only consumers of the capsule use it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

#[pymethods]
impl Memory {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self) -> String {
        self.element.to_string()
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> Result<Bound<'py, PyCapsule>> {
        if let Some(stream) = stream {
            return Err(PyBufferError::new_err(format!("host memory has no stream {stream}")).into());
        }
        if let Some(device) = dl_device.filter(|&device| device != (1, 0)) {
            return Err(
                PyBufferError::new_err(format!("host memory is not on DLPack device {device:?}")).into()
            );
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("shared memory is not copied: copy what is made of it").into());
        }
        // SAFETY: the arena stays mapped as long as the owner lives, and is free to be written.
        let exported = unsafe {
            Exported::new(self.mapped.clone(), self.data, self.element, &self.shape, None, Device::Host)
        }?;
        crate::operand::capsule(py, exported, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __repr__(&self) -> String {
        format!("<antiphon.Memory: {} {:?}>", self.element, self.shape)
    }
}
