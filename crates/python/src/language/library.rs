//! The library of algorithms, for `antiphon.language.library`.

use antiphon_language::{
    Options,
    library::{self, ALGORITHMS, Setting},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use super::convert;

#[doc = stub!("library_names")]
#[pyfunction]
pub(crate) fn library_names() -> Vec<&'static str> {
    ALGORITHMS.iter().map(|algorithm| algorithm.name).collect()
}

#[doc = stub!("library_plan")]
#[pyfunction]
#[pyo3(signature = (
    name, ranks, *, nodes, inplace, reduce_op, unit_size, instances, reuse_resources, num_threads_per_block, buffer_alignment,
    min_message_size, max_message_size
))]
#[allow(clippy::too_many_arguments)] // the function's
pub(crate) fn library_plan(
    py: Python<'_>,
    name: &str,
    ranks: u32,
    nodes: u32,
    inplace: bool,
    reduce_op: &Bound<'_, PyAny>,
    unit_size: u64,
    instances: u32,
    reuse_resources: bool,
    num_threads_per_block: u64,
    buffer_alignment: u64,
    min_message_size: u64,
    max_message_size: u64,
) -> PyResult<String> {
    let algorithm = library::find(name).ok_or_else(|| {
        let names = library_names().join(", ");
        PyValueError::new_err(format!("the library has no {name:?}; it has {names}"))
    })?;
    let options = Options {
        instances,
        reuse_resources,
        num_threads_per_block,
        buffer_alignment,
        min_message_size,
        max_message_size,
        ..Options::default()
    };
    let op = convert::reduce_op(reduce_op)?;
    let setting = Setting { ranks, nodes, inplace, op, unit_size, options };
    // Whatever is wrong is wrong with the arguments.
    let plan = py.detach(|| algorithm.plan(&setting).map(|plan| plan.to_json()));
    plan.map_err(|error| PyValueError::new_err(error.to_string()))
}
