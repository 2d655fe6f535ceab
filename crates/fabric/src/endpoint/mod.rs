//! A rank's end of a world, below the communicator: what rounds, messages and symmetric memory all use.

mod health;
#[cfg(not(loom))]
mod witness;

use std::{sync::Arc, time::Duration};

use antiphon_device::{
    host::{
        memory::SharedMemory,
        wait::{Doorbell, Patience, wait_for},
    },
    sync::{AtomicU64, Ordering},
};

use crate::{
    FabricError, Nodes, Signature,
    layout::{Layout, Regions},
    links::{Links, Word},
};

pub(crate) use health::{Health, Peer, Remote};

/// One rank's end of a world: its number, the mapped memory, the state of its peers and the rules of a wait.
///
/// All parts of a communicator share it: the caller's thread, the background, messages, and buffers that outlive the communicator.
pub(crate) struct Endpoint {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// In nanoseconds.
    timeout: AtomicU64,
    pub(crate) patience: Patience,
    pub(crate) health: Health,
    pub(crate) regions: Regions,
    pub(crate) interrupt: Option<Interrupt>,
    /// The way to the ranks of other nodes, if there are any.
    pub(crate) links: Option<Links>,
    /// Where others of this machine read what this rank waits for.
    #[cfg(not(loom))]
    pub(crate) entry: crate::job::Entry,
}

/// Whether the program wants to stop waiting; see [`Builder::interrupt`].
pub(crate) type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

impl Endpoint {
    pub(crate) fn new(
        health: Health,
        regions: Regions,
        timeout: Duration,
        interrupt: Option<Interrupt>,
        links: Option<Links>,
    ) -> Self {
        let (rank, world_size) = (health.rank(), regions.layout().world_size);
        let local =
            links.as_ref().map_or(world_size, |links| links.nodes().ranks(links.nodes().of(rank)).len());
        let patience = Patience::for_ranks(local, health.count_cores());
        let timeout = AtomicU64::new(nanoseconds(timeout));
        #[cfg(not(loom))]
        antiphon_device::host::signal::count_sigusr1();
        Self {
            #[cfg(not(loom))]
            entry: crate::job::Entry::new(regions.number(), rank, world_size, health.members()),
            rank,
            world_size,
            timeout,
            patience,
            health,
            regions,
            interrupt,
            links,
        }
    }

    /// The nodes of its ranks.
    pub(crate) fn nodes(&self) -> Nodes {
        self.links.as_ref().map_or_else(|| Nodes::one(self.world_size), |links| links.nodes().clone())
    }

    /// Fails unless all ranks share one memory, which `what` needs.
    pub(crate) fn check_one_node(&self, what: &str) -> Result<(), FabricError> {
        self.links.as_ref().map_or(Ok(()), |links| links.nodes().check_one(self.rank, what))
    }

    /// The regions in the memory of a communicator of these ranks of this one, in which this rank is `rank`, and its links between their
    /// `nodes`, if there are several: from now on it takes messages. The links' number is made of this communicator's.
    pub(crate) fn regions_of(
        &self,
        memory: SharedMemory,
        layout: Layout,
        (rank, group, nodes): (usize, &[usize], &Nodes),
        number: impl FnOnce(u64) -> u64,
    ) -> (Regions, Option<Links>) {
        let Some(links) = self.links.as_ref().filter(|_| nodes.count() > 1) else {
            return (Regions::new(memory, layout), None);
        };
        let regions = Regions::on_node(memory, layout, nodes.clone(), rank);
        let number = number(links.communicator());
        let links = links.of_group(number, rank, group, nodes.clone(), regions.clone());
        (regions, Some(links))
    }

    /// Moves messages between nodes, if there are any.
    pub(crate) fn poll(&self) {
        if let Some(links) = &self.links {
            links.poll();
        }
    }

    /// Waits at a bell of this rank until `ready` returns something; see [`wait_for`].
    #[inline]
    pub(crate) fn wait_for<T, E>(
        &self,
        bell: &Doorbell,
        patience: Patience,
        ready: impl FnMut() -> Option<T>,
        check: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<T, E> {
        match &self.links {
            None => wait_for(bell, patience, ready, check),
            Some(links) => links.wait_for(bell, patience, ready, check),
        }
    }

    /// Makes the communicator unusable because of `error`, and leaves the reason for all to see, unless it has failed before.
    pub(crate) fn report(&self, error: &FabricError) {
        self.health.report(&self.regions, error, |fault| self.tell(Word::Fault(fault)));
    }

    /// Says that this rank is gone for good.
    pub(crate) fn depart(&self) {
        self.health.depart(&self.regions);
        if let Some(links) = &self.links {
            links.depart();
        }
    }

    /// Marks a round in which this rank gave up, after it has [reported](Self::report) why.
    pub(crate) fn give_up(&self, lane: usize, round: u64) {
        self.regions.mark_given_up(self.rank, lane, round);
        self.tell(Word::GivenUp { lane, round });
    }

    /// Tells the ranks of other nodes what this rank has written for the ranks of its own.
    pub(crate) fn tell(&self, word: Word) {
        if let Some(links) = &self.links {
            links.tell(word);
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        // Nothing else is read by what it says.
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(nanoseconds(timeout), Ordering::Relaxed);
    }

    pub(crate) fn check_rank(&self, rank: usize, role: &str) -> Result<(), FabricError> {
        match rank < self.world_size {
            true => Ok(()),
            false => Err(FabricError::no_such_rank(role, rank, self.world_size)),
        }
    }

    /// What a waiting rank does at each look around: it notes for which ranks it waits, and reports that if SIGUSR1 asked it to.
    pub(crate) fn look_around(
        &self,
        operation: Signature,
        missing: &impl Fn() -> Vec<usize>,
        waited: Duration,
    ) {
        if let Some(links) = &self.links {
            links.forget_rails(|mate| self.health.is_gone(&self.regions, mate));
        }
        #[cfg(not(loom))]
        self.entry.note(operation, waited, &missing());
        self.health.answer(&self.regions, operation, missing, waited);
    }

    /// Fails if the program wants to stop waiting.
    pub(crate) fn check_interrupt(&self, operation: impl Into<Option<Signature>>) -> Result<(), FabricError> {
        match &self.interrupt {
            Some(interrupted) if interrupted() => {
                Err(FabricError::Interrupted { operation: operation.into() })
            }
            _ => Ok(()),
        }
    }
}

/// A duration in nanoseconds; longer than 584 years is for ever.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// While one of these lives, this rank takes part. Buffers may outlive it, and only keep the memory mapped.
pub(crate) struct Presence(pub(crate) Arc<Endpoint>, u32);

impl Presence {
    pub(crate) fn new(shared: Endpoint) -> Self {
        Self(Arc::new(shared), std::process::id())
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        // A forked child inherits the value but not the part that it stands for.
        if self.1 == std::process::id() {
            self.0.depart();
        }
    }
}
