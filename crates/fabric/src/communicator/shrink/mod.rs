//! Continuing without the ranks that were lost.
//!
//! The survivors [agree](agreement) on who they are, in the memory that they share on each node, where every rank has words of its own,
//! and by the messages of the communicator between nodes: neither needs rank 0, or whatever brought the ranks together once. On each node
//! the lowest of them makes new memory and sends it to the others. Between nodes the connections stay as they are.

mod agreement;
#[cfg(all(test, not(loom)))]
mod model;
#[cfg(test)]
mod tests;

use std::{
    cell::RefCell,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use antiphon_device::{
    host::{memory::SharedMemory, process::network_namespace},
    sync::Ordering,
};

use self::agreement::{Agreement, Next, Sight};
pub(crate) use self::agreement::{Said, Step, View};
use super::{
    Communicator,
    descriptors::{Mailbox, Post, open, unavailable},
};
use crate::{FabricError, endpoint::Endpoint, layout::Layout, notice::Notice, rendezvous::random_word};

impl Communicator {
    /// A communicator of the ranks that are left, when ranks of this one were lost (or it was [aborted](Self::abort)):
    /// without a new meeting. It is a world of its own, with memory of its own; its ranks are in the order in which they
    /// were, and numbered anew. Ranks stay on their nodes.
    ///
    /// All ranks that live and have not dropped their communicator call it together, after whatever made them give up; a call
    /// that others still wait in has to be [aborted](Self::abort) first. All get the same ranks, also if more of them are
    /// lost meanwhile. This communicator stays what it was.
    ///
    /// Where a network is cut, ranks on both sides live and take each other for lost: each side gets a communicator of its own. If two
    /// nodes have lost each other and a third one has not, it goes with one of them, or with neither.
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
        let said = notice(endpoint, endpoint.rank).said();
        if matches!(said.state, Some((Step::GaveUp, _))) {
            return Err(gave_up(endpoint, endpoint.rank));
        }
        let seen = Seen(endpoint);
        let lost = (0..endpoint.world_size).map(|rank| seen.says_lost(endpoint.rank, rank)).collect();
        let agreement = Agreement::new(endpoint.rank, lost, said.decided);
        let view = agreement.view();
        let shrunk = Survivor::new(endpoint, agreement).and_then(Survivor::run);
        shrunk.inspect_err(|_| {
            say(endpoint, Said { state: Some((Step::GaveUp, view)), decided: said.decided }, None);
        })
    }
}

fn notice(endpoint: &Endpoint, rank: usize) -> &Notice {
    &endpoint.regions.control(rank).notice.0
}

/// The mailbox of a rank in a view. What was sent there in another one is not taken for it.
fn mailbox(endpoint: &Endpoint, rank: usize, view: View) -> Mailbox {
    let [name, password, network] = notice(endpoint, rank).mailbox();
    Mailbox { name: mailbox_name(name), password: format!("{password:016x}-{:016x}", view.number()), network }
}

fn mailbox_name(word: u64) -> String {
    format!("antiphon-{word:016x}")
}

/// Says to all ranks what this one says now, and which rank it has lost, if it has.
fn say(endpoint: &Endpoint, said: Said, lost: Option<usize>) {
    if let Some(lost) = lost {
        endpoint.regions.loss(endpoint.rank, lost).store(1, Ordering::Release);
    }
    notice(endpoint, endpoint.rank).say(said);
    endpoint.health.wake_all(&endpoint.regions);
    if let Some(links) = &endpoint.links {
        links.tell_notice(said, lost);
    }
}

fn gave_up(endpoint: &Endpoint, by: usize) -> FabricError {
    FabricError::ShrinkAborted { by, members: endpoint.health.members().clone() }
}

/// What a rank sees of the others.
struct Seen<'a>(&'a Endpoint);

impl Sight for Seen<'_> {
    fn is_gone(&self, rank: usize) -> bool {
        self.0.regions.has_left(rank) || self.0.health.has_lost(rank)
    }

    fn said(&self, rank: usize) -> Said {
        notice(self.0, rank).said()
    }

    fn says_lost(&self, rank: usize, lost: usize) -> bool {
        self.0.regions.loss(rank, lost).load(Ordering::Acquire) != 0
    }
}

/// A rank on its way to a smaller communicator.
struct Survivor<'a> {
    endpoint: &'a Endpoint,
    start: Instant,
    post: Post,
    agreement: Agreement,
    /// The memory of the view, while the ranks of this node share it.
    sharing: Option<Sharing>,
    /// The communicators of the views in which this rank is ready or was.
    made: Vec<(View, Communicator)>,
}

/// Memory on its way to the ranks of a node.
struct Sharing {
    view: View,
    layout: Layout,
    /// The memory, if this rank is the leader.
    memory: Option<(SharedMemory, OwnedFd)>,
}

