//! Symmetric memory of the ranks, on the host and on GPUs, and the kernels and failures of the GPUs.

use antiphon::{
    collectives::cuda::CudaBuilder,
    device::cuda::{Context, Driver},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use super::{Communicator, prepare};
use crate::{
    arguments::{Count, DTypeName},
    cuda::{self, CudaBuffer},
    error::Result,
    interrupt,
    shared::SharedBuffer,
    stream::device_or_current,
};

#[pymethods]
impl Communicator {
    #[doc = stub!("Communicator.prepare_cuda")]
    #[pyo3(signature = (device = None, *, dtypes = None, ops = None, staging_bytes = None))]
    fn prepare_cuda(
        &self,
        py: Python<'_>,
        device: Option<u32>,
        dtypes: Option<Vec<DTypeName>>,
        ops: Option<Vec<Bound<'_, PyAny>>>,
        staging_bytes: Option<Count>,
    ) -> Result<()> {
        let kernels = prepare::kernels(dtypes, ops)?;
        let staging_bytes = staging_bytes.map(|bytes| bytes.0);
        if let Some(bytes) = staging_bytes.filter(|&bytes| bytes < CudaBuilder::LEAST_STAGING_BYTES) {
            let least = CudaBuilder::LEAST_STAGING_BYTES;
            let text = format!("prepare_cuda: staging_bytes is {bytes}, and must be at least {least}");
            return Err(PyValueError::new_err(text).into());
        }
        let (_queue, device) = (self.queue()?, device_or_current(py, device)?);
        let prepare = || self.gpus.session().prepare(device, &kernels, staging_bytes);
        Ok(interrupt::detached(py, prepare)?)
    }

    #[doc = stub!("Communicator.on_cuda_failure")]
    fn on_cuda_failure(&self, py: Python<'_>, action: &Bound<'_, PyAny>) -> Result<()> {
        self.queue()?;
        let action = cuda::action(action)?;
        py.detach(|| self.gpus.session().on_failure(action));
        Ok(())
    }

    #[doc = stub!("Communicator.check")]
    fn check(&self, py: Python<'_>) -> Result<()> {
        self.queue()?;
        Ok(py.detach(|| self.gpus.session().check())?)
    }

    #[doc = stub!("Communicator.create_cuda_buffer")]
    #[pyo3(signature = (num_bytes, device = None))]
    fn create_cuda_buffer(
        &self,
        py: Python<'_>,
        num_bytes: Count,
        device: Option<u32>,
    ) -> Result<CudaBuffer> {
        let (queue, device) = (self.queue()?, device_or_current(py, device)?);
        Ok(interrupt::detached(py, || {
            let context = Context::primary(Driver::load()?.device(device)?)?;
            CudaBuffer::new(&queue, &context, num_bytes.0)
        })?)
    }

    #[doc = stub!("Communicator.free_cuda_buffer")]
    fn free_cuda_buffer(&self, py: Python<'_>, buffer: &CudaBuffer) -> Result<()> {
        let queue = self.queue()?;
        buffer.check_owner(&queue)?;
        Ok(interrupt::detached(py, || buffer.free(&queue))?)
    }

    #[doc = stub!("Communicator.register_cuda")]
    fn register_cuda(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> Result<()> {
        let (queue, memory) = (self.queue()?, cuda::Registrable::new(memory)?);
        memory.check_owner(&queue)?;
        Ok(interrupt::detached(py, || memory.register(self.gpus.session()))?)
    }

    #[doc = stub!("Communicator.unregister_cuda")]
    fn unregister_cuda(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> Result<()> {
        let (_queue, memory) = (self.queue()?, cuda::Registrable::new(memory)?);
        Ok(interrupt::detached(py, || memory.unregister(self.gpus.session()))?)
    }

    #[doc = stub!("Communicator.create_shared_buffer")]
    fn create_shared_buffer(&self, py: Python<'_>, num_bytes: Count) -> Result<SharedBuffer> {
        let queue = self.queue()?;
        let buffer = interrupt::detached(py, || queue.run(|comm| comm.create_shared_buffer(num_bytes.0)))?;
        Ok(SharedBuffer::new(buffer, &queue, self.rank, self.world_size))
    }

    #[doc = stub!("Communicator.free_shared_buffer")]
    fn free_shared_buffer(&self, py: Python<'_>, buffer: &SharedBuffer) -> Result<()> {
        let queue = self.queue()?;
        buffer.check_owner(&queue)?;
        // Taken when its turn has come: a call that ends before leaves it where it is.
        Ok(interrupt::detached(py, || queue.run(|comm| comm.free_shared_buffer(buffer.take()?)))?)
    }
}
