//! Which ranks contribute to a block and which receive it, and where a rank has it. All places and lengths are in elements.

use std::ops::Range;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::Nodes;
use antiphon_topology::{MixedGroup, Partition};

use super::{MixedLayout, call::CheckedMixedCall};
use crate::chunked::copy;

/// The contributors and the receivers of each block, and its place.
pub(super) struct Flow<'a> {
    pub(super) call: &'a CheckedMixedCall<'a>,
    pub(super) layout: &'a MixedLayout,
    /// The groups of ranks that share tensors: group `g` has block `g`.
    groups: Partition<4>,
    /// The node of each contributor to a block, where they are on several nodes; else empty.
    nodes: &'a [u32],
    /// Bytes of an element.
    pub(super) size: usize,
}

impl<'a> Flow<'a> {
    /// `nodes` are those of all ranks, if there are several. `nodes_of_group` has the node of each rank of a group, counted from the
    /// group's first: it is the same for all groups.
    pub(super) fn new(
        layout: &'a MixedLayout,
        call: &'a CheckedMixedCall<'a>,
        nodes: Option<&'a Nodes>,
        nodes_of_group: &'a [u32],
    ) -> Self {
        let nodes = match (call.gathers, nodes) {
            (true, _) if layout.use_inter_tp() => nodes_of_group,
            (false, Some(nodes)) => nodes.of_ranks(),
            _ => &[],
        };
        Self { call, layout, groups: layout.partition(MixedGroup::Tp), nodes, size: call.input.dtype.size() }
    }

    pub(super) fn rank(&self) -> usize {
        self.layout.world_rank()
    }

    pub(super) fn own_group(&self) -> usize {
        self.groups.index_of(self.rank())
    }

    /// A rank of a group, by its place there.
    pub(super) fn member(&self, group: usize, place: usize) -> usize {
        self.groups.rank(group, place)
    }

    /// This rank's place in its group.
    pub(super) fn own_place(&self) -> usize {
        self.groups.position_of(self.rank())
    }

    /// How many ranks a group has.
    pub(super) fn group_size(&self) -> usize {
        self.groups.size()
    }

    /// How many groups there are, and blocks.
    pub(super) fn group_count(&self) -> usize {
        self.groups.count()
    }

    /// How many ranks contribute to a block.
    fn contributor_count(&self) -> usize {
        if self.call.gathers { self.group_size() } else { self.layout.world_size() }
    }

    /// The groups to whose blocks this rank contributes.
    pub(super) fn contributed(&self) -> Range<usize> {
        if self.call.gathers { self.own_only() } else { 0..self.group_count() }
    }

    /// The groups whose blocks this rank receives.
    pub(super) fn received(&self) -> Range<usize> {
        if self.call.gathers { 0..self.group_count() } else { self.own_only() }
    }

    fn own_only(&self) -> Range<usize> {
        self.own_group()..self.own_group() + 1
    }

    /// How many blocks' contributions are in a mailbox.
    pub(super) fn width(&self) -> usize {
        self.contributed().len()
    }

    /// The index of a group's contribution in a mailbox.
    pub(super) fn slot(&self, group: usize) -> usize {
        if self.call.gathers { 0 } else { group }
    }

    /// The length of the longest block.
    pub(super) fn longest(&self) -> usize {
        self.call.blocks.longest()
    }

    /// The range of a group's block that lies in this part of the longest block.
    pub(super) fn clip(&self, group: usize, part: &Range<usize>) -> Range<usize> {
        self.call.blocks.clip(group, part)
    }

    /// Where a group's contribution begins in a mailbox that has this part of all blocks one after the other.
    fn packed(&self, group: usize, part: &Range<usize>) -> usize {
        match self.call.gathers {
            true => 0,
            false => (0..group).map(|before| self.clip(before, part).len()).sum(),
        }
    }

    /// What the ranks of a node need of such a mailbox, in bytes.
    pub(super) fn needed_on(&self, node: usize, part: &Range<usize>) -> Range<usize> {
        let range = match self.call.gathers {
            true => 0..self.clip(self.own_group(), part).len(),
            false => {
                let groups = groups_on(self.layout, node);
                self.packed(groups.start, part)..self.packed(groups.end, part)
            }
        };
        range.start * self.size..range.end * self.size
    }

