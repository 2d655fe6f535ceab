//! Ctrl-C while a call waits.
//!
//! Python's signal handlers run on its main thread, between two steps of Python code. A call that waits is one step, so it
//! checks now and then whether a handler must run. If the handler raises, the wait ends and the call raises the exception.

use std::cell::{Cell, RefCell};

use pyo3::prelude::*;

thread_local! {
    /// Whether this thread waits on behalf of Python: the library's own threads do not.
    static WAITING: Cell<bool> = const { Cell::new(false) };
    /// The exception that a signal handler raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Releases the interpreter while `work` waits. [`check`] may end it.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let outer = WAITING.replace(true);
        let result = work();
        WAITING.set(outer);
        result
    })
}

/// Whether the wait should end: the hook of a communicator.
pub(crate) fn check() -> bool {
    // No interpreter means that the process is about to end.
    WAITING.get() && Python::try_attach(raises).unwrap_or(true)
}

fn raises(py: Python<'_>) -> bool {
    let raised = py.check_signals().err();
    let interrupted = raised.is_some();
    RAISED.set(raised);
    interrupted
}

/// Takes the exception of the signal handler that ended a wait.
pub(crate) fn take() -> Option<PyErr> {
    RAISED.take()
}
