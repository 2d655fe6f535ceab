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
    let longest = agree_on_splits(&mut rounds, &signature, sends, receives)?;
    let size = input.dtype.size();
    Ok(move_blocks(&mut rounds, &signature, longest * size, &input, sends, &output, receives, size)?)
}

/// The sum; one that overflows is larger than any tensor.
fn total(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

/// Exchanges the counts and checks that what each rank sends is what the other expects; the longest block.
fn agree_on_splits(
    rounds: &mut Rounds,
    signature: &Signature,
    sends: &[usize],
    receives: &[usize],
) -> Result<usize> {
    let (world_size, row) = (rounds.world_size(), 2 * rounds.world_size() * size_of::<u64>());
    let outbox = rounds.outbox(row).cast::<u64>();
    for (i, &count) in sends.iter().chain(receives).enumerate() {
        // SAFETY: the outbox has room for two counts per rank.
        unsafe { outbox.add(i).write_unaligned(count as u64) };
    }
    rounds.exchange(signature)?;
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
