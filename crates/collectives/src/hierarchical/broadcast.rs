//! A broadcast that leaves the root's node along all of its rails.
//!
//! In the mirrored form the root alone sends to the other nodes. Here the root posts a *piece* for the ranks of its own node, and a *share* of
//! it for the other nodes. Each of the other ranks of its node posts its own share for them in the next round. So one round carries a piece, the
//! root's share of it, and the other shares of the piece before.

use std::ops::Range;

use antiphon_fabric::{FabricError, Nodes, Rounds, Signature, Written};

use crate::chunked::copy;

/// The most bytes of a piece: a mailbox holds one, and behind it the share of another one, at its own place.
const PIECE: usize = Rounds::CAPACITY / 2;

/// A broadcast to be carried out.
pub(crate) struct Broadcast<'c> {
    pub(crate) nodes: &'c Nodes,
    pub(crate) signature: &'c Signature,
    pub(crate) root: usize,
    /// How long it is, in bytes.
    pub(crate) len: usize,
    /// The root's; others do not read it.
    pub(crate) input: *const u8,
    /// Valid for writing `len` bytes, apart from the input; null where there is nothing to write: at a root that has the result already.
    pub(crate) output: *mut u8,
}

impl Broadcast<'_> {
    pub(crate) fn run(&self, rounds: &mut Rounds) -> Result<(), FabricError> {
        let (rank, pieces) = (rounds.rank(), self.len.div_ceil(PIECE).max(1));
        let sends = self.senders().contains(&rank);
        for round in 0..=pieces {
            let (piece, before) = (self.piece(round), round.checked_sub(1).map(|before| self.piece(before)));
            if rank == self.root {
                // SAFETY: the piece lies within the input, and the outbox has room for one.
                unsafe {
                    copy(self.input.add(piece.start), rounds.outbox(Rounds::CAPACITY), piece.len());
                }
            }
            let posted = match before.as_ref().filter(|_| sends) {
                _ if rank == self.root => self.share(rank, &piece),
                Some(before) => {
                    let share = self.share(rank, before);
                    PIECE + share.start..PIECE + share.end
                }
                None => 0..0,
            };
            rounds.exchange_by_node(self.signature, |_| {
                Written::nothing(Rounds::CAPACITY).and(posted.clone())
            })?;
            if sends {
                self.pass_on(rounds, &piece);
            } else {
                for &sender in self.senders() {
                    match &before {
                        _ if sender == self.root => self.gather(rounds, sender, 0, &piece),
                        Some(before) => self.gather(rounds, sender, PIECE, before),
                        None => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// The ranks that send to other nodes.
    fn senders(&self) -> &[usize] {
        self.nodes.ranks(self.nodes.of(self.root))
    }

    /// The bytes of a piece, none behind the last.
    fn piece(&self, index: usize) -> Range<usize> {
        let start = self.len.min(index * PIECE);
        start..self.len.min(start + PIECE)
    }

    /// What one of the senders sends of a piece.
    fn share(&self, sender: usize, piece: &Range<usize>) -> Range<usize> {
        let (senders, place) = (self.senders().len(), self.nodes.rank_in_node(sender));
        piece.len() * place / senders..piece.len() * (place + 1) / senders
    }

    /// Takes a piece that the root has posted for its node, and puts the own share of it into the next outbox. The root has its share where it is
    /// posted, and only copies the piece, if the output is apart from the input.
    fn pass_on(&self, rounds: &mut Rounds, piece: &Range<usize>) {
        let (rank, next) = (rounds.rank(), rounds.outbox(Rounds::CAPACITY));
        let posted = match rank == self.root {
            true => self.input.wrapping_add(piece.start),
            false => rounds.inbox(self.root, Rounds::CAPACITY),
        };
        let share = self.share(rank, piece);
        // SAFETY: the root has posted the piece, or has it in its input, and the output has room for it. The outbox is free since the wait.
        unsafe {
            if rank != self.root {
                copy(posted.add(share.start), next.add(PIECE + share.start), share.len());
            }
            if !self.output.is_null() {
                copy(posted, self.output.add(piece.start), piece.len());
            }
        }
    }

    /// Takes a sender's share of a piece, which is posted at an offset in bytes of the mailbox.
    fn gather(&self, rounds: &Rounds, sender: usize, behind: usize, piece: &Range<usize>) {
        let share = self.share(sender, piece);
        // SAFETY: the sender has posted its share, for which the output has room.
        unsafe {
            let posted = rounds.inbox(sender, Rounds::CAPACITY).add(behind + share.start);
            copy(posted, self.output.add(piece.start + share.start), share.len());
        }
    }
}
