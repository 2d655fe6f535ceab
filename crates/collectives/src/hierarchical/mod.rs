//! Reductions of ranks on several nodes in which each byte crosses each link between nodes once, and broadcasts that all ranks of
//! the root's node send.
//!
//! The mirrored forms send what a rank posts to all other nodes. Here the ranks of a node first add up among themselves:
//!
//! 1. Every rank posts its *inputs* for the ranks of its own node alone.
//! 2. Each rank adds up its share of them, for the owners on each node, and posts these *sums* for that node alone, unrounded. So a sum
//!    goes along the rail of the rank that added it up.
//! 3. The owner of an element combines the sums of all nodes in the order of the nodes, and rounds. That is the defined order.
//! 4. Where others want the *results* too, the owner posts them: an all-reduce for all nodes, a reduce for the root on its own node.
//!
//! A call goes in pieces. One round carries the inputs of a piece, the sums of the piece before, and the results of the one before that.
//!
//! No rank waits for another in a new way: every step is a round of all ranks ([`Rounds::exchange_by_node`]), which every node gets
//! from every rank, if only its head. What fills a packet, and when it may be filled again, is therefore as in every round.

mod broadcast;
mod form;
mod piece;

use std::ops::Range;

use antiphon_fabric::{FabricError, Nodes, Rounds, Signature, Written};

pub(crate) use broadcast::Broadcast;
pub use form::{Form, prefer};
pub(crate) use form::{HIERARCHICAL, broadcast_form, form, suggested};
use piece::{Owners, Piece, both};

use crate::{all_reduce::Reduce, chunked::copy};

/// Bytes of one piece: as much as a two-shot's.
const PIECE: usize = 256 << 10;

/// The operations that are carried out so.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// Everything for every rank.
    AllReduce,
    /// Everything for this rank.
    Reduce(usize),
    /// Each rank's block, and the most elements of a block.
    ReduceScatter,
}

/// A call to be carried out.
pub(crate) struct Work<'c, R> {
    pub(crate) kind: Kind,
    pub(crate) nodes: &'c Nodes,
    pub(crate) signature: &'c Signature,
    pub(crate) reducer: &'c R,
    /// The size of an element.
    pub(crate) size: usize,
    /// The elements of the tensor, or of the longest block.
    pub(crate) elements: usize,
    pub(crate) input: *const u8,
    /// Null where this rank gets nothing.
    pub(crate) output: *mut u8,
}

/// Where things lie in a mailbox, in bytes. Each has room for all elements of a piece, at the element's own place.
#[derive(Clone, Copy)]
struct Places {
    /// The most elements of a piece.
    step: usize,
    sums: usize,
    results: usize,
}

impl Places {
    fn new(size: usize, sum: usize) -> Self {
        let step = (PIECE / size).min(Rounds::CAPACITY / (2 * size + sum));
        let step = step - step % 64;
        Self { step, sums: step * size, results: step * (size + sum) }
    }
}

impl<R: Reduce> Work<'_, R> {
    /// Carries the call out. `block` has the elements of a rank's block in the input, for a reduce-scatter. `arrived` hears up to which byte
    /// the output of an all-reduce is complete.
    pub(crate) fn run(
        &self,
        rounds: &mut Rounds,
        block: impl Fn(usize) -> Range<usize>,
        mut arrived: impl FnMut(usize),
    ) -> Result<(), FabricError> {
        let places = Places::new(self.size, self.reducer.sum_size());
        let gathers = !matches!(self.kind, Kind::ReduceScatter);
        let step = if gathers { places.step } else { places.step / self.nodes.world_size() };
        assert!(step > 0, "a piece has an element of each of {} ranks", self.nodes.world_size());
        let pieces = self.elements.div_ceil(step).max(1);
        let rank = rounds.rank();
        // The piece whose inputs, sums or results a round carries.
        let stage = |round: usize, later: usize| {
            let index = round.checked_sub(later).filter(|&index| index < pieces)?;
            let range = index * step..self.elements.min((index + 1) * step);
            let owners = match self.kind {
                Kind::AllReduce => Owners::Ranks(range.len()),
                Kind::Reduce(root) => Owners::Node(self.nodes.of(root), range.len()),
                Kind::ReduceScatter => Owners::Blocks(range.len()),
            };
            Some(Stage {
                work: self,
                piece: Piece { nodes: self.nodes, owners },
                places,
                rank,
                range,
                block: &block,
            })
        };
        for round in 0..=pieces + usize::from(gathers) {
            let (inputs, sums) = (stage(round, 0), stage(round, 1));
            let results = stage(round, 2).filter(|_| gathers);
            if let Some(inputs) = &inputs {
                inputs.fill(rounds);
            }
            rounds.exchange_by_node(self.signature, |node| {
                let written = Written::nothing(Rounds::CAPACITY);
                let written = written.and(sums.as_ref().map_or(0..0, |sums| sums.sent(node)));
                written.and(results.as_ref().map_or(0..0, |results| results.published()))
            })?;
            if let Some(results) = &results {
                results.gather(rounds);
                arrived(results.range.end * self.size);
            }
            if let Some(sums) = &sums {
                sums.conclude(rounds);
            }
            if let Some(inputs) = &inputs {
                inputs.accumulate(rounds);
            }
        }
        Ok(())
    }
}

/// One piece of a call, on one rank.
struct Stage<'c, R, B> {
    work: &'c Work<'c, R>,
    piece: Piece<'c>,
    places: Places,
    rank: usize,
    /// Its elements of the tensor, or of every block.
    range: Range<usize>,
    block: &'c B,
}

