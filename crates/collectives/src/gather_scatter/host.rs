//! The loop on host memory: what each rank puts into its outbox, and what it takes from the inbox of each peer.
//!
//! A rank's input falls into pieces, one for each peer or the same one for all; so does its output, by the operation's row
//! ([`Layout`](antiphon_operation::Layout)). The pieces move a *part* at a time: a range of bytes of each piece. A mailbox holds
//! the same part of the piece for each rank, one behind the other, or the one part that is for all.

use std::ops::Range;

use antiphon_fabric::{Communicator, FabricError, Rounds, Written};
use antiphon_operation::Root;

use crate::{
    all_reduce::{InOrder, Reduce},
    arguments::CheckedCall,
    chunked::{chunk_for, copy, exchange_chunks},
};

/// Bytes of one piece that a rank posts: its two mailboxes stay in L2.
const PIECE: usize = 128 << 10;

/// Carries a call out whose longest piece, of any rank, has `longest` elements.
pub(super) fn run(
    comm: &Communicator,
    rounds: &mut Rounds,
    call: &CheckedCall<'_>,
    longest: usize,
) -> Result<(), FabricError> {
    let (rank, world_size, size) = (call.rank, call.world_size, call.dtype.size());
    let (sent, received) = (call.input_layout(), call.output_layout());
    let row = call.signature.operation.row();
    let root = call.call.root;
    let width = if sent.is_divided() { world_size } else { 1 };
    // The ranks whose elements come: no other rank gives any, and a root that is the only receiver posts none.
    let sources = if row.root == Some(Root::Gives) { root..root + 1 } else { 0..world_size };
    let posts = row.root != Some(Root::Gets) || rank != root;
    let reducer = row.reduces.then(|| InOrder::new(comm, call.dtype, call.call.op));
    // Where this rank's own elements for itself are.
    let own = |part: &Range<usize>| {
        let piece = within(sent.piece(rank), size, part);
        call.input.map_or(std::ptr::null(), |input| input.data.wrapping_add(piece.start))
    };
    exchange_chunks(
        rounds,
        &call.signature,
        longest * size,
        chunk_for(width, PIECE),
        width,
        |part, outbox| {
            let payload = part.len() * width;
            let Some(input) = call.input.filter(|_| posts) else { return Written::nothing(payload) };
            for peer in (0..width).filter(|&peer| width == 1 || peer != rank) {
                let piece = within(sent.piece(if width == 1 { rank } else { peer }), size, &part);
                // SAFETY: pieces lie within the input, and the outbox has room for `width` parts.
                unsafe { copy(input.data.add(piece.start), outbox.add(peer * part.len()), piece.len()) };
            }
            let own = if width == 1 { 0..0 } else { rank * part.len()..(rank + 1) * part.len() };
            Written::nothing(payload).and(0..own.start).and(own.end..payload)
        },
        |part, inboxes| {
            let Some(output) = call.output else { return };
            if width > 1 {
                for inbox in inboxes.iter_mut() {
                    *inbox = inbox.wrapping_add(rank * part.len());
                }
            }
            if sources.contains(&rank) {
                inboxes[rank] = own(&part);
            }
            if let Some(reducer) = &reducer {
                let piece = within(received.piece(rank), size, &part);
                // SAFETY: every rank has posted as many elements for this rank; the own ones are read where they are, which in
                // place is exactly where the result goes.
                unsafe { reducer.run(output.data.add(piece.start), inboxes, piece.len() / size) };
                return;
            }
            for source in sources.clone() {
                let piece = within(received.piece(source), size, &part);
                // SAFETY: the source has posted as many bytes for this rank, and the output has a piece for each. In place, what
                // is overwritten has been posted, and the own piece is where it belongs.
                unsafe {
                    let to = output.data.add(piece.start);
                    if !std::ptr::eq(inboxes[source], to) {
                        copy(inboxes[source], to, piece.len());
                    }
                }
            }
        },
    )
}

/// The bytes of a piece that a part covers; a piece may be shorter than others.
#[inline]
fn within(piece: Range<usize>, size: usize, part: &Range<usize>) -> Range<usize> {
    let len = piece.len() * size;
    let start = piece.start * size;
    start + part.start.min(len)..start + part.end.min(len)
}
