//! The class `Plan`: an execution plan that is loaded on a communicator.

mod collection;
mod source;

use std::sync::{Arc, PoisonError, Weak};

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::{self, Queue},
    prelude::{DType, FabricError},
    session::{self, Order, SessionError},
    tensor::Device,
};
use antiphon_executor::{
    ExecutorError, LoadedPlan, Options, PacketKind,
    cuda::{CudaOptions, Form, Ports},
};
use antiphon_plan::verify::Memory;
use pyo3::{
    exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
};

pub(crate) use self::collection::PlanCollection;
use self::source::Source;
use super::{Communicator, refused};
use crate::{
    arguments::{Count, DTypeName, Given, Place, overlap, same_device},
    cuda::LastStreams,
    error::{Error, Result},
    fork::Process,
    interrupt,
    operand::{Operand, Tensor, Usage, not_reduced, refuse_gradient},
    stream::{RawStream, device_or_current, on},
};

#[doc = stub!("Plan")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct Plan {
    loaded: Loaded,
    plan: antiphon_plan::Plan,
    reduces: bool,
    owner: Weak<Queue>,
    process: Process,
}

/// Where a plan is loaded.
enum Loaded {
    /// Absent when closed. Locked in a turn of the queue only.
    Host(Box<Mutex<Option<LoadedPlan>>>),
    Gpu(session::LoadedPlan, Arc<LastStreams>),
}

impl Loaded {
    fn device(&self) -> Device {
        match self {
            Self::Host(_) => Device::Host,
            Self::Gpu(gpu, _) => Device::Cuda(gpu.device()),
        }
    }
}

/// The arrays of a call.
struct Operands {
    /// Absent when the output holds it.
    input: Option<Operand>,
    output: Operand,
}

impl Operands {
    fn in_place(output: Operand) -> Self {
        Operands { input: None, output }
    }
}

/// How a plan is loaded.
pub(super) struct HowLoaded<'a> {
    pub(super) place: Place,
    pub(super) packets: &'a str,
    pub(super) form: &'a str,
    pub(super) ports: &'a str,
    pub(super) most_scratch: Option<Count>,
}

impl HowLoaded<'_> {
    fn packets(&self) -> PyResult<PacketKind> {
        PacketKind::ALL.into_iter().find(|kind| kind.name() == self.packets).ok_or_else(|| {
            let known = PacketKind::ALL.map(PacketKind::name).join(", ");
            PyValueError::new_err(format!("unknown packets {:?}: known are {known}", self.packets))
        })
    }

    fn form(&self) -> PyResult<Form> {
        Form::ALL.into_iter().find(|form| form.name() == self.form).ok_or_else(|| {
            let known = Form::ALL.map(Form::name).join(", ");
            PyValueError::new_err(format!("unknown form {:?}: known are {known}", self.form))
        })
    }

    fn ports(&self) -> PyResult<Ports> {
        Ports::ALL.into_iter().find(|ports| ports.name() == self.ports).ok_or_else(|| {
            let known = Ports::ALL.map(Ports::name).join(", ");
            PyValueError::new_err(format!("unknown ports {:?}: known are {known}", self.ports))
        })
    }

    /// What the executor on GPUs is told.
    fn on_gpus(&self) -> PyResult<CudaOptions> {
        let most_scratch = self.most_scratch.map_or(CudaOptions::default().most_scratch, |bytes| bytes.0);
        let (packets, form, ports) = (self.packets()?, self.form()?, self.ports()?);
        Ok(CudaOptions { packets, form, ports, most_scratch })
    }

    /// The GPU, if it is one.
    fn device(&self, py: Python<'_>) -> Result<Option<u32>> {
        match self.place {
            Place::Cuda(device) => Ok(Some(device_or_current(py, device)?)),
            Place::Host if self.most_scratch.is_some() => {
                let text = "load_plan: most_scratch is for plans on GPUs: pass device=\"cuda\" with it";
                Err(PyValueError::new_err(text).into())
            }
            Place::Host if self.form()? != Form::Auto => {
                let text = "load_plan: form is for plans on GPUs: pass device=\"cuda\" with it";
                Err(PyValueError::new_err(text).into())
            }
            Place::Host if self.ports()? != Ports::Blocks => {
                let text = "load_plan: ports is for plans on GPUs: pass device=\"cuda\" with it";
                Err(PyValueError::new_err(text).into())
            }
            Place::Host => Ok(None),
        }
    }
}

