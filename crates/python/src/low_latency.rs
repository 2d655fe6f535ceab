//! Mixtures of experts: the low-latency calls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use antiphon::{
    device::DeviceError,
    fabric::{FabricError, Queue},
    moe::{
        self, LowLatencyCombine, LowLatencyDispatch, LowLatencyFormat, LowLatencyHandle, LowLatencyReceived,
        MoeConfig, MoeError,
        low_latency::cuda::{CudaLowLatency, CudaLowLatencyHandle, LowLatency},
    },
};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

use crate::{
    arguments::Given,
    communicator::Communicator,
    cuda::primary,
    error::Result,
    fork::Process,
    interrupt,
    moe::{Array, check_apart},
    stream::stream_or_current,
};

#[doc = stub!("MoeLowLatency")]
#[pyclass(frozen, module = "antiphon", weakref)]
pub(crate) struct MoeLowLatency {
    /// Absent when closed.
    engine: Mutex<Option<Engine>>,
    queue: Weak<Queue>,
    process: Process,
}

/// What makes the calls.
enum Engine {
    Host(moe::Moe),
    Cuda(Box<CudaLowLatency>),
}

#[doc = stub!("MoeLowLatencyHandle")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeLowLatencyHandle(Routes);

enum Routes {
    Host(LowLatencyHandle),
    Cuda(Mutex<CudaLowLatencyHandle>),
}

fn format_of(name: &str) -> Result<LowLatencyFormat> {
    Ok(match name {
        "bf16" => LowLatencyFormat::Bf16,
        "fp8" => LowLatencyFormat::Fp8,
        "fp8_powers_of_two" => LowLatencyFormat::Fp8PowersOfTwo,
        "fp8_packed" => LowLatencyFormat::Fp8Packed,
        _ => {
            let text = format!("the format must be bf16, fp8, fp8_powers_of_two or fp8_packed, not {name:?}");
            return Err(PyValueError::new_err(text).into());
        }
    })
}

impl MoeLowLatency {
    fn lock(&self) -> MutexGuard<'_, Option<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> Result<Arc<Queue>> {
        self.process.check(|| "MoeLowLatency".to_owned())?;
        Ok(self.queue.upgrade().ok_or_else(closed)?)
    }

    /// Makes a call: on the host in the order of the communicator's, on a GPU in its current stream.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        host: impl FnOnce(&mut moe::Moe, &antiphon::prelude::Communicator) -> Result<T, MoeError> + Send,
        cuda: impl FnOnce(&CudaLowLatency, usize) -> Result<T, MoeError> + Send,
    ) -> Result<T> {
        let queue = self.queue()?;
        let device = match &*self.lock() {
            Some(Engine::Cuda(engine)) => Some(engine.ordinal()),
            _ => None,
        };
        let stream =
            device.map(|device| stream_or_current(py, device, None)).transpose()?.unwrap_or_default();
        let outcome = interrupt::detached(py, || {
            if device.is_some() {
                return match &*self.lock() {
                    Some(Engine::Cuda(engine)) => cuda(engine, stream).map(Some),
                    _ => Ok(None),
                };
            }
            queue.run(|comm| match &mut *self.lock() {
                Some(Engine::Host(moe)) => host(moe, comm).map(Some),
                _ => Ok(None),
            })
        })?;
        Ok(outcome.ok_or_else(closed)?)
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("this MoeLowLatency or its communicator is closed")
}

fn of_another() -> MoeError {
    MoeError::Handle { call: "low_latency_combine", problem: "of another instance" }
}

#[pymethods]
impl MoeLowLatency {
    #[new]
    #[pyo3(signature = (comm, *, max_tokens, hidden, num_experts, top_k, device = None))]
    fn new(
        py: Python<'_>,
        comm: &Communicator,
        max_tokens: usize,
        hidden: usize,
        num_experts: usize,
        top_k: usize,
        device: Option<u32>,
    ) -> Result<Self> {
        let queue = comm.queue()?;
        let most = LowLatency { max_tokens, hidden, num_experts, top_k };
        let engine = interrupt::detached(py, || {
            queue.run(|comm| match device {
                None => moe::Moe::new(comm, MoeConfig::default()).map(Engine::Host),
                Some(device) => {
                    let context =
                        primary(device).map_err(|error| FabricError::from(DeviceError::from(error)))?;
                    CudaLowLatency::new(comm, &context, most).map(Box::new).map(Engine::Cuda)
                }
            })
        })?;
        Ok(Self {
            engine: Mutex::new(Some(engine)),
            queue: Arc::downgrade(&queue),
            process: Process::current(),
        })
    }

    #[doc = stub!("MoeLowLatency.bytes")]
    #[staticmethod]
    #[pyo3(signature = (world_size, *, max_tokens, hidden, num_experts, top_k))]
    fn bytes(world_size: usize, max_tokens: usize, hidden: usize, num_experts: usize, top_k: usize) -> usize {
        LowLatency { max_tokens, hidden, num_experts, top_k }.bytes(world_size)
    }

    #[doc = stub!("MoeLowLatency.check")]
    fn check(&self) -> Result<()> {
        match &*self.lock() {
            Some(Engine::Cuda(engine)) => Ok(engine.check()?),
            _ => Ok(()),
        }
    }

