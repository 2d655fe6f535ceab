//! The modes on host memory. Offsets and lengths are in bytes.

use std::ops::Range;

use antiphon_fabric::{Communicator, FabricError, Operation, Rounds, Signature, Written};
use antiphon_operation::Call;

use super::{
    MixedLayout,
    call::{Blocks, CheckedMixedCall},
};
use crate::{
    all_reduce::InOrder,
    arguments::{Input, Output},
    chunked::{chunk_for, copy, exchange_chunks},
    collectives::call_checked,
    error::Result,
};

/// Bytes of one piece that a rank posts: its two mailboxes stay in L2.
const PIECE: usize = 128 << 10;

/// The contributors and the receivers of each block, and its place.
pub(super) struct Flow<'a> {
    call: &'a CheckedMixedCall<'a>,
    rank: usize,
    /// Ranks of a group.
    tp: usize,
    groups: usize,
    /// Bytes of an element.
    size: usize,
}

impl<'a> Flow<'a> {
    pub(super) fn new(layout: &MixedLayout, call: &'a CheckedMixedCall<'a>) -> Self {
        let (rank, tp, groups) = (layout.world_rank(), layout.tp_size(), layout.dp_size());
        Self { call, rank, tp, groups, size: call.input.dtype.size() }
    }

    fn own_group(&self) -> usize {
        self.rank / self.tp
    }

    fn group(&self, group: usize) -> Range<usize> {
        group * self.tp..(group + 1) * self.tp
    }

    /// The ranks whose sum a group's block is.
    fn contributors(&self, group: usize) -> Range<usize> {
        if self.call.gathers { self.group(group) } else { 0..self.groups * self.tp }
    }

    /// The groups to whose blocks this rank contributes.
    fn contributed(&self) -> Range<usize> {
        if self.call.gathers { self.own_only() } else { 0..self.groups }
    }

    /// The groups whose blocks this rank receives.
    fn received(&self) -> Range<usize> {
        if self.call.gathers { 0..self.groups } else { self.own_only() }
    }

    fn own_only(&self) -> Range<usize> {
        self.own_group()..self.own_group() + 1
    }

    /// How many blocks' contributions are in a mailbox.
    fn width(&self) -> usize {
        self.contributed().len()
    }

    /// The index of a group's contribution in a mailbox.
    fn slot(&self, group: usize) -> usize {
        if self.call.gathers { 0 } else { group }
    }

    fn longest(&self) -> usize {
        self.call.bytes()
    }

    /// The range of a group's block that lies in this part of the longest block.
    fn clip(&self, group: usize, part: &Range<usize>) -> Range<usize> {
        let len = self.call.blocks.len(group) * self.size;
        part.start.min(len)..part.end.min(len)
    }

    /// The contribution to a group's block, from its `start` on.
    fn input(&self, group: usize, start: usize) -> *const u8 {
        let block = if self.call.gathers { 0 } else { self.call.blocks.start(group) * self.size };
        // SAFETY: callers ask for what lies in a block, which lies in the input.
        unsafe { self.call.input.data.add(block + start) }
    }

    /// Where a group's block is received, from its `start` on.
    fn output(&self, group: usize, start: usize) -> *mut u8 {
        let block = if self.call.gathers { self.call.blocks.start(group) * self.size } else { 0 };
        // SAFETY: callers ask for what lies in a block, which lies in the output.
        unsafe { self.call.output.data.add(block + start) }
    }

    /// Posts this rank's contributions to a part of all blocks, in slots of `stride` bytes.
    fn fill(&self, part: &Range<usize>, stride: usize, outbox: *mut u8) {
        for group in self.contributed() {
            let part = self.clip(group, part);
            // SAFETY: the part lies in the block, and the outbox has a slot for each block.
            unsafe {
                let slot = outbox.add(self.slot(group) * stride);
                copy(self.input(group, part.start), slot, part.len());
            }
        }
    }

    /// Reduces `part` of a group's block, which lies `start` bytes into its contributors' slots; the sum's address.
    ///
    /// # Safety
    /// `inboxes` are those of all ranks, which have been filled with slots of `stride` bytes.
    unsafe fn reduce(
        &self,
        reducer: &InOrder,
        group: usize,
        part: &Range<usize>,
        inboxes: &mut [*const u8],
        start: usize,
        stride: usize,
    ) -> *mut u8 {
        let output = self.output(group, part.start);
        let contributors = self.contributors(group);
        let sources = &mut inboxes[contributors.clone()];
        // SAFETY: every contributor has posted the part; the output is no mailbox.
        unsafe {
            for source in sources.iter_mut() {
                *source = source.add(self.slot(group) * stride + start);
            }
            reducer.run_from(contributors.start, output, sources, part.len() / self.size);
        }
        output
    }

    /// The share of a part of the block that a tensor parallel rank of the group reduces.
    fn share(&self, part: &Range<usize>, tp_rank: usize) -> Range<usize> {
        let elements = part.len() / self.size;
        let bound = |rank: usize| part.start + elements * rank / self.tp * self.size;
        bound(tp_rank)..bound(tp_rank + 1)
    }
}

