//! How ranks find out what the others send them, where each knows its own counts alone.

use antiphon_fabric::Rounds;

use crate::{
    arguments::CheckedCall,
    error::{CollectiveError, Result},
};

/// Exchanges the counts and checks that what each rank sends is what the other expects; the longest piece.
pub(super) fn agree_on_counts(rounds: &mut Rounds, call: &CheckedCall<'_>) -> Result<usize> {
    let (world_size, row) = (rounds.world_size(), 2 * rounds.world_size() * size_of::<u64>());
    let outbox = rounds.outbox(row).cast::<u64>();
    for (i, &count) in call.call.counts.iter().chain(call.call.receives.iter()).enumerate() {
        // SAFETY: the outbox has room for two counts per rank.
        unsafe { outbox.add(i).write_unaligned(count as u64) };
    }
    rounds.exchange(&call.signature)?;
    let inboxes = rounds.inboxes(row);
    // SAFETY: every rank has posted two counts per rank.
    let count =
        |rank: usize, index: usize| unsafe { inboxes[rank].cast::<u64>().add(index).read_unaligned() };
    let mut longest = 0;
    let mut wrong = None;
    for from in 0..world_size {
        for to in 0..world_size {
            let (sent, expected) = (count(from, to), count(to, world_size + from));
            longest = longest.max(sent);
            if sent != expected && wrong.is_none() {
                wrong = Some(CollectiveError::SplitsDisagree { from, to, sent, expected });
            }
        }
    }
    // Every rank sees the same counts and so comes to the same conclusion: they stay in step, and the communicator
    // stays usable.
    wrong.map_or(Ok(longest as usize), Err)
}
