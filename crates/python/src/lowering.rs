//! Compilers' graphs, for `antiphon.lowering`.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
};

use antiphon::device::sync::Mutex;
use antiphon_lowering::{
    Costs, Decisions, Edits, Graph, LoweringError, Opinion, Options, World, check, lower, second_opinion,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

fn refused(error: LoweringError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// What to do, as JSON.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    world: World,
    options: Options,
}

/// What came of it, as JSON.
#[derive(serde::Serialize)]
struct Answer<'l> {
    edits: Edits,
    #[serde(rename = "plan")]
    decisions: &'l Decisions,
    /// For each group that has calls, what its ranks compare.
    digests: BTreeMap<String, String>,
    report: antiphon_lowering::Report,
    text: String,
}

#[doc = stub!("Lowering")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct Lowering {
    before: Graph,
    decisions: Decisions,
    answer: Vec<u8>,
    /// The program that was last looked at, and its graph: of one program both questions are asked.
    after: Mutex<Option<(Vec<u8>, Arc<Graph>)>>,
}

impl Lowering {
    /// The graph of a program.
    fn after(&self, program: &[u8]) -> Result<Arc<Graph>, LoweringError> {
        let mut after = self.after.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, graph)) = &*after
            && known == program
        {
            return Ok(Arc::clone(graph));
        }
        let graph = Arc::new(Graph::from_torch(program)?);
        *after = Some((program.to_vec(), Arc::clone(&graph)));
        Ok(graph)
    }
}

#[pymethods]
impl Lowering {
    #[new]
    fn new(py: Python<'_>, program: &[u8], request: &str) -> PyResult<Self> {
        let request: Request =
            serde_json::from_str(request).map_err(|error| PyValueError::new_err(error.to_string()))?;
        py.detach(|| {
            let before = Graph::from_torch(program).map_err(refused)?;
            let costs = Costs::new(request.world.device, &request.options.tables)
                .map_err(|error| PyValueError::new_err(error.to_string()))?;
            let lowered = lower(&before, &request.world, &costs, &request.options);
            let groups = lowered.decisions.calls.iter().map(|call| call.group.as_str());
            let digests = groups.map(|group| (group.to_owned(), lowered.decisions.digest(group))).collect();
            let text = lowered.report.to_string();
            let edits = Edits::between(&before, &lowered.graph);
            let answer =
                Answer { edits, decisions: &lowered.decisions, digests, report: lowered.report, text };
            let answer = serde_json::to_vec(&answer).expect("plain values with names");
            Ok(Self { before, decisions: lowered.decisions, answer, after: Mutex::new(None) })
        })
    }

    #[doc = stub!(Lowering.answer)]
    fn answer<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.answer)
    }

    #[doc = stub!(Lowering.check)]
    fn check(&self, py: Python<'_>, after: &[u8]) -> PyResult<Vec<String>> {
        let findings = py
            .detach(|| Ok(check(&self.before, &self.decisions, self.after(after)?.as_ref())))
            .map_err(refused)?;
        Ok(findings.iter().map(ToString::to_string).collect())
    }

    #[doc = stub!(Lowering.second_opinion)]
    fn second_opinion(&self, py: Python<'_>, after: &[u8]) -> PyResult<(bool, String)> {
        let opinion = py.detach(|| {
            let after = self.after(after)?;
            Ok(second_opinion(&self.before, &after, self.decisions.numerics))
        });
        Ok(match opinion.map_err(refused)? {
            Opinion::Equal => (true, "the programs were run, and agree".into()),
            Opinion::Different(difference) => (false, difference.to_string()),
            Opinion::None(reason) => (true, format!("the programs were not run: {reason}")),
        })
    }
}

#[doc = stub!("spelled")]
#[pyfunction]
pub(crate) fn spelled(operator: &str, meaning: &str, roles: BTreeMap<String, usize>) -> PyResult<String> {
    let roles: Vec<(String, usize)> = roles.into_iter().collect();
    antiphon_lowering::spelled(operator, meaning, &roles).map_err(refused)
}