/// Every receiver of a block reduces all of it.
pub(super) fn one_hop(
    rounds: &mut Rounds,
    signature: &Signature,
    flow: &Flow<'_>,
    reducer: &InOrder,
) -> Result<(), FabricError> {
    let width = flow.width();
    exchange_chunks(
        rounds,
        signature,
        flow.longest(),
        chunk_for(width, PIECE),
        width,
        |part, outbox| {
            flow.fill(&part, part.len(), outbox);
            Written::all(part.len() * width)
        },
        |part, inboxes| {
            for group in flow.received() {
                let clipped = flow.clip(group, &part);
                // SAFETY: slots are as long as the part.
                unsafe { flow.reduce(reducer, group, &clipped, inboxes, 0, part.len()) };
            }
        },
    )
}

/// Each rank of a group reduces its share of the group's block and posts the sum. A round carries the contributions to one piece
/// together with the sums of the piece before.
pub(super) fn two_hops(
    rounds: &mut Rounds,
    signature: &Signature,
    flow: &Flow<'_>,
    reducer: &InOrder,
) -> Result<(), FabricError> {
    let (longest, rank, own_group) = (flow.longest(), flow.rank, flow.own_group());
    let step = chunk_for(flow.width() + 1, PIECE);
    let pieces = longest.div_ceil(step).max(1);
    let piece = |index: usize| index * step..longest.min((index + 1) * step);
    // Behind the slots of contributions.
    let sums = flow.width() * step;
    for round in 0..=pieces {
        let mut written = Written::nothing(Rounds::CAPACITY);
        if round > 0 {
            let part = flow.clip(own_group, &piece(round - 1));
            let share = flow.share(&part, rank % flow.tp);
            written = written.and(sums..sums + share.len());
        }
        if round < pieces {
            flow.fill(&piece(round), step, rounds.outbox(Rounds::CAPACITY));
            written = written.and(0..sums);
        }
        rounds.exchange(signature, written)?;
        if round > 0 {
            for group in flow.received() {
                let part = flow.clip(group, &piece(round - 1));
                for peer in flow.group(group).filter(|&peer| peer != rank) {
                    let share = flow.share(&part, peer % flow.tp);
                    // SAFETY: the peer has put the sum of its share there before it posted this round.
                    unsafe {
                        let from = rounds.inbox(peer, Rounds::CAPACITY).add(sums);
                        copy(from, flow.output(group, share.start), share.len());
                    }
                }
            }
        }
        if round < pieces {
            let part = flow.clip(own_group, &piece(round));
            let share = flow.share(&part, rank % flow.tp);
            let next = rounds.outbox(Rounds::CAPACITY);
            let inboxes = rounds.inboxes(Rounds::CAPACITY);
            // SAFETY: all contributions to the piece have been posted; the outbox of the next round is free since the wait.
            unsafe {
                let sum = flow.reduce(reducer, own_group, &share, inboxes, share.start - part.start, step);
                copy(sum, next.add(sums), share.len());
            }
        }
    }
    Ok(())
}

/// Two collectives in the groups.
pub(super) fn composed(
    tp: &Communicator,
    dp: &Communicator,
    layout: &MixedLayout,
    call: &CheckedMixedCall<'_>,
) -> Result<()> {
    let (group, size) = (layout.dp_rank(), call.input.dtype.size());
    let &CheckedMixedCall { blocks, input, output, .. } = call;
    let (start, count) = (blocks.start(group) * size, blocks.len(group));
    if call.gathers {
        // SAFETY: the group's block lies in the row.
        let own = Output { data: unsafe { output.data.add(start) }, count, ..output };
        call_checked(tp, &Call::new(Operation::AllReduce), input, own)?;
        return gather_blocks(dp, call, own);
    }
    scatter_blocks(dp, call)?;
    call_checked(tp, &Call::new(Operation::AllReduce), output.as_input(), output)
}

/// Every rank's block goes to all ranks of its data parallel group.
fn gather_blocks(dp: &Communicator, call: &CheckedMixedCall<'_>, own: Output) -> Result<()> {
    let (blocks, output, size) = (call.blocks, call.output, call.input.dtype.size());
    if let Blocks::Even { .. } = blocks {
        return call_checked(dp, &Call::new(Operation::AllGather), own.as_input(), output);
    }
    for group in 0..dp.world_size() {
        // SAFETY: the group's block lies in the row.
        let data = unsafe { output.data.add(blocks.start(group) * size) };
        let block = Output { data, count: blocks.len(group), ..output };
        let call = Call::new(Operation::Broadcast).with_root(group);
        call_checked(dp, &call, block.as_input(), block)?;
    }
    Ok(())
}

/// Every rank gets the sum of its data parallel group's contributions to its block.
fn scatter_blocks(dp: &Communicator, call: &CheckedMixedCall<'_>) -> Result<()> {
    let (blocks, input, output, size) = (call.blocks, call.input, call.output, call.input.dtype.size());
    if let Blocks::Even { .. } = blocks {
        return call_checked(dp, &Call::new(Operation::ReduceScatter), input, output);
    }
    for group in 0..dp.world_size() {
        // SAFETY: the group's block lies in the row.
        let data = unsafe { input.data.add(blocks.start(group) * size) };
        let block = Input { data, count: blocks.len(group), ..input };
        let call = Call::new(Operation::Reduce).with_root(group);
        call_checked(dp, &call, block, output)?;
    }
    Ok(())
}
