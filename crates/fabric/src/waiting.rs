//! The published wait of a rank, from which reports are made: a rank that gets SIGUSR1 reports at the next look of its wait.
//!
//! Every rank keeps in its control block what it waits in, as of its last look. So the rank that was asked can also say what
//! those do that it waits for.

use std::time::Duration;

use antiphon_device::sync::{AtomicU64, Ordering};

use crate::Signature;

/// A rank that waits looks around about every millisecond. One that has not for so long does something else.
pub(crate) const FRESH: Duration = Duration::from_millis(500);

/// The wait of a rank, as of its last look around.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Wait {
    /// When it last looked around, on the machine's clock, in nanoseconds; 0 before the first time.
    looked: AtomicU64,
    /// How long it had waited then, in nanoseconds.
    waited: AtomicU64,
    /// The operation.
    words: [AtomicU64; 2],
}

impl Wait {
    /// Notes a look. (Two threads of a rank may wait at once: what one sees may then be of both, which is for people to read.)
    pub(crate) fn note(&self, operation: Signature, waited: Duration) {
        for (word, value) in self.words.iter().zip(operation.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        self.waited.store(waited.as_nanos() as u64, Ordering::Relaxed);
        // Pairs with the acquire load in `current`.
        self.looked.store(now(), Ordering::Release);
    }

    /// The operation in which the rank waits now, and for how long it has waited.
    pub(crate) fn current(&self) -> Option<(Signature, Duration)> {
        let age = now().saturating_sub(self.looked.load(Ordering::Acquire));
        let words = [0, 1].map(|word| self.words[word].load(Ordering::Relaxed));
        let waited = Duration::from_nanos(self.waited.load(Ordering::Relaxed).saturating_add(age));
        (age < FRESH.as_nanos() as u64).then_some((Signature::from_words(words)?, waited))
    }
}

/// The clock that all processes of the machine read.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
