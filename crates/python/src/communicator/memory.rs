//! Symmetric memory of the ranks, on the host and on GPUs, and the kernels and failures of the GPUs.

use antiphon::collectives::cuda::CudaBuilder;
use pyo3::{exceptions::PyValueError, prelude::*};

use super::{Communicator, prepare};
use crate::{
    arguments::{Count, DTypeName, Place},
    cuda,
    error::Result,
    interrupt,
    stream::device_or_current,
    symmetric::SymmetricBuffer,
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

    #[doc = stub!("Communicator.symmetric")]
    #[pyo3(signature = (num_bytes, device = None))]
    fn symmetric(&self, py: Python<'_>, num_bytes: Count, device: Option<Place>) -> Result<SymmetricBuffer> {
        let queue = self.queue()?;
        let device = match device.unwrap_or(Place::Host) {
            Place::Host => None,
            Place::Cuda(device) => Some(device_or_current(py, device)?),
        };
        Ok(interrupt::detached(py, || SymmetricBuffer::new(&queue, num_bytes.0, device))?)
    }

    #[doc = stub!("Communicator.free")]
    fn free(&self, py: Python<'_>, buffer: &SymmetricBuffer) -> Result<()> {
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
}
