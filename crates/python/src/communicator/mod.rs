//! The class `Communicator`, in parts: here its construction, groups and end; each other file has the methods of one kind.
//! A method gathers the arrays of its call (`prepare`), then waits for the call or starts it (`run`).

mod collectives;
mod fused;
mod memory;
mod messages;
mod objects;
mod plan;
mod prepare;
mod run;

use std::{sync::PoisonError, time::Duration};

use antiphon::device::sync::Mutex;
use antiphon::{
    collectives::cuda::CudaEngine,
    fabric::{self, Builder, Nodes, rendezvous::Environment},
    operation::Operation,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use plan::HowLoaded;
pub(crate) use plan::{Plan, PlanCollection};
use prepare::call;

use crate::{
    arguments::{Count, Place, Prepared, seconds},
    cuda::Gpus,
    error::Result,
    fork::Process,
    handle::Handle,
    interrupt,
    stream::RawStream,
};

#[doc = stub!("Communicator")]
#[pyclass(frozen, module = "antiphon", weakref)]
pub(crate) struct Communicator {
    rank: usize,
    world_size: usize,
    nodes: Nodes,
    timeout: Mutex<Duration>,
    process: Process,
    /// The queue of the calls, and what runs on GPUs. Calls hold a reference to the queue.
    gpus: Gpus,
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

    #[doc = stub!("Communicator.alone")]
    #[staticmethod]
    #[pyo3(signature = (timeout = None, arena_bytes = None))]
    fn alone(py: Python<'_>, timeout: Option<f64>, arena_bytes: Option<usize>) -> Result<Self> {
        let builder = builder(timeout, arena_bytes)?;
        Ok(Self::new(interrupt::detached(py, || builder.alone())?))
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

    #[doc = stub!("Communicator.nodes")]
    #[getter]
    fn nodes(&self) -> Vec<Vec<usize>> {
        (0..self.nodes.count()).map(|node| self.nodes.ranks(node).to_vec()).collect()
    }

    #[doc = stub!("Communicator.node")]
    #[getter]
    fn node(&self) -> usize {
        self.nodes.of(self.rank)
    }

    #[doc = stub!("Communicator.node_rank")]
    #[getter]
    fn node_rank(&self) -> usize {
        self.nodes.rank_in_node(self.rank)
    }

    #[doc = stub!("Communicator.is_local")]
    fn is_local(&self, rank: usize) -> Result<bool> {
        if rank >= self.world_size {
            let problem = format!("is_local: rank {rank} is not below the world size {}", self.world_size);
            return Err(PyValueError::new_err(problem).into());
        }
        Ok(self.nodes.share_memory(self.rank, rank))
    }

    #[doc = stub!("Communicator.cuda_engine")]
    #[getter]
    fn cuda_engine(&self) -> &'static str {
        CudaEngine::name_on(&self.nodes)
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
        self.gpus.session().is_closed()
    }

    #[doc = stub!("Communicator.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        if !self.process.is_current() {
            return Ok(()); // it was never this process's
        }
        let session = self.gpus.session();
        // Started operations complete, as their handles promise.
        let finished = interrupt::detached(py, || session.finish());
        py.detach(|| session.close());
        match finished {
            Err(error @ fabric::FabricError::Interrupted { .. }) => Err(error.into()),
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

    #[doc = stub!("Communicator.node_group")]
    fn node_group(&self, py: Python<'_>) -> Result<Self> {
        let queue = self.queue()?;
        Ok(Self::new(interrupt::detached(py, || queue.run(|comm| comm.node_group()))?))
    }

    #[doc = stub!("Communicator.rail_group")]
    fn rail_group(&self, py: Python<'_>) -> Result<Self> {
        let queue = self.queue()?;
        Ok(Self::new(interrupt::detached(py, || queue.run(|comm| comm.rail_group()))?))
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

    #[doc = stub!("Communicator.load_plan")]
    #[pyo3(signature = (plan, *, device = None, packets = "ll16", form = "auto", ports = "blocks", most_scratch = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last five")]
    fn load_plan(
        &self,
        py: Python<'_>,
        plan: &Bound<'_, PyAny>,
        device: Option<Place>,
        packets: &str,
        form: &str,
        ports: &str,
        most_scratch: Option<Count>,
    ) -> Result<Plan> {
        let place = device.unwrap_or(Place::Host);
        self.load(py, plan, &HowLoaded { place, packets, form, ports, most_scratch })
    }
}

#[doc = stub!("launcher_variables")]
#[pyfunction]
pub(crate) fn launcher_variables() -> Vec<&'static str> {
    Environment::LAUNCHERS.to_vec()
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

pub(crate) fn refused(error: antiphon::tensor::TensorError) -> fabric::FabricError {
    fabric::FabricError::invalid(error.to_string())
}
