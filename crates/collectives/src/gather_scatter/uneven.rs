//! All-to-all with a length of its own for every pair of ranks.

use antiphon_fabric::{Communicator, FabricError, Operation, Rounds, Signature};

use crate::{
    arguments::{Input, Output, has_count, same_dtype},
    error::{CollectiveError, Result},
    stream::copy,
};

const OPERATION: Operation = Operation::AllToAllV;
/// Its only algorithm.
const UNEVEN: u8 = 1;
/// Rows of up to so many bytes travel with the counts: if no rank's is longer, one round does it all.
const WITH_COUNTS: usize = 64 << 10;

/// `sends[r]` elements go to rank `r`, `receives[r]` come from it; both lie packed in rank order.
pub(crate) fn all_to_all_v(
    comm: &Communicator,
    input: Input,
    sends: &[usize],
    output: Output,
    receives: &[usize],
) -> Result<()> {
    let world_size = comm.world_size();
    same_dtype(OPERATION, &input, &output)?;
    for (which, list) in [("send counts", sends), ("receive counts", receives)] {
        if list.len() != world_size {
            return Err(CollectiveError::Splits { which, actual: list.len(), world_size });
        }
    }
    has_count(OPERATION, "input", input.count, total(sends), || "the sum of the send counts".into())?;
    has_count(OPERATION, "output", output.count, total(receives), || "the sum of the receive counts".into())?;
    let signature = Signature { dtype: Some(input.dtype), algorithm: UNEVEN, ..Signature::new(OPERATION) };
    // SAFETY: every rank posts two counts per rank, and then slots of one size.
    let mut rounds = unsafe { comm.rounds()? };
    let size = input.dtype.size();
    let Some(longest) = agree_on_splits(&mut rounds, &signature, &input, sends, &output, receives)? else {
        return Ok(());
    };
    Ok(move_blocks(&mut rounds, &signature, longest * size, &input, sends, &output, receives, size)?)
}

/// The sum; one that overflows is larger than any tensor.
fn total(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

/// Exchanges the counts and checks that what each rank sends is what the other expects; the longest block. Where all rows are
/// short, the blocks come along, and none is left to move.
fn agree_on_splits(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    sends: &[usize],
    output: &Output,
    receives: &[usize],
) -> Result<Option<usize>> {
    let (rank, world_size, size) = (rounds.rank(), rounds.world_size(), input.dtype.size());
    let counts = 2 * world_size * size_of::<u64>();
    let is_short = |row: usize| row.saturating_mul(size) <= WITH_COUNTS.min(Rounds::CAPACITY - counts);
    let outbox = rounds.outbox(Rounds::CAPACITY);
    for (i, &count) in sends.iter().chain(receives).enumerate() {
        // SAFETY: the outbox has room for two counts per rank.
        unsafe { outbox.cast::<u64>().add(i).write_unaligned(count as u64) };
    }
    if is_short(input.count) {
        // SAFETY: behind the counts there is room for a short row.
        unsafe { copy(input.data, outbox.add(counts), input.count * size) };
    }
    rounds.exchange(signature)?;
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
    for (from, (offset, len)) in offsets(receives, size).enumerate() {
        let before: usize = (0..rank).map(|to| count(from, to) as usize * size).sum();
        // SAFETY: the row of the rank is short, so it lies behind its counts, and has a block of this length for this rank.
        unsafe { copy(inboxes[from].add(counts + before), output.data.add(offset), len) };
    }
    Ok(None)
}

/// Where each block begins, in bytes.
fn offsets(counts: &[usize], size: usize) -> impl Iterator<Item = (usize, usize)> {
    counts.iter().scan(0, move |offset, &count| {
        let start = *offset;
        *offset += count * size;
        Some((start, count * size))
    })
}

#[allow(clippy::too_many_arguments)] // two tensors, each with its counts
fn move_blocks(
    rounds: &mut Rounds,
    signature: &Signature,
    longest: usize,
    input: &Input,
    sends: &[usize],
    output: &Output,
    receives: &[usize],
    size: usize,
) -> Result<(), FabricError> {
    let rank = rounds.rank();
    // Each pair of ranks has a slot of the same size in the sender's mailbox.
    let slot = Rounds::CAPACITY / rounds.world_size() / 64 * 64;
    let part = |len: usize, start: usize| start.min(len)..(start + slot).min(len);
    for start in (0..longest).step_by(slot) {
        let outbox = rounds.outbox(Rounds::CAPACITY);
        for (peer, (offset, len)) in offsets(sends, size).enumerate() {
            let part = part(len, start);
            // SAFETY: blocks lie in the input as the counts say, which sum up to its length.
            unsafe { copy(input.data.add(offset + part.start), outbox.add(peer * slot), part.len()) };
        }
        rounds.exchange(signature)?;
        let inboxes = rounds.inboxes(Rounds::CAPACITY);
        for (peer, (offset, len)) in offsets(receives, size).enumerate() {
            let part = part(len, start);
            // SAFETY: the peer sends as many bytes as this rank expects, as was agreed.
            unsafe {
                copy(inboxes[peer].add(rank * slot), output.data.add(offset + part.start), part.len());
            }
        }
    }
    Ok(())
}
