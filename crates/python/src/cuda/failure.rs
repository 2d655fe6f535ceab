//! How a program learns of kernels that give up while it makes no call.

use std::sync::Arc;

use antiphon::{prelude::FabricError, session::FailureAction};
use pyo3::{exceptions::PyTypeError, prelude::*};

use crate::error::{Error, Result};

/// The action that one of the words names, or a callable that takes the exception.
pub(crate) fn action(action: &Bound<'_, PyAny>) -> Result<FailureAction> {
    if let Ok(word) = action.extract::<String>() {
        return Ok(word.parse()?);
    }
    match action.is_callable() {
        true => {
            let call = action.clone().unbind();
            Ok(FailureAction::Call(Arc::new(move |error| tell(&call, error))))
        }
        false => {
            let found = action.get_type();
            let text = format!("on_failure is \"error\", \"abort\" or a callable, not {found}");
            Err(PyTypeError::new_err(text).into())
        }
    }
}

/// Calls the callable; its exceptions go to Python's hook for unraisable exceptions.
fn tell(call: &Py<PyAny>, error: &FabricError) {
    // Without an interpreter there is no program any more that could want to hear.
    let _ = Python::try_attach(|py| {
        let exception = PyErr::from(Error::from(error.clone())).into_value(py);
        if let Err(raised) = call.call1(py, (exception,)) {
            raised.write_unraisable(py, Some(call.bind(py)));
        }
    });
}
