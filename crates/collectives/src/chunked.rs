//! Data of any length in chunks, one for each round: the loop that all collectives on host memory share.

use std::ops::Range;

use antiphon_fabric::{FabricError, Rounds, Signature, Written};

/// Bytes of a chunk where ranks are on several nodes: a round costs them a message's latency, which counts for more than caches.
pub(crate) const BETWEEN_NODES: usize = 512 << 10;

/// Copies bytes between a user's tensor and a mailbox.
///
/// # Safety
/// Both are valid for `len` bytes and do not overlap.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Exchanges `len` bytes in rounds of at most `chunk` bytes.
///
/// Every rank posts the same number of rounds: at least one, so that ranks always meet and compare signatures. For each
/// chunk, `fill` writes this rank's contribution to the outbox and says where, and `drain` reads the inboxes of all ranks. A contribution
/// is `width` times as long as the chunk: a collective that sends different data to each rank passes the world size.
///
/// A mailbox is reused two rounds later. So some ranks may fill the next chunk while others still drain this one.
#[inline]
pub(crate) fn exchange_chunks(
    rounds: &mut Rounds,
    signature: &Signature,
    len: usize,
    chunk: usize,
    width: usize,
    mut fill: impl FnMut(Range<usize>, *mut u8) -> Written,
    drain: impl FnMut(Range<usize>, &mut [*const u8]),
) -> Result<(), FabricError> {
    let exchange = |rounds: &mut Rounds, part: Range<usize>| {
        let written = fill(part.clone(), rounds.outbox(part.len() * width));
        rounds.exchange(signature, written)
    };
    in_chunks(rounds, len, chunk, width, exchange, drain)
}

/// As [`exchange_chunks`], where each other node gets something else: `written(bytes, node)` says which part of the contribution to a chunk of
/// `bytes` bytes is for `node`.
#[inline]
#[expect(clippy::too_many_arguments, reason = "one more than the loop that it varies")]
pub(crate) fn exchange_chunks_by_node(
    rounds: &mut Rounds,
    signature: &Signature,
    len: usize,
    chunk: usize,
    width: usize,
    mut fill: impl FnMut(Range<usize>, *mut u8),
    written: impl Fn(usize, usize) -> Written,
    drain: impl FnMut(Range<usize>, &mut [*const u8]),
) -> Result<(), FabricError> {
    let exchange = |rounds: &mut Rounds, part: Range<usize>| {
        fill(part.clone(), rounds.outbox(part.len() * width));
        rounds.exchange_by_node(signature, |node| written(part.len(), node))
    };
    in_chunks(rounds, len, chunk, width, exchange, drain)
}

/// The rounds of an exchange. `exchange` makes that of a chunk.
#[inline]
fn in_chunks(
    rounds: &mut Rounds,
    len: usize,
    chunk: usize,
    width: usize,
    mut exchange: impl FnMut(&mut Rounds, Range<usize>) -> Result<(), FabricError>,
    mut drain: impl FnMut(Range<usize>, &mut [*const u8]),
) -> Result<(), FabricError> {
    debug_assert!(chunk > 0 && chunk * width <= Rounds::CAPACITY);
    let mut start = 0;
    loop {
        let part = start..len.min(start + chunk);
        exchange(rounds, part.clone())?;
        drain(part.clone(), rounds.inboxes(part.len() * width));
        start = part.end;
        if start >= len {
            return Ok(());
        }
    }
}

/// The largest chunk, in bytes, for contributions of `width` chunks: whole elements of any dtype, in whole cache lines.
pub(crate) fn chunk_for(width: usize, preferred: usize) -> usize {
    let room = Rounds::CAPACITY / width.max(1);
    let chunk = preferred.min(room);
    (chunk - chunk % 64).max(8)
}
