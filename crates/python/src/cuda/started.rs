//! Started collectives and messages on GPUs.

use antiphon::session;
use pyo3::prelude::*;

use crate::{
    arguments::Operands,
    error::Result,
    stream::{on, stream_or_current},
};

/// A collective or a message in a stream of the session, and the owners of its memory.
pub(crate) type Started = session::Started<Operands>;

/// Has the current stream wait for the end, after which the memory may be used in the order of that stream.
pub(crate) fn finish(started: Started) -> Result<Operands> {
    Python::attach(|py| {
        let device = started.device();
        let stream = stream_or_current(py, device, None)?;
        // SAFETY: the current stream of the library, on this device.
        Ok(started.finish(unsafe { on(device, stream) })?)
    })
}
