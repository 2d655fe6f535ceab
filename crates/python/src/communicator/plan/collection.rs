//! The class `PlanCollection`: plans from which each call takes one.

use std::{sync::PoisonError, time::Duration};

use antiphon::{
    device::sync::Mutex,
    operation::Operation,
    prelude::{DType, FabricError},
    session::{self, SessionError},
};
use antiphon_executor::{AlgorithmCollection, ExecutorError, Options};
use antiphon_plan::verify::Memory;
use pyo3::{
    exceptions::{PyNotImplementedError, PyValueError},
    prelude::*,
};

use super::{
    super::{Communicator, prepare::reduce_op, refused},
    HowLoaded, Source, no_stream, of_numbers,
};
use crate::{
    arguments::{Count, DTypeName, Given, Place},
    call::{Call, CallTensors, What},
    cuda::views,
    error::Result,
    fork::Process,
    interrupt,
    operand::Usage,
    stream::{RawStream, device_or_current, on},
};

/// What a collection's calls can be.
const COLLECTIVES: [&str; 4] = ["allreduce", "allgather", "reducescatter", "alltoall"];

#[doc = stub!("PlanCollection")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct PlanCollection {
    comm: Py<Communicator>,
    plans: Plans,
    /// What was added.
    added: Mutex<Vec<Added>>,
    process: Process,
}

/// What a collection says of one of its plans, or of the built-in call: its name, its time in microseconds, and why it does not do it.
type Said = (String, Option<f64>, Option<String>);

/// Where a collection's plans are.
enum Plans {
    /// Absent when closed. Locked in a turn of the queue only.
    Host(Mutex<Option<AlgorithmCollection>>),
    Gpu(session::PlanCollection),
}

#[derive(Clone)]
struct Added {
    name: String,
    /// All, of the built-in calls.
    collective: Option<String>,
}

impl PlanCollection {
    fn operation(collective: &str) -> PyResult<Operation> {
        let operation = antiphon_plan::Plan::operation_of(collective);
        operation.filter(|_| COLLECTIVES.contains(&collective)).ok_or_else(|| {
            let known = COLLECTIVES.join(", ");
            PyValueError::new_err(format!("unknown collective {collective:?}: a collection does {known}"))
        })
    }

    fn comm(&self) -> PyResult<&Communicator> {
        self.process.check(|| "this collection of plans".to_owned())?;
        Ok(self.comm.get())
    }

    /// The GPU, without which there is no `what`.
    fn gpu(&self, what: &str) -> PyResult<&session::PlanCollection> {
        match &self.plans {
            Plans::Gpu(gpu) => Ok(gpu),
            Plans::Host(_) => Err(PyNotImplementedError::new_err(format!(
                "{what}: this collection is on the host, where the first plan that serves a call does it"
            ))),
        }
    }

    fn device(&self) -> Option<u32> {
        match &self.plans {
            Plans::Gpu(gpu) => Some(gpu.device()),
            Plans::Host(_) => None,
        }
    }

    fn note(&self, name: &str, collective: Option<&str>) {
        let added = Added { name: name.to_owned(), collective: collective.map(str::to_owned) };
        self.added.lock().unwrap_or_else(PoisonError::into_inner).push(added);
    }

    fn added(&self) -> Vec<Added> {
        self.added.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// With the collection on the host, in the queue's turn.
    fn on_host<T: Send>(
        &self,
        py: Python<'_>,
        plans: &Mutex<Option<AlgorithmCollection>>,
        work: impl FnOnce(&antiphon::prelude::Communicator, &mut AlgorithmCollection) -> Result<T, ExecutorError>
        + Send,
    ) -> Result<T> {
        let queue = self.comm()?.queue()?;
        Ok(interrupt::detached(py, || {
            queue.run(|comm| match &mut *plans.lock().unwrap_or_else(PoisonError::into_inner) {
                Some(collection) => work(comm, collection),
                None => Err(FabricError::invalid("the collection is closed").into()),
            })
        })?)
    }
}

/// The dtype as plans take it: bytes, if it has no arithmetic.
fn dtype_of(name: &DTypeName) -> PyResult<DType> {
    Ok(name.element()?.dtype().filter(|dtype| dtype.is_numeric()).unwrap_or(DType::U8))
}

/// Executes what does a call on the host.
///
/// # Safety
/// The memory is valid until this returns; no other code writes the input, or uses the output, meanwhile.
unsafe fn execute_on_host(
    comm: &antiphon::prelude::Communicator,
    plans: &mut AlgorithmCollection,
    collective: &str,
    call: &Call,
) -> Result<(), ExecutorError> {
    // SAFETY: the caller answers for the memory.
    unsafe {
        match call.tensors {
            CallTensors::Apart(Some(input), Some(output)) => {
                let (input, output) = (input.view().map_err(refused)?, output.view_mut().map_err(refused)?);
                plans.execute(comm, collective, input, output)
            }
            CallTensors::Shared(buffer) => {
                let part = buffer.bytes() / comm.world_size();
                let bytes = match call.what.operation {
                    Operation::AllGather => [part, buffer.bytes()],
                    Operation::ReduceScatter => [buffer.bytes(), part],
                    _ => [buffer.bytes(); 2],
                };
                let plan = plans.select(comm, collective, bytes, buffer.dtype)?;
                plan.execute_in_place(comm, buffer.view_mut().map_err(refused)?)
            }
            _ => Err(FabricError::invalid(format!("{collective} lacks an operand")).into()),
        }
    }
}

#[pymethods]
impl PlanCollection {
    #[new]
    #[pyo3(signature = (comm, *, device = None, allow_other_bits = false))]
    fn new(comm: Bound<'_, Communicator>, device: Option<Place>, allow_other_bits: bool) -> Result<Self> {
        let py = comm.py();
        let (owner, _queue) = (comm.get(), comm.get().queue()?);
        let plans = match device.unwrap_or(Place::Host) {
            Place::Host => Plans::Host(Mutex::new(Some(AlgorithmCollection::new()))),
            Place::Cuda(device) => {
                let device = device_or_current(py, device)?;
                let made = || owner.gpus().session().plan_collection(device, allow_other_bits);
                Plans::Gpu(interrupt::detached(py, made)?)
            }
        };
        let added = Mutex::new(Vec::new());
        Ok(Self { comm: comm.unbind(), plans, added, process: Process::current() })
    }

