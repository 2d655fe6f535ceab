//! The class `Communicator`: every method gathers the arrays of its call (see [`prepare`]), then waits for it or starts it.

mod fused;
mod plan;
mod prepare;
mod run;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use antiphon::{
    fabric::{self, Builder, Queue, Source},
    operation::Operation,
    prelude::CollectiveError,
};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
    pybacked::PyBackedBytes,
    types::{PyBytes, PyList},
};

use fused::Arguments;
pub(crate) use plan::Plan;
use prepare::{call, reducing, rows};

use crate::{
    arguments::{Count, Given, Operands, Prepared, Tag, overlap},
    cuda::{self, CudaBuffer, Gpus, RawStream},
    error::Result,
    fork::Process,
    handle::Handle,
    interrupt,
    operand::{Operand, Usage},
    shared::SharedBuffer,
};

#[doc = stub!("Communicator")]
#[pyclass(frozen, module = "antiphon", weakref)]
pub(crate) struct Communicator {
    rank: usize,
    world_size: usize,
    timeout: Mutex<Duration>,
    process: Process,
    /// Absent when closed. Calls hold a reference of their own.
    queue: Mutex<Option<Arc<Queue>>>,
    gpus: Gpus,
}

/// A number of seconds that someone gave.
pub(crate) fn seconds(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let duration = |seconds| {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| PyValueError::new_err(format!("{name} is {seconds}, which is no number of seconds")))
    };
    seconds.map(duration).transpose()
}

#[pymethods]
impl Communicator {
    #[doc = stub!("Communicator.from_env")]
    #[staticmethod]
    #[pyo3(signature = (timeout = None, arena_bytes = None))]
    fn from_env(py: Python<'_>, timeout: Option<f64>, arena_bytes: Option<usize>) -> Result<Self> {
        let builder = builder(timeout, arena_bytes)?;
        Ok(Self::new(interrupt::detached(py, || builder.from_env())?))
    }

    #[staticmethod]
    #[pyo3(signature = (rank, world_size, path, secret, timeout = None, arena_bytes = None, parent = None))]
    #[expect(clippy::too_many_arguments, reason = "`antiphon.init` names them")]
    fn at_path(
        py: Python<'_>,
        rank: usize,
        world_size: usize,
        path: std::path::PathBuf,
        secret: Vec<u8>,
        timeout: Option<f64>,
        arena_bytes: Option<usize>,
        parent: Option<&Self>,
    ) -> Result<Self> {
        let builder = of_parent(builder(timeout, arena_bytes)?, parent)?;
        Ok(Self::new(interrupt::detached(py, || builder.at_path(rank, world_size, path, secret))?))
    }

    #[staticmethod]
    #[pyo3(signature = (rank, world_size, exchange, timeout = None, arena_bytes = None, parent = None))]
    fn by_exchange(
        py: Python<'_>,
        rank: usize,
        world_size: usize,
        exchange: Py<PyAny>,
        timeout: Option<f64>,
        arena_bytes: Option<usize>,
        parent: Option<&Self>,
    ) -> Result<Self> {
        let builder = of_parent(builder(timeout, arena_bytes)?, parent)?;
        let mut raised = None;
        let mut all_gather = |mine: Vec<u8>| {
            Python::attach(|py| {
                let all = exchange.call1(py, (PyBytes::new(py, &mine),));
                all.and_then(|all| all.extract::<Vec<Vec<u8>>>(py)).map_err(|error| {
                    let text = error.to_string();
                    raised = Some(error);
                    text
                })
            })
        };
        let comm = interrupt::detached(py, || builder.by_exchange(rank, world_size, &mut all_gather));
        match raised {
            Some(error) => Err(error.into()),
            None => Ok(Self::new(comm?)),
        }
    }

    #[doc = stub!("Communicator.rank")]
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    #[doc = stub!("Communicator.world_size")]
    #[getter]
    fn world_size(&self) -> usize {
        self.world_size
    }

    #[doc = stub!("Communicator.timeout")]
    #[getter]
    fn timeout(&self) -> f64 {
        self.timeout.lock().unwrap_or_else(PoisonError::into_inner).as_secs_f64()
    }

    #[setter]
    fn set_timeout(&self, timeout: f64) -> Result<()> {
        let timeout = seconds("timeout", Some(timeout))?.expect("it was given");
        self.queue()?.monitor().set_timeout(timeout);
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
        Ok(())
    }

