//! The class `Plan`: an execution plan that is loaded on a communicator.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, PoisonError, Weak},
};

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::{self, Queue},
    prelude::FabricError,
};
use antiphon_executor::{ExecutorError, LoadedPlan, Options};
use antiphon_plan::{
    OpKind, PlanError,
    verify::{self, VerifiedPlan},
};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    intern,
    prelude::*,
    types::PyString,
};

use super::{Communicator, refused};
use crate::{
    arguments::{Given, overlap, same_device},
    error::Result,
    fork::Process,
    interrupt,
    language::FinishedPlan,
    operand::{Operand, Tensor, Usage, refuse_gradient},
};

#[doc = stub!("Plan")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct Plan {
    /// Absent when closed. Locked in a turn of the queue only.
    loaded: Mutex<Option<LoadedPlan>>,
    plan: antiphon_plan::Plan,
    reduces: bool,
    owner: Weak<Queue>,
    process: Process,
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

impl Communicator {
    /// Proves a plan, and loads it together with the other ranks.
    pub(super) fn load(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> Result<Plan> {
        let (queue, source) = (self.queue()?, Source::of(source)?);
        let mut unread = None;
        let loaded = interrupt::detached(py, || {
            let plan = source.plan().inspect_err(|error| {
                if let PlanError::File { kind, .. } = error {
                    unread = Some(io::Error::new(*kind, error.to_string()));
                }
            });
            let plan = plan.map_err(ExecutorError::from).and_then(prove);
            // A rank without a plan tells the others, which would wait for it.
            queue.run(|comm| {
                let plan = comm.agree("has no plan that can run", plan)?;
                LoadedPlan::load(comm, &plan, Options::default())
            })
        });
        if let Some(error) = unread {
            return Err(PyErr::from(error).into());
        }
        let loaded = loaded?;
        let plan = loaded.plan().clone();
        let (reduces, owner) = (reduces(&plan), Arc::downgrade(&queue));
        Ok(Plan { loaded: Mutex::new(Some(loaded)), plan, reduces, owner, process: Process::current() })
    }
}

/// Where a plan comes from.
enum Source {
    Finished(Py<FinishedPlan>),
    Text(String),
    File(PathBuf),
}

impl Source {
    /// A program, the text of a plan, or the path of its file.
    fn of(source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (finish, to_json) = (intern!(source.py(), "finish"), intern!(source.py(), "to_json"));
        if let Ok(finished) = source.cast::<FinishedPlan>() {
            return Ok(Self::Finished(finished.clone().unbind()));
        }
        if source.hasattr(finish)? {
            return Ok(Self::Finished(source.call_method0(finish)?.extract()?));
        }
        if source.hasattr(to_json)? {
            return Ok(Self::Text(source.call_method0(to_json)?.extract()?));
        }
        if let Ok(text) = source.cast::<PyString>()
            && text.to_cow()?.trim_start().starts_with('{')
        {
            return Ok(Self::Text(text.extract()?));
        }
        source.extract().map(Self::File).map_err(|_| {
            let text = format!("a plan is its text, the path of its file, or a program, not {source:?}");
            PyTypeError::new_err(text)
        })
    }

    fn plan(self) -> std::result::Result<antiphon_plan::Plan, PlanError> {
        match self {
            Self::Finished(finished) => Ok(finished.get().plan().clone()),
            Self::Text(text) => antiphon_plan::Plan::from_json(text.as_bytes()),
            Self::File(path) => antiphon_plan::Plan::from_file(path),
        }
    }
}

fn prove(plan: antiphon_plan::Plan) -> std::result::Result<VerifiedPlan, ExecutorError> {
    let name = plan.name.clone().unwrap_or_default();
    VerifiedPlan::new(plan, &verify::Options::default())
        .map_err(|report| FabricError::invalid(format!("plan {name:?} is not proved:\n{report}")).into())
}

/// Whether a plan computes with elements, and does not only move them.
fn reduces(plan: &antiphon_plan::Plan) -> bool {
    let inner = |op: &antiphon_plan::Op| {
        matches!(op.kind, OpKind::Reduce(_) | OpKind::SwitchReduce(_) | OpKind::SwitchReduceBroadcast(_))
    };
    let mut ops = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    ops.any(|op| match &op.kind {
        OpKind::Pipeline(pipeline) => pipeline.ops.iter().any(inner),
        _ => inner(op),
    })
}

impl Plan {
    /// The arrays of a call, and what the caller gets.
    fn prepare<'py>(
        &self,
        x: &Bound<'py, PyAny>,
        out: Given<'_, 'py>,
    ) -> Result<(Operands, Bound<'py, PyAny>)> {
        [Some(x), out].into_iter().flatten().try_for_each(|array| refuse_gradient(array, "execute"))?;
        let usage = Usage::Call(None);
        let read = Operand::import(x, "the input", usage)?.on_host("a plan")?;
        let read = if self.reduces { read.numeric()? } else { read };
        let Some(out) = out.filter(|out| !out.is(x)) else {
            if out.is_some() || self.plan.inplace {
                return Ok((Operands::in_place(read.written(x, "the output")?), x.clone()));
            }
            let (new, write) = read.new_like(x, &self.output_shape(read.shape())?, usage)?;
            return Ok((Operands { input: Some(read), output: write }, new));
        };
        let write =
            Operand::import(out, "the output", usage)?.on_host("a plan")?.written(out, "the output")?;
        same_device(&read.tensor, &write.tensor)?;
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

/// Executes a plan, in place if there is no input.
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

    #[doc = stub!("Plan.execute")]
    #[pyo3(signature = (x, out = None))]
    fn execute<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let queue = self.queue()?;
        let (operands, result) = self.prepare(x, out)?;
        let (input, output) = (operands.input.as_ref().map(|read| read.tensor), operands.output.tensor);
        interrupt::detached(py, || {
            queue.run(|comm| {
                let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
                let plan = loaded.as_mut().ok_or_else(|| FabricError::invalid("the plan is closed"))?;
                // SAFETY: the operands, and the references of the caller, live until this returns.
                unsafe { execute(plan, comm, input, output) }
            })
        })?;
        Ok(result)
    }

    #[doc = stub!("Plan.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        if !self.process.is_current() {
            return Ok(()); // it was never this process's
        }
        let Some(queue) = self.owner.upgrade() else { return Ok(()) };
        Ok(interrupt::detached(py, || {
            queue.run(|comm| {
                let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).take();
                loaded.map_or(Ok(()), |plan| plan.free(comm))
            })
        })?)
    }

    fn __repr__(&self) -> String {
        let antiphon_plan::Plan { collective, .. } = &self.plan;
        format!("<antiphon.Plan {:?}: {collective} of {} ranks>", self.title(), self.plan.num_ranks())
    }
}
