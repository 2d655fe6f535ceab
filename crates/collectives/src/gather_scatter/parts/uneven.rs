//! The exchange of counts where each rank knows only its own.

use antiphon_fabric::{Rounds, Written};

use crate::{
    arguments::CheckedCall,
    chunked::copy,
    error::{CollectiveError, Result},
};

/// The bytes of the longest input that travels with the counts. If no rank's input is longer, one round moves everything.
const WITH_COUNTS: usize = 64 << 10;

/// Exchanges the counts and checks that what each rank sends is what the other expects; the longest piece. Where all inputs are
/// short, the pieces come along, and none is left to move.
pub(in crate::gather_scatter) fn agree_on_counts(
    rounds: &mut Rounds,
    call: &CheckedCall<'_>,
) -> Result<Option<usize>> {
    let (Some(input), Some(output)) = (call.input, call.output) else { return Ok(None) }; // there are both: no rank is a root
    let (rank, world_size, size) = (rounds.rank(), rounds.world_size(), call.dtype.size());
    let counts = 2 * world_size * size_of::<u64>();
    let is_short = |row: usize| row.saturating_mul(size) <= WITH_COUNTS.min(Rounds::CAPACITY - counts);
    let outbox = rounds.outbox(Rounds::CAPACITY);
    for (i, &count) in call.call.counts.iter().chain(call.call.receives.iter()).enumerate() {
        // SAFETY: the outbox has room for two counts per rank.
        unsafe { outbox.cast::<u64>().add(i).write_unaligned(count as u64) };
    }
    let mut written = counts;
    if is_short(input.count) {
        // SAFETY: behind the counts there is room for a short row.
        unsafe { copy(input.data, outbox.add(counts), input.count * size) };
        written += input.count * size;
    }
    rounds.exchange(&call.signature, Written::nothing(Rounds::CAPACITY).and(0..written))?;
    let inboxes = rounds.inboxes(Rounds::CAPACITY);
    // SAFETY: every rank has posted two counts per rank.
    let count =
        |rank: usize, index: usize| unsafe { inboxes[rank].cast::<u64>().add(index).read_unaligned() };
    let (mut longest, mut are_short) = (0, true);
    let mut wrong = None;
    for from in 0..world_size {
        let mut row = 0usize;
        for to in 0..world_size {
            let (sent, expected) = (count(from, to), count(to, world_size + from));
            longest = longest.max(sent);
            row = row.saturating_add(sent as usize);
            if sent != expected && wrong.is_none() {
                wrong = Some(CollectiveError::SplitsDisagree { from, to, sent, expected });
            }
        }
        are_short &= is_short(row);
    }
    // Every rank sees the same counts and so comes to the same conclusion: they stay in step, and the communicator
    // stays usable.
    if let Some(wrong) = wrong {
        return Err(wrong);
    }
    if !are_short {
        return Ok(Some(longest as usize));
    }
    let received = call.output_layout();
    for (from, inbox) in inboxes.iter().enumerate() {
        let before: usize = (0..rank).map(|to| count(from, to) as usize * size).sum();
        let piece = received.piece(from);
        // SAFETY: the row of the rank is short, so it lies behind its counts, and has a piece of this length for this rank.
        unsafe { copy(inbox.add(counts + before), output.data.add(piece.start * size), piece.len() * size) };
    }
    Ok(None)
}
