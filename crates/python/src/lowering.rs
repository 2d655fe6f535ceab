//! Compilers' graphs, for `antiphon.lowering`.

use std::collections::BTreeMap;

use antiphon_lowering::{Costs, Edits, Graph, LoweringError, Options, Plan, World, check, lower as lowered};
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
struct Answer {
    edits: Edits,
    plan: Plan,
    /// For each group that has calls, what its ranks compare.
    digests: BTreeMap<String, String>,
    report: antiphon_lowering::Report,
    text: String,
}

#[doc = stub!("lower")]
#[pyfunction]
pub(crate) fn lower<'py>(py: Python<'py>, program: &[u8], request: &str) -> PyResult<Bound<'py, PyBytes>> {
    let request: Request =
        serde_json::from_str(request).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let answer = py.detach(|| {
        let before = Graph::from_torch(program).map_err(refused)?;
        let costs = Costs::new(request.world.device, &request.options.tables)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let lowered = lowered(&before, &request.world, &costs, &request.options);
        let groups = lowered.plan.calls.iter().map(|call| call.group.as_str());
        let digests = groups.map(|group| (group.to_owned(), lowered.plan.digest(group))).collect();
        let text = lowered.report.to_string();
        let edits = Edits::between(&before, &lowered.graph);
        Ok::<_, PyErr>(Answer { edits, plan: lowered.plan, digests, report: lowered.report, text })
    });
    let answer = serde_json::to_vec(&answer?).expect("plain values with names");
    Ok(PyBytes::new(py, &answer))
}

#[doc = stub!("spelled")]
#[pyfunction]
pub(crate) fn spelled(operator: &str, meaning: &str, roles: BTreeMap<String, usize>) -> PyResult<String> {
    let roles: Vec<(String, usize)> = roles.into_iter().collect();
    antiphon_lowering::spelled(operator, meaning, &roles).map_err(refused)
}

#[doc = stub!("check_lowering")]
#[pyfunction]
pub(crate) fn check_lowering(
    py: Python<'_>,
    before: &[u8],
    plan: &[u8],
    after: &[u8],
) -> PyResult<Vec<String>> {
    let findings = py.detach(|| {
        let (before, after) = (Graph::from_torch(before)?, Graph::from_torch(after)?);
        Ok(check(&before, &Plan::from_json(plan)?, &after))
    });
    Ok(findings.map_err(refused)?.iter().map(ToString::to_string).collect())
}
