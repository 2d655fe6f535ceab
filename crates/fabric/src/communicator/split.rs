//! Groups of ranks.

use serde::{Deserialize, Serialize};

use super::{Builder, Communicator};
use crate::{
    FabricError,
    rendezvous::{Address, RendezvousError, Secret, Ticket},
};

/// What a rank says about the group it wants.
#[derive(Serialize, Deserialize)]
struct Choice {
    color: Option<u64>,
    key: i64,
    /// How to meet the group, if this rank turns out to be its first.
    name: String,
    secret: String,
}

impl Communicator {
    /// Splits the world into groups: ranks that give the same `color` form one, ordered by `key` and then by rank.
    /// A rank without a colour joins none. The group has memory, order and failures of its own.
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
    /// As [`barrier`](Self::barrier) and as making any communicator.
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>, FabricError> {
        let ticket = Ticket::random();
        let Address::Abstract(name) = ticket.address else {
            unreachable!("random tickets have abstract names")
        };
        let choices = self.exchange_objects(&Choice { color, key, name, secret: ticket.secret.expose() })?;
        if color.is_none() {
            return Ok(None);
        }
        let mut group: Vec<usize> = (0..choices.len()).filter(|&rank| choices[rank].color == color).collect();
        group.sort_by_key(|&rank| (choices[rank].key, rank));
        let place =
            group.iter().position(|&rank| rank == self.rank()).expect("a rank is in the group it chose");
        let Choice { name, secret, .. } = &choices[group[0]];
        let ticket =
            Ticket { address: Address::Abstract(name.clone()), secret: Secret::new(secret.as_bytes()) };
        Builder::default()
            .timeout(self.timeout())
            .arena_bytes(self.shared().regions.layout().arena_bytes)
            .interrupt_by(self.shared().interrupt.clone())
            .watched(place, group.len(), &ticket, &|| self.all_there(&group))
            .map(Some)
    }

    /// Fails once a rank of the group is lost, which a meeting alone would take for being late.
    fn all_there(&self, group: &[usize]) -> Result<(), RendezvousError> {
        let shared = self.shared();
        match group.iter().find(|&&rank| rank != shared.rank && shared.health.is_gone(&shared.regions, rank))
        {
            Some(&rank) => Err(RendezvousError::PeerLost { rank }),
            None => Ok(()),
        }
    }
}
