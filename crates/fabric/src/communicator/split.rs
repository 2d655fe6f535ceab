//! Groups of ranks.

use std::os::fd::AsFd;

use antiphon_device::host::memory::SharedMemory;

use super::Communicator;
use crate::{
    FabricError,
    endpoint::{Endpoint, Health},
    layout::Layout,
    rendezvous::random_word,
};

impl Communicator {
    /// Splits the world into groups: ranks that give the same `color` form one, ordered by `key` and then by rank.
    /// A rank without a colour joins none. The group has memory, order and failures of its own; it shares the handles
    /// of its processes with the world, and keeps the world's memory mapped as long as it lives.
    ///
    /// All ranks of this communicator take part until all groups are made: either every rank gets its group or none does.
    ///
    /// ```
    /// use antiphon_fabric::LocalWorld;
    ///
    /// let places = LocalWorld::run(4, |comm| {
    ///     let pair = comm.split(Some(comm.rank() as u64 / 2), 0)?.unwrap();
    ///     Ok::<_, antiphon_fabric::FabricError>((pair.rank(), pair.world_size()))
    /// });
    /// assert_eq!(*places[3].as_ref().unwrap(), (1, 2));
    /// ```
    ///
    /// # Errors
    /// [`FabricError::Device`] when a rank cannot have the memory or a descriptor, [`FabricError::InvalidArgument`] that
    /// names it elsewhere (and the communicator stays usable); as [`barrier`](Self::barrier).
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>, FabricError> {
        let choices = self.exchange_objects(&(color, key, random_word()))?;
        let is_ours = |rank: &usize| color.is_some() && choices[*rank].0 == color;
        let mut group: Vec<usize> = (0..choices.len()).filter(is_ours).collect();
        group.sort_by_key(|&rank| (choices[rank].1, rank));
        // The first rank's random word is the number of the group, where it needs one.
        let number = group.first().map_or(0, |&first| choices[first].2);
        self.make_group(&group, number)
    }

    /// The ranks of this rank's node, in the order in which they are here; every rank calls it. What needs one memory works there.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn node_group(&self) -> Result<Self, FabricError> {
        let nodes = self.nodes();
        let group = self.split(Some(nodes.of(self.rank()) as u64), 0)?;
        Ok(group.expect("every rank is on a node"))
    }

    /// The group of the ranks that have this rank's place on their nodes: one rank of each node that has that place. Every rank calls it.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn rail_group(&self) -> Result<Self, FabricError> {
        let nodes = self.nodes();
        let group = self.split(Some(nodes.rank_in_node(self.rank()) as u64), 0)?;
        Ok(group.expect("every rank has a place on its node"))
    }

    /// The communicator of this rank's group: its memory, which the first of its ranks on each node makes, and its links between nodes. A
    /// rank whose `group` is empty gets none.
    fn make_group(&self, group: &[usize], number: u64) -> Result<Option<Self>, FabricError> {
        let parent = self.endpoint();
        let nodes = parent.nodes();
        let is_here = |rank: &usize| nodes.share_memory(*rank, self.rank());
        let mates: Vec<usize> = group.iter().copied().filter(is_here).collect();
        let leads = mates.first() == Some(&self.rank());
        let layout = Layout::new(group.len(), parent.regions.layout().arena_bytes);
        let layout = layout.expect("a group needs no more than its world");
        let made = leads.then(|| SharedMemory::create(layout.total())).transpose();
        let made = self.agree("has no memory for its group", made.map_err(FabricError::from))?;
        let (to, from) = if leads { (&mates[1..], &[][..]) } else { (&[][..], &mates[..mates.len().min(1)]) };
        let descriptor = made.as_ref().map(|(_, descriptor)| descriptor.as_fd());
        let received = self.hand_over(descriptor, to, from)?.pop();
        let mapped = match made {
            Some((memory, _)) => Ok(Some(memory)),
            None => received.map(|descriptor| SharedMemory::from_fd(descriptor, layout.total())).transpose(),
        };
        let made = mapped.map(|memory| memory.map(|memory| self.group_in(memory, layout, group, number)));
        let made = made.map_err(FabricError::from);
        // When all have agreed, all are ready for messages of the group.
        let agreed =
            self.agree("cannot map its group's memory", made.as_ref().map(drop).map_err(Clone::clone));
        if let Err(error) = agreed {
            // What a lost rank posted last may have reached some peers and not this rank. Those peers have the group, and
            // would wait in it for this rank.
            if let (Ok(Some(group)), true) = (&made, parent.health.check_usable().is_err()) {
                group.endpoint().report(&error);
            }
            return Err(error);
        }
        made
    }

    /// The communicator of a group that this rank is in. From now on it takes messages.
    fn group_in(&self, memory: SharedMemory, layout: Layout, group: &[usize], number: u64) -> Self {
        let parent = self.endpoint();
        let rank = group.iter().position(|&rank| rank == self.rank()).expect("a rank is in its group");
        let nodes = parent.nodes().of_group(group);
        let (regions, links) = parent.regions_of(memory, layout, (rank, group, &nodes), |_| number);
        let health = Health::of_group(rank, parent, group);
        Self::new(Endpoint::new(health, regions, parent.timeout(), parent.interrupt.clone(), links))
    }
}
