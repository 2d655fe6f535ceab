//! The session of a communicator: the arrays of a call as the tensors of `antiphon::session`.
//!
//! A thread takes a lock of the session detached from the interpreter: a thread that has one may need the interpreter, to check for
//! signals.

mod failure;
mod last_streams;
mod register;
mod started;
mod work;

use std::sync::Arc;

use antiphon::{
    fabric::Communicator,
    session::{Order, Session},
};
use pyo3::prelude::*;

pub(crate) use failure::action;
pub(crate) use last_streams::LastStreams;
pub(crate) use register::Registrable;
pub(crate) use started::{Started, finish};
pub(crate) use work::views;

use crate::stream::RawStream;

/// A communicator's session, and what Python adds to it.
pub(crate) struct Gpus {
    session: Session,
    last_streams: Arc<LastStreams>,
}

impl Gpus {
    pub(crate) fn new(comm: Communicator) -> Self {
        Self { session: Session::new(comm), last_streams: Arc::default() }
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Keeps the stream of a call that was made, until the next call of the same order has been made.
    pub(crate) fn keep_stream(&self, py: Python<'_>, stream: RawStream, orders: &[Order]) -> PyResult<()> {
        self.last_streams.keep(py, stream, orders)
    }

    /// What keeps the streams of calls beyond this.
    pub(crate) fn last_streams(&self) -> Arc<LastStreams> {
        self.last_streams.clone()
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        // Without an interpreter there is nothing to detach from.
        if Python::try_attach(|py| py.detach(|| self.session.close())).is_none() {
            self.session.close();
        }
    }
}
