//! What torch's autograd must know of a call that works on a tensor's memory: that the call tracks no gradient, and what it writes.

use antiphon::operation::{Extent, Operation, Root};
use pyo3::{
    exceptions::{PyNotImplementedError, PyValueError},
    intern,
    prelude::*,
    sync::PyOnceLock,
};

use super::buffer;
use crate::error::Result;

/// Refuses a tensor whose derivatives would be lost: one that requires grad, unless grad mode is off, and one that has a tangent
/// of forward mode. `call` is the method.
#[inline]
pub(crate) fn refuse_gradient(array: &Bound<'_, PyAny>, call: &str) -> Result<()> {
    match requires_grad(array)? {
        None => Ok(()),
        Some(requires_grad) => {
            if requires_grad {
                refuse(array.py(), call)?;
            }
            refuse_tangent(array, call)
        }
    }
}

fn refuse_tangent(array: &Bound<'_, PyAny>, call: &str) -> Result<()> {
    static FORWARD: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let py = array.py();
    let forward =
        FORWARD.get_or_try_init(py, || Ok::<_, PyErr>(py.import("torch.autograd.forward_ad")?.unbind()))?;
    let forward = forward.bind(py);
    // Outside of every level no tensor has a tangent, and the number is found sooner than a tensor's.
    let level = forward.getattr_opt(intern!(py, "_current_level"))?;
    if level.map_or(Ok(0), |level| level.extract::<i64>())? < 0 {
        return Ok(());
    }
    let tangent = forward.call_method1("unpack_dual", (array,))?.getattr("tangent")?;
    match tangent.is_none() {
        true => Ok(()),
        false => {
            let text = format!(
                "{call}: a tensor has a tangent of forward mode, and {call} computes no forward-mode derivatives: pass \
                 torch.autograd.forward_ad.unpack_dual(x).primal"
            );
            Err(PyNotImplementedError::new_err(text).into())
        }
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
