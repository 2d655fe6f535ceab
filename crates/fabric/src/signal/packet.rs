//! The head of a packet.

use antiphon_device::sync::{AtomicU64, Ordering};

/// Payloads up to this many bytes travel inside the head: one cache line carries everything.
pub(crate) const INLINE: usize = 40;

/// The stamp, two words about the data, and room for a tiny payload: one cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Head {
    stamp: AtomicU64,
    words: [AtomicU64; 2],
    #[cfg(not(loom))]
    pub(crate) inline: std::cell::UnsafeCell<[u64; INLINE / 8]>,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Head>() == 64);

// SAFETY: `inline` is written by the packet's owner before `publish` and read by others after `arrival`; see the
// module's page for why these never overlap.
#[cfg(not(loom))]
unsafe impl Sync for Head {}

/// How many packets of a channel the receiver has consumed. Only the receiver writes it.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Consumed {
    count: AtomicU64,
    /// The signature that the receiver expected instead of a packet that it refused; zero if it refused none.
    expected: [AtomicU64; 2],
}

impl Consumed {
    /// Gives the places of the first `count` packets back to the sender.
    #[inline]
    pub(crate) fn announce(&self, count: u64) {
        // Pairs with the acquire load in `count`: we have read the packets.
        self.count.store(count, Ordering::Release);
    }

    #[inline]
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Tells the sender what was expected instead of its packet.
    pub(crate) fn refuse(&self, expected: [u64; 2]) {
        self.expected[1].store(expected[1], Ordering::Relaxed);
        // Pairs with the acquire load in `refusal`: a reader that sees the first word sees the second.
        self.expected[0].store(expected[0], Ordering::Release);
    }

    /// The signature that the receiver expected, if it refused a packet.
    pub(crate) fn refusal(&self) -> Option<[u64; 2]> {
        let words = [self.expected[0].load(Ordering::Acquire), self.expected[1].load(Ordering::Relaxed)];
        (words[0] != 0).then_some(words)
    }
}

impl Head {
    /// Makes everything written before visible to every reader that sees the stamp. Only the owner calls it.
    #[inline]
    pub(crate) fn publish(&self, stamp: u64, words: [u64; 2]) {
        self.words[0].store(words[0], Ordering::Relaxed);
        self.words[1].store(words[1], Ordering::Relaxed);
        // Pairs with the acquire load in `arrival`.
        self.stamp.store(stamp, Ordering::Release);
    }

    /// The stamp. What was written before it is visible to a reader that sees it.
    pub(crate) fn stamp(&self) -> u64 {
        // Pairs with the release store in `publish`.
        self.stamp.load(Ordering::Acquire)
    }

    /// The words, once the packet with this stamp is here.
    #[inline]
    pub(crate) fn arrival(&self, stamp: u64) -> Option<[u64; 2]> {
        // Pairs with the release store in `publish`.
        (self.stamp.load(Ordering::Acquire) == stamp)
            .then(|| [self.words[0].load(Ordering::Relaxed), self.words[1].load(Ordering::Relaxed)])
    }
}
