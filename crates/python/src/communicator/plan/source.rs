//! Where a plan comes from, and its proof.

use std::{io, path::PathBuf};

use antiphon::prelude::FabricError;
use antiphon_executor::ExecutorError;
use antiphon_plan::{
    PlanError,
    verify::{self, Memory, VerifiedPlan},
};
use pyo3::{exceptions::PyTypeError, intern, prelude::*, types::PyString};

use crate::language::FinishedPlan;

/// Where a plan comes from.
pub(super) enum Source {
    Finished(Py<FinishedPlan>),
    Text(String),
    File(PathBuf),
}

impl Source {
    /// A program, the text of a plan, or the path of its file.
    pub(super) fn of(source: &Bound<'_, PyAny>) -> PyResult<Self> {
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

    /// The proof of the plan for a memory. Why its file was not read goes to `unread`, too.
    pub(super) fn proved(
        self,
        memory: Memory,
        unread: &mut Option<io::Error>,
    ) -> std::result::Result<VerifiedPlan, ExecutorError> {
        let plan = self.plan().inspect_err(|error| {
            if let PlanError::File { kind, .. } = error {
                *unread = Some(io::Error::new(*kind, error.to_string()));
            }
        });
        prove(plan?, memory)
    }

    fn plan(self) -> std::result::Result<antiphon_plan::Plan, PlanError> {
        match self {
            Self::Finished(finished) => Ok(finished.get().plan().clone()),
            Self::Text(text) => antiphon_plan::Plan::from_json(text.as_bytes()),
            Self::File(path) => antiphon_plan::Plan::from_file(path),
        }
    }
}

/// Proves a plan for the memory of a host or of GPUs.
fn prove(plan: antiphon_plan::Plan, memory: Memory) -> std::result::Result<VerifiedPlan, ExecutorError> {
    let name = plan.name.clone().unwrap_or_default();
    let whose = match memory {
        Memory::Host => "",
        Memory::Device => " for the memory of GPUs",
    };
    VerifiedPlan::new(plan, &verify::Options { memory, ..verify::Options::default() }).map_err(|report| {
        FabricError::invalid(format!("plan {name:?} is not proved{whose}:\n{report}")).into()
    })
}
