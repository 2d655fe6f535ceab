//! The algorithms on host memory. They call `arrived` with the number of bytes up to which the output is complete.

use std::ops::Range;

use antiphon_fabric::{ArenaOffsets, FabricError, Rounds, Signature, Written};

use crate::{
    arguments::{Input, Output},
    chunked::{BETWEEN_NODES, chunk_for, copy, exchange_chunks},
};

/// Reduces the contributions of all ranks.
pub(crate) trait Reduce {
    /// Reduces `count` elements.
    ///
    /// # Safety
    /// As [`Reducer::run`](antiphon_device::host::reduce::Reducer::run).
    unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize);

    /// The size in bytes of an element's sum over one node, which travels to other nodes.
    fn sum_size(&self) -> usize;

    /// Adds up the contributions of one node's ranks, in their order.
    ///
    /// # Safety
    /// As [`Reducer::accumulate`](antiphon_device::host::reduce::Reducer::accumulate).
    unsafe fn accumulate(&self, sums: *mut u8, sources: &[*const u8], count: usize);

    /// Reduces the sums of all nodes, in their order. Both halves give the bits of [`run`](Self::run).
    ///
    /// # Safety
    /// As [`Reducer::conclude`](antiphon_device::host::reduce::Reducer::conclude).
    unsafe fn conclude(&self, destination: *mut u8, sums: &[*const u8], count: usize);
}

/// Bytes of one piece of a one-shot: a rank's two mailboxes and its part of input and output stay in L2.
const ONE_SHOT_PIECE: usize = 128 << 10;
/// Bytes of one piece of a two-shot; the results take as much again.
const TWO_SHOT_PIECE: usize = 256 << 10;

pub(super) fn one_shot(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
    reducer: &impl Reduce,
    mut arrived: impl FnMut(usize),
) -> Result<(), FabricError> {
    let size = input.dtype.size();
    let chunk = chunk_for(1, if rounds.nodes().is_some() { BETWEEN_NODES } else { ONE_SHOT_PIECE });
    exchange_chunks(
        rounds,
        signature,
        input.count * size,
        chunk,
        1,
        |part, outbox| {
            // SAFETY: the part lies within the input, and the outbox has room for it.
            unsafe { copy(input.data.add(part.start), outbox, part.len()) };
            Written::all(part.len())
        },
        |part, inboxes| {
            // SAFETY: every rank has posted as many bytes; the output is no mailbox.
            unsafe { reducer.run(output.data.add(part.start), inboxes, part.len() / size) };
            arrived(part.end);
        },
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

/// The size in bytes from which on a round first finds out whether all tensors are symmetric memory.
const WORTH_ASKING: usize = 32 << 10;
/// Bytes that are reduced before the result is sent: they stay in L1.
const SYMMETRIC_PIECE: usize = 8 << 10;

pub(super) fn two_shot(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
    reducer: &impl Reduce,
    mut arrived: impl FnMut(usize),
) -> Result<(), FabricError> {
    let len = input.count * input.dtype.size();
    if len >= WORTH_ASKING && rounds.nodes().is_none() && ask_where(rounds, signature, input, output)? {
        two_shot_symmetric(rounds, signature, input, reducer)?;
        arrived(len);
        return Ok(());
    }
    two_shot_staged(rounds, signature, input, output, reducer, arrived)
}

/// One round in which every rank posts the arena offsets of its input and output. Returns whether all are symmetric memory.
fn ask_where(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
) -> Result<bool, FabricError> {
    let len = input.count * input.dtype.size();
    let offsets = ArenaOffsets::of(rounds, [(input.data, len), (output.data.cast_const(), len)]);
    let written = offsets.put(rounds);
    rounds.exchange(signature, written)?;
    // SAFETY: every rank has posted its offsets in this round.
    let is_symmetric = |rank| unsafe { ArenaOffsets::<2>::of_rank(rounds, rank) }.all_symmetric();
    Ok((0..rounds.world_size()).all(is_symmetric))
}

/// Each rank reduces its part directly from the inputs of all ranks and writes it directly into all outputs: nothing
/// is staged, and no byte is moved twice. The inboxes hold every rank's [`ArenaOffsets`] of input and output.
fn two_shot_symmetric(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    reducer: &impl Reduce,
) -> Result<(), FabricError> {
    let (rank, world_size, size) = (rounds.rank(), rounds.world_size(), input.dtype.size());
    let whole = Piece { range: 0..input.count * size, world_size, size };
    let own = whole.part(rank);
    let arenas = rounds.arenas();
    // SAFETY: every rank has posted its offsets, and the round is open until the next exchange.
    let output = unsafe { ArenaOffsets::<2>::of_rank(rounds, rank) };
    for place in own.clone().step_by(SYMMETRIC_PIECE) {
        let len = SYMMETRIC_PIECE.min(own.end - place);
        let address = |peer: usize, offsets: ArenaOffsets<2>, tensor: usize| {
            let offset = offsets.get(tensor).expect("all tensors are symmetric memory");
            // SAFETY: the offset is that of a tensor of the peer, in which this part lies.
            unsafe { arenas.at(peer, offset + place) }
        };
        let result = address(rank, output, 1);
        let sources = rounds.inboxes(size_of::<ArenaOffsets<2>>());
        // SAFETY: the inboxes hold the ranks' offsets. This part of all inputs and outputs is this rank's alone until the
        // next round, and each rank's input is apart from its output or exactly the same.
        unsafe {
            for (peer, source) in sources.iter_mut().enumerate() {
                *source = address(peer, ArenaOffsets::read(*source), 0);
            }
            reducer.run(result, sources, len / size);
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                copy(result, address(peer, ArenaOffsets::of_rank(rounds, peer), 1), len);
            }
        }
    }
    rounds.exchange(signature, Written::nothing(0))
}

fn two_shot_staged(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
    reducer: &impl Reduce,
    mut arrived: impl FnMut(usize),
) -> Result<(), FabricError> {
    let (rank, world_size, size) = (rounds.rank(), rounds.world_size(), input.dtype.size());
    let len = input.count * size;
    let step = chunk_for(2, TWO_SHOT_PIECE);
    let pieces = len.div_ceil(step).max(1);
    let piece = |index: usize| Piece { range: index * step..len.min((index + 1) * step), world_size, size };
    // A mailbox holds the inputs of one piece and, from RESULTS on, the results of the piece before.
    const RESULTS: usize = Rounds::CAPACITY / 2;
    // Noting what is written takes a tenth of a small call, and only ranks of other nodes need it.
    let is_sent = rounds.nodes().is_some();
    for round in 0..=pieces {
        let mut written = Written::nothing(Rounds::CAPACITY);
        if is_sent && round > 0 {
            let results = piece(round - 1).part(rank).len();
            written = written.and(RESULTS..RESULTS + results);
        }
        if round < pieces {
            let piece = piece(round);
            let own = piece.part(rank);
            let outbox = rounds.outbox(Rounds::CAPACITY);
            // SAFETY: the piece lies within the input and the first half of the mailbox; this rank's own part is
            // needed by no other rank.
            unsafe {
                let from = input.data.add(piece.range.start);
                copy(from, outbox, own.start);
                copy(from.add(own.end), outbox.add(own.end), piece.range.len() - own.end);
            }
            if is_sent {
                written = written.and(0..own.start).and(own.end..piece.range.len());
            }
        }
        rounds.exchange(signature, written)?;
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
            arrived(piece.range.end);
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
