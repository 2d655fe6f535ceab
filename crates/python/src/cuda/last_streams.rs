//! The streams that the next calls wait for.

use std::sync::PoisonError;

use antiphon::{device::sync::Mutex, session::Order};
use pyo3::{intern, prelude::*};

use crate::stream::{RawStream, imported};

/// CuPy's stream of the last call of each order, which the next call on another stream waits for. CuPy destroys a stream with its
/// last reference; torch never destroys one.
#[derive(Default)]
pub(crate) struct LastStreams(Mutex<[Option<Py<PyAny>>; Order::COUNT]>);

impl LastStreams {
    /// Keeps the stream of a call that was made, if it is CuPy's current one, until the next call of the same order has been made.
    pub(crate) fn keep(&self, py: Python<'_>, stream: RawStream, orders: &[Order]) -> PyResult<()> {
        let Some(cupy) = imported(py, "cupy")? else { return Ok(()) };
        let current = cupy.getattr(intern!(py, "cuda"))?.call_method0(intern!(py, "get_current_stream"))?;
        let is_current = current.getattr(intern!(py, "ptr"))?.extract::<RawStream>()? == stream;
        for &order in orders {
            let kept = is_current.then(|| current.clone().unbind());
            let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let before = std::mem::replace(&mut last[order as usize], kept);
            drop(last);
            drop(before); // without the lock, as this may run Python
        }
        Ok(())
    }
}