    #[doc = stub!("MoeLowLatency.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        let (Some(queue), true) = (self.queue.upgrade(), self.process.is_current()) else { return Ok(()) };
        let closed = interrupt::detached(py, || {
            queue.run(|comm| match self.lock().take() {
                Some(Engine::Host(moe)) => moe.close(comm),
                _ => Ok(()),
            })
        });
        Ok(closed?)
    }

    #[doc = stub!("MoeLowLatency.dispatch")]
    #[pyo3(signature = (x, ids, received_x, *, format, max_tokens, num_experts, counts, source_tokens, layout_range, received_scales = None, statistics = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names all but three")]
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        received_x: &Bound<'_, PyAny>,
        format: &str,
        max_tokens: usize,
        num_experts: usize,
        counts: &Bound<'_, PyAny>,
        source_tokens: &Bound<'_, PyAny>,
        layout_range: &Bound<'_, PyAny>,
        received_scales: Given<'_, '_>,
        statistics: Given<'_, '_>,
    ) -> Result<MoeLowLatencyHandle> {
        let format = format_of(format)?;
        let (x, ids) = (Array::read(x, "x")?, Array::read(ids, "ids")?);
        let received_x = Array::write(received_x, "received_x")?;
        let scales = Array::given(received_scales, "received_scales", Array::write)?;
        let counts = Array::write(counts, "counts")?;
        let source_tokens = Array::write(source_tokens, "source_tokens")?;
        let layout_range = Array::write(layout_range, "layout_range")?;
        let statistics = Array::given(statistics, "statistics", Array::write)?;
        let outputs = [&received_x, &counts, &source_tokens, &layout_range].map(Some);
        let optional = [scales.as_ref(), statistics.as_ref()];
        check_apart(
            "low_latency_dispatch",
            &[Some(&x), Some(&ids)],
            &[outputs.as_slice(), optional.as_slice()].concat(),
        )?;
        // SAFETY: the arrays live until this returns, or on a GPU until the stream has passed, as the caller's library sees to;
        // the written ones are apart from all others; that nobody else uses them meanwhile is the caller's to see to.
        let write = |array: &Array| unsafe { array.view_mut() };
        let call = LowLatencyDispatch {
            max_tokens,
            num_experts,
            format,
            // SAFETY: as above.
            x: unsafe { x.view() }?,
            // SAFETY: as above.
            ids: unsafe { ids.view() }?,
            received: LowLatencyReceived {
                x: write(&received_x)?,
                scales: scales.as_ref().map(write).transpose()?,
                counts: write(&counts)?,
                source_tokens: write(&source_tokens)?,
                layout_range: write(&layout_range)?,
                statistics: statistics.as_ref().map(write).transpose()?,
            },
        };
        let call = Mutex::new(Some(call));
        let take =
            || call.lock().unwrap_or_else(PoisonError::into_inner).take().expect("one of them runs, once");
        let routes = self.run(
            py,
            |moe, comm| moe.low_latency_dispatch(comm, take()).map(Routes::Host),
            |engine, stream| {
                // SAFETY: the stream is that of the library whose tensors are used, and so of the device; the rest as above.
                let handle = unsafe { engine.dispatch(&take(), engine.context().borrow_stream(stream)) };
                handle.map(|handle| Routes::Cuda(Mutex::new(handle)))
            },
        )?;
        Ok(MoeLowLatencyHandle(routes))
    }

    #[doc = stub!("MoeLowLatency.combine")]
    fn combine(
        &self,
        py: Python<'_>,
        handle: &MoeLowLatencyHandle,
        rows: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let (rows, ids) = (Array::read(rows, "rows")?, Array::read(ids, "ids")?);
        let (weights, output) = (Array::read(weights, "weights")?, Array::write(output, "output")?);
        check_apart("low_latency_combine", &[Some(&rows), Some(&ids), Some(&weights)], &[Some(&output)])?;
        // SAFETY: as in `dispatch`.
        let read = |array: &Array| unsafe { array.view() };
        let call = LowLatencyCombine {
            rows: read(&rows)?,
            ids: read(&ids)?,
            weights: read(&weights)?,
            // SAFETY: as in `dispatch`.
            output: unsafe { output.view_mut() }?,
        };
        let call = Mutex::new(Some(call));
        let take =
            || call.lock().unwrap_or_else(PoisonError::into_inner).take().expect("one of them runs, once");
        self.run(
            py,
            |moe, comm| match &handle.0 {
                Routes::Host(handle) => moe.low_latency_combine(comm, handle, take()),
                Routes::Cuda(_) => Err(of_another()),
            },
            |engine, stream| {
                let Routes::Cuda(handle) = &handle.0 else { return Err(of_another()) };
                let handle = handle.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: as in `dispatch`.
                unsafe { engine.combine(&handle, &take(), engine.context().borrow_stream(stream)) }
            },
        )
    }
}

#[pymethods]
impl MoeLowLatencyHandle {
    #[doc = stub!("MoeLowLatencyHandle.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        match &self.0 {
            Routes::Host(handle) => handle.num_tokens(),
            Routes::Cuda(handle) => handle.lock().unwrap_or_else(PoisonError::into_inner).num_tokens(),
        }
    }
}