impl Communicator {
    /// Proves a plan, and loads it together with the other ranks.
    pub(super) fn load(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        how: &HowLoaded<'_>,
    ) -> Result<Plan> {
        let (queue, source) = (self.queue()?, Source::of(source)?);
        let (options, device) = (how.on_gpus()?, how.device(py)?);
        let mut unread = None;
        let loaded = interrupt::detached(py, || {
            let memory = if device.is_some() { Memory::Device } else { Memory::Host };
            let proved = source.proved(memory, &mut unread);
            let plan = proved.as_ref().ok().map(|proved| proved.plan().clone());
            // A rank without a plan tells the others, which would wait for it.
            let loaded = match device {
                Some(device) => {
                    let loaded = self.gpus().session().load_plan(device, proved, options)?;
                    Loaded::Gpu(loaded, self.gpus().last_streams())
                }
                None => Loaded::Host(Box::new(Mutex::new(Some(queue.run(|comm| {
                    let plan = comm.agree("has no plan that can run", proved)?;
                    LoadedPlan::load(comm, &plan, Options { packets: options.packets })
                })?)))),
            };
            Ok::<_, SessionError>((loaded, plan))
        });
        if let Some(error) = unread {
            return Err(PyErr::from(error).into());
        }
        let (loaded, plan) = loaded?;
        let plan = plan.expect("it was loaded");
        let (reduces, owner) = (plan.reduces(), Arc::downgrade(&queue));
        Ok(Plan { loaded, plan, reduces, owner, process: Process::current() })
    }
}

impl Plan {
    /// The arrays of a call, and what the caller gets.
    fn operands<'py>(
        &self,
        x: &Bound<'py, PyAny>,
        out: Given<'_, 'py>,
        usage: Usage,
    ) -> Result<(Operands, Bound<'py, PyAny>)> {
        [Some(x), out].into_iter().flatten().try_for_each(|array| refuse_gradient(array, "execute"))?;
        let read = self.here(Operand::import(x, "the input", usage)?, "the input")?;
        let read = if self.reduces { read.numeric()? } else { read };
        let Some(out) = out.filter(|out| !out.is(x)) else {
            if out.is_some() || self.plan.inplace {
                return Ok((Operands::in_place(read.written(x, "the output")?), x.clone()));
            }
            read.allocates_in_order(usage)?;
            let (new, write) = read.new_like(x, &self.output_shape(read.shape())?, usage)?;
            same_device(&read.tensor, &write.tensor)?;
            return Ok((Operands { input: Some(read), output: write }, new));
        };
        let write = self.here(Operand::import(out, "the output", usage)?, "the output")?;
        let write = write.written(out, "the output")?;
        if read.element != write.element {
            let text = format!("the input is {}, the output is {}", read.element, write.element);
            return Err(PyTypeError::new_err(text).into());
        }
        if read.tensor.data == write.tensor.data && read.tensor.bytes() == write.tensor.bytes() {
            return Ok((Operands::in_place(write), out.clone()));
        }
        if overlap(&read.tensor, &write.tensor) {
            let text = "input and output overlap: they must be apart, or the same";
            return Err(PyValueError::new_err(text).into());
        }
        Ok((Operands { input: Some(read), output: write }, out.clone()))
    }

    /// Refuses memory of another device than the plan's.
    fn here(&self, operand: Operand, which: &str) -> Result<Operand> {
        let (device, serves) = (operand.tensor.device, self.loaded.device());
        if device == serves {
            return Ok(operand);
        }
        let text = format!(
            "{which} is on {device}, and plan {:?} was loaded on {serves}: load_plan takes the device",
            self.title()
        );
        Err(PyValueError::new_err(text).into())
    }

    /// The shape of an output for an input of this one: as many times larger, or smaller, as the plan says in the first
    /// dimension, or flat if that does not divide.
    fn output_shape(&self, shape: &[usize]) -> PyResult<Vec<usize>> {
        let chunks = self.plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
        let [input, output] = chunks.map(|chunks| chunks as usize);
        let times = |count: usize| {
            let all = count.checked_mul(output)?;
            all.is_multiple_of(input).then(|| all.checked_div(input)).flatten()
        };
        if input == output {
            return Ok(shape.to_vec());
        }
        if let Some((&first, rest)) = shape.split_first()
            && let Some(first) = times(first)
        {
            return Ok([&[first], rest].concat());
        }
        times(shape.iter().product()).map(|count| vec![count]).ok_or_else(|| {
            let text =
                format!("an input of shape {shape:?} is not {input} chunks, of which {output} come out");
            PyValueError::new_err(text)
        })
    }

    fn queue(&self) -> PyResult<Arc<Queue>> {
        self.process.check(|| format!("plan {:?}", self.title()))?;
        self.owner.upgrade().ok_or_else(|| {
            PyRuntimeError::new_err(format!("the communicator of plan {:?} is closed", self.title()))
        })
    }

    fn title(&self) -> &str {
        self.plan.name.as_deref().unwrap_or_default()
    }
}

#[cold]
fn no_stream(stream: RawStream) -> Error {
    PyValueError::new_err(format!("execute: host memory has no stream {stream}")).into()
}

#[cold]
fn not_registered() -> Error {
    let text = "execute: registered is for plans on GPUs: on the host, arrays in symmetric memory are not staged without it";
    PyValueError::new_err(text).into()
}

