//! The communicator: a rank's end of a world.

mod background;
mod builder;
mod descriptors;
mod extension;
mod messages;
mod monitor;
mod objects;
mod queue;
pub(crate) mod shrink;
mod split;

use std::{
    cell::{OnceCell, RefCell, RefMut},
    sync::Arc,
    time::Duration,
};

use crate::{
    FabricError, Members, Nodes, Operation, Signature, Written,
    endpoint::{Endpoint, Presence},
    signal::rounds::Rounds,
    symmetric::Allocator,
};

pub use background::Pending;
pub use builder::Builder;
pub use messages::Messenger;
pub use monitor::Monitor;
pub use queue::Queue;

/// A rank's end of a world of ranks that act together.
///
/// All ranks must make the same calls in the same order; a rank that calls something else gives every rank a
/// [`FabricError::Mismatch`] that shows both sides. A call returns when this rank's part is done. No call waits longer
/// than [`timeout`](Self::timeout) without news.
///
/// A communicator is one ordered stream of calls, so it can move between threads but not be used by two at once
/// (`Send`, not `Sync`). Dropping it notifies the peers: those that still need this rank get
/// [`PeerLost`](FabricError::PeerLost), instead of waiting.
///
/// The collectives themselves are in the crate `antiphon-collectives`; here is what they are made of.
///
/// ```
/// use antiphon_fabric::LocalWorld;
///
/// let names = LocalWorld::run(3, |comm| {
///     comm.barrier()?;
///     comm.exchange_objects(&format!("rank {}", comm.rank()))
/// });
/// assert_eq!(names[2].as_ref().unwrap(), &["rank 0", "rank 1", "rank 2"]);
/// ```
pub struct Communicator {
    endpoint: Arc<Endpoint>,
    messenger: Messenger,
    rounds: RefCell<Rounds>,
    lane: usize,
    allocator: RefCell<Allocator>,
    background: OnceCell<background::Worker>,
    extensions: extension::Extensions,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Endpoint { rank, world_size, .. }, timeout) = (&*self.endpoint, self.timeout());
        write!(f, "Communicator {{ rank: {rank}, world_size: {world_size}, timeout: {timeout:?} }}")
    }
}

impl Communicator {
    /// Begins to make a communicator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The communicator that torchrun's (or `antiphon run`'s) environment describes; see
    /// [`Environment`](crate::rendezvous::Environment).
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`] that names the variable that is missing, or the ranks that are.
    pub fn from_env() -> Result<Self, FabricError> {
        Self::builder().from_env()
    }

    /// The communicator for what its ranks share.
    fn new(endpoint: Endpoint) -> Self {
        Self::on_lane(Messenger::new(Presence::new(endpoint)), 0)
    }

    fn on_lane(messenger: Messenger, lane: usize) -> Self {
        let endpoint = messenger.presence.0.clone();
        let allocator = Allocator::new(endpoint.regions.layout().arena_bytes);
        Self {
            rounds: RefCell::new(Rounds::new(messenger.messages.clone(), lane)),
            lane,
            allocator: RefCell::new(allocator),
            background: OnceCell::new(),
            extensions: extension::Extensions::default(),
            messenger,
            endpoint,
        }
    }

    /// This rank, from 0.
    #[inline]
    pub fn rank(&self) -> usize {
        self.endpoint.rank
    }

    /// How many ranks there are.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.endpoint.world_size
    }

    /// How long a call waits for a peer before it fails.
    pub fn timeout(&self) -> Duration {
        self.endpoint.timeout()
    }

    /// Changes how long a call waits for a peer before it fails, also for waits under way; see [`Monitor::set_timeout`], which
    /// any thread may call.
    pub fn set_timeout(&self, timeout: Duration) {
        self.endpoint.set_timeout(timeout);
    }

    /// The rounds that collectives are made of: for crates that implement them.
    ///
    /// # Errors
    /// [`FabricError::Failed`] when an earlier call failed.
    ///
    /// # Panics
    /// When the rounds of an unfinished call are still borrowed.
    ///
    /// # Safety
    /// Equal signatures mean payloads of one layout on all ranks. And the rounds
    /// stay where they are: they are not exchanged for those of another communicator.
    #[inline]
    pub unsafe fn rounds(&self) -> Result<RefMut<'_, Rounds>, FabricError> {
        self.own_rounds()
    }

    #[inline]
    pub(crate) fn own_rounds(&self) -> Result<RefMut<'_, Rounds>, FabricError> {
        let rounds = self.rounds.borrow_mut();
        rounds.check_usable()?;
        Ok(rounds)
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// [`PeerLost`](FabricError::PeerLost), [`Timeout`](FabricError::Timeout),
    /// [`Mismatch`](FabricError::Mismatch), [`Aborted`](FabricError::Aborted), [`Failed`](FabricError::Failed).
    pub fn barrier(&self) -> Result<(), FabricError> {
        self.own_rounds()?.exchange(&Signature::new(Operation::Barrier), Written::nothing(0))
    }

    /// Does `work`, which is part of a call of this signature: errors name this call instead of its parts.
    pub fn as_part_of<T>(&self, call: &Signature, work: impl FnOnce() -> T) -> T {
        self.rounds.borrow_mut().call = Some(*call);
        let done = work();
        self.rounds.borrow_mut().call = None;
        done
    }

    /// Checks that a rank exists.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] with the numbers; `role` says what the rank was meant to be.
    pub fn check_rank(&self, rank: usize, role: &str) -> Result<(), FabricError> {
        self.endpoint.check_rank(rank, role)
    }

    /// A value that lives as long as this communicator: made by `init` at the first call for its type, found again
    /// later. Crates above keep their tables and workspaces here rather than in globals.
    ///
    /// # Errors
    /// Whatever `init` returns.
    pub fn extension<T: Send + 'static, E>(&self, init: impl FnOnce(&Self) -> Result<T, E>) -> Result<&T, E> {
        self.extensions.get_or_try_init(|| init(self))
    }

    /// The ranks of this communicator, as the world numbers them.
    pub fn members(&self) -> &Members {
        self.endpoint.health.members()
    }

    /// The nodes of the ranks: which of them share a memory.
    pub fn nodes(&self) -> Nodes {
        self.endpoint.nodes()
    }

    /// Fails unless all ranks share one memory, which `what` needs.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] that names the ranks of other nodes.
    pub fn check_one_node(&self, what: &str) -> Result<(), FabricError> {
        self.endpoint.check_one_node(what)
    }

    /// The nodes of the ranks, if there are several.
    #[inline]
    pub fn several_nodes(&self) -> Option<&Nodes> {
        self.endpoint.links.as_ref().map(|links| links.nodes())
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(crate) fn allocator(&self) -> &RefCell<Allocator> {
        &self.allocator
    }

    /// Buffers are allocated in the order of the caller's calls; the background has an order of its own.
    pub(crate) fn check_foreground(&self, what: &str) -> Result<(), FabricError> {
        if self.lane == 0 {
            return Ok(());
        }
        Err(FabricError::invalid(format!(
            "{what} must be called on the communicator itself, not in the background"
        )))
    }
}
