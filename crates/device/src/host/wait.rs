//! Waiting for another process without hurting it.
//!
//! A peer's answer usually comes within a microsecond, so a waiter first spins. When ranks outnumber cores the peer
//! may need this very core, so it soon yields, and then sleeps on a futex in shared memory ([`Doorbell`]).
//!
//! The notifier reads one word, and makes a system call only if a waiter sleeps. There is
//! deliberately no full fence between the two (it would cost more than the whole message): a waiter that falls
//! asleep at that very moment can be missed, and therefore never sleeps longer than [`NAP`] before it looks again.

use std::time::{Duration, Instant};

#[cfg(not(loom))]
use rustix::thread::futex;

use crate::sync::{AtomicU32, Ordering, fence};

/// The longest uninterrupted sleep: the price of a missed wake-up, and the period of health checks.
pub const NAP: Duration = Duration::from_millis(1);

/// How patiently to spin before yielding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Polls back to back: the answer is expected within a microsecond.
    pub polls: u32,
    /// Polls with a pause instruction between them.
    pub pauses: u32,
    /// Polls with a yield to the scheduler between them.
    pub yields: u32,
}

impl Patience {
    /// Each rank has a core of its own: spin for some 50 µs.
    pub const OWN_CORE: Self = Self { polls: 1_000, pauses: 1_000, yields: 50 };
    /// Ranks share cores: the awaited rank may need this one.
    pub const SHARED_CORE: Self = Self { polls: 50, pauses: 0, yields: 20 };

    /// The patience for `ranks` ranks on `cores` cores.
    pub fn for_ranks(ranks: usize, cores: usize) -> Self {
        if ranks <= cores { Self::OWN_CORE } else { Self::SHARED_CORE }
    }
}

/// Where the threads of one waiter sleep, in memory that all notifiers share.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Doorbell(AtomicU32);

impl Doorbell {
    /// Wakes the threads that sleep here. Costs one load when none does.
    #[inline]
    pub fn ring(&self) {
        if self.0.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.0.store(0, Ordering::Relaxed);
        #[cfg(not(loom))]
        let _ = futex::wake(self.0.as_core(), futex::Flags::empty(), i32::MAX as u32);
    }

    /// Announces that the caller is about to sleep. What it waits for must be checked once more after this.
    pub fn arm(&self) {
        self.0.store(1, Ordering::Relaxed);
        // Pairs with the waker's own program order: after this, either we see what it made ready, or it sees the
        // bell armed (or we are the rare one that naps, see the module's page).
        fence(Ordering::SeqCst);
    }

    /// Whether no notifier has rung since [`arm`](Self::arm): for models, which do not sleep.
    #[cfg(loom)]
    pub fn is_armed(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Sleeps until rung since [`arm`](Self::arm), for [`NAP`] at most.
    pub fn sleep(&self) {
        #[cfg(not(loom))]
        {
            let nap = rustix::fs::Timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as _ };
            // Woken, timed out, interrupted or rung meanwhile: the caller looks again in every case.
            let _ = futex::wait(self.0.as_core(), futex::Flags::empty(), 1, Some(&nap));
        }
    }
}

/// Waits until `ready` returns something, in the three steps of the module's page.
///
/// `check` runs now and then while waiting (about every [`NAP`], and not before the first has passed) with the time waited so
/// far, and ends the wait with its error: it is where a deadline, a dead peer or an interrupt is noticed.
///
/// # Errors
/// Whatever `check` returns.
#[inline]
pub fn wait_for<T, E>(
    bell: &Doorbell,
    patience: Patience,
    mut ready: impl FnMut() -> Option<T>,
    check: impl FnMut(Duration) -> Result<(), E>,
) -> Result<T, E> {
    for _ in 0..patience.polls {
        if let Some(value) = ready() {
            return Ok(value);
        }
    }
    wait_slowly(bell, patience, ready, check)
}

#[cold]
fn wait_slowly<T, E>(
    bell: &Doorbell,
    patience: Patience,
    mut ready: impl FnMut() -> Option<T>,
    mut check: impl FnMut(Duration) -> Result<(), E>,
) -> Result<T, E> {
    let start = Instant::now();
    for _ in 0..patience.pauses {
        if let Some(value) = ready() {
            return Ok(value);
        }
        std::hint::spin_loop();
    }
    for _ in 0..patience.yields {
        if let Some(value) = ready() {
            return Ok(value);
        }
        std::thread::yield_now();
    }
    let mut checked = Duration::ZERO;
    loop {
        bell.arm();
        if let Some(value) = ready() {
            return Ok(value);
        }
        bell.sleep();
        let waited = start.elapsed();
        if waited - checked >= NAP {
            checked = waited;
            check(waited)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_sleeper_is_woken_by_the_bell() {
        let shared = Arc::new((Doorbell::default(), AtomicU32::new(0)));
        let waker = shared.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            waker.1.store(7, Ordering::Release);
            waker.0.ring();
        });
        let seen = wait_for(
            &shared.0,
            Patience::SHARED_CORE,
            || Some(shared.1.load(Ordering::Acquire)).filter(|&v| v != 0),
            |waited| if waited > Duration::from_secs(10) { Err("deadline") } else { Ok(()) },
        );
        assert_eq!(seen, Ok(7));
        thread.join().unwrap();
    }

    #[test]
    fn the_check_ends_a_wait_for_what_never_comes() {
        let bell = Doorbell::default();
        let limit = Duration::from_millis(30);
        let start = Instant::now();
        let result: Result<(), Duration> = wait_for(
            &bell,
            Patience::OWN_CORE,
            || None,
            |waited| {
                if waited > limit { Err(waited) } else { Ok(()) }
            },
        );
        assert!(result.unwrap_err() > limit);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
