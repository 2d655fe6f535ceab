//! The mark of a rank that gave up: a rank that ends its round later sees the mark, and fails too.
//!
//! The time-outs of ranks are not simultaneous. A rank that posts a round and gives up leaves its packet behind, so a late rank finds
//! all packets of the round. Therefore a rank that gives up *marks* the round before its call returns, and every rank looks at
//! the mark after it has found all packets, as the last step of its wait:
//!
//! ```text
//! gives up:  post, look for all packets in vain, mark the round, return the error
//! ends:      post, find all packets, look at the mark:  marked → error,  else → the result
//! ```
//!
//! So a rank that looks after the mark was made fails as well. A rank that looked before had ended its wait: only a rank that ended before
//! another one gave up has a result. Nothing waits for the mark, so the mark can stop no rank: a look is one load. The mark is the earliest
//! round in which any rank gave up, because a rank that gave up in a later round has had the result of this one.

use antiphon_device::sync::{AtomicU64, Ordering};

/// The earliest marked round of a lane; zero bytes are no mark.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(crate) struct Earliest {
    /// The complement of the round, so that an earlier round is a greater number.
    complement: AtomicU64,
}

impl Earliest {
    /// Says that a rank gave up in this round.
    #[cold]
    pub(crate) fn mark(&self, round: u64) {
        // Pairs with the acquire load in `includes`: the reason was written before. Sequentially consistent, so that the mark
        // is there for all ranks before the call returns.
        self.complement.raise(!round, Ordering::SeqCst);
    }

    /// Whether a rank gave up in this round or before.
    #[inline]
    pub(crate) fn includes(&self, round: u64) -> bool {
        self.complement.load(Ordering::Acquire) >= !round
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_round_counts_whichever_is_marked_first() {
        let mark = Earliest::default();
        assert!(!mark.includes(1) && !mark.includes(u64::MAX - 1));
        for round in [7, 5, 9] {
            mark.mark(round);
        }
        assert_eq!([4, 5, 6, 7, 10].map(|round| mark.includes(round)), [false, true, true, true, true]);
    }
}
