//! Detecting waits that will never end.
//!
//! While a rank waits, it checks now and then for what makes the wait hopeless: a peer that gave up (and left the
//! reason in its control block), a peer whose process ended, a peer that dropped its communicator, or the deadline.
//! The rank writes what it finds into its own control block, so that the *cause* spreads and not its consequences: when rank 3
//! is killed and rank 2 exits because of that, the error on rank 0 names rank 3.
//!
//! A rank that gives up in a group leaves the reason in the world's memory too, where it counts once the rank is gone:
//! its groups fail alone, but ranks that wait for it in other groups get the reason. Reasons use the world's rank numbers.

use std::{
    collections::BTreeSet,
    sync::{Arc, OnceLock},
    time::Duration,
};

use antiphon_device::{
    host::process::ProcessWatch,
    sync::{AtomicU64, Ordering},
};

use super::Endpoint;
#[cfg(not(loom))]
use super::witness::Witness;
use crate::{
    FabricError, Members, Nodes, Signature,
    engine::{Lost, Progress},
    error::Loss,
    layout::{LANES, Regions},
    links::Word,
};

/// Watches the peers of one rank.
pub(crate) struct Health {
    rank: usize,
    members: Members,
    peers: Vec<Peer>,
    /// The world, if this communicator is a group of it.
    world: Option<Arc<Endpoint>>,
    /// The first error of this communicator, after which it is unusable.
    first: OnceLock<Arc<FabricError>>,
    /// How often this rank had been asked what it does when it said so last.
    answered: AtomicU64,
}

/// The process of a rank, as far as it is known; groups share it with their world.
#[derive(Clone)]
pub(crate) struct Peer {
    /// Its handle, if it is another process than this one and can be watched.
    pub(crate) process: Option<Arc<ProcessWatch>>,
    /// Its id and the PID namespace of that, if it is known.
    pub(crate) id: Option<(u32, u64)>,
    /// The cores it may run on.
    pub(crate) cores: Arc<[u32]>,
    /// The connection to it, if it is on another node.
    pub(crate) remote: Option<Remote>,
}

/// The connection to a rank on another node.
#[derive(Clone)]
pub(crate) struct Remote {
    pub(crate) progress: Arc<Progress>,
    /// The engine's number of the rank.
    pub(crate) number: usize,
    pub(crate) node: usize,
}

impl Peer {
    /// How the process of this rank was lost, if it was.
    fn loss(&self) -> Option<Loss> {
        if self.process.as_ref().is_some_and(|process| process.has_ended()) {
            return Some(Loss::ProcessEnded);
        }
        let Remote { progress, number, node } = self.remote.as_ref()?;
        Some(match progress.lost(*number)? {
            Lost::Reset => Loss::ProcessEnded,
            Lost::Unreachable => Loss::Unreachable { node: *node },
        })
    }
}

/// The reason in a control block: the event in the upper half, the rank that it concerns (by its world number) in the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Lost(usize),
    TimedOut(usize),
    Disagreed(usize),
    Interrupted,
    /// It launched a graph beside a call.
    Overlapped,
    /// Its program, or that of this rank, called abort.
    Aborted(usize),
    Other,
}

impl Fault {
    fn of(error: &FabricError) -> Self {
        match error {
            FabricError::PeerLost { .. } => error.lost_world_rank().map_or(Self::Other, Self::Lost),
            FabricError::Timeout { missing, members, .. } => {
                Self::TimedOut(missing.first().map_or(0, |&rank| members.world_rank(rank)))
            }
            FabricError::Mismatch { peer, members, .. } => Self::Disagreed(members.world_rank(*peer)),
            FabricError::Interrupted { .. } => Self::Interrupted,
            FabricError::Overlap { .. } => Self::Overlapped,
            FabricError::AbortCalled { by, members, .. } => Self::Aborted(members.world_rank(*by)),
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
            Self::Aborted(rank) => (6, rank),
            Self::Overlapped => (7, 0),
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
            6 => Some(Self::Aborted(rank)),
            7 => Some(Self::Overlapped),
            _ => Some(Self::Other),
        }
    }
}

