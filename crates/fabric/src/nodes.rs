//! The nodes of a communicator: which of its ranks share a memory.

use std::{collections::BTreeMap, sync::Arc};

use crate::FabricError;

/// How the ranks of a communicator are spread over nodes. A *node* is the ranks that share a memory: those of one machine, usually. The
/// ranks of a node need not be neighbours, and nodes may have different numbers of ranks. Nodes are numbered in the order of
/// their first ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes(Arc<Inner>);

#[derive(Debug, PartialEq, Eq)]
struct Inner {
    /// The node of each rank.
    of_rank: Vec<u32>,
    /// The ranks of each node, ascending.
    ranks: Vec<Vec<usize>>,
    names: Vec<String>,
}

impl Nodes {
    /// All ranks on one node, which needs no name.
    pub(crate) fn one(world_size: usize) -> Self {
        Self::named(std::iter::repeat_n("", world_size))
    }

    /// The nodes of ranks, given the name of each rank's node.
    pub fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut numbers, mut inner) =
            (BTreeMap::new(), Inner { of_rank: vec![], ranks: vec![], names: vec![] });
        for (rank, name) in names.into_iter().enumerate() {
            let node = *numbers.entry(name).or_insert_with(|| {
                inner.ranks.push(Vec::new());
                inner.names.push(name.to_owned());
                inner.ranks.len() - 1
            });
            inner.of_rank.push(node as u32);
            inner.ranks[node].push(rank);
        }
        Self(Arc::new(inner))
    }

    /// The nodes of a group of these ranks.
    pub(crate) fn of_group(&self, ranks: &[usize]) -> Self {
        Self::named(ranks.iter().map(|&rank| self.name(self.of(rank))))
    }

    /// How many nodes there are.
    #[inline]
    pub fn count(&self) -> usize {
        self.0.ranks.len()
    }

    /// How many ranks there are.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.0.of_rank.len()
    }

    /// The node of a rank.
    ///
    /// # Panics
    /// When there is no such rank.
    #[inline]
    pub fn of(&self, rank: usize) -> usize {
        self.0.of_rank[rank] as usize
    }

    /// The node of every rank.
    #[inline]
    pub fn of_ranks(&self) -> &[u32] {
        &self.0.of_rank
    }

    /// The ranks of a node, in ascending order.
    ///
    /// # Panics
    /// When there is no such node.
    pub fn ranks(&self, node: usize) -> &[usize] {
        &self.0.ranks[node]
    }

    /// The name of a node; empty where all ranks met on one.
    ///
    /// # Panics
    /// When there is no such node.
    pub fn name(&self, node: usize) -> &str {
        &self.0.names[node]
    }

    /// The place of a rank among the ranks of its node, from 0.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn rank_in_node(&self, rank: usize) -> usize {
        let mates = self.ranks(self.of(rank));
        mates.binary_search(&rank).expect("a rank is one of its node's")
    }

    /// The place of a rank among all ranks in the order of their nodes, and within a node ascending: the ranks of each node are neighbours.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn place(&self, rank: usize) -> usize {
        let before = (0..self.of(rank)).map(|node| self.ranks(node).len()).sum::<usize>();
        before + self.rank_in_node(rank)
    }

    /// Whether both ranks share a memory.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn share_memory(&self, rank: usize, other: usize) -> bool {
        self.of(rank) == self.of(other)
    }

    /// The *rail* of a rank to another node: the rank there to which it sends what it posts for the whole node. The senders of a
    /// node are spread over the receivers.
    pub(crate) fn rail(&self, from: usize, to: usize) -> usize {
        let receivers = self.ranks(to);
        receivers[self.rank_in_node(from) % receivers.len()]
    }

    /// The ranks that are on other nodes than this rank.
    pub(crate) fn elsewhere(&self, rank: usize) -> Vec<usize> {
        (0..self.world_size()).filter(|&other| !self.share_memory(rank, other)).collect()
    }

    /// Fails unless all ranks share one memory, which `what` needs.
    pub(crate) fn check_one(&self, rank: usize, what: &str) -> Result<(), FabricError> {
        if self.count() == 1 {
            return Ok(());
        }
        Err(FabricError::invalid(format!(
            "{what} needs memory that all ranks share, and ranks {:?} of {} are on other nodes than rank {rank}: the group of a \
             node's ranks (node_group) has it",
            self.elsewhere(rank),
            self.world_size()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_numbered_by_their_first_ranks() {
        let nodes = Nodes::named(["b", "a", "b", "a", "a"]);
        assert_eq!((nodes.count(), nodes.world_size()), (2, 5));
        assert_eq!((nodes.ranks(0), nodes.ranks(1)), (&[0, 2][..], &[1, 3, 4][..]));
        assert_eq!((nodes.name(0), nodes.of(4), nodes.rank_in_node(4)), ("b", 1, 2));
        assert_eq!(nodes.elsewhere(0), [1, 3, 4]);
        assert_eq!([0, 1, 2, 3, 4].map(|rank| nodes.place(rank)), [0, 2, 1, 3, 4]);
        assert!(nodes.share_memory(1, 4) && !nodes.share_memory(0, 1));
        let group = nodes.of_group(&[4, 2]);
        assert_eq!((group.count(), group.name(0)), (2, "a"));
    }

    #[test]
    fn rails_spread_the_senders_over_the_receivers() {
        let nodes = Nodes::named(["a", "a", "a", "b", "b"]);
        assert_eq!([0, 1, 2].map(|rank| nodes.rail(rank, 1)), [3, 4, 3]);
        assert_eq!([3, 4].map(|rank| nodes.rail(rank, 0)), [0, 1]);
    }

    #[test]
    fn what_needs_one_memory_names_the_ranks_elsewhere() {
        let nodes = Nodes::named(["a", "b", "b"]);
        let error = nodes.check_one(0, "symmetric").unwrap_err().to_string();
        assert!(error.contains("symmetric") && error.contains("[1, 2] of 3"), "{error}");
        Nodes::one(3).check_one(0, "anything").unwrap();
    }
}
