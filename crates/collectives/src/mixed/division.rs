//! How the ranks of several nodes divide the sums of a piece: pure arithmetic, equal on all ranks.
//!
//! The ranks of a node that contribute to a block, its *adders* there, each add up one share of it. Adders of one place on all nodes are a
//! *rail*. Where the sums are divided along rails ([`Bytes2`](super::MixedMode::Bytes2)), the ranks of a rail that are in the block's group, the
//! *owners* of the share, each combine a part of the nodes' sums; else ([`Bytes1`](super::MixedMode::Bytes1)) every receiver combines all.

use std::ops::Range;

use super::{
    MixedLayout,
    call::Blocks,
    flow::{divided, groups_on},
};

/// A piece of all blocks. Nodes are those of the layout; ranges and places are in elements.
#[derive(Clone)]
pub(super) struct Division<'a> {
    pub(super) layout: &'a MixedLayout,
    /// Whether only the ranks of a block's group contribute to it, and all ranks receive it; else it is the other way round.
    pub(super) gathers: bool,
    pub(super) blocks: Blocks<'a>,
    pub(super) by_rail: bool,
    /// The part of the longest block.
    pub(super) part: Range<usize>,
}

impl Division<'_> {
    /// How many ranks of a node add up a block to which the node contributes.
    pub(super) fn adders(&self) -> usize {
        if self.gathers { self.layout.local_tp_size() } else { self.layout.local_size() }
    }

    /// A rank's place among the adders of its node.
    pub(super) fn place(&self, rank: usize) -> usize {
        rank % self.layout.local_size() % self.adders()
    }

    /// The rank that adds up a share of a block on a node.
    pub(super) fn adder(&self, node: usize, group: usize, place: usize) -> usize {
        let first = if self.gathers { group % self.layout.local_dp_size() * self.adders() } else { 0 };
        node * self.layout.local_size() + first + place
    }

    /// How many ranks of a rail own a part of its share.
    pub(super) fn owners(&self) -> usize {
        if self.by_rail { self.layout.inter_tp_size() } else { 1 }
    }

    /// The nodes that contribute to a block, ascending.
    pub(super) fn contributing(&self, group: usize) -> Range<usize> {
        if self.gathers { self.nodes_of(group) } else { 0..self.layout.inter_size() }
    }

    /// The nodes that a group is on, ascending.
    pub(super) fn nodes_of(&self, group: usize) -> Range<usize> {
        let (nodes, first) = (self.layout.inter_tp_size(), group / self.layout.local_dp_size());
        first * nodes..(first + 1) * nodes
    }

    /// The piece of a group's block.
    pub(super) fn clip(&self, group: usize) -> Range<usize> {
        self.blocks.clip(group, &self.part)
    }

    /// The share of a block that the adders of this place add up.
    pub(super) fn share(&self, group: usize, place: usize) -> Range<usize> {
        divided(&self.clip(group), place, self.adders())
    }

    /// The part of it that one of the owners combines.
    pub(super) fn owned(&self, group: usize, place: usize, owner: usize) -> Range<usize> {
        divided(&self.share(group, place), owner, self.owners())
    }

    /// The owner that a node's adders are.
    pub(super) fn owner_on(&self, node: usize) -> usize {
        node % self.owners()
    }

    fn length(&self, groups: Range<usize>, place: usize, owner: usize) -> usize {
        groups.map(|group| self.owned(group, place, owner).len()).sum()
    }

    /// Where an adder of this place has the sums of what an owner combines. What is for the groups of one node and one owner lies together.
    pub(super) fn sums_at(&self, group: usize, place: usize, owner: usize) -> usize {
        if self.gathers {
            return self.owned(group, place, owner).start - self.share(group, place).start;
        }
        let groups = groups_on(self.layout, self.nodes_of(group).start);
        let before: usize = (0..groups.start).map(|group| self.share(group, place).len()).sum();
        let owners: usize = (0..owner).map(|owner| self.length(groups.clone(), place, owner)).sum();
        before + owners + self.length(groups.start..group, place, owner)
    }

    /// What of a rank's sums another node needs.
    pub(super) fn sums_for(&self, rank: usize, own_group: usize, node: usize) -> Range<usize> {
        let (place, owner) = (self.place(rank), self.owner_on(node));
        let groups = match self.gathers {
            // Owners are in the group, and receivers everywhere.
            true if self.by_rail && !self.nodes_of(own_group).contains(&node) => return 0..0,
            true => own_group..own_group + 1,
            false => groups_on(self.layout, node),
        };
        let start = self.sums_at(groups.start, place, owner);
        start..start + self.length(groups, place, owner)
    }

    /// Where the owner of part of a share has the results.
    pub(super) fn results_at(&self, group: usize, place: usize, owner: usize) -> usize {
        match self.gathers {
            true => 0,
            false => {
                self.length(groups_on(self.layout, self.nodes_of(group).start).start..group, place, owner)
            }
        }
    }

    /// What of a rank's results another node needs.
    pub(super) fn results_for(&self, rank: usize, own_group: usize, node: usize) -> Range<usize> {
        let own_node = rank / self.layout.local_size();
        let (place, owner) = (self.place(rank), self.owner_on(own_node));
        match self.gathers {
            true => 0..self.owned(own_group, place, owner).len(),
            false if groups_on(self.layout, node) != groups_on(self.layout, own_node) => 0..0,
            false => 0..self.length(groups_on(self.layout, own_node), place, owner),
        }
    }

    /// The groups of whose blocks this rank owns a part of a share.
    pub(super) fn owned_groups(&self, rank: usize, own_group: usize) -> Range<usize> {
        match self.gathers {
            true => own_group..own_group + 1,
            false => groups_on(self.layout, rank / self.layout.local_size()),
        }
    }
}

