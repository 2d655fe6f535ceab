//! The loops on host memory: what each rank puts into its outbox, and what it takes from whose inbox.
//!
//! In all of them a *part* is a range of bytes of one block, and a row in a mailbox holds the same part of the block
//! for each rank, one after the other.

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{FabricError, Rounds, Signature};

use crate::{
    arguments::{Input, Output},
    stream::{copy, piece_for, stream},
};

type Result = std::result::Result<(), FabricError>;

/// Bytes of one piece that a rank posts: its two mailboxes stay in L2.
const PIECE: usize = 128 << 10;

pub(super) fn all_gather(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
) -> Result {
    let (rank, block) = (rounds.rank(), input.count * input.dtype.size());
    // SAFETY: parts lie within a block; the own block moves once, unless it is in its place already.
    unsafe {
        let own = output.data.add(rank * block);
        if !std::ptr::eq(own, input.data) {
            copy(input.data, own, block);
        }
    }
    stream(
        rounds,
        signature,
        block,
        piece_for(1, PIECE),
        1,
        // SAFETY: as above, and the outbox has room for the part.
        |part, outbox| unsafe { copy(input.data.add(part.start), outbox, part.len()) },
        |part, inboxes| {
            for (peer, inbox) in inboxes.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                // SAFETY: the peer has posted as many bytes.
                unsafe { copy(*inbox, output.data.add(peer * block + part.start), part.len()) };
            }
        },
    )
}

pub(super) fn gather(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: Option<&Output>,
) -> Result {
    let (rank, block) = (rounds.rank(), input.count * input.dtype.size());
    stream(
        rounds,
        signature,
        block,
        piece_for(1, PIECE),
        1,
        |part, outbox| {
            if output.is_none() {
                // SAFETY: parts lie within the block, and the outbox has room for the part.
                unsafe { copy(input.data.add(part.start), outbox, part.len()) }
            }
        },
        |part, inboxes| {
            let Some(output) = output else { return };
            for (peer, inbox) in inboxes.iter().enumerate() {
                // SAFETY: the peer has posted as many bytes; the own part comes straight from the input.
                unsafe {
                    let from = if peer == rank { input.data.add(part.start) } else { *inbox };
                    copy(from, output.data.add(peer * block + part.start), part.len());
                }
            }
        },
    )
}

pub(super) fn broadcast(
    rounds: &mut Rounds,
    signature: &Signature,
    input: Option<&Input>,
    output: &Output,
    root: usize,
) -> Result {
    let len = output.count * output.dtype.size();
    stream(
        rounds,
        signature,
        len,
        piece_for(1, PIECE),
        1,
        |part, outbox| {
            let Some(input) = input else { return };
            // SAFETY: parts lie within both tensors, which are apart unless this is in place.
            unsafe {
                let from = input.data.add(part.start);
                copy(from, outbox, part.len());
                if !std::ptr::eq(input.data, output.data) {
                    copy(from, output.data.add(part.start), part.len());
                }
            }
        },
        |part, inboxes| {
            if input.is_none() {
                // SAFETY: the root has posted as many bytes.
                unsafe { copy(inboxes[root], output.data.add(part.start), part.len()) }
            }
        },
    )
}

pub(super) fn scatter(
    rounds: &mut Rounds,
    signature: &Signature,
    input: Option<&Input>,
    output: &Output,
    root: usize,
) -> Result {
    let (rank, world_size) = (rounds.rank(), rounds.world_size());
    let block = output.count * output.dtype.size();
    stream(
        rounds,
        signature,
        block,
        piece_for(world_size, PIECE),
        world_size,
        |part, outbox| {
            let Some(input) = input else { return };
            for peer in 0..world_size {
                // SAFETY: parts lie within each block of the row; the outbox has room for a row of parts.
                unsafe {
                    copy(
                        input.data.add(peer * block + part.start),
                        outbox.add(peer * part.len()),
                        part.len(),
                    );
                }
            }
        },
        // SAFETY: the root has posted a row of parts.
        |part, inboxes| unsafe {
            copy(inboxes[root].add(rank * part.len()), output.data.add(part.start), part.len());
        },
    )
}

/// Puts the part of every block but this rank's own into the outbox.
///
/// # Safety
/// The row holds `world_size` blocks, and the outbox has room for as many parts.
unsafe fn fill_row(
    row: *const u8,
    block: usize,
    part: &std::ops::Range<usize>,
    outbox: *mut u8,
    rank: usize,
    world_size: usize,
) {
    for peer in (0..world_size).filter(|&peer| peer != rank) {
        // SAFETY: passed on.
        unsafe { copy(row.add(peer * block + part.start), outbox.add(peer * part.len()), part.len()) };
    }
}

pub(super) fn all_to_all(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
) -> Result {
    let (rank, world_size) = (rounds.rank(), rounds.world_size());
    let block = input.count / world_size * input.dtype.size();
    let in_place = std::ptr::eq(input.data, output.data);
    stream(
        rounds,
        signature,
        block,
        piece_for(world_size, PIECE),
        world_size,
        // SAFETY: the row holds one block per rank.
        |part, outbox| unsafe { fill_row(input.data, block, &part, outbox, rank, world_size) },
        |part, inboxes| {
            for (peer, inbox) in inboxes.iter().enumerate() {
                // SAFETY: every peer has posted a row of parts. In place, what is overwritten has been posted.
                unsafe {
                    let to = output.data.add(peer * block + part.start);
                    match peer == rank {
                        false => copy(inbox.add(rank * part.len()), to, part.len()),
                        true if in_place => {}
                        true => copy(input.data.add(rank * block + part.start), to, part.len()),
                    }
                }
            }
        },
    )
}

pub(super) fn reduce_scatter(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: &Output,
    reducer: &Reducer,
) -> Result {
    let (rank, world_size, size) = (rounds.rank(), rounds.world_size(), input.dtype.size());
    let block = output.count * size;
    stream(
        rounds,
        signature,
        block,
        piece_for(world_size, PIECE),
        world_size,
        // SAFETY: the row holds one block per rank.
        |part, outbox| unsafe { fill_row(input.data, block, &part, outbox, rank, world_size) },
        // SAFETY: every peer has posted a row of parts; the own part is read where it is, which in place is exactly
        // where the result goes.
        |part, inboxes| unsafe {
            for inbox in inboxes.iter_mut() {
                *inbox = inbox.add(rank * part.len());
            }
            inboxes[rank] = input.data.add(rank * block + part.start);
            reducer.run(output.data.add(part.start), inboxes, part.len() / size);
        },
    )
}

pub(super) fn reduce(
    rounds: &mut Rounds,
    signature: &Signature,
    input: &Input,
    output: Option<&Output>,
    reducer: &Reducer,
) -> Result {
    let (rank, size) = (rounds.rank(), input.dtype.size());
    stream(
        rounds,
        signature,
        input.count * size,
        piece_for(1, PIECE),
        1,
        |part, outbox| {
            if output.is_none() {
                // SAFETY: parts lie within the input, and the outbox has room for the part.
                unsafe { copy(input.data.add(part.start), outbox, part.len()) }
            }
        },
        |part, inboxes| {
            let Some(output) = output else { return };
            // SAFETY: every peer has posted as many bytes; the own part is read where it is, which in place is exactly
            // where the result goes.
            unsafe {
                inboxes[rank] = input.data.add(part.start);
                reducer.run(output.data.add(part.start), inboxes, part.len() / size);
            }
        },
    )
}
