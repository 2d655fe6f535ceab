//! The end of the process.
//!
//! When a process exits, UCX frees its own state, although other threads still run: one may move messages, or drop the last handle of an
//! engine. A thread that used UCX then would free the same memory twice. So the exiting thread first takes the locks of all engines that are
//! open, says goodbye for them, and keeps the locks. No thread uses UCX afterwards.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError, Weak},
    time::Instant,
};

use super::{super::owner::Owner, FAREWELL, worker::Shared};

/// Filled when the process begins to exit.
static EXITING: OnceLock<()> = OnceLock::new();
/// The engines that are open, each with the process that made it.
static OPEN: Mutex<Vec<(Owner, Weak<Shared>)>> = Mutex::new(Vec::new());

/// Whether the process exits: UCX is not to be used any more.
pub(super) fn is_exiting() -> bool {
    EXITING.get().is_some()
}

/// Remembers an engine for the process's exit.
pub(super) fn register(shared: &Arc<Shared>) {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(|| {
        // SAFETY: the function stays where it is: this library is never closed. It may fail for want of memory, and then nothing is lost
        // but this care.
        unsafe { libc::atexit(leave_all) };
    });
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|(_, shared)| shared.strong_count() > 0);
    open.push((Owner::this(), Arc::downgrade(shared)));
}

extern "C" fn leave_all() {
    let _ = EXITING.set(());
    let open = match OPEN.try_lock() {
        Ok(open) => open,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        // A forked child may have inherited it locked. Another thread that registers an engine right now is not waited for.
        Err(TryLockError::WouldBlock) => return,
    };
    let deadline = Instant::now() + FAREWELL;
    for shared in open.iter().filter(|(owner, _)| owner.is_this()).filter_map(|(_, shared)| shared.upgrade())
    {
        shared.leave_for_good(deadline);
        // Its drop would change nothing, but a thread that waits for its lock still reads it.
        std::mem::forget(shared);
    }
}
