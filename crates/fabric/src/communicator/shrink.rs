//! Continuing without the ranks that were lost.
//!
//! The survivors meet in the memory that they already share. Each has a word there, in its control block, that states its
//! progress. The survivors make one attempt after the other, and all make the same number of attempts:
//!
//! 1. A rank *arrives*, and waits until each of the others has arrived or is gone. The ranks that arrived take part. All ranks
//!    find the same members: a rank that is gone does not arrive any more, and an arrival stays written down.
//! 2. The lowest of these ranks makes new memory and sends it to the others. A rank that has received the memory is *ready*.
//! 3. The attempt succeeds if all of these ranks are ready. It fails if one of them is gone and was not ready. This is final, and
//!    all other ranks find the same: the next attempt begins without that rank.
//!
//! A rank that gives up earlier records this for good, and the others give up too.

use std::{
    cell::RefCell,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use antiphon_device::host::{memory::SharedMemory, process::network_namespace, wait::wait_for};

use super::{
    Communicator,
    descriptors::{Mailbox, Post, open, unavailable},
};
use crate::{
    FabricError,
    endpoint::Endpoint,
    layout::{Layout, Regions},
    notice::{Notice, Progress, Step},
    rendezvous::random_word,
};

impl Communicator {
    /// A communicator of the ranks that are left, when ranks of this one were lost (or it was [aborted](Self::abort)):
    /// without a new meeting. It is a world of its own, with memory of its own; its ranks are in the order in which they
    /// were, and numbered anew.
    ///
    /// All ranks that live and have not dropped their communicator call it together, after whatever made them give up; a call
    /// that others still wait in has to be [aborted](Self::abort) first. All get the same ranks, also if more of them are
    /// lost meanwhile. This communicator stays what it was.
    ///
    /// ```
    /// use antiphon_fabric::{FabricError, LocalWorld};
    ///
    /// LocalWorld::run(3, |comm| {
    ///     if comm.rank() == 1 {
    ///         return Ok::<_, FabricError>(()); // drops its communicator
    ///     }
    ///     assert!(matches!(comm.barrier(), Err(FabricError::PeerLost { rank: 1, .. })));
    ///     let comm = comm.shrink()?;
    ///     assert_eq!(comm.world_size(), 2);
    ///     comm.barrier()
    /// });
    /// ```
    ///
    /// # Errors
    /// [`ShrinkTimeout`](FabricError::ShrinkTimeout) when a rank that lives does not come within the timeout;
    /// [`FabricError::Device`] when this rank cannot have the memory, [`FabricError::InvalidArgument`] in the background and
    /// for what else stands in this rank's way, [`Interrupted`](FabricError::Interrupted). After each of these no rank can
    /// shrink this communicator any more: the others get [`ShrinkAborted`](FabricError::ShrinkAborted).
    pub fn shrink(&self) -> Result<Self, FabricError> {
        self.check_foreground("shrink")?;
        let endpoint = self.endpoint();
        endpoint.check_carried("shrink")?;
        let attempts = match notice(endpoint, endpoint.rank).progress() {
            Some(Progress { step: Step::GaveUp, .. }) => return Err(gave_up(endpoint, endpoint.rank)),
            Some(Progress { attempt, .. }) => attempt + 1..,
            None => 1..,
        };
        let shrunk = Survivor::new(endpoint).and_then(|survivor| {
            for attempt in attempts {
                if let Some(comm) = survivor.attempt(attempt)? {
                    return Ok(comm);
                }
            }
            unreachable!("there is no last number")
        });
        shrunk.inspect_err(|_| tell(endpoint, Progress { attempt: 0, step: Step::GaveUp }))
    }
}

fn notice(endpoint: &Endpoint, rank: usize) -> &Notice {
    &endpoint.regions.control(rank).notice.0
}

/// The mailbox of a rank in an attempt. What was sent there in an earlier one is not taken for it.
fn mailbox(endpoint: &Endpoint, rank: usize, attempt: u64) -> Mailbox {
    let [name, password, network] = notice(endpoint, rank).mailbox();
    Mailbox { name: format!("antiphon-{name:016x}"), password: format!("{password:016x}-{attempt}"), network }
}

/// Gives this rank a mailbox of a random name and password.
fn make_mailbox(endpoint: &Endpoint) {
    let words = [random_word(), random_word(), network_namespace()];
    notice(endpoint, endpoint.rank).set_mailbox(words);
}

fn tell(endpoint: &Endpoint, progress: Progress) {
    notice(endpoint, endpoint.rank).tell(progress);
    endpoint.health.wake_all(&endpoint.regions);
}

fn gave_up(endpoint: &Endpoint, by: usize) -> FabricError {
    FabricError::ShrinkAborted { by, members: endpoint.health.members().clone() }
}

/// A rank on its way to a smaller communicator.
struct Survivor<'a> {
    endpoint: &'a Endpoint,
    start: Instant,
    post: RefCell<Post>,
}

