//! The class `MixedHandler`.

use std::sync::Arc;

use antiphon::device::sync::Mutex;
use antiphon::{
    collectives::mixed::{self, MixedMode, MixedOp},
    fabric::gpu::Runtime,
    prelude::{Communicator as Comm, FabricError, MixedLayout},
    session::SessionError,
    tensor::{Device, dlpack::ElementType},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    arguments::{Count, Given, Operands, prepare},
    call::{
        What,
        mixed::{Handler, Mixed, half_of},
    },
    communicator::Communicator,
    error::Result,
    interrupt,
    operand::{Operand, Usage, refuse_gradient},
    parallel_info::ParallelInfo,
    stream::RawStream,
};

#[doc = stub!("MixedHandler")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MixedHandler {
    comm: Py<Communicator>,
    layout: MixedLayout,
    /// The element type and the device of its tensors.
    element: ElementType,
    device: Device,
    handler: Handler,
}

fn op_of(number: u8) -> PyResult<MixedOp> {
    MixedOp::ALL
        .into_iter()
        .find(|&op| op as u8 == number)
        .ok_or_else(|| PyValueError::new_err(format!("there is no mixed operation {number}")))
}

fn mode_of(name: &str) -> PyResult<MixedMode> {
    MixedMode::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
        let known = MixedMode::ALL.map(MixedMode::name).join(", ");
        PyValueError::new_err(format!("unknown mode {name:?}: known are {known}"))
    })
}

#[pymethods]
impl MixedHandler {
    #[new]
    #[pyo3(signature = (comm, layout, device = None, dtype = "bfloat16", most_blocks = None, *, join_nvshmem = false))]
    fn new(
        py: Python<'_>,
        comm: Py<Communicator>,
        layout: &ParallelInfo,
        device: Option<u32>,
        dtype: &str,
        most_blocks: Option<usize>,
        join_nvshmem: bool,
    ) -> Result<Self> {
        let (queue, layout) = (comm.get().queue()?, layout.layout());
        let element = ElementType::named(dtype);
        let dtype = element.and_then(|element| element.dtype());
        let (element, dtype) =
            element.zip(dtype).ok_or_else(|| PyValueError::new_err("the dtype has no arithmetic"))?;
        let session = comm.get().gpus().session();
        let handler = interrupt::detached(py, || {
            let host = queue.run(|comm| mixed::MixedHandler::new(comm, layout))?;
            let runtime = if join_nvshmem { Runtime::Join } else { Runtime::Initialize };
            let gpu =
                device.map(|device| session.mixed(device, layout, dtype, most_blocks, runtime).map(Arc::new));
            Ok::<_, SessionError>(Handler { host: Arc::new(Mutex::new(host)), gpu: gpu.transpose()? })
        })?;
        let device = device.map_or(Device::Host, Device::Cuda);
        Ok(Self { comm, layout, element, device, handler })
    }

