//! How a program learns of kernels that give up while it makes no call.

use antiphon::{collectives::cuda::OnFailure, prelude::FabricError};
use pyo3::{exceptions::PyTypeError, prelude::*};

use crate::error::{Error, Result};

/// The action after a kernel has given up, for each GPU of a communicator.
pub(crate) enum Action {
    /// One of the words.
    Word(String),
    /// A callable that takes the exception.
    Call(Py<PyAny>),
}

impl Action {
    pub(crate) fn new(action: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(word) = action.extract::<String>() {
            word.parse::<OnFailure>()?;
            return Ok(Self::Word(word));
        }
        match action.is_callable() {
            true => Ok(Self::Call(action.clone().unbind())),
            false => {
                let found = action.get_type();
                let text = format!("on_failure is \"error\", \"abort\" or a callable, not {found}");
                Err(PyTypeError::new_err(text).into())
            }
        }
    }

    /// For one GPU.
    pub(super) fn on_failure(&self, py: Python<'_>) -> OnFailure {
        match self {
            Self::Word(word) => word.parse().unwrap_or_default(),
            Self::Call(call) => {
                let call = call.clone_ref(py);
                OnFailure::Callback(Box::new(move |error: &FabricError| tell(&call, error)))
            }
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
