//! The class `Plan`: an execution plan that is loaded on a communicator.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use antiphon::{fabric::Queue, prelude::FabricError, tensor::dlpack::ElementType};
use antiphon_executor::{ExecutorError, LoadedPlan, Options};
use antiphon_plan::{
    Extent,
    verify::{self, VerifiedPlan},
};
use pyo3::{exceptions::PyValueError, intern, prelude::*, types::PyString};

use super::Communicator;
use crate::{
    arguments::{Given, overlap, same_device},
    error::Result,
    fork::Process,
    interrupt,
    operand::{Operand, Tensor, Usage},
};

/// A plan that is ready to run; see `_core.pyi`.
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct Plan {
    /// Absent when closed.
    loaded: Mutex<Option<LoadedPlan>>,
    plan: antiphon_plan::Plan,
    owner: Weak<Queue>,
    process: Process,
    rank: usize,
}

impl Communicator {
    /// Proves a plan, and loads it together with the other ranks.
    pub(super) fn load(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> Result<Plan> {
        let queue = self.queue()?;
        let plan = py.detach({
            let source = Source::of(source)?;
            move || source.plan()
        });
        // A rank that has no plan says so to the others, which would wait for it.
        let loaded = interrupt::detached(py, || {
            queue.run(|comm| {
                let plan = comm.agree("has no plan that is proved", plan)?;
                LoadedPlan::load(comm, &plan, Options::default())
            })
        })?;
        Ok(Plan {
            plan: loaded.plan().clone(),
            loaded: Mutex::new(Some(loaded)),
            owner: Arc::downgrade(&queue),
            process: Process::current(),
            rank: self.rank,
        })
    }
}

/// Where a plan comes from.
enum Source {
    Text(String),
    File(PathBuf),
}

impl Source {
    /// A program, the text of a plan, or the path of its file.
    fn of(source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = source.py();
        if source.hasattr(intern!(py, "to_json"))? {
            return Ok(Self::Text(source.call_method0(intern!(py, "to_json"))?.extract()?));
        }
        match source.cast::<PyString>() {
            Ok(text) if text.to_cow()?.trim_start().starts_with('{') => Ok(Self::Text(text.extract()?)),
            _ => Ok(Self::File(source.extract()?)),
        }
    }

    fn plan(self) -> Result<VerifiedPlan, ExecutorError> {
        let text = match self {
            Self::Text(text) => text.into_bytes(),
            Self::File(path) => std::fs::read(&path).map_err(|error| {
                FabricError::invalid(format!("cannot read the plan {}: {error}", path.display()))
            })?,
        };
        let plan = antiphon_plan::Plan::from_json(&text)?;
        let proved = VerifiedPlan::new(plan, &verify::Options::default());
        Ok(proved.map_err(|report| FabricError::invalid(format!("the plan is not proved:\n{report}")))?)
    }
}