#[cfg(test)]
mod tests {
    use antiphon_topology::MixedGroup;

    use super::*;

    /// Every division of layouts on one to three nodes, of even and uneven blocks, for each rank.
    fn each(check: impl Fn(&Division<'_>, &[usize])) {
        let sizes = [1, 2, 3];
        for (local_tp, local_dp) in sizes.iter().flat_map(|tp| sizes.map(|dp| (*tp, dp))) {
            for (inter_tp, inter_dp) in [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)] {
                let world_size = local_tp * local_dp * inter_tp * inter_dp;
                let layout = MixedLayout::builder(world_size, 0)
                    .local_size(local_tp * local_dp)
                    .local_tp(local_tp)
                    .inter_tp(inter_tp)
                    .build()
                    .unwrap();
                let counts: Vec<usize> = (0..layout.dp_size()).map(|group| group * 17 % 40).collect();
                for (gathers, by_rail) in [(false, false), (false, true), (true, false), (true, true)] {
                    for part in [0..64, 5..23, 39..40, 0..0] {
                        let blocks = Blocks::Uneven(&counts);
                        check(&Division { layout: &layout, gathers, blocks, by_rail, part }, &counts);
                    }
                }
            }
        }
    }

    fn covers(parts: impl Iterator<Item = Range<usize>>, whole: Range<usize>) {
        let end = parts.fold(whole.start, |end, part| {
            assert_eq!(part.start, end);
            part.end
        });
        assert_eq!(end, whole.end);
    }

    #[test]
    fn every_element_is_added_up_and_owned_once() {
        each(|division, counts| {
            for group in 0..counts.len() {
                covers(
                    (0..division.adders()).map(|place| division.share(group, place)),
                    division.clip(group),
                );
                for place in 0..division.adders() {
                    let owned = (0..division.owners()).map(|owner| division.owned(group, place, owner));
                    covers(owned, division.share(group, place));
                }
            }
        });
    }

    #[test]
    fn adders_are_the_contributors_of_their_nodes() {
        each(|division, counts| {
            let groups = division.layout.groups(MixedGroup::Tp);
            for (group, members) in groups.iter().enumerate().take(counts.len()) {
                let contributors: Vec<usize> = match division.gathers {
                    true => members.clone(),
                    false => (0..division.layout.world_size()).collect(),
                };
                let adders = division.contributing(group).flat_map(|node| {
                    (0..division.adders()).map(move |place| division.adder(node, group, place))
                });
                let adders: Vec<usize> = adders.collect();
                assert_eq!(adders, contributors);
                assert!(
                    adders.iter().enumerate().all(|(i, &rank)| division.place(rank) == i % division.adders())
                );
                let nodes = division.nodes_of(group);
                assert!(members.iter().all(|rank| nodes.contains(&(rank / division.layout.local_size()))));
                assert!(nodes.clone().all(|node| groups_on(division.layout, node).contains(&group)));
            }
        });
    }

    /// No two sums or results of a rank share a place, and a node gets what its ranks take, and nothing else.
    #[test]
    fn nodes_get_what_their_ranks_take() {
        each(|division, counts| {
            let layout = division.layout;
            let partition = layout.partition(MixedGroup::Tp);
            for rank in 0..layout.world_size() {
                let (own, place) = (partition.index_of(rank), division.place(rank));
                let added = if division.gathers { own..own + 1 } else { 0..counts.len() };
                let mut used = Vec::new();
                for (group, owner) in
                    added.flat_map(|group| (0..division.owners()).map(move |owner| (group, owner)))
                {
                    let start = division.sums_at(group, place, owner);
                    let places = start..start + division.owned(group, place, owner).len();
                    used.extend(places.clone());
                    for node in 0..layout.inter_size() {
                        let takes = match (division.by_rail, division.gathers) {
                            // An owner takes them, else every receiver.
                            (true, _) => {
                                division.nodes_of(group).contains(&node) && division.owner_on(node) == owner
                            }
                            (false, true) => true,
                            (false, false) => division.nodes_of(group).contains(&node),
                        };
                        let sent = division.sums_for(rank, own, node);
                        let is_sent = |place: usize| sent.contains(&place);
                        assert!(places.clone().all(|place| is_sent(place) == takes), "{sent:?} {places:?}");
                    }
                }
                used.sort_unstable();
                assert!(used.iter().enumerate().all(|(index, &place)| index == place), "{used:?}");
                let mut used = Vec::new();
                let owner = division.owner_on(rank / layout.local_size());
                for group in division.owned_groups(rank, own) {
                    let start = division.results_at(group, place, owner);
                    used.extend(start..start + division.owned(group, place, owner).len());
                }
                assert!(used.iter().enumerate().all(|(index, &place)| index == place), "{used:?}");
                for node in 0..layout.inter_size() {
                    let receives = division.gathers || groups_on(division.layout, node).contains(&own);
                    let expected = if receives { 0..used.len() } else { 0..0 };
                    assert_eq!(division.results_for(rank, own, node), expected);
                }
            }
        });
    }
}