    #[doc = stub!("Communicator.closed")]
    #[getter]
    fn closed(&self) -> bool {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    #[doc = stub!("Communicator.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        if !self.process.is_current() {
            return Ok(()); // it was never this process's
        }
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        // What was started goes on to its end, as its handles promise.
        let finish = |queue: Arc<fabric::Queue>| {
            queue.run(|_| Ok::<_, fabric::FabricError>(()))?;
            queue.messenger().flush()
        };
        let finished = queue.map(|queue| interrupt::detached(py, || finish(queue)));
        py.detach(|| self.gpus.close());
        match finished {
            Some(Err(error @ fabric::FabricError::Interrupted { .. })) => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> Result<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let closed = if self.closed() { ", closed" } else { "" };
        format!("<antiphon.Communicator: rank {} of {}{closed}>", self.rank, self.world_size)
    }

    #[doc = stub!("Communicator.split")]
    #[pyo3(signature = (color, key = 0))]
    fn split(&self, py: Python<'_>, color: Option<Count>, key: i64) -> Result<Option<Self>> {
        let queue = self.queue()?;
        let group =
            interrupt::detached(py, || queue.run(|comm| comm.split(color.map(|color| color.0 as u64), key)))?;
        Ok(group.map(Self::new))
    }

    #[doc = stub!("Communicator.shrink")]
    fn shrink(&self, py: Python<'_>) -> Result<Self> {
        let queue = self.queue()?;
        Ok(Self::new(interrupt::detached(py, || queue.run(|comm| comm.shrink()))?))
    }

    #[doc = stub!("Communicator.abort")]
    fn abort(&self, py: Python<'_>) -> Result<()> {
        let queue = self.queue()?;
        py.detach(|| queue.monitor().abort());
        Ok(())
    }

    #[doc = stub!("Communicator.barrier")]
    #[pyo3(signature = (*, device = None, stream = None))]
    fn barrier(&self, py: Python<'_>, device: Option<u32>, stream: Option<RawStream>) -> Result<()> {
        match device {
            None if stream.is_some() => {
                Err(PyValueError::new_err("barrier: a stream needs its device").into())
            }
            None => self.run(py, Prepared::bare(call(Operation::Barrier)), None).map(drop),
            Some(device) => self.run_barrier(py, device, stream),
        }
    }

    #[doc = stub!("Communicator.start_barrier")]
    fn start_barrier(&self, py: Python<'_>) -> Result<Handle> {
        self.start(py, Prepared::bare(call(Operation::Barrier)))
    }

