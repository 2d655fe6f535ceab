//! Symmetric memory as Python sees it.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::{self, FabricError, Mapped, Queue},
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

#[doc = stub!("SharedBuffer")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct SharedBuffer {
    /// Absent when freed.
    buffer: Mutex<Option<fabric::SharedBuffer>>,
    owner: Weak<Queue>,
    process: Process,
    rank: usize,
    world_size: usize,
    num_bytes: usize,
}

impl SharedBuffer {
    pub(crate) fn new(
        buffer: fabric::SharedBuffer,
        owner: &Arc<Queue>,
        rank: usize,
        world_size: usize,
    ) -> Self {
        let (num_bytes, owner, process) = (buffer.len(), Arc::downgrade(owner), Process::current());
        Self { num_bytes, buffer: Mutex::new(Some(buffer)), owner, process, rank, world_size }
    }

    /// Refuses a communicator that has not made it, or a buffer that has been freed.
    pub(crate) fn check_owner(&self, queue: &Arc<Queue>) -> Result<()> {
        if !std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(queue)) {
            return Err(PyValueError::new_err("the buffer belongs to another communicator").into());
        }
        match &*self.lock() {
            Some(_) => Ok(()),
            None => Err(freed().into()),
        }
    }

    /// The buffer, to be freed.
    pub(crate) fn take(&self) -> std::result::Result<fabric::SharedBuffer, FabricError> {
        self.lock().take().ok_or_else(|| FabricError::invalid("the buffer has been freed"))
    }

    fn lock(&self) -> MutexGuard<'_, Option<fabric::SharedBuffer>> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the copy of a rank begins, and what keeps it mapped.
    fn copy_of(&self, rank: usize) -> Result<(*mut u8, Mapped)> {
        if rank >= self.world_size {
            let text = format!("rank {rank} is not below the world size {}", self.world_size);
            return Err(PyValueError::new_err(text).into());
        }
        self.process.check(|| "buffer".to_owned())?;
        let buffer = self.lock();
        let buffer = buffer.as_ref().ok_or_else(freed)?;
        Ok((buffer.as_mut_ptr(rank), buffer.keep_mapped()))
    }
}

fn freed() -> PyErr {
    PyValueError::new_err("the buffer has been freed")
}

#[pymethods]
impl SharedBuffer {
    #[doc = stub!("SharedBuffer.__len__")]
    fn __len__(&self) -> usize {
        self.num_bytes
    }

    #[doc = stub!("SharedBuffer.pointer")]
    fn pointer(&self, rank: usize) -> Result<usize> {
        Ok(self.copy_of(rank)?.0.addr())
    }

    #[doc = stub!("SharedBuffer.memory")]
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
        let (data, mapped) = self.copy_of(rank.unwrap_or(self.rank))?;
        Ok(Memory { data, mapped, element, shape })
    }

    fn __repr__(&self) -> String {
        format!("<antiphon.SharedBuffer: {} bytes on each of {} ranks>", self.num_bytes, self.world_size)
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
