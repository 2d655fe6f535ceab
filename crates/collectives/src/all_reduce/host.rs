//! The algorithms on host memory. `arrived` hears up to which byte the output is complete.

use std::ops::Range;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{FabricError, Rounds, Signature};

use crate::{
    arguments::{Input, Output},
    chunked::{chunk_for, copy, exchange_chunks},
};

/// What makes one of everybody's contributions.
pub(crate) trait Reduce {
    /// Reduces `count` elements.
    ///
    /// # Safety
    /// As [`Reducer::run`].
    unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize);
}

impl Reduce for Reducer {
    #[inline]
    unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize) {
        // SAFETY: passed on.
        unsafe { self.run(destination, sources, count) }
    }
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
    exchange_chunks(
        rounds,
        signature,
        input.count * size,
        chunk_for(1, ONE_SHOT_PIECE),
        1,
        // SAFETY: the part lies within the input, and the outbox has room for it.
        |part, outbox| unsafe { copy(input.data.add(part.start), outbox, part.len()) },
        |part, inboxes| {
            // SAFETY: every rank has posted as many bytes; the output is nobody's mailbox.
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

/// A message of this size is worth asking first whether everybody's tensors are symmetric memory.
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
    if len >= WORTH_ASKING && ask_where(rounds, signature, input, output)? {
        two_shot_symmetric(rounds, signature, input, reducer)?;
        arrived(len);
        return Ok(());
    }
    two_shot_staged(rounds, signature, input, output, reducer, arrived)
}

/// Where a rank's tensors lie in its arena, as it says in its packet; the input is read by all only after that.
#[repr(C)]
#[derive(Clone, Copy)]
struct Where {
    symmetric: u64,
    input: u64,
    output: u64,
}

/// One round in which every rank says where its tensors are; whether all are in symmetric memory.
fn ask_where(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
) -> Result<bool, FabricError> {
    const LEN: usize = size_of::<Where>();
    let len = input.count * input.dtype.size();
    let offsets = rounds.arena_offset(input.data, len).zip(rounds.arena_offset(output.data, len));
    let (from, to) = offsets.unwrap_or_default();
    let mine = Where { symmetric: offsets.is_some().into(), input: from as u64, output: to as u64 };
    // SAFETY: an outbox of its size.
    unsafe { rounds.outbox(LEN).cast::<Where>().write_unaligned(mine) };
    rounds.exchange(signature)?;
    // SAFETY: every rank has posted its own.
    let is_symmetric = |inbox: &*const u8| unsafe { inbox.cast::<Where>().read_unaligned().symmetric == 1 };
    Ok(rounds.inboxes(LEN).iter().all(is_symmetric))
}

/// Each rank reduces its part straight from everybody's input and writes it straight into everybody's output: nothing
/// is staged, and no byte is moved twice. The inboxes hold everybody's [`Where`].
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
    // SAFETY: every rank has posted where its tensors are, and the round is open until the next exchange.
    let of = |inbox: *const u8| unsafe { inbox.cast::<Where>().read_unaligned() };
    for place in own.clone().step_by(SYMMETRIC_PIECE) {
        let len = SYMMETRIC_PIECE.min(own.end - place);
        let sources = rounds.inboxes(size_of::<Where>());
        // SAFETY: all offsets are those of tensors of this length. This part of all inputs and outputs is this rank's
        // alone until the next round, and each rank's input is apart from its output or exactly the same.
        unsafe {
            let result = arenas.at(rank, of(sources[rank]).output as usize + place);
            for (peer, source) in sources.iter_mut().enumerate() {
                *source = arenas.at(peer, of(*source).input as usize + place);
            }
            reducer.run(result, sources, len / size);
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                let theirs = of(rounds.inbox(peer, size_of::<Where>()));
                copy(result, arenas.at(peer, theirs.output as usize + place), len);
            }
        }
    }
    rounds.exchange(signature)
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
