//! The word by which a rank that shrinks its communicator tells its peers how far it has come; see `communicator/shrink.rs`.

use antiphon_device::sync::{AtomicU64, Ordering};

/// How far a rank has come, in which attempt (the first is 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) attempt: u64,
    pub(crate) step: Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Arrived,
    Ready,
    GaveUp,
}

/// The state that a rank publishes while it shrinks its communicator.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Notice {
    /// Its [`Progress`], or zero.
    progress: AtomicU64,
    /// Its mailbox: what names it, what its peers say there, and the network namespace in which it can be seen.
    mailbox: [AtomicU64; 3],
}

impl Notice {
    pub(crate) fn progress(&self) -> Option<Progress> {
        // Pairs with the release store in `tell`: the mailbox was written before.
        let word = self.progress.load(Ordering::Acquire);
        let step = match word % 4 {
            0 => return None,
            1 => Step::Arrived,
            2 => Step::Ready,
            _ => Step::GaveUp,
        };
        Some(Progress { attempt: word / 4, step })
    }

    pub(crate) fn tell(&self, Progress { attempt, step }: Progress) {
        let step = match step {
            Step::Arrived => 1,
            Step::Ready => 2,
            Step::GaveUp => 3,
        };
        self.progress.store(attempt * 4 + step, Ordering::Release);
    }

    /// The words that name the mailbox.
    pub(crate) fn mailbox(&self) -> [u64; 3] {
        [0, 1, 2].map(|word| self.mailbox[word].load(Ordering::Relaxed))
    }

    pub(crate) fn set_mailbox(&self, words: [u64; 3]) {
        for (word, value) in self.mailbox.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
    }
}
