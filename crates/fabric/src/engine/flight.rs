//! Which sends are complete.

use antiphon_device::sync::{AtomicU64, Ordering};

/// The sends that read one buffer. The buffer may be written again once they are complete.
///
/// All sends of a flight go through one engine.
#[derive(Debug, Default)]
pub struct Flight {
    // Both are written under the engine's lock: no thread writes between another's load and its store.
    started: AtomicU64,
    finished: AtomicU64,
}

impl Flight {
    /// A flight without sends, which is complete.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether no send reads the buffer any more.
    #[inline]
    pub fn is_complete(&self) -> bool {
        // Acquire pairs with the release of `finish`: what the engine read, it read before. Finished sends are counted first, since
        // others may start between the two loads.
        let finished = self.finished.load(Ordering::Acquire);
        finished == self.started.load(Ordering::Relaxed)
    }

    /// Counts a send that begins. The caller holds the engine's lock.
    pub(super) fn start(&self) {
        self.started.store(self.started.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Counts a send that has read its payload. The caller holds the engine's lock.
    pub(super) fn finish(&self) {
        self.finished.store(self.finished.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}
