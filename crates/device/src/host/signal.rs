//! SIGUSR1, which asks a rank to report what it waits for.

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};

/// How often the signal has come, once this process catches it.
static CAUGHT: OnceLock<AtomicU64> = OnceLock::new();

/// Has this process count SIGUSR1, which would end it otherwise. A handler that the program has, or sets later, stays.
pub fn count_sigusr1() {
    CAUGHT.get_or_init(|| {
        install();
        AtomicU64::new(0)
    });
}

/// How many have come.
pub fn count_of_sigusr1() -> u64 {
    CAUGHT.get().map_or(0, |caught| caught.load(Ordering::Relaxed))
}

fn install() {
    // SAFETY: all-zero bytes are a valid action: the default, without flags.
    let (mut current, mut ours): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = count as extern "C" fn(libc::c_int) as libc::sighandler_t;
    ours.sa_flags = libc::SA_RESTART;
    // SAFETY: both actions are valid, and the handler does what a handler may: it uses an atomic.
    unsafe {
        if libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut current) == 0
            && current.sa_sigaction == libc::SIG_DFL
        {
            libc::sigaction(libc::SIGUSR1, &ours, std::ptr::null_mut());
        }
    }
}

extern "C" fn count(_signal: libc::c_int) {
    if let Some(caught) = CAUGHT.get() {
        // One that comes at this very moment on another thread may be lost: it asks the same.
        caught.store(caught.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}