    #[doc = stub!("PlanCollection.device")]
    #[getter(device)]
    fn device_number(&self) -> Option<u32> {
        self.device()
    }

    #[doc = stub!("PlanCollection.add")]
    #[pyo3(signature = (plan, *, dtypes = None, packets = "ll16", form = "auto", ports = "blocks", most_scratch = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last five")]
    fn add(
        &self,
        py: Python<'_>,
        plan: &Bound<'_, PyAny>,
        dtypes: Option<Vec<DTypeName>>,
        packets: &str,
        form: &str,
        ports: &str,
        most_scratch: Option<Count>,
    ) -> Result<()> {
        let (comm, source) = (self.comm()?, Source::of(plan)?);
        let dtypes = dtypes.iter().flatten().map(dtype_of).collect::<PyResult<Vec<_>>>()?;
        let place = self.device().map_or(Place::Host, |device| Place::Cuda(Some(device)));
        let how = HowLoaded { place, packets, form, ports, most_scratch };
        let (queue, options, device) = (comm.queue()?, how.on_gpus()?, how.device(py)?);
        let mut unread = None;
        let added = interrupt::detached(py, || {
            let memory = if device.is_some() { Memory::Device } else { Memory::Host };
            let proved = source.proved(memory, &mut unread);
            let named = proved.as_ref().ok().map(|proved| {
                let plan = proved.plan();
                (plan.name.clone().unwrap_or_default(), plan.collective.clone())
            });
            match &self.plans {
                Plans::Gpu(gpu) => gpu.add(proved, &dtypes, options)?,
                Plans::Host(plans) => queue.run(|comm| {
                    let plan = comm.agree("has no plan that can run", proved)?;
                    match &mut *plans.lock().unwrap_or_else(PoisonError::into_inner) {
                        Some(collection) => {
                            collection.add(comm, &plan, &dtypes, Options { packets: options.packets })
                        }
                        None => Err(FabricError::invalid("the collection is closed").into()),
                    }
                })?,
            }
            Ok::<_, SessionError>(named)
        });
        if let Some(error) = unread {
            return Err(PyErr::from(error).into());
        }
        if let Some((name, collective)) = added? {
            self.note(&name, Some(&collective));
        }
        Ok(())
    }

    #[doc = stub!("PlanCollection.add_built_in")]
    #[pyo3(signature = (op = None))]
    fn add_built_in(&self, py: Python<'_>, op: Given<'_, '_>) -> Result<()> {
        let (comm, gpu, op) = (self.comm()?, self.gpu("add_built_in")?, reduce_op(op)?);
        let _queue = comm.queue()?;
        interrupt::detached(py, || gpu.add_built_in(op))?;
        self.note("built-in", None);
        Ok(())
    }

    #[doc = stub!("PlanCollection.tune")]
    #[pyo3(signature = (sizes, dtype, *, collective = None))]
    fn tune(
        &self,
        py: Python<'_>,
        sizes: (Count, Count),
        dtype: DTypeName,
        collective: Option<&str>,
    ) -> Result<()> {
        let (comm, gpu, dtype) = (self.comm()?, self.gpu("tune")?, dtype_of(&dtype)?);
        let (_queue, range) = (comm.queue()?, sizes.0.0..=sizes.1.0);
        let collectives = match collective {
            Some(collective) => {
                Self::operation(collective)?;
                vec![collective.to_owned()]
            }
            None => {
                let added = self.added();
                let known = COLLECTIVES.iter().map(|&collective| collective.to_owned());
                let is_added =
                    |name: &String| added.iter().any(|each| each.collective.as_ref() == Some(name));
                known.filter(is_added).collect()
            }
        };
        for collective in collectives {
            let range = range.clone();
            interrupt::detached(py, || gpu.tune(&collective, dtype, range))?;
        }
        Ok(())
    }