    #[doc = stub!("Communicator.exchange_bytes")]
    fn exchange_bytes<'py>(&self, py: Python<'py>, mine: PyBackedBytes) -> Result<Bound<'py, PyList>> {
        let queue = self.queue()?;
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(&mine)))?;
        Ok(PyList::new(py, all.iter().map(|bytes| PyBytes::new(py, bytes)))?)
    }

    #[doc = stub!("Communicator.exchange_objects")]
    fn exchange_objects<'py>(
        &self,
        py: Python<'py>,
        object: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyList>> {
        let pickle = py.import("pickle")?;
        // Bytes go round even if pickling failed: the others must not be left waiting.
        let pickled = pickle.call_method1("dumps", (object,)).and_then(|p| Ok(p.extract::<PyBackedBytes>()?));
        let queue = self.queue()?;
        let mine: &[u8] = pickled.as_deref().unwrap_or(&[]);
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(mine)))?;
        pickled?;
        let objects = PyList::empty(py);
        for (rank, bytes) in all.iter().enumerate() {
            if bytes.is_empty() {
                let text = format!("the object of rank {rank} could not be pickled there");
                return Err(PyRuntimeError::new_err(text).into());
            }
            objects.append(pickle.call_method1("loads", (PyBytes::new(py, bytes),))?)?;
        }
        Ok(objects)
    }

    #[doc = stub!("Communicator.broadcast_object")]
    #[pyo3(signature = (object, root = Count(0)), text_signature = "($self, object, root=0)")]
    fn broadcast_object<'py>(
        &self,
        py: Python<'py>,
        object: &Bound<'py, PyAny>,
        root: Count,
    ) -> Result<Bound<'py, PyAny>> {
        let pickle = py.import("pickle")?;
        // Bytes go round even if pickling failed: the others must not be left waiting. No pickle is one byte long.
        if root.0 >= self.world_size {
            let text = format!("root rank {} is not below the world size {}", root.0, self.world_size);
            return Err(PyValueError::new_err(text).into());
        }
        let pickled = match root.0 == self.rank {
            true => {
                pickle.call_method1("dumps", (object,)).and_then(|p| Ok(Some(p.extract::<PyBackedBytes>()?)))
            }
            false => Ok(None),
        };
        let mine: &[u8] = match &pickled {
            Ok(Some(bytes)) => bytes,
            Ok(None) => &[],
            Err(_) => &[0],
        };
        let queue = self.queue()?;
        let all = interrupt::detached(py, || queue.run(|comm| comm.exchange_bytes(mine)))?;
        if pickled?.is_some() {
            return Ok(object.clone());
        }
        let problem = match all[root.0].as_slice() {
            [] => "is not the root there",
            [0] => "could not pickle its object",
            bytes => return Ok(pickle.call_method1("loads", (PyBytes::new(py, bytes),))?),
        };
        Err(PyRuntimeError::new_err(format!("broadcast_object: rank {} {problem}", root.0)).into())
    }

    #[doc = stub!("Communicator.all_reduce")]
    #[pyo3(signature = (x, op = None, *, out = None, algorithm = None, registered = false, stream = None))]
    #[allow(clippy::too_many_arguments)] // of which Python names the last four
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        algorithm: Option<&str>,
        registered: bool,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let usage = Usage::Call(stream);
        self.run(py, self.prepare_all_reduce(x, op, out, algorithm, registered, usage)?, stream)
    }

    #[doc = stub!("Communicator.start_all_reduce")]
    #[pyo3(signature = (x, op = None, *, out = None, algorithm = None))]
    fn start_all_reduce<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        algorithm: Option<&str>,
    ) -> Result<Handle> {
        self.start(py, self.prepare_all_reduce(x, op, out, algorithm, false, Usage::Started)?)
    }

    #[doc = stub!("Communicator.all_reduce_fused")]
    #[expect(clippy::too_many_arguments, reason = "a call of keywords")]
    #[pyo3(signature = (x = None, *, tokens = None, hidden = None, experts = None, expert_scales = None, shared = None, rows = None, index = None, routed_scaling = 1.0, rounded = false, bias = None, pre_norm = false, pre_weight = None, residual = None, weight = None, weight_bias = 0.0, eps = 1e-6, round_before_weight = false, quantize = None, scale = None, group_size = 128, scale_layout = None, sum_out = None, residual_out = None, norm_out = None, inverse_rms_out = None, codes = None, scales = None, algorithm = None, stream = None))]
    fn all_reduce_fused<'py>(
        &self,
        py: Python<'py>,
        x: Given<'_, 'py>,
        tokens: Option<usize>,
        hidden: Option<usize>,
        experts: Given<'_, 'py>,
        expert_scales: Given<'_, 'py>,
        shared: Given<'_, 'py>,
        rows: Given<'_, 'py>,
        index: Given<'_, 'py>,
        routed_scaling: f32,
        rounded: bool,
        bias: Given<'_, 'py>,
        pre_norm: bool,
        pre_weight: Given<'_, 'py>,
        residual: Given<'_, 'py>,
        weight: Given<'_, 'py>,
        weight_bias: f32,
        eps: f32,
        round_before_weight: bool,
        quantize: Option<&str>,
        scale: Given<'_, 'py>,
        group_size: usize,
        scale_layout: Given<'_, 'py>,
        sum_out: Given<'_, 'py>,
        residual_out: Given<'_, 'py>,
        norm_out: Given<'_, 'py>,
        inverse_rms_out: Given<'_, 'py>,
        codes: Given<'_, 'py>,
        scales: Given<'_, 'py>,
        algorithm: Option<&str>,
        stream: Option<RawStream>,
    ) -> Result<()> {
        let arguments = Arguments {
            x,
            tokens,
            hidden,
            experts,
            expert_scales,
            shared,
            rows,
            index,
            routed_scaling,
            rounded,
            bias,
            pre_norm,
            pre_weight,
            residual,
            weight,
            weight_bias,
            round_before_weight,
            eps,
            quantize,
            scale,
            group_size,
            scale_layout,
            sum_out,
            residual_out,
            norm_out,
            inverse_rms_out,
            codes,
            scales,
            algorithm,
            stream,
        };
        self.run_fused(py, &arguments)
    }

    #[doc = stub!("Communicator.all_reduce_rms_norm")]
    #[expect(clippy::too_many_arguments, reason = "a call of keywords")]
    #[pyo3(signature = (x, residual = None, weight = None, *, eps = 1e-6, weight_bias = 0.0, bias = None, pre_norm = false, pre_weight = None, quantize = None, scale = None, group_size = 128, scale_layout = None, keep_norm = false, out = None, residual_out = None, codes = None, scales = None, rounded = false, algorithm = None, stream = None))]
    fn all_reduce_rms_norm<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        residual: Given<'_, 'py>,
        weight: Given<'_, 'py>,
        eps: f32,
        weight_bias: f32,
        bias: Given<'_, 'py>,
        pre_norm: bool,
        pre_weight: Given<'_, 'py>,
        quantize: Option<&str>,
        scale: Given<'_, 'py>,
        group_size: usize,
        scale_layout: Given<'_, 'py>,
        keep_norm: bool,
        out: Given<'_, 'py>,
        residual_out: Given<'_, 'py>,
        codes: Given<'_, 'py>,
        scales: Given<'_, 'py>,
        rounded: bool,
        algorithm: Option<&str>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        let arguments = Arguments {
            x: Some(x),
            residual,
            weight,
            eps,
            weight_bias,
            bias,
            pre_norm,
            pre_weight,
            quantize,
            scale,
            group_size,
            scale_layout,
            norm_out: out,
            residual_out,
            codes,
            scales,
            rounded,
            algorithm,
            stream,
            ..Arguments::default()
        };
        self.run_rms_norm(py, arguments, keep_norm)
    }

    #[doc = stub!("Communicator.all_gather")]
    #[pyo3(signature = (x, *, out = None, stream = None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(py, self.prepare(call(Operation::AllGather), Some(x), out, Usage::Call(stream))?, stream)
    }

    #[doc = stub!("Communicator.start_all_gather")]
    #[pyo3(signature = (x, *, out = None))]
    fn start_all_gather<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(py, self.prepare(call(Operation::AllGather), Some(x), out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.all_gather_list")]
    #[pyo3(signature = (xs, *, out = None, stream = None))]
    fn all_gather_list<'py>(
        &self,
        py: Python<'py>,
        xs: Vec<Bound<'py, PyAny>>,
        out: Option<Vec<Bound<'py, PyAny>>>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyList>> {
        self.run_list(py, call(Operation::AllGather), &xs, out.as_deref(), stream)
    }

    #[doc = stub!("Communicator.reduce_scatter_list")]
    #[pyo3(signature = (xs, op = None, *, out = None, stream = None))]
    fn reduce_scatter_list<'py>(
        &self,
        py: Python<'py>,
        xs: Vec<Bound<'py, PyAny>>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<Vec<Bound<'py, PyAny>>>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyList>> {
        self.run_list(py, reducing(Operation::ReduceScatter, op)?, &xs, out.as_deref(), stream)
    }

    #[doc = stub!("Communicator.reduce_scatter")]
    #[pyo3(signature = (x, op = None, *, out = None, stream = None))]
    fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(
            py,
            self.prepare(reducing(Operation::ReduceScatter, op)?, Some(x), out, Usage::Call(stream))?,
            stream,
        )
    }

    #[doc = stub!("Communicator.start_reduce_scatter")]
    #[pyo3(signature = (x, op = None, *, out = None))]
    fn start_reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(py, self.prepare(reducing(Operation::ReduceScatter, op)?, Some(x), out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.all_to_all")]
    #[pyo3(signature = (x, *, out = None, stream = None))]
    fn all_to_all<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(py, self.prepare(call(Operation::AllToAll), Some(x), out, Usage::Call(stream))?, stream)
    }

    #[doc = stub!("Communicator.start_all_to_all")]
    #[pyo3(signature = (x, *, out = None))]
    fn start_all_to_all<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(py, self.prepare(call(Operation::AllToAll), Some(x), out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.all_to_all_v")]
    #[pyo3(signature = (x, sends, receives, *, out = None, stream = None))]
    fn all_to_all_v<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        sends: Vec<Count>,
        receives: Vec<Count>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(
            py,
            self.prepare(
                call(Operation::AllToAllV).with_counts(rows(&sends)).with_receives(rows(&receives)),
                Some(x),
                out,
                Usage::Call(stream),
            )?,
            stream,
        )
    }

    #[doc = stub!("Communicator.start_all_to_all_v")]
    #[pyo3(signature = (x, sends, receives, *, out = None))]
    fn start_all_to_all_v<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        sends: Vec<Count>,
        receives: Vec<Count>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(
            py,
            self.prepare(
                call(Operation::AllToAllV).with_counts(rows(&sends)).with_receives(rows(&receives)),
                Some(x),
                out,
                Usage::Started,
            )?,
        )
    }

    #[doc = stub!("Communicator.all_gather_v")]
    #[pyo3(signature = (x, counts, *, out = None, stream = None))]
    fn all_gather_v<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        counts: Vec<Count>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let what = call(Operation::AllGatherV).with_counts(rows(&counts));
        self.run(py, self.prepare(what, Some(x), out, Usage::Call(stream))?, stream)
    }

    #[doc = stub!("Communicator.start_all_gather_v")]
    #[pyo3(signature = (x, counts, *, out = None))]
    fn start_all_gather_v<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        counts: Vec<Count>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        let what = call(Operation::AllGatherV).with_counts(rows(&counts));
        self.start(py, self.prepare(what, Some(x), out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.reduce_scatter_v")]
    #[pyo3(signature = (x, counts, op = None, *, out = None, stream = None))]
    fn reduce_scatter_v<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        counts: Vec<Count>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let what = reducing(Operation::ReduceScatterV, op)?.with_counts(rows(&counts));
        self.run(py, self.prepare(what, Some(x), out, Usage::Call(stream))?, stream)
    }

    #[doc = stub!("Communicator.start_reduce_scatter_v")]
    #[pyo3(signature = (x, counts, op = None, *, out = None))]
    fn start_reduce_scatter_v<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        counts: Vec<Count>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        let what = reducing(Operation::ReduceScatterV, op)?.with_counts(rows(&counts));
        self.start(py, self.prepare(what, Some(x), out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.broadcast")]
    #[pyo3(signature = (x, root = Count(0), *, out = None, stream = None), text_signature = "($self, x, root=0, *, out=None, stream=None)")]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        x: Option<&Bound<'py, PyAny>>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(
            py,
            self.prepare(call(Operation::Broadcast).with_root(root.0), x, out, Usage::Call(stream))?,
            stream,
        )
    }

    #[doc = stub!("Communicator.start_broadcast")]
    #[pyo3(signature = (x, root = Count(0), *, out = None), text_signature = "($self, x, root=0, *, out=None)")]
    fn start_broadcast<'py>(
        &self,
        py: Python<'py>,
        x: Option<&Bound<'py, PyAny>>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(py, self.prepare(call(Operation::Broadcast).with_root(root.0), x, out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.reduce")]
    #[pyo3(signature = (x, op = None, root = Count(0), *, out = None, stream = None), text_signature = "($self, x, op=None, root=0, *, out=None, stream=None)")]
    fn reduce<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(
            py,
            self.prepare(
                reducing(Operation::Reduce, op)?.with_root(root.0),
                Some(x),
                out,
                Usage::Call(stream),
            )?,
            stream,
        )
    }

    #[doc = stub!("Communicator.start_reduce")]
    #[pyo3(signature = (x, op = None, root = Count(0), *, out = None), text_signature = "($self, x, op=None, root=0, *, out=None)")]
    fn start_reduce<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(
            py,
            self.prepare(reducing(Operation::Reduce, op)?.with_root(root.0), Some(x), out, Usage::Started)?,
        )
    }

    #[doc = stub!("Communicator.gather")]
    #[pyo3(signature = (x, root = Count(0), *, out = None, stream = None), text_signature = "($self, x, root=0, *, out=None, stream=None)")]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(
            py,
            self.prepare(call(Operation::Gather).with_root(root.0), Some(x), out, Usage::Call(stream))?,
            stream,
        )
    }

    #[doc = stub!("Communicator.start_gather")]
    #[pyo3(signature = (x, root = Count(0), *, out = None), text_signature = "($self, x, root=0, *, out=None)")]
    fn start_gather<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(py, self.prepare(call(Operation::Gather).with_root(root.0), Some(x), out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.scatter")]
    #[pyo3(signature = (x, root = Count(0), *, out = None, stream = None), text_signature = "($self, x, root=0, *, out=None, stream=None)")]
    fn scatter<'py>(
        &self,
        py: Python<'py>,
        x: Option<&Bound<'py, PyAny>>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.run(
            py,
            self.prepare(call(Operation::Scatter).with_root(root.0), x, out, Usage::Call(stream))?,
            stream,
        )
    }

    #[doc = stub!("Communicator.start_scatter")]
    #[pyo3(signature = (x, root = Count(0), *, out = None), text_signature = "($self, x, root=0, *, out=None)")]
    fn start_scatter<'py>(
        &self,
        py: Python<'py>,
        x: Option<&Bound<'py, PyAny>>,
        root: Count,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Handle> {
        self.start(py, self.prepare(call(Operation::Scatter).with_root(root.0), x, out, Usage::Started)?)
    }

    #[doc = stub!("Communicator.send")]
    #[pyo3(signature = (x, to, *, tag = Tag(0), stream = None), text_signature = "($self, x, to, *, tag=0, stream=None)")]
    fn send(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        to: Count,
        tag: Tag,
        stream: Option<RawStream>,
    ) -> Result<()> {
        let operand = Operand::import(x, "the input", Usage::Call(stream))?;
        self.exchange(py, Some((operand, to.0)), None, tag, stream)
    }

    #[doc = stub!("Communicator.recv")]
    #[pyo3(signature = (out, source, *, tag = Tag(0), stream = None), text_signature = "($self, out, source, *, tag=0, stream=None)")]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        out: Bound<'py, PyAny>,
        source: Count,
        tag: Tag,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        let operand = Operand::import(&out, "the output", Usage::Call(stream))?.writable("the output")?;
        self.exchange(py, None, Some((operand, source.0)), tag, stream)?;
        Ok(out)
    }

    #[doc = stub!("Communicator.recv_any")]
    #[pyo3(signature = (out, *, tag = Tag(0)), text_signature = "($self, out, *, tag=0)")]
    fn recv_any(&self, py: Python<'_>, out: &Bound<'_, PyAny>, tag: Tag) -> Result<usize> {
        self.receive(py, out, Source::Any, tag)
    }

    #[doc = stub!("Communicator.send_recv")]
    #[pyo3(signature = (x, to, out, source, *, stream = None))]
    fn send_recv<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        to: Count,
        out: Bound<'py, PyAny>,
        source: Count,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        let read = Operand::import(x, "the input", Usage::Call(stream))?;
        let write = Operand::import(&out, "the output", Usage::Call(stream))?.writable("the output")?;
        if overlap(&read.tensor, &write.tensor) {
            return Err(PyValueError::new_err("input and output overlap").into());
        }
        self.exchange(py, Some((read, to.0)), Some((write, source.0)), Tag(0), stream)?;
        Ok(out)
    }

    #[doc = stub!("Communicator.start_send")]
    #[pyo3(signature = (x, to, *, tag = Tag(0)), text_signature = "($self, x, to, *, tag=0)")]
    fn start_send(&self, py: Python<'_>, x: &Bound<'_, PyAny>, to: Count, tag: Tag) -> Result<Handle> {
        let operand = Operand::import(x, "the input", Usage::Started)?.on_host("start_send")?;
        let (queue, tensor) = (self.queue()?, operand.tensor);
        // Detached, as no lock is taken while attached that others hold while they attach.
        let pending = py.detach(|| {
            // SAFETY: the operand is the owner.
            unsafe {
                let view = tensor.view().map_err(refused)?;
                queue.messenger().start_send::<Operands>(view, [Some(operand), None], to.0, tag.0)
            }
        })?;
        Ok(Handle::new(pending, None))
    }

    #[doc = stub!("Communicator.start_recv")]
    #[pyo3(signature = (out, source, *, tag = Tag(0)), text_signature = "($self, out, source, *, tag=0)")]
    fn start_recv(
        &self,
        py: Python<'_>,
        out: Bound<'_, PyAny>,
        source: Option<Count>,
        tag: Tag,
    ) -> Result<Handle> {
        let operand = Operand::import(&out, "the output", Usage::Started)?;
        let operand = operand.on_host("start_recv")?.writable("the output")?;
        let (queue, tensor) = (self.queue()?, operand.tensor);
        let source = source.map_or(Source::Any, |rank| Source::Rank(rank.0));
        let pending = py.detach(|| {
            // SAFETY: the operand is the owner.
            unsafe {
                let view = tensor.view_mut().map_err(refused)?;
                queue.messenger().start_recv::<Operands>(view, [None, Some(operand)], source, tag.0)
            }
        })?;
        Ok(Handle::new(pending, Some(out)))
    }

    #[doc = stub!("Communicator.load_plan")]
    fn load_plan(&self, py: Python<'_>, plan: &Bound<'_, PyAny>) -> Result<Plan> {
        self.load(py, plan)
    }

    #[doc = stub!("Communicator.prepare_cuda")]
    #[pyo3(signature = (device = None, *, dtypes = None, ops = None))]
    fn prepare_cuda(
        &self,
        py: Python<'_>,
        device: Option<u32>,
        dtypes: Option<Vec<String>>,
        ops: Option<Vec<Bound<'_, PyAny>>>,
    ) -> Result<()> {
        let kernels = prepare::kernels(dtypes, ops)?;
        let (queue, device) = (self.queue()?, cuda::device_or_current(py, device)?);
        Ok(interrupt::detached(py, || self.gpus.prepare(&queue, device, &kernels))?)
    }

    #[doc = stub!("Communicator.on_cuda_failure")]
    fn on_cuda_failure(&self, py: Python<'_>, action: &Bound<'_, PyAny>) -> Result<()> {
        self.queue()?;
        self.gpus.on_failure(py, cuda::Action::new(action)?);
        Ok(())
    }

    #[doc = stub!("Communicator.check")]
    fn check(&self, py: Python<'_>) -> Result<()> {
        self.queue()?;
        Ok(py.detach(|| self.gpus.check())?)
    }

    #[doc = stub!("Communicator.create_cuda_buffer")]
    #[pyo3(signature = (num_bytes, device = None))]
    fn create_cuda_buffer(
        &self,
        py: Python<'_>,
        num_bytes: Count,
        device: Option<u32>,
    ) -> Result<CudaBuffer> {
        let (queue, device) = (self.queue()?, cuda::device_or_current(py, device)?);
        Ok(interrupt::detached(py, || {
            let context = cuda::primary(device).map_err(cuda::failed)?;
            Ok::<_, CollectiveError>(CudaBuffer::new(&queue, &context, num_bytes.0)?)
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
        if let cuda::Registrable::Buffer(buffer) = &memory {
            buffer.get().check_owner(&queue)?;
        }
        Ok(interrupt::detached(py, || self.gpus.register(&queue, &memory))?)
    }

    #[doc = stub!("Communicator.unregister_cuda")]
    fn unregister_cuda(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> Result<()> {
        let (queue, memory) = (self.queue()?, cuda::Registrable::new(memory)?);
        Ok(interrupt::detached(py, || self.gpus.unregister(&queue, &memory))?)
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

impl Communicator {
    /// Receives, and returns the rank that sent.
    fn receive(&self, py: Python<'_>, out: &Bound<'_, PyAny>, source: Source, tag: Tag) -> Result<usize> {
        let operand = Operand::import(out, "the output", Usage::Call(None))?
            .on_host("recv_any")?
            .writable("the output")?;
        let (queue, tensor) = (self.queue()?, operand.tensor);
        Ok(interrupt::detached(py, || {
            // SAFETY: the operand and the caller's reference live until this returns.
            let view = unsafe { tensor.view_mut() }.map_err(refused)?;
            queue.messenger().recv_with_tag(view, source, tag.0)
        })?)
    }
}

fn builder(timeout: Option<f64>, arena_bytes: Option<usize>) -> Result<Builder> {
    let mut builder = fabric::Communicator::builder().interrupt(interrupt::check);
    if let Some(timeout) = seconds("timeout", timeout)? {
        builder = builder.timeout(timeout);
    }
    if let Some(bytes) = arena_bytes {
        builder = builder.arena_bytes(bytes);
    }
    Ok(builder)
}

fn of_parent(builder: Builder, parent: Option<&Communicator>) -> Result<Builder> {
    Ok(match parent {
        None => builder,
        Some(parent) => builder.parent(parent.queue()?.messenger()),
    })
}

fn refused(error: antiphon::tensor::TensorError) -> fabric::FabricError {
    fabric::FabricError::invalid(error.to_string())
}
