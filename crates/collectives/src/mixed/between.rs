//! The modes between nodes in which each byte that another node needs crosses a link once.
//!
//! 1. Every rank posts its *inputs* for the ranks of its own node alone.
//! 2. Each adds up its share of them, for each block to which it contributes, and posts these *sums*, unrounded, for the nodes that combine
//!    them.
//! 3. [`MixedMode::Bytes1`](super::MixedMode::Bytes1): every receiver of a block combines the sums of all nodes, in the order of the nodes, and rounds.
//!    [`MixedMode::Bytes2`](super::MixedMode::Bytes2): each rank of a rail that is in the block's group does so with a part of the rail's sums,
//!    and posts the *results* for the nodes of the receivers.
//!
//! A call goes in pieces. One round carries the inputs of a piece, the sums of the piece before, and the results of the one before that, as in
//! a [hierarchical](crate::hierarchical) reduction. Where no two ranks of a node contribute to a block, there are no inputs to post.

use std::ops::Range;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{FabricError, Rounds, Signature, Written};

use super::{division::Division, flow::Flow};
use crate::chunked::copy;

/// Bytes of one piece of a block.
const PIECE: usize = 256 << 10;

/// A call to be carried out.
pub(super) struct Between<'a> {
    pub(super) flow: &'a Flow<'a>,
    pub(super) reducer: &'a Reducer,
    pub(super) signature: &'a Signature,
    /// Whether the ranks of a rail divide its sums.
    pub(super) by_rail: bool,
}

/// Where things lie in a mailbox. Inputs have a slot of a piece's length for each block; sums and results are packed.
#[derive(Clone, Copy)]
struct Places {
    /// The most elements of a piece of a block.
    step: usize,
    /// In bytes.
    sums: usize,
    results: usize,
    /// Bytes of an element's sum.
    sum_size: usize,
}

impl Places {
    /// For `inputs` blocks to which a rank contributes and `results` of which it owns parts, divided among `adders`.
    fn new(size: usize, sum_size: usize, adders: usize, inputs: usize, results: usize) -> Self {
        let shared = inputs * sum_size + results * size;
        // A share has at most as many elements as the piece, and as a step of whole shares divides into.
        let of_shares = Rounds::CAPACITY / (adders * inputs * size + shared) * adders;
        let step = of_shares.max(Rounds::CAPACITY / (inputs * size + shared)).min(PIECE / size);
        let step = if step > 64 { step - step % 64 } else { step };
        assert!(step > 0, "a piece has an element of each of {inputs} blocks");
        let sums = inputs * step * size;
        Self { step, sums, results: sums + inputs * step.div_ceil(adders) * sum_size, sum_size }
    }
}

impl Between<'_> {
    /// Carries the call out.
    pub(super) fn run(&self, rounds: &mut Rounds) -> Result<(), FabricError> {
        let flow = self.flow;
        let division = |part: Range<usize>| Division {
            layout: flow.layout,
            gathers: flow.call.gathers,
            blocks: flow.call.blocks,
            by_rail: self.by_rail,
            part,
        };
        let (adders, owned) =
            (division(0..0).adders(), if flow.call.gathers { 1 } else { flow.layout.local_dp_size() });
        let places = Places::new(flow.size, self.reducer.accumulator_size(), adders, flow.width(), owned);
        let (longest, step) = (flow.longest(), places.step);
        let pieces = longest.div_ceil(step).max(1);
        // A rank that is alone in adding up needs no inputs of others, and no round for them.
        let first = usize::from(adders > 1);
        // The piece whose inputs, sums or results a round carries.
        let stage = |round: usize, later: usize| {
            let index = round.checked_sub(later).filter(|&index| index < pieces)?;
            let piece = division(index * step..longest.min((index + 1) * step));
            Some(Stage { flow, reducer: self.reducer, places, piece })
        };
        for round in 0..pieces + first + usize::from(self.by_rail) {
            let (inputs, sums) = (stage(round, 0), stage(round, first));
            let results = stage(round, first + 1).filter(|_| self.by_rail);
            match &inputs {
                Some(inputs) if first == 0 => inputs.accumulate(rounds),
                Some(inputs) => inputs.fill(rounds),
                None => {}
            }
            rounds.exchange_by_node(self.signature, |node| {
                let written = Written::nothing(Rounds::CAPACITY);
                let written = written.and(sums.as_ref().map_or(0..0, |sums| sums.sent(node)));
                written.and(results.as_ref().map_or(0..0, |results| results.published(node)))
            })?;
            if let Some(results) = &results {
                results.gather(rounds);
            }
            match &sums {
                Some(sums) if self.by_rail => sums.conclude_owned(rounds),
                Some(sums) => sums.conclude_received(rounds),
                None => {}
            }
            if let Some(inputs) = inputs.filter(|_| first > 0) {
                inputs.accumulate(rounds);
            }
        }
        Ok(())
    }
}

/// One piece of a call, on one rank.
struct Stage<'a> {
    flow: &'a Flow<'a>,
    reducer: &'a Reducer,
    places: Places,
    piece: Division<'a>,
}

