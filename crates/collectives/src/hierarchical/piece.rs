//! Who does what with a piece of a call: pure arithmetic, equal on all ranks.

use std::ops::Range;

use antiphon_fabric::Nodes;

/// Who gets the result of which elements of a piece. Ranks are taken in the order of their nodes, and within a node ascending, so that what
/// a node's ranks own lies together.
#[derive(Debug, Clone, Copy)]
pub(super) enum Owners {
    /// Every rank an equal share of this many elements.
    Ranks(usize),
    /// The ranks of a node an equal share of this many elements.
    Node(usize, usize),
    /// Every rank a block of this many elements.
    Blocks(usize),
}

/// A piece, as one rank sees it. All ranges are in elements of the piece.
#[derive(Clone, Copy)]
pub(super) struct Piece<'n> {
    pub(super) nodes: &'n Nodes,
    pub(super) owners: Owners,
}

impl Piece<'_> {
    /// The ranks of the nodes before a node.
    fn before(&self, node: usize) -> usize {
        (0..node).map(|node| self.nodes.ranks(node).len()).sum()
    }

    /// Where what the rank at this place owns begins; places are in the order of the nodes.
    fn bound(&self, place: usize) -> usize {
        match self.owners {
            Owners::Ranks(elements) => elements * place / self.nodes.world_size(),
            Owners::Node(node, elements) => {
                let (before, ranks) = (self.before(node), self.nodes.ranks(node).len());
                elements * (place.clamp(before, before + ranks) - before) / ranks
            }
            Owners::Blocks(elements) => elements * place,
        }
    }

    /// What the ranks of a node own.
    pub(super) fn of_node(&self, node: usize) -> Range<usize> {
        let before = self.before(node);
        self.bound(before)..self.bound(before + self.nodes.ranks(node).len())
    }

    /// What a rank owns.
    pub(super) fn of_rank(&self, rank: usize) -> Range<usize> {
        let place = self.nodes.place(rank);
        self.bound(place)..self.bound(place + 1)
    }

    /// What a rank adds up on its node for the owners on node `to`: the share of its place in the node.
    pub(super) fn summed_by(&self, rank: usize, to: usize) -> Range<usize> {
        self.share(self.nodes.rank_in_node(rank), self.nodes.ranks(self.nodes.of(rank)).len(), to)
    }

    fn share(&self, place: usize, ranks: usize, to: usize) -> Range<usize> {
        let all = self.of_node(to);
        let bound = |place: usize| all.start + all.len() * place / ranks;
        bound(place)..bound(place + 1)
    }

    /// The rank of node `from` that adds up an element that is owned on node `to`, and where its share ends.
    pub(super) fn who_sums(&self, from: usize, to: usize, element: usize) -> (usize, usize) {
        let ranks = self.nodes.ranks(from);
        let share = |place| self.share(place, ranks.len(), to);
        let place = (0..ranks.len()).find(|&place| element < share(place).end);
        let place = place.expect("the element is one of the node's");
        (ranks[place], share(place).end)
    }
}

/// Both of two ranges.
pub(super) fn both(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts() -> Vec<Nodes> {
        let layouts = [&["a", "b"][..], &["a", "b", "b", "b"], &["b", "a", "b", "a", "a"], &["a", "b", "c"]];
        layouts.map(|names| Nodes::named(names.iter().copied())).into()
    }

    /// Every element has one owner, and on each node one rank that adds it up for that owner's node.
    #[test]
    fn every_element_is_added_up_once_on_each_node() {
        for nodes in layouts() {
            let world_size = nodes.world_size();
            for elements in [0, 1, 2, 5, 64, 1001] {
                let owners = [Owners::Ranks(elements), Owners::Node(1, elements), Owners::Blocks(elements)];
                for owners in owners {
                    let piece = Piece { nodes: &nodes, owners };
                    let total = if let Owners::Blocks(_) = owners { elements * world_size } else { elements };
                    for element in 0..total {
                        let owned = (0..world_size).filter(|&rank| piece.of_rank(rank).contains(&element));
                        let owners: Vec<usize> = owned.collect();
                        assert_eq!(owners.len(), 1, "{owners:?}");
                        let to = nodes.of(owners[0]);
                        assert!(piece.of_node(to).contains(&element));
                        for from in 0..nodes.count() {
                            let (summing, end) = piece.who_sums(from, to, element);
                            let share = piece.summed_by(summing, to);
                            assert!(
                                share.contains(&element) && share.end == end && nodes.of(summing) == from
                            );
                            let others = nodes.ranks(from).iter().filter(|&&rank| rank != summing);
                            for &other in others {
                                assert!(!piece.summed_by(other, to).contains(&element));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_that_are_apart_have_nothing_in_common() {
        assert_eq!(both(&(2..5), &(4..9)), 4..5);
        assert!(both(&(2..4), &(5..9)).is_empty() && both(&(5..9), &(2..4)).is_empty());
    }
}