/// Executes a plan on the host, in place if there is no input.
///
/// # Safety
/// The memory is valid until this returns; no other code writes the input, or uses the output, meanwhile.
unsafe fn execute(
    plan: &mut LoadedPlan,
    comm: &fabric::Communicator,
    input: Option<Tensor>,
    output: Tensor,
) -> std::result::Result<(), ExecutorError> {
    // SAFETY: the caller answers for the memory.
    let (input, output) = unsafe { (input.map(|input| input.view()), output.view_mut()) };
    match input.transpose().map_err(refused)? {
        Some(input) => plan.execute(comm, input, output.map_err(refused)?),
        None => plan.execute_in_place(comm, output.map_err(refused)?),
    }
}

/// Puts an execution of a plan into a stream of its GPU, in place if there is no input.
///
/// # Safety
/// As [`session::LoadedPlan::execute`]; the stream is one of the device.
unsafe fn execute_on(
    plan: &session::LoadedPlan,
    input: Option<Tensor>,
    output: Tensor,
    registered: bool,
    stream: RawStream,
) -> std::result::Result<(), SessionError> {
    let (input, output) = (input.map(of_numbers), of_numbers(output));
    // SAFETY: the caller answers for the memory, which only the device touches, and for the stream.
    unsafe {
        let mut output = output.view_mut().map_err(refused)?;
        let input = input.map(|input| input.view()).transpose().map_err(refused)?;
        plan.execute(on(plan.device(), stream), input.as_ref(), &mut output, registered)
    }
}

/// A tensor as one whose dtype the kernels know: as bytes, if it has no arithmetic.
fn of_numbers(tensor: Tensor) -> Tensor {
    match tensor.dtype.is_numeric() {
        true => tensor,
        false => Tensor { count: tensor.bytes(), dtype: DType::U8, ..tensor },
    }
}

#[pymethods]
impl Plan {
    #[getter]
    fn name(&self) -> Option<&str> {
        self.plan.name.as_deref()
    }

    #[doc = stub!("Plan.collective")]
    #[getter]
    fn collective(&self) -> &str {
        &self.plan.collective
    }

    #[doc = stub!("Plan.device")]
    #[getter]
    fn device(&self) -> Option<u32> {
        self.loaded.device().cuda_ordinal()
    }

    #[doc = stub!("Plan.prepare")]
    fn prepare(&self, py: Python<'_>, dtype: DTypeName, num_bytes: Count) -> Result<()> {
        let (_queue, element) = (self.queue()?, dtype.element()?);
        let Loaded::Gpu(gpu, _) = &self.loaded else {
            let text = format!(
                "prepare: plan {:?} is on the host, where the first call of a size prepares it",
                self.title()
            );
            return Err(PyNotImplementedError::new_err(text).into());
        };
        let dtype = element.dtype().filter(|dtype| dtype.is_numeric());
        if self.reduces && dtype.is_none() {
            return Err(not_reduced(&element));
        }
        let dtype = dtype.unwrap_or(DType::U8); // as `of_numbers` passes it
        Ok(interrupt::detached(py, || gpu.prepare(dtype, num_bytes.0))?)
    }

    #[doc = stub!("Plan.execute")]
    #[pyo3(signature = (x, out = None, *, registered = false, stream = None))]
    fn execute<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        registered: bool,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        let queue = self.queue()?;
        let (operands, result) = self.operands(x, out, Usage::Call(stream))?;
        let (input, output) = (operands.input.as_ref().map(|read| read.tensor), operands.output.tensor);
        match (&self.loaded, stream) {
            (Loaded::Host(_), Some(stream)) => return Err(no_stream(stream)),
            (Loaded::Host(_), None) if registered => return Err(not_registered()),
            (Loaded::Host(loaded), None) => interrupt::detached(py, || {
                queue.run(|comm| {
                    let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
                    let plan = loaded.as_mut().ok_or_else(|| FabricError::invalid("the plan is closed"))?;
                    // SAFETY: the operands, and the references of the caller, live until this returns.
                    unsafe { execute(plan, comm, input, output) }
                })
            })?,
            (Loaded::Gpu(gpu, last_streams), given) => {
                let stream = given.or(operands.output.stream).unwrap_or(0);
                // SAFETY: libraries give memory back in the order of the stream that they work on, which this is; of another
                // one the caller answers for the order, as the stub says.
                interrupt::detached(py, || unsafe { execute_on(gpu, input, output, registered, stream) })?;
                last_streams.keep(py, stream, &[Order::Plans])?;
            }
        }
        drop(operands);
        Ok(result)
    }

    #[doc = stub!("Plan.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        if !self.process.is_current() {
            return Ok(()); // it was never this process's
        }
        let Some(queue) = self.owner.upgrade() else { return Ok(()) };
        Ok(interrupt::detached(py, || match &self.loaded {
            Loaded::Gpu(gpu, _) => gpu.close(),
            Loaded::Host(loaded) => queue.run(|comm| {
                let loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner).take();
                Ok(loaded.map_or(Ok(()), |plan| plan.free(comm))?)
            }),
        })?)
    }

    fn __repr__(&self) -> String {
        let (collective, ranks) = (&self.plan.collective, self.plan.num_ranks());
        let on = self.device().map_or(String::new(), |device| format!(" on cuda:{device}"));
        format!("<antiphon.Plan {:?}: {collective} of {ranks} ranks{on}>", self.title())
    }
}
