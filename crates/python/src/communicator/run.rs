//! Running collectives: blocking or started on the host, or in a stream of a GPU.

use std::sync::Arc;

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::{self, Queue},
    prelude::CollectiveError,
    session::{Order, Session},
};
use pyo3::{
    exceptions::{PyNotImplementedError, PyRuntimeError},
    prelude::*,
    types::PyList,
};

use super::Communicator;
use crate::{
    arguments::{Operands, Prepared},
    call::{Call, What},
    cuda::Gpus,
    error::{Error, Result},
    fork::Process,
    handle::Handle,
    interrupt,
    operand::{Operand, Usage},
    stream::{RawStream, on, stream_or_current},
};

impl Communicator {
    pub(super) fn new(comm: fabric::Communicator) -> Self {
        Self {
            rank: comm.rank(),
            world_size: comm.world_size(),
            nodes: comm.nodes(),
            timeout: Mutex::new(comm.timeout()),
            process: Process::current(),
            gpus: Gpus::new(comm),
        }
    }

    pub(crate) fn gpus(&self) -> &Gpus {
        &self.gpus
    }

    /// The queue of the calls, which a call holds until it is over: it ends no earlier.
    pub(crate) fn queue(&self) -> PyResult<Arc<Queue>> {
        self.process.check(|| format!("communicator (rank {} of {})", self.rank, self.world_size))?;
        self.gpus.session().queue().map_err(|_| {
            let text = format!("this communicator (rank {} of {}) is closed", self.rank, self.world_size);
            PyRuntimeError::new_err(text)
        })
    }

    /// Waits for an operation on the host; puts one on a GPU into the stream, or the current one of the arrays' library.
    pub(crate) fn run<'py>(
        &self,
        py: Python<'py>,
        prepared: Prepared<'py>,
        stream: Option<RawStream>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let queue = self.queue()?;
        let Prepared { call, result, operands } = prepared;
        if let Some(device) = call.cuda_device() {
            if call.mixed.is_none() && !Session::has_operation(call.what.operation) {
                return Err(not_on_cuda(call.name(), device));
            }
            let current = || operands.iter().flatten().find_map(|operand| operand.stream);
            let stream = stream.or_else(current).unwrap_or(0);
            // SAFETY: libraries give memory back in the order of the stream that they work on, which this is; of another
            // one the caller answers for the order, as the stub says.
            interrupt::detached(py, || unsafe { self.gpus.run(device, stream, &call) })?;
            self.gpus.keep_stream(py, stream, Order::of(call.operation()))?;
        } else if let Some(stream) = stream {
            let text = format!("{}: host memory has no stream {stream}", call.name());
            return Err(pyo3::exceptions::PyValueError::new_err(text).into());
        } else {
            // SAFETY: the operands, and the references of the caller, live until this returns.
            interrupt::detached(py, || queue.run(|comm| unsafe { call.run(comm) }))?;
        }
        drop(operands);
        Ok(result)
    }

    /// The same operation on each array of a list, in one launch where a GPU has them all; the results.
    pub(super) fn run_list<'py>(
        &self,
        py: Python<'py>,
        what: What,
        xs: &[Bound<'py, PyAny>],
        outs: Option<&[Bound<'py, PyAny>]>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyList>> {
        if let Some(outs) = outs.filter(|outs| outs.len() != xs.len()) {
            let text = format!("{} inputs and {} outputs", xs.len(), outs.len());
            return Err(pyo3::exceptions::PyValueError::new_err(text).into());
        }
        let usage = Usage::Call(stream);
        let prepare = |(index, x)| {
            let out = outs.map(|outs: &[Bound<'py, PyAny>]| &outs[index]);
            self.prepare(what.clone(), Some(x), out, usage)
        };
        let prepared = xs.iter().enumerate().map(prepare).collect::<Result<Vec<_>>>()?;
        let results = PyList::empty(py);
        let devices: Vec<Option<u32>> = prepared.iter().map(|one| one.call.cuda_device()).collect();
        let device =
            devices.first().copied().flatten().filter(|_| devices.windows(2).all(|two| two[0] == two[1]));
        let Some(device) = device else {
            for one in prepared {
                results.append(self.run(py, one, stream)?)?;
            }
            return Ok(results);
        };
        let _queue = self.queue()?;
        let current =
            || prepared.iter().flat_map(|one| one.operands.iter().flatten()).find_map(|one| one.stream);
        let stream = stream.or_else(current).unwrap_or(0);
        let calls: Vec<Call> = prepared.iter().map(|one| one.call.clone()).collect();
        // SAFETY: as in `run`.
        interrupt::detached(py, || unsafe { self.gpus.run_list(device, stream, &calls) })?;
        self.gpus.keep_stream(py, stream, Order::of(what.operation))?;
        for one in prepared {
            results.append(one.result)?;
        }
        Ok(results)
    }

    pub(super) fn run_barrier(&self, py: Python<'_>, device: u32, stream: Option<RawStream>) -> Result<()> {
        let (_queue, stream) = (self.queue()?, stream_or_current(py, device, stream)?);
        // SAFETY: the stream is the library's current one of the device, or the caller says that it is one of it.
        interrupt::detached(py, || self.gpus.session().barrier(unsafe { on(device, stream) }))?;
        Ok(self.gpus.keep_stream(py, stream, &[Order::Collectives])?)
    }

    /// Begins an operation: in the background of the host, or in a stream beside the current one.
    pub(super) fn start(&self, py: Python<'_>, prepared: Prepared<'_>) -> Result<Handle> {
        let Prepared { call, result, operands } = prepared;
        let name = call.name();
        if let Some(device) = call.cuda_device() {
            if call.mixed.is_none() && !Session::has_operation(call.what.operation) {
                return Err(not_on_cuda(name, device));
            }
            let _queue = self.queue()?;
            let stream = operands.iter().flatten().find_map(|operand| operand.stream).unwrap_or(0);
            let started = interrupt::detached(py, || {
                // SAFETY: the operands were made to last as long as they live, and what is started keeps them.
                unsafe { self.gpus.start(device, stream, &call, operands) }
            })?;
            return Ok(Handle::on_cuda(name, started, result));
        }
        let pending = self.queue()?.start(move |comm| {
            // SAFETY: the operands were made to last as long as they live, which is until this is over.
            unsafe { call.run(comm) }?;
            Ok::<Operands, CollectiveError>(operands)
        })?;
        Ok(Handle::new(name, pending, result))
    }
}

impl Operand {
    /// Refuses memory of a GPU, for what has no kernel.
    pub(super) fn on_host(self, operation: &str) -> Result<Self> {
        match self.tensor.device.cuda_ordinal() {
            Some(device) => Err(not_on_cuda(operation, device)),
            None => Ok(self),
        }
    }
}

#[cold]
pub(super) fn not_on_cuda(operation: &str, device: u32) -> Error {
    let text = format!(
        "{operation} on cuda:{device}: it takes host memory only; on CUDA there are the collectives and the messages that name both ranks"
    );
    PyNotImplementedError::new_err(text).into()
}
