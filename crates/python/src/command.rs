//! `python -m antiphon`.

use std::ffi::OsString;

use pyo3::prelude::*;

#[doc = stub!("main")]
// Runs the command `antiphon` and returns its exit status.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| antiphon_cli::main(arguments))
}
