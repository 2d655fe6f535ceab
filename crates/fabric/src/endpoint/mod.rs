//! A rank's end of a world, below the communicator: what rounds, messages and symmetric memory all use.

mod health;
#[cfg(not(loom))]
mod witness;

use std::{sync::Arc, time::Duration};

use antiphon_device::{
    host::wait::Patience,
    sync::{AtomicU64, Ordering},
};

use crate::{FabricError, Signature, layout::Regions};

pub(crate) use health::{Health, Peer};

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
    ) -> Self {
        let (rank, world_size) = (health.rank(), regions.layout().world_size);
        let patience = Patience::for_ranks(world_size, health.count_cores());
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

/// Longer than 584 years is for ever.
fn nanoseconds(duration: Duration) -> u64 {
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
            self.0.health.depart(&self.0.regions);
        }
    }
}
