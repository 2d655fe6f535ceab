//! The handle that `start_…` returns.

use std::{
    sync::{MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use antiphon::device::sync::Mutex;
use antiphon::prelude::{FabricError, Pending};
use pyo3::{exceptions::PyTimeoutError, prelude::*, types::PyType};

use crate::{
    arguments::seconds,
    cuda::{self, Started},
    error::Error,
    fork::Process,
    operand::note_write,
};

/// How long a wait lasts before Python's signal handlers run.
const LOOK: Duration = Duration::from_millis(10);
/// How long one thread waits for another that finds out how an operation ended.
const SHORT_LOOK: Duration = Duration::from_micros(100);

#[doc = stub!("Pending")]
#[pyclass(frozen, name = "Pending", module = "antiphon")]
pub(crate) struct Handle {
    process: Process,
    state: Mutex<State>,
    /// Given back by `wait`; also keeps an array alive whose memory is only borrowed.
    result: Option<Py<PyAny>>,
    /// The rank that sent the message, once it has arrived.
    source: OnceLock<usize>,
    /// The operation.
    name: &'static str,
}

enum State {
    Pending(Box<dyn Work>),
    /// A thread is finding out how it ended.
    Ending,
    /// How it ended; kept, because a program may wait again.
    Over(Result<(), Py<PyAny>>),
}

/// A pending operation, whatever its error type.
pub(crate) trait Work: Send {
    /// Waits for at most `limit`; returns whether the operation is over, so that `finish` returns at once.
    fn wait_for(&mut self, limit: Duration) -> bool;

    /// Whether it is over.
    fn is_over(&mut self) -> bool {
        self.wait_for(Duration::ZERO)
    }

    /// The rank that sent the message, once it has arrived.
    fn source(&self) -> Option<usize> {
        None
    }

    /// Ends it, and lets go of what it kept alive.
    ///
    /// # Errors
    /// What went wrong; with the work itself if it was refused, and may be ended later.
    fn finish(self: Box<Self>) -> Result<(), Unfinished>;
}

/// Why work was not ended well.
pub(crate) struct Unfinished {
    pub(crate) error: Error,
    /// The work, if nothing of it has happened.
    pub(crate) refused: Option<Box<dyn Work>>,
}

impl<E: Into<Error>> From<E> for Unfinished {
    fn from(error: E) -> Self {
        Self { error: error.into(), refused: None }
    }
}

impl<T: Send, E: Into<Error> + From<FabricError> + Send> Work for Pending<T, E> {
    fn wait_for(&mut self, limit: Duration) -> bool {
        Pending::wait_for(self, limit)
    }

    fn source(&self) -> Option<usize> {
        Pending::source(self)
    }

    fn finish(self: Box<Self>) -> Result<(), Unfinished> {
        Ok(self.wait().map(drop)?)
    }
}

impl Work for Started {
    fn wait_for(&mut self, _limit: Duration) -> bool {
        true // it is the stream that waits
    }

    fn is_over(&mut self) -> bool {
        self.is_passed()
    }

    fn finish(self: Box<Self>) -> Result<(), Unfinished> {
        Ok(cuda::finish(*self).map(drop)?)
    }
}

impl Handle {
    /// The handle of an operation in a stream.
    pub(crate) fn on_cuda(name: &'static str, started: Started, result: Option<Bound<'_, PyAny>>) -> Self {
        Self::of(name, Box::new(started), result)
    }

    /// The handle of any work.
    pub(crate) fn of(name: &'static str, work: Box<dyn Work>, result: Option<Bound<'_, PyAny>>) -> Self {
        Self {
            name,
            process: Process::current(),
            state: Mutex::new(State::Pending(work)),
            result: result.map(Bound::unbind),
            source: OnceLock::new(),
        }
    }

    pub(crate) fn new<T, E>(
        name: &'static str,
        pending: Pending<T, E>,
        result: Option<Bound<'_, PyAny>>,
    ) -> Self
    where
        T: Send + 'static,
        E: Into<Error> + From<FabricError> + Send + 'static,
    {
        Self::of(name, Box::new(pending), result)
    }

    /// Waits for at most `limit`; returns whether it is over. As with all accesses of the state, the caller is detached from
    /// the interpreter:
    /// a thread with the lock does not need the interpreter, and a thread that needs the interpreter does not hold the lock.
    fn is_over_in(&self, limit: Duration) -> bool {
        let mut state = self.state();
        match &mut *state {
            State::Pending(work) => work.wait_for(limit),
            State::Ending => {
                drop(state);
                std::thread::sleep(limit.min(SHORT_LOOK));
                false
            }
            State::Over(_) => true,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the work, if it is over, to be ended by this thread alone.
    fn take_ended(&self) -> Option<Box<dyn Work>> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Ending) {
            State::Pending(work) => Some(work),
            other => {
                *state = other;
                None
            }
        }
    }

    /// How it ended, if that is known; or why it could not be ended now.
    fn outcome(&self, py: Python<'_>) -> Option<PyResult<()>> {
        if let Some(work) = py.detach(|| self.take_ended()) {
            if let Some(source) = work.source() {
                let _ = self.source.set(source); // once, as work is ended once
            }
            // What is saved for a backward pass between the start and the end would have other values.
            let written = || self.result.as_ref().map_or(Ok(()), |result| note_write(result.bind(py)));
            let mut refusal = None;
            let next = match work.finish() {
                Ok(()) => {
                    State::Over(written().map_err(|error| PyErr::from(error).into_value(py).into_any()))
                }
                Err(Unfinished { error, refused: Some(work) }) => {
                    refusal = Some(PyErr::from(error));
                    State::Pending(work)
                }
                Err(Unfinished { error, .. }) => {
                    State::Over(Err(PyErr::from(error).into_value(py).into_any()))
                }
            };
            py.detach(|| *self.state() = next);
            if let Some(refusal) = refusal {
                return Some(Err(refusal));
            }
        }
        // No thread waits while it holds the lock any more.
        match &*self.state() {
            State::Over(Ok(())) => Some(Ok(())),
            State::Over(Err(error)) => Some(Err(PyErr::from_value(error.bind(py).clone()))),
            _ => None,
        }
    }
}

#[pymethods]
impl Handle {
    #[doc = stub!("Pending.wait")]
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        self.process.check(|| "handle".to_owned())?;
        let limit = seconds("timeout", timeout)?;
        let start = Instant::now();
        loop {
            let left = limit.map_or(LOOK, |limit| limit.saturating_sub(start.elapsed()).min(LOOK));
            if py.detach(|| self.is_over_in(left))
                && let Some(outcome) = self.outcome(py)
            {
                outcome?;
                return Ok(self.result.as_ref().map(|result| result.clone_ref(py)));
            }
            py.check_signals()?;
            if limit.is_some_and(|limit| start.elapsed() >= limit) {
                let text = format!("still under way after {:.1?}: wait again", start.elapsed());
                return Err(PyTimeoutError::new_err(text));
            }
        }
    }

    /// Type checkers know the result of a handle's operation: `Pending[T]` is for them.
    #[classmethod]
    fn __class_getitem__<'py>(class: &Bound<'py, PyType>, _result: &Bound<'py, PyAny>) -> Bound<'py, PyType> {
        class.clone()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = py.detach(|| match &mut *self.state() {
            State::Pending(work) => ["under way", "finished"][usize::from(work.is_over())],
            State::Ending => "under way",
            State::Over(Ok(())) => "finished",
            State::Over(Err(_)) => "failed",
        });
        format!("<antiphon.Pending: {} {state}>", self.name)
    }

    #[doc = stub!("Pending.source")]
    #[getter]
    fn source(&self) -> Option<usize> {
        self.source.get().copied()
    }

    #[doc = stub!("Pending.is_finished")]
    fn is_finished(&self, py: Python<'_>) -> PyResult<bool> {
        self.process.check(|| "handle".to_owned())?;
        Ok(py.detach(|| match &mut *self.state() {
            State::Pending(work) => work.is_over(),
            State::Ending => false,
            State::Over(_) => true,
        }))
    }
}
