//! Noticing that a wait will never end.
//!
//! While a rank waits, it looks now and then at what could make the wait hopeless: a peer that gave up (and left the
//! reason in its control block), a peer whose process ended, a peer that dropped its communicator, the deadline.
//! What it finds it leaves in its own control block, so that the *cause* spreads and not its consequences: when rank 3
//! is killed and rank 2 exits because of that, rank 0 hears of rank 3.

use std::{sync::Arc, time::Duration};

use antiphon_device::{
    host::process::{ProcessWatch, pid_namespace},
    sync::Ordering,
};

use crate::{
    FabricError, Signature,
    error::Loss,
    layout::{LANES, Regions},
    rendezvous::Card,
};

/// Watches the peers of one rank.
pub(crate) struct Health {
    rank: usize,
    watches: Vec<Watch>,
}

/// What can be known of a peer's process.
enum Watch {
    /// It is this very process, or one of a PID namespace that this one cannot see.
    Unseen,
    /// It ran when the ranks met.
    Running(ProcessWatch),
    /// It ended right after the ranks met.
    Gone,
}

impl Watch {
    fn has_ended(&self) -> bool {
        match self {
            Self::Unseen => false,
            Self::Running(process) => process.has_ended(),
            Self::Gone => true,
        }
    }
}

/// The reason in a control block: what happened in the upper half, to whom in the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Lost(usize),
    TimedOut(usize),
    Disagreed(usize),
    Other,
}

impl Fault {
    fn of(error: &FabricError) -> Self {
        match error {
            FabricError::PeerLost { rank, .. } => Self::Lost(*rank),
            FabricError::Timeout { missing, .. } => Self::TimedOut(missing.first().copied().unwrap_or(0)),
            FabricError::Mismatch { peer, .. } => Self::Disagreed(*peer),
            _ => Self::Other,
        }
    }

    fn encode(self) -> u64 {
        let (kind, rank) = match self {
            Self::Lost(rank) => (1, rank),
            Self::TimedOut(rank) => (2, rank),
            Self::Disagreed(rank) => (3, rank),
            Self::Other => (4, 0),
        };
        kind << 32 | rank as u64
    }

    fn decode(word: u64) -> Option<Self> {
        let rank = word as u32 as usize;
        match word >> 32 {
            0 => None,
            1 => Some(Self::Lost(rank)),
            2 => Some(Self::TimedOut(rank)),
            3 => Some(Self::Disagreed(rank)),
            _ => Some(Self::Other),
        }
    }
}

impl Health {
    pub(crate) fn new(rank: usize, cards: &[Card]) -> Self {
        let (own, namespace) = (std::process::id(), pid_namespace());
        let watch = |card: &Card| match card.pid_namespace == namespace && card.pid != own {
            false => Watch::Unseen,
            true => ProcessWatch::open(card.pid).map_or(Watch::Gone, Watch::Running),
        };
        Self { rank, watches: cards.iter().map(watch).collect() }
    }

    /// Fails if the wait of this rank, doing `operation`, for those peers that are `missing`, is hopeless.
    pub(crate) fn check(
        &self,
        regions: &Regions,
        operation: Signature,
        missing: impl Fn() -> Vec<usize>,
        waited: Duration,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        self.faults(regions, operation)?;
        for rank in missing() {
            let ended = self.watches[rank].has_ended();
            let left = regions.control(rank).departed.0.load(Ordering::Acquire) != 0;
            // What it sent before it went counts: look once more.
            if (ended || left) && missing().contains(&rank) {
                self.faults(regions, operation)?;
                let how = if left { Loss::Left } else { Loss::ProcessEnded };
                return Err(FabricError::PeerLost { rank, operation, how });
            }
        }
        if waited < timeout {
            return Ok(());
        }
        let world_size = self.watches.len();
        match missing() {
            none if none.is_empty() => Ok(()),
            missing => Err(FabricError::Timeout { operation, waited, missing, world_size }),
        }
    }

    /// Fails if a peer gave up.
    fn faults(&self, regions: &Regions, operation: Signature) -> Result<(), FabricError> {
        let peers = (0..self.watches.len()).filter(|&rank| rank != self.rank);
        for by in peers {
            let word = regions.control(by).fault.0.load(Ordering::Acquire);
            let reason = match Fault::decode(word) {
                None => continue,
                // It speaks of us: we live, and will see for ourselves what is wrong.
                Some(Fault::Lost(rank)) if rank == self.rank => continue,
                Some(Fault::Lost(rank)) => {
                    return Err(FabricError::PeerLost { rank, operation, how: Loss::Reported { by } });
                }
                // Our own deadline will name all who are missing for us.
                Some(Fault::TimedOut(rank)) if rank != self.rank => continue,
                Some(Fault::TimedOut(rank)) => format!("gave up waiting for rank {rank}"),
                Some(Fault::Disagreed(rank)) => format!("disagreed with rank {rank} about what to do"),
                Some(Fault::Other) => "failed".to_owned(),
            };
            return Err(FabricError::Aborted { operation, by, reason });
        }
        Ok(())
    }

    /// Leaves the reason for all to see, and wakes them.
    pub(crate) fn report(&self, regions: &Regions, error: &FabricError) {
        regions.control(self.rank).fault.0.store(Fault::of(error).encode(), Ordering::Release);
        self.wake_all(regions);
    }

    /// Says that this rank is gone for good.
    pub(crate) fn depart(&self, regions: &Regions) {
        regions.control(self.rank).departed.0.store(1, Ordering::Release);
        self.wake_all(regions);
    }

    fn wake_all(&self, regions: &Regions) {
        for rank in 0..self.watches.len() {
            for bell in 0..=LANES {
                regions.control(rank).bells[bell].0.ring();
            }
        }
    }
}

/// Keeps the first error of a communicator; every later call is answered with it.
#[derive(Default)]
pub(crate) struct FirstError(Option<Arc<FabricError>>);

impl FirstError {
    pub(crate) fn check(&self) -> Result<(), FabricError> {
        match &self.0 {
            None => Ok(()),
            Some(first) => Err(FabricError::Failed(first.clone())),
        }
    }

    pub(crate) fn note(&mut self, error: &FabricError) {
        self.0.get_or_insert_with(|| Arc::new(error.clone()));
    }
}