impl<R: Reduce, B: Fn(usize) -> Range<usize>> Stage<'_, R, B> {
    fn node(&self) -> usize {
        self.piece.nodes.of(self.rank)
    }

    fn mates(&self) -> &[usize] {
        self.piece.nodes.ranks(self.node())
    }

    fn all_nodes(&self) -> Range<usize> {
        0..self.piece.nodes.count()
    }

    /// What a rank owns, without what its block is shorter than others; and where that begins in the input.
    fn owned(&self, owner: usize) -> (Range<usize>, usize) {
        let owned = self.piece.of_rank(owner);
        match self.work.kind {
            Kind::ReduceScatter => {
                let block = (self.block)(owner);
                let part = both(&self.range, &(0..block.len()));
                (owned.start..owned.start + part.len(), block.start + part.start)
            }
            _ => (owned.clone(), self.range.start + owned.start),
        }
    }

    /// The parts that this rank adds up, on its node: where they lie in the piece, and in the input.
    fn shares(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let of_node = move |node: usize| {
            let share = self.piece.summed_by(self.rank, node);
            self.piece.nodes.ranks(node).iter().map(move |&owner| {
                let (owned, source) = self.owned(owner);
                let part = both(&share, &owned);
                let source = source + part.start.saturating_sub(owned.start);
                (part, source)
            })
        };
        self.all_nodes().flat_map(of_node).filter(|(part, _)| !part.is_empty())
    }

    /// Writes what the other ranks of the node add up.
    fn fill(&self, rounds: &Rounds) {
        let outbox = rounds.outbox(Rounds::CAPACITY);
        for node in self.all_nodes() {
            let own = self.piece.summed_by(self.rank, node);
            for &owner in self.piece.nodes.ranks(node) {
                let (owned, source) = self.owned(owner);
                let before = both(&owned, &(0..own.start));
                let behind = both(&owned, &(own.end..usize::MAX));
                for part in [before, behind].into_iter().filter(|part| !part.is_empty()) {
                    let (from, size) = (source + part.start - owned.start, self.work.size);
                    // SAFETY: the part lies within the input, and has a place in the mailbox.
                    unsafe {
                        let from = self.work.input.add(from * size);
                        copy(from, outbox.add(part.start * size), part.len() * size);
                    }
                }
            }
        }
    }

    /// Adds up this rank's share of the inputs of its node, into the next outbox.
    fn accumulate(&self, rounds: &mut Rounds) {
        let (next, sum_size) = (rounds.outbox(Rounds::CAPACITY), self.work.reducer.sum_size());
        for (part, source) in self.shares() {
            let inboxes = rounds.inboxes(Rounds::CAPACITY);
            for (place, &mate) in self.mates().iter().enumerate() {
                // A mate's place is no greater than its number, so none is overwritten before it is taken.
                inboxes[place] = match mate == self.rank {
                    true => self.work.input.wrapping_add(source * self.work.size),
                    false => inboxes[mate].wrapping_add(part.start * self.work.size),
                };
            }
            let sources = &inboxes[..self.mates().len()];
            // SAFETY: the mates have posted their inputs of this share, and the own one is in the input. The outbox is free since the
            // wait, and has room for a sum of each element.
            unsafe {
                let sums = next.add(self.places.sums + part.start * sum_size);
                self.work.reducer.accumulate(sums, sources, part.len());
            }
        }
    }

    /// Where the sums for a node lie.
    fn sent(&self, node: usize) -> Range<usize> {
        let (share, size) = (self.piece.summed_by(self.rank, node), self.work.reducer.sum_size());
        self.places.sums + share.start * size..self.places.sums + share.end * size
    }

    /// Combines the nodes' sums of what this rank owns: into the output, or into the next outbox for others.
    fn conclude(&self, rounds: &mut Rounds) {
        let (node, size) = (self.node(), self.work.size);
        let (owned, _) = self.owned(self.rank);
        let to = match self.work.kind {
            Kind::ReduceScatter => self.work.output.wrapping_add(self.range.start * size),
            _ => rounds.outbox(Rounds::CAPACITY).wrapping_add(self.places.results + owned.start * size),
        };
        let mut start = owned.start;
        while start < owned.end {
            let mut end = owned.end;
            let inboxes = rounds.inboxes(Rounds::CAPACITY);
            for from in self.all_nodes() {
                let (sender, until) = self.piece.who_sums(from, node, start);
                end = end.min(until);
                let sums = self.places.sums + start * self.work.reducer.sum_size();
                // A node's number is no greater than those of its ranks, so none is overwritten before it is taken.
                inboxes[from] = inboxes[sender].wrapping_add(sums);
            }
            let sums = &inboxes[..self.piece.nodes.count()];
            // SAFETY: the ranks have posted these sums in this round. The destination is the own part of the output or of the next
            // outbox, both apart from all inboxes.
            unsafe {
                let to = to.add((start - owned.start) * size);
                self.work.reducer.conclude(to, sums, end - start);
            }
            start = end;
        }
    }

    /// Where this rank's results lie for the ranks of other nodes.
    fn published(&self) -> Range<usize> {
        match self.work.kind {
            Kind::AllReduce => {
                let owned = self.piece.of_rank(self.rank);
                let place = |element: usize| self.places.results + element * self.work.size;
                place(owned.start)..place(owned.end)
            }
            _ => 0..0,
        }
    }

    /// Takes the results of all owners.
    fn gather(&self, rounds: &Rounds) {
        if self.work.output.is_null() || self.range.is_empty() {
            return;
        }
        for owner in 0..self.piece.nodes.world_size() {
            let (owned, place) = self.owned(owner);
            let size = self.work.size;
            // SAFETY: the owner has posted its results, for which the output has room.
            unsafe {
                let results =
                    rounds.inbox(owner, Rounds::CAPACITY).add(self.places.results + owned.start * size);
                copy(results, self.work.output.add(place * size), owned.len() * size);
            }
        }
    }
}