    #[doc = stub!("MixedHandler.valid_modes")]
    fn valid_modes(&self) -> Vec<&'static str> {
        self.handler.with(|handler| handler.valid_modes().iter().map(|mode| mode.name()).collect())
    }

    #[doc = stub!("MixedHandler.select")]
    fn select(&self, py: Python<'_>, op: u8, num_bytes: Count) -> Result<&'static str> {
        let (queue, op) = (self.comm.get().queue()?, op_of(op)?);
        if let Some(gpu) = &self.handler.gpu {
            return Ok(interrupt::detached(py, || gpu.select(op, num_bytes.0))?.name());
        }
        let select = |comm: &Comm| self.handler.with(|handler| handler.select(comm, op, num_bytes.0));
        Ok(interrupt::detached(py, || queue.run(select))?.name())
    }

    #[doc = stub!("MixedHandler.tune")]
    fn tune(&self, py: Python<'_>, smallest: Count, largest: Count) -> Result<()> {
        let (queue, sizes) = (self.comm.get().queue()?, smallest.0..=largest.0);
        if let Some(gpu) = &self.handler.gpu {
            return Ok(interrupt::detached(py, || gpu.tune(sizes))?);
        }
        let tune = |comm: &Comm| self.handler.with(|handler| handler.tune(comm, sizes));
        Ok(interrupt::detached(py, || queue.run(tune))?)
    }

    #[doc = stub!("MixedHandler.release_memory")]
    fn release_memory(&self, py: Python<'_>) -> Result<()> {
        let queue = self.comm.get().queue()?;
        match &self.handler.gpu {
            Some(gpu) => Ok(interrupt::detached(py, || gpu.release_memory())?),
            None => Ok(interrupt::detached(py, || queue.run(|comm| comm.barrier()))?),
        }
    }

    #[doc = stub!("MixedHandler.restore_memory")]
    #[pyo3(signature = (problem = None))]
    fn restore_memory(&self, py: Python<'_>, problem: Option<String>) -> Result<()> {
        let problem = problem.map_or(Ok(()), |problem| Err(FabricError::invalid(problem)));
        let queue = self.comm.get().queue()?;
        match &self.handler.gpu {
            Some(gpu) => Ok(interrupt::detached(py, || gpu.restore_memory(problem))?),
            None => {
                let agree = |comm: &Comm| comm.agree("cannot restore its memory", problem);
                Ok(interrupt::detached(py, || queue.run(agree))?)
            }
        }
    }

    #[doc = stub!("MixedHandler.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        match &self.handler.gpu {
            Some(gpu) => Ok(interrupt::detached(py, || gpu.close())?),
            None => Ok(()),
        }
    }

    #[doc = stub!("MixedHandler.run")]
    #[pyo3(signature = (op, x, out = None, *, mode = None, rows = None, stream = None, strict = false))]
    #[expect(clippy::too_many_arguments, reason = "a call of keywords")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        op: u8,
        x: &Bound<'py, PyAny>,
        out: Given<'_, 'py>,
        mode: Option<&str>,
        rows: Option<Vec<Count>>,
        stream: Option<RawStream>,
        strict: bool,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let (op, mode, usage) = (op_of(op)?, mode.map(mode_of).transpose()?, Usage::Call(stream));
        [Some(x), out]
            .into_iter()
            .flatten()
            .try_for_each(|array| refuse_gradient(array, "run_mixed_comm"))?;
        let groups = (self.layout.dp_rank(), self.layout.dp_size());
        let is_uneven = rows.is_some();
        let rows: Vec<usize> = rows.unwrap_or_default().iter().map(|rows| rows.0).collect();
        let half = What::new(half_of(op, is_uneven)).with_counts(rows);
        let mut prepared = prepare(half.clone(), x, out, groups, usage)?;
        if strict {
            self.check_operands(&half, &prepared.operands)?;
        }
        let counts = is_uneven.then(|| prepared.call.what.counts.to_vec());
        let (handler, layout) = (self.handler.clone(), self.layout);
        prepared.call.mixed = Some(Mixed { handler, layout, op, mode, counts });
        self.comm.get().run(py, prepared, stream)
    }
}

impl MixedHandler {
    /// Refuses tensors of another type or on another device than the handler's, and shapes that do not go together.
    fn check_operands(&self, half: &What, operands: &Operands) -> PyResult<()> {
        let is_like_ours = |operand: &Operand| {
            operand.element == self.element
                && operand.tensor.device == self.device
                && operand.shape().len() >= 2
        };
        let go_together = match operands {
            [Some(read), Some(write)] => {
                let expected = half.output_shape(read.shape(), self.layout.dp_rank(), self.layout.dp_size());
                expected.is_ok_and(|shape| shape == write.shape())
            }
            _ => true, // in place, where the smaller is a piece of the larger
        };
        match go_together && operands.iter().flatten().all(is_like_ours) {
            true => Ok(()),
            false => Err(PyValueError::new_err("the tensors do not suit the handler")),
        }
    }
}
