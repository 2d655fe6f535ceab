//! Groups of ranks.

use std::os::fd::AsFd;

use antiphon_device::host::memory::SharedMemory;

use super::Communicator;
use crate::{
    FabricError,
    endpoint::{Endpoint, Health},
    layout::{Layout, Regions},
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
        let choices = self.exchange_objects(&(color, key))?;
        let is_ours = |rank: &usize| color.is_some() && choices[*rank].0 == color;
        let mut group: Vec<usize> = (0..choices.len()).filter(is_ours).collect();
        group.sort_by_key(|&rank| (choices[rank].1, rank));
        let Some((memory, layout)) = self.share_in_group(&group)? else { return Ok(None) };
        let rank = group.iter().position(|&rank| rank == self.rank()).expect("a rank is in its group");
        let parent = self.endpoint();
        Ok(Some(Self::new(Endpoint::new(
            Health::of_group(rank, parent, &group),
            Regions::new(memory, layout),
            parent.timeout(),
            parent.interrupt.clone(),
        ))))
    }

    /// Memory that the ranks of each group share, made by the first of it; a rank whose `group` is empty gets none.
    fn share_in_group(&self, group: &[usize]) -> Result<Option<(SharedMemory, Layout)>, FabricError> {
        let leads = group.first() == Some(&self.rank());
        let layout = Layout::new(group.len(), self.endpoint().regions.layout().arena_bytes);
        let layout = layout.expect("a group needs no more than its world");
        let made = leads.then(|| SharedMemory::create(layout.total())).transpose();
        let made = self.agree("has no memory for its group", made.map_err(FabricError::from))?;
        let (to, from) = if leads { (&group[1..], &[][..]) } else { (&[][..], &group[..group.len().min(1)]) };
        let descriptor = made.as_ref().map(|(_, descriptor)| descriptor.as_fd());
        let received = self.hand_over(descriptor, to, from)?.pop();
        let mapped = match made {
            Some((memory, _)) => Ok(Some(memory)),
            None => received.map(|descriptor| SharedMemory::from_fd(descriptor, layout.total())).transpose(),
        };
        let memory = self.agree("cannot map its group's memory", mapped.map_err(FabricError::from))?;
        Ok(memory.map(|memory| (memory, layout)))
    }
}