impl Health {
    pub(crate) fn of_world(rank: usize, peers: Vec<Peer>) -> Self {
        Self {
            rank,
            members: Members::default(),
            peers,
            world: None,
            first: OnceLock::new(),
            answered: AtomicU64::default(),
        }
    }

    /// The health of a world of these ranks of this communicator, of which this rank is one; they are on these nodes.
    pub(crate) fn of_survivors(&self, group: &[usize], nodes: &Nodes) -> Self {
        let rank = group.iter().position(|&member| member == self.rank).expect("it is one of them");
        let peer = |(rank, &member): (usize, &usize)| {
            let peer = self.peers[member].clone();
            let remote = peer.remote.map(|remote| Remote { node: nodes.of(rank), ..remote });
            Peer { remote, ..peer }
        };
        Self::of_world(rank, group.iter().enumerate().map(peer).collect())
    }

    /// The health of a group that consists of these ranks of `parent`; this rank is `rank` of them.
    pub(crate) fn of_group(rank: usize, parent: &Arc<Endpoint>, group: &[usize]) -> Self {
        let parents = &parent.health;
        Self {
            rank,
            members: Members::of_group(group.iter().map(|&member| parents.members.world_rank(member))),
            peers: group.iter().map(|&member| parents.peers[member].clone()).collect(),
            world: Some(parents.world.as_ref().unwrap_or(parent).clone()),
            first: OnceLock::new(),
            answered: AtomicU64::default(),
        }
    }

