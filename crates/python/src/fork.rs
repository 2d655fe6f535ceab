//! Detects the use of a communicator in a forked child: it stands for the parent's rank, and its threads do not run in the child.

use std::sync::OnceLock;

use antiphon::device::sync::{AtomicU32, Ordering};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// The process that made something. (Asking for the process id at every call would be a system call.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(u32);

/// How many forks lie between the first process and this one.
fn forks() -> &'static AtomicU32 {
    static FORKS: OnceLock<AtomicU32> = OnceLock::new();
    FORKS.get_or_init(AtomicU32::default)
}

#[doc = stub!("after_fork")]
// Tells the library that this process is the child of a fork.
#[pyfunction]
pub(crate) fn after_fork() {
    // A child begins with one thread.
    forks().store(forks().load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Process {
    pub(crate) fn current() -> Self {
        Self(forks().load(Ordering::Relaxed))
    }

    pub(crate) fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Refuses what another process made.
    pub(crate) fn check(self, what: impl FnOnce() -> String) -> PyResult<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(format!(
            "this {} belongs to the process that made it, and this one was forked since: make communicators after forking",
            what()
        )))
    }
}
