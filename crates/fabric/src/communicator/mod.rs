//! The communicator: a rank's end of a world.

mod background;
mod builder;
mod descriptors;
mod extension;
mod messages;
mod monitor;
mod objects;
mod queue;
mod shrink;
mod split;

use std::{
    cell::{OnceCell, RefCell, RefMut},
    sync::Arc,
    time::Duration,
};

use antiphon_device::{
    host::wait::Patience,
    sync::{AtomicU64, Ordering},
};

use crate::{
    FabricError, Members, Operation, Signature,
    health::Health,
    layout::Regions,
    signal::{channel::Messages, rounds::Rounds},
    symmetric::Allocator,
};

pub use background::Pending;
pub use builder::Builder;
pub use messages::{Messenger, Source};
pub use monitor::Monitor;
pub use queue::Queue;
pub(crate) use shrink::Notice;

/// What all parts of a communicator share: the caller's thread, the background, buffers that outlive it.
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// In nanoseconds.
    timeout: AtomicU64,
    pub(crate) patience: Patience,
    pub(crate) health: Health,
    pub(crate) regions: Regions,
    pub(crate) messages: Messages,
    pub(crate) interrupt: Option<Interrupt>,
    /// Where others of this machine read what this rank waits for.
    #[cfg(not(loom))]
    pub(crate) entry: crate::job::Entry,
}

/// Whether the program wants to stop waiting; see [`Builder::interrupt`].
pub(crate) type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

impl Shared {
    pub(crate) fn new(
        health: Health,
        regions: Regions,
        timeout: Duration,
        interrupt: Option<Interrupt>,
    ) -> Self {
        let (rank, world_size) = (health.rank(), regions.layout().world_size);
        let patience = Patience::for_ranks(world_size, health.count_cores());
        let messages = Messages::new(world_size);
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
            messages,
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
        if rank < self.world_size {
            return Ok(());
        }
        Err(FabricError::invalid(format!(
            "{role} rank {rank} is not below the world size {}",
            self.world_size
        )))
    }

    /// A rank's look around while it waits: it notes for whom, and says so if it was asked to.
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
pub(crate) struct Presence(pub(crate) Arc<Shared>, u32);

impl Presence {
    pub(crate) fn new(shared: Shared) -> Self {
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
    shared: Arc<Shared>,
    messenger: Messenger,
    rounds: RefCell<Rounds>,
    lane: usize,
    allocator: RefCell<Allocator>,
    background: OnceCell<background::Worker>,
    extensions: extension::Extensions,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Shared { rank, world_size, .. }, timeout) = (&*self.shared, self.timeout());
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
    fn new(shared: Shared) -> Self {
        Self::on_lane(Arc::new(Presence::new(shared)), 0)
    }

    fn on_lane(presence: Arc<Presence>, lane: usize) -> Self {
        let shared = presence.0.clone();
        let allocator = Allocator::new(shared.regions.layout().arena_bytes);
        Self {
            rounds: RefCell::new(Rounds::new(shared.clone(), lane)),
            lane,
            allocator: RefCell::new(allocator),
            background: OnceCell::new(),
            extensions: extension::Extensions::default(),
            messenger: Messenger { presence },
            shared,
        }
    }

    /// This rank, from 0.
    #[inline]
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// How many ranks there are.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// How long a call waits for a peer before it fails.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout()
    }

    /// Changes how long a call waits for a peer before it fails, also for waits under way; see [`Monitor::set_timeout`], which
    /// any thread may call.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared.set_timeout(timeout);
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
    /// What a rank posts is what every rank takes it for: equal signatures mean payloads of one layout. And the rounds
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

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// [`PeerLost`](FabricError::PeerLost), [`Timeout`](FabricError::Timeout),
    /// [`Mismatch`](FabricError::Mismatch), [`Aborted`](FabricError::Aborted), [`Failed`](FabricError::Failed).
    pub fn barrier(&self) -> Result<(), FabricError> {
        self.own_rounds()?.exchange(&Signature::new(Operation::Barrier))
    }

    /// Does `work`, which is part of a call of this signature: errors name the call, and not what it is made of.
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
        self.shared.check_rank(rank, role)
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
        self.shared.health.members()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
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
