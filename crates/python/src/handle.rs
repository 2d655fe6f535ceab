//! What `start_…` returns.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use antiphon::prelude::{FabricError, Pending};
use pyo3::{exceptions::PyTimeoutError, prelude::*};

use crate::{arguments::Operands, error::Error, fork::Process};

/// How long a wait goes on before Python's signal handlers have their turn.
const LOOK: Duration = Duration::from_millis(10);

/// An operation that goes on; see `_core.pyi`.
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct Handle {
    process: Process,
    state: Mutex<State>,
    /// Given back by `wait`; also keeps an array alive whose memory is only borrowed.
    result: Option<Py<PyAny>>,
}

enum State {
    Pending(Box<dyn Work>),
    /// How it ended; kept, as one may wait again.
    Over(Result<(), Py<PyAny>>),
}

/// A pending operation, whatever its error type.
trait Work: Send {
    fn wait_for(&mut self, limit: Duration) -> bool;
    fn finish(self: Box<Self>) -> Result<Operands, Error>;
}

impl<E: Into<Error> + From<FabricError> + Send> Work for Pending<Operands, E> {
    fn wait_for(&mut self, limit: Duration) -> bool {
        Pending::wait_for(self, limit)
    }

    fn finish(self: Box<Self>) -> Result<Operands, Error> {
        self.wait().map_err(Into::into)
    }
}

impl Handle {
    pub(crate) fn new<E>(pending: Pending<Operands, E>, result: Option<Bound<'_, PyAny>>) -> Self
    where
        E: Into<Error> + From<FabricError> + Send + 'static,
    {
        let state = Mutex::new(State::Pending(Box::new(pending)));
        Self { process: Process::current(), state, result: result.map(Bound::unbind) }
    }

    /// Whether it is over after `limit` at most. The interpreter must be detached: another thread may hold the lock.
    fn is_over_in(&self, limit: Duration) -> bool {
        match &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Pending(work) => work.wait_for(limit),
            State::Over(_) => true,
        }
    }

    fn outcome(&self, py: Python<'_>) -> PyResult<()> {
        // Over, so nobody holds the lock for long.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Pending(_) = &*state {
            let State::Pending(work) = std::mem::replace(&mut *state, State::Over(Ok(()))) else {
                unreachable!()
            };
            let outcome =
                work.finish().map(drop).map_err(|error| PyErr::from(error).into_value(py).into_any());
            *state = State::Over(outcome);
        }
        match &*state {
            State::Over(Err(error)) => Err(PyErr::from_value(error.bind(py).clone())),
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl Handle {
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        self.process.check(|| "handle".to_owned())?;
        let limit = crate::communicator::seconds("timeout", timeout)?;
        let start = Instant::now();
        loop {
            let left = limit.map_or(LOOK, |limit| limit.saturating_sub(start.elapsed()).min(LOOK));
            if py.detach(|| self.is_over_in(left)) {
                self.outcome(py)?;
                return Ok(self.result.as_ref().map(|result| result.clone_ref(py)));
            }
            py.check_signals()?;
            if limit.is_some_and(|limit| start.elapsed() >= limit) {
                let text = format!("still under way after {:.1?}: wait again", start.elapsed());
                return Err(PyTimeoutError::new_err(text));
            }
        }
    }

    fn is_finished(&self, py: Python<'_>) -> PyResult<bool> {
        self.process.check(|| "handle".to_owned())?;
        Ok(py.detach(|| self.is_over_in(Duration::ZERO)))
    }
}
