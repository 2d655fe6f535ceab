//! The loop on host memory: what each rank puts into its outbox, and what it takes from the inbox of each peer.
//!
//! A rank's input falls into pieces, one for each peer or the same one for all; so does its output, by the operation's row
//! ([`Layout`](antiphon_operation::Layout)). The pieces move a *part* at a time: a range of bytes of each piece. A mailbox holds
//! the same part of the piece for each rank, one behind the other, or the one part that is for all. The parts for the ranks of one node lie
//! together, as only they go to that node.

use std::ops::Range;

use antiphon_fabric::{Communicator, FabricError, Nodes, Rounds, Signature, Written};
use antiphon_operation::Root;

use crate::{
    all_reduce::{InOrder, Reduce},
    arguments::CheckedCall,
    chunked::{BETWEEN_NODES, chunk_for, copy, exchange_chunks_by_node},
    error::Result,
    hierarchical::{Broadcast, HIERARCHICAL, Kind, Work},
};

/// Bytes of one piece that a rank posts: its two mailboxes stay in L2.
const PIECE: usize = 128 << 10;

/// Carries a call out whose longest piece, of any rank, has `longest` elements.
pub(in crate::gather_scatter) fn run(
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
    let nodes = comm.several_nodes();
    // Where the part for a rank is in a mailbox that has one for each.
    let place = |peer: usize| nodes.map_or(peer, |nodes| nodes.place(peer));
    // Where this rank's own elements for itself are.
    let own = |part: &Range<usize>| {
        let piece = within(sent.piece(rank), size, part);
        call.input.map_or(std::ptr::null(), |input| input.data.wrapping_add(piece.start))
    };
    exchange_chunks_by_node(
        rounds,
        &call.signature,
        longest * size,
        chunk_for(width, if nodes.is_some() { BETWEEN_NODES } else { PIECE }),
        width,
        |part, outbox| {
            let Some(input) = call.input.filter(|_| posts) else { return };
            for peer in (0..width).filter(|&peer| width == 1 || peer != rank) {
                let piece = within(sent.piece(if width == 1 { rank } else { peer }), size, &part);
                // SAFETY: pieces lie within the input, and the outbox has room for `width` parts.
                unsafe {
                    copy(
                        input.data.add(piece.start),
                        outbox.add(if width == 1 { 0 } else { place(peer) } * part.len()),
                        piece.len(),
                    )
                };
            }
        },
        |len, node| {
            let written = Written::nothing(len * width);
            // Of a root's input nobody else has any, and only a root that gets needs what others have.
            let gets = row.root != Some(Root::Gets) || nodes.is_some_and(|nodes| nodes.of(root) == node);
            match nodes {
                _ if !(posts && gets && sources.contains(&rank)) => written,
                Some(nodes) if width > 1 => {
                    let first = nodes.place(nodes.ranks(node)[0]);
                    written.and(first * len..(first + nodes.ranks(node).len()) * len)
                }
                _ => written.and(0..len),
            }
        },
        |part, inboxes| {
            let Some(output) = call.output else { return };
            if width > 1 {
                for inbox in inboxes.iter_mut() {
                    *inbox = inbox.wrapping_add(place(rank) * part.len());
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

/// Carries a reduction out [by nodes](crate::hierarchical).
pub(in crate::gather_scatter) fn run_by_nodes(
    comm: &Communicator,
    rounds: &mut Rounds,
    call: &CheckedCall<'_>,
    longest: usize,
    kind: Kind,
    nodes: &Nodes,
) -> Result<()> {
    let (sent, received, size) = (call.input_layout(), call.output_layout(), call.dtype.size());
    let signature = &Signature { algorithm: HIERARCHICAL, ..call.signature };
    let reducer = &InOrder::new(comm, call.dtype, call.call.op);
    let input = call.input.map_or(std::ptr::null(), |input| input.data);
    let output = match (call.output, kind) {
        (Some(output), Kind::Reduce(root)) if root == call.rank => output.data,
        (Some(output), Kind::ReduceScatter) => {
            output.data.wrapping_add(received.piece(call.rank).start * size)
        }
        _ => std::ptr::null_mut(),
    };
    let work = Work { kind, nodes, signature, reducer, size, elements: longest, input, output };
    Ok(work.run(rounds, |rank| sent.piece(rank), |_| ())?)
}

/// Carries a broadcast of `longest` elements out [by nodes](crate::hierarchical).
pub(in crate::gather_scatter) fn broadcast_by_nodes(
    rounds: &mut Rounds,
    call: &CheckedCall<'_>,
    longest: usize,
    nodes: &Nodes,
) -> Result<(), FabricError> {
    let (root, size) = (call.call.root, call.dtype.size());
    let input = call.input.filter(|_| call.rank == root);
    let input = input.map_or(std::ptr::null(), |input| {
        input.data.wrapping_add(call.input_layout().piece(root).start * size)
    });
    let output = call.output.map_or(std::ptr::null_mut(), |output| {
        output.data.wrapping_add(call.output_layout().piece(root).start * size)
    });
    let broadcast = Broadcast {
        nodes,
        signature: &Signature { algorithm: HIERARCHICAL, ..call.signature },
        root,
        len: longest * size,
        input,
        output: if std::ptr::eq(input, output) { std::ptr::null_mut() } else { output },
    };
    broadcast.run(rounds)
}

/// The bytes of a piece that a part covers; a piece may be shorter than others.
#[inline]
fn within(piece: Range<usize>, size: usize, part: &Range<usize>) -> Range<usize> {
    let len = piece.len() * size;
    let start = piece.start * size;
    start + part.start.min(len)..start + part.end.min(len)
}
