//! The routes of a dispatch, on the host or between GPUs.

use std::sync::{MutexGuard, PoisonError};

use antiphon::device::sync::Mutex;
use pyo3::exceptions::PyTypeError;

use crate::error::{Error, Result};

/// The routes of a dispatch: `H` on the host, `C` between GPUs.
pub(super) enum Routes<H, C> {
    Host(H),
    Cuda(Mutex<C>),
}

impl<H, C> Routes<H, C> {
    pub(super) fn host(&self, call: &str) -> Result<&H> {
        match self {
            Self::Host(routes) => Ok(routes),
            Self::Cuda(_) => Err(elsewhere(call, "a GPU", "the host")),
        }
    }

    pub(super) fn cuda(&self, call: &str) -> Result<MutexGuard<'_, C>> {
        match self {
            Self::Cuda(routes) => Ok(lock(routes)),
            Self::Host(_) => Err(elsewhere(call, "the host", "a GPU")),
        }
    }

    /// What both have.
    pub(super) fn either<T>(&self, host: impl FnOnce(&H) -> T, cuda: impl FnOnce(&C) -> T) -> T {
        match self {
            Self::Host(routes) => host(routes),
            Self::Cuda(routes) => cuda(&lock(routes)),
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn elsewhere(call: &str, routes: &str, tensors: &str) -> Error {
    PyTypeError::new_err(format!(
        "{call}: the routes are of a dispatch on {routes}, the tensors are on {tensors}"
    ))
    .into()
}
