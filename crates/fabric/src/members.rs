//! The ranks of the world that a communicator has.

use std::sync::Arc;

/// The ranks of a communicator as the world numbers them. The world is the communicator that was made by a meeting; all
/// others are groups that were [split](crate::Communicator::split) off it, or off such a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members(Option<Arc<[usize]>>);

impl Members {
    /// A group of these ranks of the world, in the order of the group.
    pub(crate) fn of_group(world_ranks: impl IntoIterator<Item = usize>) -> Self {
        Self(Some(world_ranks.into_iter().collect()))
    }

    /// The number in the world of a rank of the communicator; of a rank that does not exist, its own.
    pub fn world_rank(&self, rank: usize) -> usize {
        // The rank may come from memory that a broken process has scribbled on.
        self.0.as_ref().and_then(|world_ranks| world_ranks.get(rank).copied()).unwrap_or(rank)
    }

    /// The number in the communicator of a rank of the world, if the communicator has that rank.
    pub fn rank(&self, world_rank: usize) -> Option<usize> {
        match &self.0 {
            None => Some(world_rank),
            Some(world_ranks) => world_ranks.iter().position(|&member| member == world_rank),
        }
    }

    /// Whether this is not the world itself.
    #[cfg(not(loom))]
    pub(crate) fn is_group(&self) -> bool {
        self.0.is_some()
    }

    /// A rank, as the end of a clause: "rank 3", or "rank 1 of the group, 3 of the world".
    pub(crate) fn name(&self, rank: usize) -> String {
        match self.0.as_ref().and_then(|world_ranks| world_ranks.get(rank)) {
            None => format!("rank {rank}"),
            Some(world_rank) => format!("rank {rank} of the group, {world_rank} of the world"),
        }
    }

    /// A rank, as the subject of a clause.
    pub(crate) fn subject(&self, rank: usize) -> String {
        self.name(rank) + if self.0.is_some() { "," } else { "" }
    }

    /// Some ranks out of all: "ranks [1, 3] of 4", or "ranks [1] of 2 in the group, [3] of the world".
    pub(crate) fn names(&self, ranks: &[usize], all: usize) -> String {
        let names = format!("ranks {ranks:?} of {all}");
        if self.0.is_none() {
            return names;
        }
        let world_ranks: Vec<usize> = ranks.iter().map(|&rank| self.world_rank(rank)).collect();
        format!("{names} in the group, {world_ranks:?} of the world")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_says_both_numbers_and_the_world_one() {
        let (world, group) = (Members::default(), Members::of_group([7, 3]));
        assert_eq!(world.subject(3), "rank 3");
        assert_eq!(group.name(1), "rank 1 of the group, 3 of the world");
        assert_eq!(group.subject(1), "rank 1 of the group, 3 of the world,");
        assert_eq!(world.names(&[1, 3], 4), "ranks [1, 3] of 4");
        assert_eq!(group.names(&[0, 1], 2), "ranks [0, 1] of 2 in the group, [7, 3] of the world");
        assert_eq!((group.world_rank(0), group.rank(3), group.rank(0)), (7, Some(1), None));
        assert_eq!((world.world_rank(5), world.rank(5)), (5, Some(5)));
    }
}
