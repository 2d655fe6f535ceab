//! Noticing that a wait will never end.
//!
//! While a rank waits, it looks now and then at what could make the wait hopeless: a peer that gave up (and left the
//! reason in its control block), a peer whose process ended, a peer that dropped its communicator, the deadline.
//! What it finds it leaves in its own control block, so that the *cause* spreads and not its consequences: when rank 3
//! is killed and rank 2 exits because of that, rank 0 hears of rank 3.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use antiphon_device::{host::process::ProcessWatch, sync::Ordering};

use crate::{
    FabricError, Signature,
    error::Loss,
    layout::{LANES, Regions},
};

/// Watches the peers of one rank.
pub(crate) struct Health {
    rank: usize,
    /// The peers' processes, as far as they are others than this one and can be watched.
    processes: Vec<Option<Arc<ProcessWatch>>>,
    /// What this communicator failed of, if it did.
    first: OnceLock<Arc<FabricError>>,
}

/// The reason in a control block: what happened in the upper half, to whom in the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Lost(usize),
    TimedOut(usize),
    Disagreed(usize),
    Interrupted,
    Other,
}

impl Fault {
    fn of(error: &FabricError) -> Self {
        match error {
            FabricError::PeerLost { rank, .. } => Self::Lost(*rank),
            FabricError::Timeout { missing, .. } => Self::TimedOut(missing.first().copied().unwrap_or(0)),
            FabricError::Mismatch { peer, .. } => Self::Disagreed(*peer),
            FabricError::Interrupted { .. } => Self::Interrupted,
            _ => Self::Other,
        }
    }

    fn encode(self) -> u64 {
        let (kind, rank) = match self {
            Self::Lost(rank) => (1, rank),
            Self::TimedOut(rank) => (2, rank),
            Self::Disagreed(rank) => (3, rank),
            Self::Other => (4, 0),
            Self::Interrupted => (5, 0),
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
            5 => Some(Self::Interrupted),
            _ => Some(Self::Other),
        }
    }
}

impl Health {
    pub(crate) fn new(rank: usize, processes: Vec<Option<Arc<ProcessWatch>>>) -> Self {
        Self { rank, processes, first: OnceLock::new() }
    }

    /// Fails if this communicator failed before: its ranks are no longer in step.
    #[inline]
    pub(crate) fn check_usable(&self) -> Result<(), FabricError> {
        match self.first.get() {
            None => Ok(()),
            Some(first) => Err(FabricError::Failed(first.clone())),
        }
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
        // What a rank sent before it went counts, so whoever looks lost is looked for once more. Crashes come first:
        // ranks that left because of one, in another group perhaps, are not to blame.
        let crashed = |rank| self.has_crashed(regions, rank).then_some(Loss::ProcessEnded);
        let reported = |rank| self.who_lost(regions, rank).map(|by| Loss::Reported { by });
        for rank in missing() {
            let how = crashed(rank).or_else(|| reported(rank));
            if let Some(how) = how.filter(|_| missing().contains(&rank)) {
                return Err(FabricError::PeerLost { rank, operation, how });
            }
        }
        for rank in missing() {
            let why = self.why_lost(regions, operation, rank);
            if let Some(error) = why.filter(|_| missing().contains(&rank)) {
                return Err(error);
            }
        }
        if waited < timeout {
            return Ok(());
        }
        let world_size = self.processes.len();
        match missing() {
            none if none.is_empty() => Ok(()),
            missing => Err(FabricError::Timeout { operation, waited, missing, world_size }),
        }
    }

    /// Whether nothing will ever come from a rank again.
    pub(crate) fn is_gone(&self, regions: &Regions, rank: usize) -> bool {
        regions.control(rank).has_departed() || self.has_ended(rank)
    }

    fn has_ended(&self, rank: usize) -> bool {
        self.processes[rank].as_ref().is_some_and(|process| process.has_ended())
    }

    /// Whether the process of a rank ended without a word.
    fn has_crashed(&self, regions: &Regions, rank: usize) -> bool {
        !regions.control(rank).has_departed()
            && fault_of(regions, rank).is_none()
            && self.has_ended(rank)
            // It may have said something just before it ended.
            && !regions.control(rank).has_departed()
            && fault_of(regions, rank).is_none()
    }