impl<'a> Survivor<'a> {
    fn new(endpoint: &'a Endpoint) -> Result<Self, FabricError> {
        make_mailbox(endpoint);
        let socket = open(&mailbox(endpoint, endpoint.rank, 0).name).map_err(|e| unavailable(&e))?;
        let post = RefCell::new(Post::new(endpoint.rank, socket));
        Ok(Self { endpoint, start: Instant::now(), post })
    }

    /// The communicator, unless a rank is lost in the attempt.
    fn attempt(&self, attempt: u64) -> Result<Option<Communicator>, FabricError> {
        let endpoint = self.endpoint;
        tell(endpoint, Progress { attempt, step: Step::Arrived });
        let group = self.await_arrivals(attempt)?;
        let Some(regions) = self.share_memory(attempt, &group)? else { return Ok(None) };
        let comm = Communicator::new(Endpoint::new(
            endpoint.health.of_survivors(&group),
            regions,
            endpoint.timeout(),
            endpoint.interrupt.clone(),
            None,
        ));
        tell(endpoint, Progress { attempt, step: Step::Ready });
        let unready = || group.iter().copied().filter(|&rank| !self.is_ready(rank, attempt)).collect();
        let succeeded = self.wait(unready, || {
            let unready: Vec<usize> = unready();
            Ok(if unready.is_empty() {
                Some(true)
            } else {
                self.is_hopeless(&unready, attempt).then_some(false)
            })
        })?;
        Ok(succeeded.then_some(comm))
    }

    /// Waits until every rank has arrived or is gone; returns those that have arrived.
    fn await_arrivals(&self, attempt: u64) -> Result<Vec<usize>, FabricError> {
        let ranks = 0..self.endpoint.world_size;
        let awaited = || {
            let is_awaited = |&rank: &usize| !self.has_arrived(rank, attempt) && !self.is_out(rank, attempt);
            ranks.clone().filter(is_awaited).collect::<Vec<_>>()
        };
        self.wait(awaited, || Ok(awaited().is_empty().then_some(())))?;
        Ok(ranks.clone().filter(|&rank| self.has_arrived(rank, attempt)).collect())
    }

    /// Memory that the group shares, made by the first of it; none if the attempt is lost.
    fn share_memory(&self, attempt: u64, group: &[usize]) -> Result<Option<Regions>, FabricError> {
        let (endpoint, leader) = (self.endpoint, group[0]);
        let leads = leader == endpoint.rank;
        let layout = Layout::new(group.len(), endpoint.regions.layout().arena_bytes);
        let layout = layout.expect("fewer ranks need no more");
        let made = leads.then(|| SharedMemory::create(layout.total())).transpose()?;
        let descriptor = made.as_ref().map(|(_, descriptor)| descriptor.as_fd());
        let (to, from) = if leads { (&group[1..], &[][..]) } else { (&[][..], &group[..1]) };
        let mailboxes = (0..endpoint.world_size).map(|rank| mailbox(endpoint, rank, attempt)).collect();
        self.post.borrow_mut().address(mailboxes, to);
        self.post.borrow().check_networks(group.iter().copied(), endpoint.health.members())?;
        let missing = || self.post.borrow().missing(from);
        let delivered = self.wait(missing, || {
            self.post.borrow_mut().advance(descriptor).map_err(|e| unavailable(&e))?;
            let missing = missing();
            Ok(if missing.is_empty() {
                Some(true)
            } else {
                self.is_hopeless(group, attempt).then_some(false)
            })
        })?;
        let memory = match made {
            _ if !delivered => return Ok(None),
            Some((memory, _)) => memory,
            None => {
                let arrived = self.post.borrow_mut().take(leader).expect("it was delivered");
                SharedMemory::from_fd(arrived.map_err(|e| unavailable(&e))?, layout.total())?
            }
        };
        Ok(Some(Regions::new(memory, layout)))
    }

    /// Waits until `ready` returns true, or a rank gives up.
    fn wait<T>(
        &self,
        missing: impl Fn() -> Vec<usize>,
        mut ready: impl FnMut() -> Result<Option<T>, FabricError>,
    ) -> Result<T, FabricError> {
        let Endpoint { rank, world_size, regions, patience, health, .. } = self.endpoint;
        let check = |_: Duration| {
            self.endpoint.check_interrupt(None)?;
            if let Some(by) = (0..*world_size).find(|&rank| self.has_given_up(rank)) {
                return Err(gave_up(self.endpoint, by));
            }
            let waited = self.start.elapsed();
            if waited < self.endpoint.timeout() {
                return Ok(());
            }
            let (missing, members) = (missing(), health.members().clone());
            Err(FabricError::ShrinkTimeout { waited, missing, world_size: *world_size, members })
        };
        let bell = &regions.control(*rank).bells[0].0;
        wait_for(bell, *patience, || ready().transpose(), check)?
    }

