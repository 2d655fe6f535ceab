//! Moving any amount of data through rounds: the one loop that all collectives share.

use std::ops::Range;

use antiphon_fabric::{FabricError, Rounds, Signature};

/// Copies bytes between a user's tensor and a mailbox.
///
/// # Safety
/// Both are valid for `len` bytes and do not overlap.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Runs `len` bytes through rounds, at most `piece` bytes at a time.
///
/// Every rank posts as many rounds (at least one, so that ranks always meet and compare signatures). For each piece,
/// `fill` writes this rank's contribution to the outbox and `drain` reads everybody's inboxes. A contribution is
/// `width` times as long as the piece: collectives that have something else for each rank pass the world size.
///
/// A mailbox is reused two rounds later, so while some ranks drain a piece, others already fill the next.
#[inline]
pub(crate) fn stream(
    rounds: &mut Rounds,
    signature: &Signature,
    len: usize,
    piece: usize,
    width: usize,
    mut fill: impl FnMut(Range<usize>, *mut u8),
    mut drain: impl FnMut(Range<usize>, &mut [*const u8]),
) -> Result<(), FabricError> {
    debug_assert!(piece > 0 && piece * width <= Rounds::CAPACITY);
    let mut start = 0;
    loop {
        let part = start..len.min(start + piece);
        let payload = part.len() * width;
        fill(part.clone(), rounds.outbox(payload));
        rounds.exchange(signature)?;
        drain(part.clone(), rounds.inboxes(payload));
        start = part.end;
        if start >= len {
            return Ok(());
        }
    }
}

/// The largest piece for contributions of `width` pieces: whole elements of any dtype, in whole cache lines.
pub(crate) fn piece_for(width: usize, preferred: usize) -> usize {
    let room = Rounds::CAPACITY / width.max(1);
    let piece = preferred.min(room);
    (piece - piece % 64).max(8)
}