    #[doc = stub!("PlanCollection.prepare")]
    fn prepare(&self, py: Python<'_>, collective: &str, dtype: DTypeName, num_bytes: Count) -> Result<()> {
        let (comm, gpu, dtype) = (self.comm()?, self.gpu("prepare")?, dtype_of(&dtype)?);
        Self::operation(collective)?;
        let _queue = comm.queue()?;
        Ok(interrupt::detached(py, || gpu.prepare(collective, dtype, num_bytes.0))?)
    }

    #[doc = stub!("PlanCollection.execute")]
    #[pyo3(signature = (collective, x, out = None, *, stream = None))]
    fn execute<'py>(
        &self,
        py: Python<'py>,
        collective: &str,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        let comm = self.comm()?;
        let (_queue, what) = (comm.queue()?, What::new(Self::operation(collective)?));
        let prepared = comm.prepare(what, Some(x), out, Usage::Call(stream))?;
        let call = prepared.call;
        if call.cuda_device() != self.device() {
            let place =
                |device: Option<u32>| device.map_or("host".to_owned(), |device| format!("cuda:{device}"));
            let (there, here) = (place(call.cuda_device()), place(self.device()));
            let text = format!("the arrays are on {there}, and this collection is on {here}");
            return Err(PyValueError::new_err(text).into());
        }
        match (&self.plans, stream) {
            (Plans::Host(_), Some(stream)) => return Err(no_stream(stream)),
            (Plans::Host(plans), None) => self.on_host(py, plans, |comm, plans| {
                // SAFETY: the operands, and the references of the caller, live until this returns.
                unsafe { execute_on_host(comm, plans, collective, &call) }
            })?,
            (Plans::Gpu(gpu), given) => {
                let kept = prepared.operands[1].as_ref().and_then(|output| output.stream);
                let stream = given.or(kept).unwrap_or(0);
                // SAFETY: libraries give memory back in the order of the stream that they work on, which this is; of another
                // one the caller answers for the order, as the stub says.
                let orders = interrupt::detached(py, || unsafe {
                    let tensors = views(call.tensors.map(of_numbers))?;
                    gpu.execute(on(gpu.device(), stream), (collective, call.what.operation), tensors)
                })?;
                comm.gpus().keep_stream(py, stream, orders)?;
            }
        }
        drop(prepared.operands);
        Ok(prepared.result.expect("each of these collectives has an output"))
    }

    #[doc = stub!("PlanCollection.explain")]
    fn explain(
        &self,
        py: Python<'_>,
        collective: &str,
        num_bytes: Count,
        dtype: DTypeName,
    ) -> Result<Vec<Said>> {
        let (_comm, dtype) = (self.comm()?, dtype_of(&dtype)?);
        let operation = Self::operation(collective)?;
        match &self.plans {
            Plans::Gpu(gpu) => {
                let said = interrupt::detached(py, || gpu.explain(collective, dtype, num_bytes.0))?;
                let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
                Ok(said.into_iter().map(|each| (each.name, each.time.map(micros), each.why_not)).collect())
            }
            Plans::Host(plans) => self.on_host(py, plans, |comm, plans| {
                let part = num_bytes.0 / comm.world_size();
                let bytes = match operation {
                    Operation::AllGather => [part, num_bytes.0],
                    Operation::ReduceScatter => [num_bytes.0, part],
                    _ => [num_bytes.0; 2],
                };
                let explained = plans.explain(collective, bytes, dtype).into_iter();
                Ok(explained.map(|(plan, why)| (plan.name.clone().unwrap_or_default(), None, why)).collect())
            }),
        }
    }

    #[doc = stub!("PlanCollection.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        if !self.process.is_current() {
            return Ok(()); // it was never this process's
        }
        let Ok(queue) = self.comm.get().queue() else { return Ok(()) };
        Ok(interrupt::detached(py, || match &self.plans {
            Plans::Gpu(gpu) => gpu.close(),
            Plans::Host(plans) => queue.run(|comm| {
                let plans = plans.lock().unwrap_or_else(PoisonError::into_inner).take();
                Ok(plans.map_or(Ok(()), |plans| plans.free(comm))?)
            }),
        })?)
    }

    fn __len__(&self) -> usize {
        self.added().len()
    }

    fn __repr__(&self) -> String {
        let names: Vec<_> = self.added().into_iter().map(|each| each.name).collect();
        let on = self.device().map_or("host".to_owned(), |device| format!("cuda:{device}"));
        format!("<antiphon.PlanCollection of {names:?} on {on}>")
    }
}
