//! The algorithms on host memory.

use std::ops::Range;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{FabricError, Rounds, Signature};

use crate::{
    arguments::{Input, Output},
    stream::{copy, piece_for, stream},
};

/// Bytes of one piece of a one-shot: a rank's two mailboxes and its part of input and output stay in L2.
const ONE_SHOT_PIECE: usize = 128 << 10;
/// Bytes of one piece of a two-shot; the results take as much again.
const TWO_SHOT_PIECE: usize = 256 << 10;

pub(super) fn one_shot(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
    reducer: &Reducer,
) -> Result<(), FabricError> {
    let size = input.dtype.size();
    stream(
        rounds,
        signature,
        input.count * size,
        piece_for(1, ONE_SHOT_PIECE),
        1,
        // SAFETY: the part lies within the input, and the outbox has room for it.
        |part, outbox| unsafe { copy(input.data.add(part.start), outbox, part.len()) },
        // SAFETY: every rank has posted as many bytes; the output is nobody's mailbox.
        |part, inboxes| unsafe { reducer.run(output.data.add(part.start), inboxes, part.len() / size) },
    )
}

/// One piece of the tensor, divided among the ranks. Offsets are in bytes.
struct Piece {
    range: Range<usize>,
    world_size: usize,
    size: usize,
}

impl Piece {
    /// The part that `rank` reduces, relative to the piece.
    fn part(&self, rank: usize) -> Range<usize> {
        let elements = self.range.len() / self.size;
        let bound = |r: usize| elements * r / self.world_size * self.size;
        bound(rank)..bound(rank + 1)
    }
}

pub(super) fn two_shot(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
    reducer: &Reducer,
) -> Result<(), FabricError> {
    let (rank, world_size, size) = (rounds.rank(), rounds.world_size(), input.dtype.size());
    let len = input.count * size;
    let step = piece_for(2, TWO_SHOT_PIECE);
    let pieces = len.div_ceil(step).max(1);
    let piece = |index: usize| Piece { range: index * step..len.min((index + 1) * step), world_size, size };
    // A mailbox holds the inputs of one piece and, from RESULTS on, the results of the piece before.
    const RESULTS: usize = Rounds::CAPACITY / 2;
    for round in 0..=pieces {
        if round < pieces {
            let piece = piece(round);
            let own = piece.part(rank);
            let outbox = rounds.outbox(Rounds::CAPACITY);
            // SAFETY: the piece lies within the input and the first half of the mailbox; this rank's own part is
            // needed by nobody else.
            unsafe {
                let from = input.data.add(piece.range.start);
                copy(from, outbox, own.start);
                copy(from.add(own.end), outbox.add(own.end), piece.range.len() - own.end);
            }
        }
        rounds.exchange(signature)?;
        if round > 0 {
            let piece = piece(round - 1);
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                let part = piece.part(peer);
                // SAFETY: the peer has put the results of its part there before it posted this round.
                unsafe {
                    let results = rounds.inbox(peer, Rounds::CAPACITY).add(RESULTS);
                    copy(results, output.data.add(piece.range.start + part.start), part.len());
                }
            }
        }
        if round < pieces {
            let piece = piece(round);
            let own = piece.part(rank);
            let next = rounds.outbox(Rounds::CAPACITY);
            let inboxes = rounds.inboxes(Rounds::CAPACITY);
            // SAFETY: every peer has posted its input of this part; the own input is at the same place as the own
            // output if this is in place, which a reduction allows. The outbox of the next round is free since the
            // wait.
            unsafe {
                for inbox in inboxes.iter_mut() {
                    *inbox = inbox.add(own.start);
                }
                let place = piece.range.start + own.start;
                inboxes[rank] = input.data.add(place);
                reducer.run(output.data.add(place), inboxes, own.len() / size);
                copy(output.data.add(place), next.add(RESULTS), own.len());
            }
        }
    }
    Ok(())
}