    /// This rank's contribution to a group's block, from its `start` on.
    pub(super) fn input(&self, group: usize, start: usize) -> *const u8 {
        let block = if self.call.gathers { 0 } else { self.call.blocks.start(group) };
        // SAFETY: callers ask for what lies in a block, which lies in the input.
        unsafe { self.call.input.data.add((block + start) * self.size) }
    }

    /// Where a group's block is received, from its `start` on.
    pub(super) fn output(&self, group: usize, start: usize) -> *mut u8 {
        let block = if self.call.gathers { self.call.blocks.start(group) } else { 0 };
        // SAFETY: callers ask for what lies in a block, which lies in the output.
        unsafe { self.call.output.data.add((block + start) * self.size) }
    }

    /// Posts a part of this rank's contribution to a group's block at `place` of an outbox.
    ///
    /// # Safety
    /// The outbox has room for it there.
    pub(super) unsafe fn post(&self, group: usize, part: &Range<usize>, outbox: *mut u8, place: usize) {
        // SAFETY: the part lies in the block; the rest is passed on.
        unsafe {
            let to = outbox.add(place * self.size);
            copy(self.input(group, part.start), to, part.len() * self.size);
        }
    }

    /// Posts a part of this rank's contributions to all blocks, one after the other.
    ///
    /// # Safety
    /// The outbox has room for the part of each block to which the rank contributes.
    pub(super) unsafe fn post_packed(&self, part: &Range<usize>, outbox: *mut u8) {
        for group in self.contributed() {
            // SAFETY: passed on.
            unsafe { self.post(group, &self.clip(group, part), outbox, self.packed(group, part)) };
        }
    }

    /// Reduces what [`post_packed`](Self::post_packed) has posted of a group's block.
    ///
    /// # Safety
    /// `inboxes` are those of all ranks, which have posted this part so.
    pub(super) unsafe fn reduce_packed(
        &self,
        reducer: &Reducer,
        group: usize,
        part: &Range<usize>,
        inboxes: &mut [*const u8],
    ) {
        let (place, clipped) = (self.packed(group, part), self.clip(group, part));
        // SAFETY: passed on.
        unsafe { self.reduce(reducer, group, &clipped, inboxes, place) };
    }

    /// Reduces `part` of a group's block, which lies at `place` of its contributors' mailboxes; the sum's address.
    ///
    /// # Safety
    /// `inboxes` are those of all ranks, and every contributor has posted the part.
    pub(super) unsafe fn reduce(
        &self,
        reducer: &Reducer,
        group: usize,
        part: &Range<usize>,
        inboxes: &mut [*const u8],
        place: usize,
    ) -> *mut u8 {
        let (output, contributors) = (self.output(group, part.start), self.contributor_count());
        for index in 0..contributors {
            // A contributor's index is no greater than its rank, so none is overwritten before it is taken.
            let rank = if self.call.gathers { self.member(group, index) } else { index };
            inboxes[index] = inboxes[rank].wrapping_add(place * self.size);
        }
        let sources = &inboxes[..contributors];
        // SAFETY: every contributor has posted the part; the output is no mailbox.
        unsafe {
            match self.nodes {
                [] => reducer.run(output, sources, part.len()),
                nodes => reducer.run_by_node(output, sources, nodes, part.len()),
            }
        }
        output
    }

    /// The share of a part of a block that a rank of the group reduces.
    pub(super) fn share(&self, part: &Range<usize>, place: usize) -> Range<usize> {
        divided(part, place, self.group_size())
    }
}

/// The groups of a layout that have ranks on a node.
pub(super) fn groups_on(layout: &MixedLayout, node: usize) -> Range<usize> {
    let (nodes_of_group, groups) = (layout.inter_tp_size(), layout.local_dp_size());
    let first = node / nodes_of_group * groups;
    first..first + groups
}

/// One of `shares` shares of a range, which differ by one element at most.
pub(super) fn divided(range: &Range<usize>, index: usize, shares: usize) -> Range<usize> {
    let bound = |index: usize| range.start + range.len() * index / shares;
    bound(index)..bound(index + 1)
}