impl<'a> Survivor<'a> {
    fn new(endpoint: &'a Endpoint, agreement: Agreement) -> Result<Self, FabricError> {
        let words = [random_word(), random_word(), network_namespace()];
        notice(endpoint, endpoint.rank).set_mailbox(words);
        let socket = open(&mailbox_name(words[0])).map_err(|e| unavailable(&e))?;
        let post = Post::new(endpoint.rank, socket);
        say(endpoint, agreement.said(), None);
        Ok(Self { endpoint, start: Instant::now(), post, agreement, sharing: None, made: Vec::new() })
    }

    /// Waits until the ranks that are left have agreed, or one gives up.
    fn run(self) -> Result<Communicator, FabricError> {
        let endpoint = self.endpoint;
        let Endpoint { rank, world_size, regions, patience, health, .. } = endpoint;
        let this = RefCell::new(self);
        let check = |_: Duration| {
            endpoint.check_interrupt(None)?;
            let this = this.borrow();
            let waited = this.start.elapsed();
            if waited < endpoint.timeout() {
                return Ok(());
            }
            let (missing, members) = (this.agreement.missing(&Seen(endpoint)), health.members().clone());
            Err(FabricError::ShrinkTimeout { waited, missing, world_size: *world_size, members })
        };
        let bell = &regions.control(*rank).bells[0].0;
        endpoint.wait_for(bell, *patience, || this.borrow_mut().look().transpose(), check)?
    }

    /// Goes as far as is possible now.
    fn look(&mut self) -> Result<Option<Communicator>, FabricError> {
        let (endpoint, seen) = (self.endpoint, Seen(self.endpoint));
        loop {
            match self.agreement.look(&seen, |said, lost| say(endpoint, said, lost)) {
                Next::Decided(view) => {
                    let at = self.made.iter().position(|(made, _)| *made == view);
                    return Ok(Some(self.made.swap_remove(at.expect("it was ready in this view")).1));
                }
                Next::GaveUp { by } => return Err(gave_up(endpoint, by)),
                Next::Waits if self.agreement.is_ready() => return Ok(None),
                Next::Waits => {}
            }
            let Some(memory) = self.share_memory()? else { return Ok(None) };
            let made = self.communicator(memory);
            self.made.push((self.agreement.view(), made));
            self.agreement.get_ready(|said, lost| say(endpoint, said, lost));
        }
    }

    /// Memory that the ranks of the view share on this node, made by the first of them; none as long as it has not come to all that
    /// get it from this rank, or to this one.
    fn share_memory(&mut self) -> Result<Option<(SharedMemory, Layout)>, FabricError> {
        let (endpoint, view, nodes) = (self.endpoint, self.agreement.view(), self.endpoint.nodes());
        let is_mate = |&rank: &usize| nodes.share_memory(rank, endpoint.rank);
        let mates: Vec<usize> = self.agreement.ranks().filter(is_mate).collect();
        if !mates.iter().all(|&rank| self.agreement.has_arrived(&Seen(endpoint), rank)) {
            return Ok(None);
        }
        let leader = mates[0];
        let leads = leader == endpoint.rank;
        if self.sharing.as_ref().is_none_or(|sharing| sharing.view != view) {
            let layout = Layout::new(self.agreement.ranks().count(), endpoint.regions.layout().arena_bytes);
            let layout = layout.expect("fewer ranks need no more");
            let memory = leads.then(|| SharedMemory::create(layout.total())).transpose()?;
            let mailboxes = (0..endpoint.world_size).map(|rank| mailbox(endpoint, rank, view)).collect();
            self.post.address(mailboxes, if leads { &mates[1..] } else { &[] });
            self.post.check_networks(mates.iter().copied(), endpoint.health.members())?;
            self.sharing = Some(Sharing { view, layout, memory });
        }
        let Some(Sharing { layout, memory, .. }) = &self.sharing else { return Ok(None) };
        let (layout, from) = (*layout, if leads { &[][..] } else { &mates[..1] });
        let descriptor = memory.as_ref().map(|(_, descriptor)| descriptor.as_fd());
        self.post.advance(descriptor).map_err(|e| unavailable(&e))?;
        if !self.post.missing(from).is_empty() {
            return Ok(None);
        }
        let made = self.sharing.take().and_then(|sharing| sharing.memory);
        Ok(Some(match made {
            Some((memory, _)) => (memory, layout),
            None => {
                let arrived = self.post.take(leader).expect("it was delivered");
                (SharedMemory::from_fd(arrived.map_err(|e| unavailable(&e))?, layout.total())?, layout)
            }
        }))
    }

    /// The communicator of the view. From now on it takes messages.
    fn communicator(&self, (memory, layout): (SharedMemory, Layout)) -> Communicator {
        let endpoint = self.endpoint;
        let group: Vec<usize> = self.agreement.ranks().collect();
        let nodes = endpoint.nodes().of_group(&group);
        let rank = group.iter().position(|&rank| rank == endpoint.rank).expect("a rank is in its view");
        let number = |shrunk| self.agreement.view().communicator(shrunk);
        let (regions, links) = endpoint.regions_of(memory, layout, (rank, &group, &nodes), number);
        Communicator::new(Endpoint::new(
            endpoint.health.of_survivors(&group, &nodes),
            regions,
            endpoint.timeout(),
            endpoint.interrupt.clone(),
            links,
        ))
    }
}