    /// Who has seen that a rank is lost, perhaps from where more can be seen.
    fn who_lost(&self, regions: &Regions, rank: usize) -> Option<usize> {
        let peers = (0..self.processes.len()).filter(|&by| by != self.rank && by != rank);
        peers.into_iter().find(|&by| fault_of(regions, by) == Some(Fault::Lost(rank)))
    }

    /// Why nothing more will come from rank `by`, if so. What made it give up goes before its being gone: the cause
    /// spreads. (One that gave up later than what is awaited of it is not asked: that has arrived.)
    fn why_lost(&self, regions: &Regions, operation: Signature, by: usize) -> Option<FabricError> {
        let left = regions.control(by).has_departed();
        let gone = left || self.has_ended(by);
        let how = if left { Loss::Left } else { Loss::ProcessEnded };
        let reason = match fault_of(regions, by) {
            None => return gone.then_some(FabricError::PeerLost { rank: by, operation, how }),
            Some(Fault::Lost(rank)) if rank != self.rank => {
                return Some(FabricError::PeerLost { rank, operation, how: Loss::Reported { by } });
            }
            Some(Fault::Lost(_)) => "took this rank for lost".to_owned(),
            // Our own deadline will name all who are missing for us.
            Some(Fault::TimedOut(rank)) if rank != self.rank && !gone => return None,
            Some(Fault::TimedOut(rank)) => format!("gave up waiting for rank {rank}"),
            Some(Fault::Disagreed(rank)) => format!("disagreed with rank {rank} about what to do"),
            Some(Fault::Interrupted) => "was interrupted".to_owned(),
            Some(Fault::Other) => "failed".to_owned(),
        };
        Some(FabricError::Aborted { operation, by, reason })
    }

    /// Makes this communicator unusable, and leaves the reason for all to see. Only the first error counts: others
    /// are its consequences.
    pub(crate) fn report(&self, regions: &Regions, error: &FabricError) {
        if self.first.set(Arc::new(error.clone())).is_ok() {
            // Who was aborted passes the reason on.
            let fault = match error {
                FabricError::Aborted { by, .. } => fault_of(regions, *by),
                _ => None,
            };
            let fault = fault.unwrap_or(Fault::of(error));
            regions.control(self.rank).fault.0.store(fault.encode(), Ordering::Release);
            self.wake_all(regions);
        }
    }

    /// Says that this rank is gone for good.
    pub(crate) fn depart(&self, regions: &Regions) {
        regions.control(self.rank).depart();
        self.wake_all(regions);
    }

    fn wake_all(&self, regions: &Regions) {
        for rank in 0..self.processes.len() {
            for bell in 0..=LANES {
                regions.control(rank).bells[bell].0.ring();
            }
        }
    }
}

fn fault_of(regions: &Regions, rank: usize) -> Option<Fault> {
    Fault::decode(regions.control(rank).fault.0.load(Ordering::Acquire))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Operation;
    use proptest::prelude::*;

    #[test]
    fn a_fault_says_whom_the_error_was_about() {
        let operation = Signature::new(Operation::Barrier);
        let lost = FabricError::PeerLost { rank: 3, operation, how: Loss::Left };
        let timeout = |missing: &[usize]| {
            let waited = Duration::ZERO;
            FabricError::Timeout { operation, waited, missing: missing.to_vec(), world_size: 9 }
        };
        let mismatch = FabricError::Mismatch { rank: 1, mine: operation, peer: 5, theirs: operation };
        assert_eq!(Fault::of(&lost), Fault::Lost(3));
        assert_eq!(Fault::of(&timeout(&[7, 8])), Fault::TimedOut(7));
        assert_eq!(Fault::of(&mismatch), Fault::Disagreed(5));
        assert_eq!(Fault::of(&FabricError::invalid("a panic")), Fault::Other);
    }

    proptest! {
        #[test]
        fn faults_survive_the_word(kind in 0usize..5, rank in 0..=u32::MAX as usize) {
            let about_a_rank = [Fault::Lost(rank), Fault::TimedOut(rank), Fault::Disagreed(rank)];
            let fault = *about_a_rank.iter().chain(&[Fault::Interrupted, Fault::Other]).nth(kind).unwrap();
            prop_assert_eq!(Fault::decode(fault.encode()), Some(fault));
        }

        /// A broken process may have scribbled on the word; and only an untouched one means that all is well.
        #[test]
        fn any_other_word_is_a_fault_too(word: u64) {
            prop_assert_eq!(Fault::decode(word).is_none(), word >> 32 == 0);
        }
    }
}
