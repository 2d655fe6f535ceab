//! The Python exception for each error: that of MSCCL++ 0.9.0, which scripts may catch.

use antiphon_language::LanguageError;
use antiphon_plan::PlanError;
use pyo3::exceptions::{
    PyAttributeError, PyIndexError, PyKeyError, PyRuntimeError, PyTypeError, PyValueError,
};

use crate::error::Error;

impl From<LanguageError> for Error {
    fn from(error: LanguageError) -> Self {
        let text = error.to_string();
        Error::from(match error {
            LanguageError::NoSuchRank { what: "Rank" | "Buffer", .. } => PyAttributeError::new_err(text),
            LanguageError::BackwardRange { .. }
            | LanguageError::ToItself { .. }
            | LanguageError::DuplicateThreadBlock { .. }
            | LanguageError::NotInGroup { .. } => PyValueError::new_err(text),
            LanguageError::NoSwitchEnd { .. } => PyKeyError::new_err(text),
            LanguageError::ForeignChannel { .. } | LanguageError::TooMany { .. } => {
                PyIndexError::new_err(text)
            }
            // The only reason why instances fail that is not a limit is a policy that divides nothing.
            LanguageError::Plan(PlanError::Undivided { .. }) => PyTypeError::new_err(text),
            _ => PyRuntimeError::new_err(text),
        })
    }
}