    /// The processes by their ranks of this communicator, as each process has stated its rank; or the contradiction.
    pub(crate) fn check_places(&self, places: &[(usize, Option<(u32, u64)>)]) -> Result<(), String> {
        for (member, &(rank, id)) in places.iter().enumerate() {
            let Some(peer) = self.peers.get(rank) else {
                return Err(format!(
                    "rank {member} is rank {rank} of its parent, and this one's has {}",
                    self.peers.len()
                ));
            };
            // Processes of other machines have numbers of their own.
            if peer.remote.is_none() && id != peer.id {
                return Err(format!(
                    "rank {member} is rank {rank} of its parent, which is another process of this one's"
                ));
            }
            if let Some(first) = places[..member].iter().position(|&(before, _)| before == rank) {
                return Err(format!("ranks {first} and {member} are both rank {rank} of their parent"));
            }
        }
        Ok(())
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The ranks of this communicator, as the world numbers them.
    pub(crate) fn members(&self) -> &Members {
        &self.members
    }

    /// On how many cores these ranks run.
    pub(crate) fn count_cores(&self) -> usize {
        let cores: BTreeSet<u32> = self.peers.iter().flat_map(|peer| peer.cores.iter().copied()).collect();
        cores.len()
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
        // A message that a rank sent before it ended still counts, so the check looks once more for a rank that seems lost. Crashes
        // come first: ranks that left because of a crash, in another group perhaps, are not to blame.
        let crashed = |rank| self.crash(regions, rank);
        let reported = |rank| self.who_lost(regions, rank).map(|by| Loss::Reported { by });
        for rank in missing() {
            let how = crashed(rank).or_else(|| reported(rank));
            if let Some(how) = how.filter(|_| missing().contains(&rank)) {
                return Err(self.lost(rank, operation, how));
            }
        }
        // An abort ends every wait, whichever rank the wait is for.
        if let Some(error) = self.abort_called(regions, operation).filter(|_| !missing().is_empty()) {
            return Err(error);
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
        match missing() {
            none if none.is_empty() => Ok(()),
            missing => Err(self.timed_out(operation, waited, missing)),
        }
    }

    /// Reports what this rank waits for, and what its peers do, if the process got SIGUSR1 since the last report.
    pub(crate) fn answer(
        &self,
        regions: &Regions,
        operation: Signature,
        missing: &impl Fn() -> Vec<usize>,
        waited: Duration,
    ) {
        regions.control(self.rank).wait.0.note(operation, waited);
        #[cfg(not(loom))]
        {
            let asked = antiphon_device::host::signal::count_of_sigusr1();
            if self.answered.load(Ordering::Relaxed) == asked {
                return;
            }
            self.answered.store(asked, Ordering::Relaxed);
            let here = antiphon_device::host::process::pid_namespace();
            let pid = |rank: usize| {
                let id: Option<(u32, u64)> = self.peers[rank].id;
                id.and_then(|(pid, namespace)| (namespace == here && here != 0).then_some(pid))
            };
            let witness = Witness { rank: self.rank, members: &self.members, regions, pid: &pid };
            eprint!("{}", witness.tell(operation, &missing(), waited));
        }
        #[cfg(loom)]
        let _ = (missing, &self.answered);
    }

    /// The error if this rank or a peer has called abort.
    fn abort_called(&self, regions: &Regions, operation: Signature) -> Option<FabricError> {
        (0..self.peers.len()).find_map(|rank| match fault_of(regions, rank)? {
            Fault::Aborted(by) => Some(self.aborted_by(Some(operation), self.members.rank(by)?)),
            _ => None,
        })
    }

    fn aborted_by(&self, operation: Option<Signature>, by: usize) -> FabricError {
        FabricError::AbortCalled { operation, by, members: self.members.clone() }
    }

    /// The error of this rank when its program calls abort.
    pub(crate) fn aborted_here(&self) -> FabricError {
        self.aborted_by(None, self.rank)
    }

    /// The error when the deadline has passed.
    pub(crate) fn timed_out(
        &self,
        operation: Signature,
        waited: Duration,
        missing: Vec<usize>,
    ) -> FabricError {
        let (world_size, members) = (self.peers.len(), self.members.clone());
        FabricError::Timeout { operation, waited, missing, world_size, members }
    }

    /// The error when a peer calls something else.
    pub(crate) fn disagreement(&self, mine: Signature, peer: usize, theirs: Signature) -> FabricError {
        FabricError::Mismatch { rank: self.rank, mine, peer, theirs, members: self.members.clone() }
    }

    /// The error when two calls of this rank ran at once.
    pub(crate) fn overlap(&self, operation: Signature) -> FabricError {
        FabricError::Overlap { operation, rank: self.rank, members: self.members.clone() }
    }

    /// The error when a peer has given up.
    pub(crate) fn aborted(&self, operation: Signature, by: usize, reason: String) -> FabricError {
        FabricError::Aborted { operation, by, reason, members: self.members.clone() }
    }

    fn lost(&self, rank: usize, operation: Signature, how: Loss) -> FabricError {
        FabricError::PeerLost { rank, operation, how, members: self.members.clone() }
    }

    /// Whether nothing will ever come from a rank again. (A rank that a broken process made up is not gone.)
    pub(crate) fn is_gone(&self, regions: &Regions, rank: usize) -> bool {
        rank < self.peers.len()
            && (regions.control(rank).has_departed() || self.loss(regions, rank).is_some())
    }

    /// Whether the process of a rank is lost. What it had said to this rank before is there.
    pub(crate) fn has_lost(&self, rank: usize) -> bool {
        self.peers[rank].loss().is_some()
    }

    /// How the process of a rank was lost, if it was. One that has said that it leaves is waited for until that counts: what it sent before
    /// may still be under way.
    fn loss(&self, regions: &Regions, rank: usize) -> Option<Loss> {
        self.peers[rank].loss().filter(|_| !regions.is_leaving(rank))
    }

    /// How a rank was lost, if that was without a word of it.
    fn crash(&self, regions: &Regions, rank: usize) -> Option<Loss> {
        let silent = || !regions.control(rank).has_departed() && self.reason(regions, rank).is_none();
        // It may have said something just before it ended.
        silent().then(|| self.loss(regions, rank)).flatten().filter(|_| silent())
    }

    /// The rank that has noticed that a rank is lost, which may know more.
    fn who_lost(&self, regions: &Regions, rank: usize) -> Option<usize> {
        let lost = Some(Fault::Lost(self.members.world_rank(rank)));
        let peers = (0..self.peers.len()).filter(|&by| by != self.rank && by != rank);
        peers.into_iter().find(|&by| fault_of(regions, by) == lost)
    }

    /// Why a rank gave up, if it said so here, or, of a rank that is gone, elsewhere.
    fn reason(&self, regions: &Regions, rank: usize) -> Option<Fault> {
        let elsewhere = || {
            let (health, regions) = self.world(regions);
            let rank = self.members.world_rank(rank);
            let control = regions.control(rank);
            let words = [&control.fault.0, &control.fault_in_group.0];
            let reasons = words.into_iter().filter_map(|word| Fault::decode(word.load(Ordering::Acquire)));
            // A rank that was lost to a group may be there otherwise.
            let still =
                |fault: &Fault| !matches!(fault, Fault::Lost(lost) if !health.is_gone(regions, *lost));
            reasons.into_iter().find(still)
        };
        fault_of(regions, rank).or_else(|| self.is_gone(regions, rank).then(elsewhere).flatten())
    }

    /// The world that this communicator is, or is a group of.
    fn world<'a>(&'a self, regions: &'a Regions) -> (&'a Self, &'a Regions) {
        self.world.as_ref().map_or((self, regions), |world| (&world.health, &world.regions))
    }

    /// The error of a rank that has all it waited for, when a rank gave up before.
    #[cold]
    pub(crate) fn given_up(&self, regions: &Regions, operation: Signature) -> FabricError {
        // Every rank writes its reason before the mark; a broken process may have written the mark alone.
        let unknown = || self.aborted(operation, usize::from(self.rank == 0), "gave up".to_owned());
        self.find_given_up(regions, operation).unwrap_or_else(unknown)
    }

    /// Why a peer gave up, if one did.
    #[inline]
    pub(crate) fn find_given_up(&self, regions: &Regions, operation: Signature) -> Option<FabricError> {
        (0..self.peers.len()).find_map(|peer| self.given_up_by(regions, operation, peer))
    }

    /// The error of a rank whose message a peer will not take, because the peer gave up.
    pub(crate) fn given_up_by(
        &self,
        regions: &Regions,
        operation: Signature,
        peer: usize,
    ) -> Option<FabricError> {
        let fault = fault_of(regions, peer).filter(|_| peer != self.rank)?;
        Some(self.explain(operation, peer, fault))
    }

    /// Why nothing more will come from rank `by`, if so. What made it give up goes before its being gone: the cause
    /// spreads. (One that gave up later than what is awaited of it is not asked: that has arrived.)
    fn why_lost(&self, regions: &Regions, operation: Signature, by: usize) -> Option<FabricError> {
        let left = regions.control(by).has_departed();
        let how = if left { Some(Loss::Left) } else { self.loss(regions, by) };
        match self.reason(regions, by) {
            None => how.map(|how| self.lost(by, operation, how)),
            // Our own deadline will name all ranks that this rank misses.
            Some(Fault::TimedOut(rank)) if rank != self.members.world_rank(self.rank) && how.is_none() => {
                None
            }
            Some(fault) => Some(self.explain(operation, by, fault)),
        }
    }

    /// The error that a peer's reason to give up is for this rank.
    fn explain(&self, operation: Signature, by: usize, fault: Fault) -> FabricError {
        let own = self.members.world_rank(self.rank);
        // Members are named in both ways, as everywhere.
        let name = |world_rank| match self.members.rank(world_rank) {
            Some(rank) => self.members.name(rank),
            None => format!("rank {world_rank} of the world"),
        };
        let reason = match fault {
            Fault::Lost(world_rank) if world_rank != own => {
                return match self.members.rank(world_rank) {
                    Some(rank) => self.lost(rank, operation, Loss::Reported { by }),
                    None => self.lost(by, operation, Loss::Followed { world_rank }),
                };
            }
            Fault::Lost(_) => "took this rank for lost".to_owned(),
            Fault::TimedOut(rank) => format!("gave up waiting for {}", name(rank)),
            Fault::Disagreed(rank) => format!("disagreed with {} about what to do", name(rank)),
            Fault::Interrupted => "was interrupted".to_owned(),
            Fault::Overlapped => "launched a graph at the same time as another call".to_owned(),
            Fault::Aborted(world_rank) => match self.members.rank(world_rank) {
                Some(by) => return self.aborted_by(Some(operation), by),
                None => format!("left when {} had called abort", name(world_rank)),
            },
            Fault::Other => "failed".to_owned(),
        };
        self.aborted(operation, by, reason)
    }

    /// Makes this communicator unusable, and leaves the reason for all of this node to see; `tell` gets the word that says it to others. Only
    /// the first error counts: others are its consequences. A thread that fails beside the first one returns once the reason is told.
    pub(super) fn report(&self, regions: &Regions, error: &FabricError, tell: impl FnOnce(u64)) {
        self.first.get_or_init(|| {
            // A rank that gives up because a peer gave up passes the peer's reason on.
            let fault = match error {
                FabricError::Aborted { by, .. } => self.reason(regions, *by),
                _ => None,
            };
            let fault = fault.unwrap_or(Fault::of(error));
            regions.control(self.rank).say_fault(fault.encode());
            self.tell_world(fault);
            self.wake_all(regions);
            tell(fault.encode());
            Arc::new(error.clone())
        });
    }

    /// Leaves the reason why this rank gave up in a group, for ranks that will wait for it elsewhere. A rank that is lost
    /// explains more than what comes after it.
    fn tell_world(&self, fault: Fault) {
        let Some(world) = &self.world else { return };
        let control = world.regions.control(world.rank);
        let told = Fault::decode(control.fault_in_group.0.load(Ordering::Acquire));
        if !matches!(told, Some(Fault::Lost(lost)) if world.health.is_gone(&world.regions, lost)) {
            control.say_fault_in_group(fault.encode());
            world.tell(Word::FaultInGroup(fault.encode()));
        }
    }

    /// Says to this node that this rank is gone for good.
    pub(super) fn depart(&self, regions: &Regions) {
        regions.control(self.rank).depart();
        self.wake_all(regions);
    }

    pub(crate) fn wake_all(&self, regions: &Regions) {
        for rank in 0..self.peers.len() {
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
    fn a_fault_names_the_rank_of_the_world() {
        let members = Members::of_group([20, 21, 22, 23]);
        let operation = Signature::new(Operation::Barrier);
        let lost = FabricError::PeerLost { rank: 3, operation, how: Loss::Left, members: members.clone() };
        let timeout = |missing: &[usize]| {
            let waited = Duration::ZERO;
            let (missing, members) = (missing.to_vec(), members.clone());
            FabricError::Timeout { operation, waited, missing, world_size: 9, members }
        };
        let members = members.clone();
        let mismatch =
            FabricError::Mismatch { rank: 1, mine: operation, peer: 2, theirs: operation, members };
        assert_eq!(Fault::of(&lost), Fault::Lost(23));
        assert_eq!(Fault::of(&timeout(&[2, 3])), Fault::TimedOut(22));
        assert_eq!(Fault::of(&mismatch), Fault::Disagreed(22));
        assert_eq!(Fault::of(&FabricError::invalid("a panic")), Fault::Other);
    }

    proptest! {
        #[test]
        fn faults_survive_the_word(kind in 0usize..6, rank in 0..=u32::MAX as usize) {
            let about_a_rank = [Fault::Lost(rank), Fault::TimedOut(rank), Fault::Disagreed(rank), Fault::Aborted(rank)];
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