impl Stage<'_> {
    fn node(&self) -> usize {
        self.flow.rank() / self.flow.layout.local_size()
    }

    fn own_place(&self) -> usize {
        self.piece.place(self.flow.rank())
    }

    /// Where an element of a block lies among the inputs.
    fn input_at(&self, group: usize, element: usize) -> usize {
        self.flow.slot(group) * self.places.step + element - self.piece.part.start
    }

    /// Writes what the other adders of the node add up.
    fn fill(&self, rounds: &Rounds) {
        let outbox = rounds.outbox(Rounds::CAPACITY);
        for group in self.flow.contributed() {
            let (all, own) = (self.piece.clip(group), self.piece.share(group, self.own_place()));
            for part in [all.start..own.start, own.end..all.end].into_iter().filter(|part| !part.is_empty()) {
                // SAFETY: the outbox has a slot for each block.
                unsafe { self.flow.post(group, &part, outbox, self.input_at(group, part.start)) };
            }
        }
    }

    /// Adds up this rank's share of the inputs of its node, into the outbox of the round to be posted next.
    fn accumulate(&self, rounds: &mut Rounds) {
        let (next, place, adders) = (rounds.outbox(Rounds::CAPACITY), self.own_place(), self.piece.adders());
        let owners = self.piece.owners();
        for (group, owner) in
            self.flow.contributed().flat_map(|group| (0..owners).map(move |owner| (group, owner)))
        {
            let part = self.piece.owned(group, place, owner);
            if part.is_empty() {
                continue;
            }
            let inboxes = rounds.inboxes(Rounds::CAPACITY);
            for mate in 0..adders {
                let rank = self.piece.adder(self.node(), group, mate);
                // A mate's place is no greater than its rank, so none is overwritten before it is taken.
                inboxes[mate] = match rank == self.flow.rank() {
                    true => self.flow.input(group, part.start),
                    false => inboxes[rank].wrapping_add(self.input_at(group, part.start) * self.flow.size),
                };
            }
            let at = self.places.sums + self.piece.sums_at(group, place, owner) * self.places.sum_size;
            // SAFETY: the mates have posted their inputs of this part, and the own one is in the input. The outbox is free since the
            // wait, and has room for a sum of each element of the share.
            unsafe { self.reducer.accumulate(next.add(at), &inboxes[..adders], part.len()) };
        }
    }

    /// Where the sums for a node lie.
    fn sent(&self, node: usize) -> Range<usize> {
        let sums = self.piece.sums_for(self.flow.rank(), self.flow.own_group(), node);
        let place = |element: usize| self.places.sums + element * self.places.sum_size;
        place(sums.start)..place(sums.end)
    }

    /// Combines the nodes' sums of `part` of a block, which lies in a share and is for this owner.
    ///
    /// # Safety
    /// `to` is valid for writing as many elements, and no part of this round's inboxes.
    unsafe fn conclude(&self, rounds: &mut Rounds, to: *mut u8, group: usize, place: usize, owner: usize) {
        let part = self.piece.owned(group, place, owner);
        if part.is_empty() {
            return;
        }
        let at = self.places.sums + self.piece.sums_at(group, place, owner) * self.places.sum_size;
        let (inboxes, nodes) = (rounds.inboxes(Rounds::CAPACITY), self.piece.contributing(group));
        for (index, node) in nodes.clone().enumerate() {
            // A node's index is no greater than the ranks of the node, so none is overwritten before it is taken.
            inboxes[index] = inboxes[self.piece.adder(node, group, place)].wrapping_add(at);
        }
        let (sums, sources) = (&inboxes[..nodes.len()], nodes.len() * self.piece.adders());
        // SAFETY: the adders have posted these sums in this round; the rest is passed on.
        unsafe { self.reducer.conclude(to, sums, sources, part.len()) };
    }

    /// Combines all that this rank receives, into the output.
    fn conclude_received(&self, rounds: &mut Rounds) {
        for group in self.flow.received() {
            for place in 0..self.piece.adders() {
                let to = self.flow.output(group, self.piece.share(group, place).start);
                // SAFETY: the share lies in the output.
                unsafe { self.conclude(rounds, to, group, place, 0) };
            }
        }
    }

    /// Combines what this rank owns, into the next outbox.
    fn conclude_owned(&self, rounds: &mut Rounds) {
        let (rank, place, owner) = (self.flow.rank(), self.own_place(), self.piece.owner_on(self.node()));
        for group in self.piece.owned_groups(rank, self.flow.own_group()) {
            let at = self.places.results + self.piece.results_at(group, place, owner) * self.flow.size;
            let to = rounds.outbox(Rounds::CAPACITY).wrapping_add(at);
            // SAFETY: the next outbox is free since the wait, and has room for what the rank owns of each block.
            unsafe { self.conclude(rounds, to, group, place, owner) };
        }
    }

    /// Where the results for a node lie.
    fn published(&self, node: usize) -> Range<usize> {
        let results = self.piece.results_for(self.flow.rank(), self.flow.own_group(), node);
        let place = |element: usize| self.places.results + element * self.flow.size;
        place(results.start)..place(results.end)
    }

    /// Takes the results of what this rank receives.
    fn gather(&self, rounds: &Rounds) {
        let size = self.flow.size;
        for group in self.flow.received() {
            for (owner, node) in self.piece.nodes_of(group).enumerate() {
                for place in 0..self.piece.adders() {
                    let part = self.piece.owned(group, place, owner);
                    let at = self.places.results + self.piece.results_at(group, place, owner) * size;
                    let rank = self.piece.adder(node, group, place);
                    // SAFETY: the owner has posted its results, for which the output has room.
                    unsafe {
                        let results = rounds.inbox(rank, Rounds::CAPACITY).add(at);
                        copy(results, self.flow.output(group, part.start), part.len() * size);
                    }
                }
            }
        }
    }
}
