//! What torch's autograd must know of a call that works on a tensor's memory: that the call tracks no gradient, and what it writes.

use antiphon::operation::{Extent, Operation, Root};
use pyo3::{exceptions::PyValueError, intern, prelude::*, sync::PyOnceLock};

use super::buffer;
use crate::error::Result;

/// Refuses a tensor whose gradient would be lost: one that requires grad, unless grad mode is off. `call` is the method.
#[inline]
pub(crate) fn refuse_gradient(array: &Bound<'_, PyAny>, call: &str) -> Result<()> {
    match requires_grad(array)? {
        Some(true) => refuse(array.py(), call),
        _ => Ok(()),
    }
}

/// Tells autograd that a call writes an array in place: a backward pass that has saved it raises then.
#[inline]
pub(crate) fn note_write(array: &Bound<'_, PyAny>) -> Result<()> {
    if requires_grad(array)?.is_none() {
        return Ok(());
    }
    static INCREMENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = array.py();
    let increment = INCREMENT.get_or_try_init(py, || {
        // The public function does the same in a Python frame, which takes longer than the rest of a small call.
        let direct = py.import("torch._C").and_then(|module| module.getattr("_increment_version"));
        match direct {
            Ok(direct) if direct.call1(((array,),)).is_ok() => Ok(direct.unbind()),
            _ => public_increment(py),
        }
    })?;
    increment.bind(py).call1(((array,),))?;
    Ok(())
}

fn public_increment(py: Python<'_>) -> PyResult<Py<PyAny>> {
    Ok(py.import("torch.autograd.graph")?.getattr("increment_version")?.unbind())
}

/// Whether a tensor of torch requires grad; nothing of other arrays.
fn requires_grad(array: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
    if buffer::is_supported(array) {
        return Ok(None);
    }
    let flag = array.getattr_opt(intern!(array.py(), "requires_grad"))?;
    flag.map(|flag| flag.is_truthy()).transpose()
}

#[cold]
fn refuse(py: Python<'_>, call: &str) -> Result<()> {
    if !py.import("torch")?.call_method0("is_grad_enabled")?.is_truthy()? {
        return Ok(());
    }
    let instead = match operator(call) {
        Some(name) => format!(
            "torch.ops.antiphon.{name} does (antiphon.torch.ops.register names the communicator); else "
        ),
        None => String::new(),
    };
    let text = format!(
        "{call}: a tensor requires grad, and {call} tracks no gradient: {instead}pass x.detach(), or call it under torch.no_grad()"
    );
    Err(PyValueError::new_err(text).into())
}

/// The operator that tracks the gradient of a call: operations whose results have one shape on all ranks have one.
fn operator(call: &str) -> Option<&'static str> {
    let name = call.trim_start_matches("start_");
    let row = Operation::ALL.iter().filter(|operation| operation.is_call()).map(|operation| operation.row());
    row.filter(|row| row.root != Some(Root::Gets) && row.output != Extent::Part)
        .map(|row| row.name)
        .find(|&operator| operator == name)
}