    fn progress(&self, rank: usize) -> Option<Progress> {
        notice(self.endpoint, rank).progress()
    }

    fn has_given_up(&self, rank: usize) -> bool {
        self.progress(rank).is_some_and(|progress| progress.step == Step::GaveUp)
    }

    /// Whether a rank takes part in an attempt. One that is ahead did.
    fn has_arrived(&self, rank: usize, attempt: u64) -> bool {
        let arrived = |progress: Progress| progress.step != Step::GaveUp && progress.attempt >= attempt;
        self.progress(rank).is_some_and(arrived)
    }

    /// Whether a rank has the memory of an attempt. One that is ahead counts too: it went on because the attempt has
    /// succeeded, or because of a rank that never will be ready.
    fn is_ready(&self, rank: usize, attempt: u64) -> bool {
        let is_ready = |Progress { attempt: its, step }| match step {
            Step::GaveUp => false,
            Step::Arrived => its > attempt,
            Step::Ready => its >= attempt,
        };
        self.progress(rank).is_some_and(is_ready)
    }

    /// Whether a rank is gone that never arrived in an attempt.
    fn is_out(&self, rank: usize, attempt: u64) -> bool {
        let Endpoint { health, regions, .. } = self.endpoint;
        // It may have come further just before it ended.
        health.is_gone(regions, rank) && !self.has_arrived(rank, attempt) && !self.has_given_up(rank)
    }

    /// Whether one of these ranks is gone and was not ready.
    fn is_hopeless(&self, ranks: &[usize], attempt: u64) -> bool {
        let Endpoint { health, regions, .. } = self.endpoint;
        let is_lost = |&rank: &usize| {
            health.is_gone(regions, rank) && !self.is_ready(rank, attempt) && !self.has_given_up(rank)
        };
        ranks.iter().any(is_lost)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::LocalWorld;

    /// The rank `victim` of 4 arrives with the others and leaves when they all wait for it; the others continue in a second attempt.
    #[test]
    fn a_rank_that_arrives_and_is_lost_is_left_out_in_the_next_attempt() {
        for victim in 0..4 {
            let results = LocalWorld::run_with(4, Duration::from_secs(20), |comm| {
                let endpoint = comm.endpoint();
                if comm.rank() == victim {
                    make_mailbox(endpoint);
                    tell(endpoint, Progress { attempt: 1, step: Step::Arrived });
                    let have_arrived = || (0..4).all(|rank| notice(endpoint, rank).progress().is_some());
                    while !have_arrived() {
                        thread::yield_now();
                    }
                    thread::sleep(Duration::from_millis(20));
                    return Ok(None);
                }
                let left = comm.shrink()?;
                left.barrier()?;
                let attempt = notice(endpoint, comm.rank()).progress().map(|progress| progress.attempt);
                Ok::<_, FabricError>(Some((attempt, left.exchange_objects(&comm.rank())?)))
            });
            let others: Vec<usize> = (0..4).filter(|&rank| rank != victim).collect();
            for &rank in &others {
                assert_eq!(
                    results[rank].clone().unwrap(),
                    Some((Some(2), others.clone())),
                    "without {victim}"
                );
            }
        }
    }

    /// What was decided is not taken back: a rank that leaves when it is ready is in, and missed by the first call.
    #[test]
    fn a_rank_that_is_lost_when_ready_is_lost_to_the_new_communicator() {
        let results = LocalWorld::run_with(3, Duration::from_secs(20), |comm| {
            if comm.rank() == 0 {
                let survivor = Survivor::new(comm.endpoint())?;
                tell(comm.endpoint(), Progress { attempt: 1, step: Step::Arrived });
                let group = survivor.await_arrivals(1)?;
                let _memory = survivor.share_memory(1, &group)?;
                tell(comm.endpoint(), Progress { attempt: 1, step: Step::Ready });
                return Ok(3);
            }
            let three = comm.shrink()?;
            Ok::<_, FabricError>(three.world_size())
        });
        assert!(results.iter().all(|result| *result.as_ref().unwrap() == 3), "{results:?}");
    }

    #[test]
    fn a_rank_that_gives_up_ends_it_for_all_and_for_good() {
        let results = LocalWorld::run_with(2, Duration::from_secs(20), |comm| {
            if comm.rank() == 0 {
                tell(comm.endpoint(), Progress { attempt: 0, step: Step::GaveUp });
                let again = comm.shrink();
                comm.barrier()?; // it stays until the other has seen it
                return again.map(drop);
            }
            let first = comm.shrink();
            comm.barrier()?;
            first.map(drop)
        });
        for result in results {
            assert!(matches!(result, Err(FabricError::ShrinkAborted { by: 0, .. })), "{result:?}");
        }
    }
}
