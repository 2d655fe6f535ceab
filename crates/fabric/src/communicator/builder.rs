//! Making a communicator.

use std::{path::PathBuf, sync::Arc, time::Duration};

use antiphon_device::host::{cpu::allowed_cores, process::pid_namespace};

use super::{Communicator, Messenger};
use crate::{
    FabricError, Operation, Signature,
    endpoint::{Endpoint, Health, Interrupt, Peer},
    layout::{Layout, Regions},
    rendezvous::{
        self, Address, Card, Environment, Exchange, PATIENCE, RendezvousError, Secret, Ticket,
        exchange_ticket,
    },
};

/// Settings of a communicator to be; all ranks must give the same ones.
///
/// ```
/// use std::time::Duration;
/// use antiphon_fabric::Communicator;
///
/// let alone = Communicator::builder().timeout(Duration::from_secs(5)).at_path(0, 1, "/nowhere", "secret")?;
/// assert_eq!(alone.world_size(), 1); // a world of one rank has no rendezvous
/// # Ok::<(), antiphon_fabric::FabricError>(())
/// ```
#[derive(Clone, Default)]
pub struct Builder {
    timeout: Option<Duration>,
    arena_bytes: Option<usize>,
    interrupt: Option<Interrupt>,
    parent: Option<Arc<Endpoint>>,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { timeout, arena_bytes, .. } = self;
        write!(f, "Builder {{ timeout: {timeout:?}, arena_bytes: {arena_bytes:?} }}")
    }
}

impl Builder {
    /// The timeout unless something else is said.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
    /// The symmetric memory of each rank unless something else is said, in bytes. Only what is touched costs memory.
    pub const DEFAULT_ARENA_BYTES: usize = 1 << 30;

    /// How long a call waits for a peer before it fails.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How many bytes of symmetric memory each rank can have.
    pub fn arena_bytes(mut self, bytes: usize) -> Self {
        self.arena_bytes = Some(bytes);
        self
    }

    /// A function that is called about every millisecond while a call waits: true ends the wait with
    /// [`FabricError::Interrupted`]. Bindings to languages with signals of their own need this. Groups that are
    /// [split](Communicator::split) off inherit it.
    pub fn interrupt(mut self, interrupted: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.interrupt = Some(Arc::new(interrupted));
        self
    }

    /// Makes a group of some ranks of the communicator `parent`, which meet by themselves: the others take no part, as they
    /// do in a [split](Communicator::split). Errors name the ranks as the world numbers them too, and the group shares the
    /// handles of its processes. All ranks of the group give the same parent.
    ///
    /// ```
    /// use antiphon_fabric::{Communicator, FabricError, LocalWorld, rendezvous::Ticket};
    ///
    /// let ticket = Ticket::random();
    /// LocalWorld::run(3, |comm| match comm.rank() {
    ///     0 => Ok::<_, FabricError>(()),
    ///     rank => {
    ///         let pair = Communicator::builder().parent(comm.messenger()).with_ticket(rank - 1, 2, &ticket)?;
    ///         assert_eq!(pair.members().world_rank(1), 2);
    ///         pair.barrier()
    ///     }
    /// });
    /// ```
    pub fn parent(mut self, parent: &Messenger) -> Self {
        self.parent = Some(parent.presence.0.clone());
        self
    }

    /// Meets the ranks that torchrun's environment describes. What the builder says goes before `ANTIPHON_TIMEOUT`
    /// and `ANTIPHON_ARENA_BYTES`.
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`].
    pub fn from_env(self) -> Result<Communicator, FabricError> {
        self.at(Environment::read()?)
    }

    /// Makes a world of this rank alone, as [`from_env`](Self::from_env) does where a launcher starts a single rank: for
    /// notebooks, unit tests and models that are not sharded.
    ///
    /// ```
    /// let comm = antiphon_fabric::Communicator::builder().alone()?;
    /// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
    /// # Ok::<(), antiphon_fabric::FabricError>(())
    /// ```
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`].
    pub fn alone(self) -> Result<Communicator, FabricError> {
        self.at(Environment::alone()?)
    }

    fn at(mut self, environment: Environment) -> Result<Communicator, FabricError> {
        self.timeout = self.timeout.or(environment.timeout);
        self.arena_bytes = self.arena_bytes.or(environment.arena_bytes);
        self.with_ticket(environment.rank, environment.world_size, &environment.ticket)
    }

    /// Meets at a path that all ranks know: a socket appears there until all have come.
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`].
    pub fn at_path(
        self,
        rank: usize,
        world_size: usize,
        path: impl Into<PathBuf>,
        secret: impl Into<Vec<u8>>,
    ) -> Result<Communicator, FabricError> {
        let ticket = Ticket { address: Address::Path(path.into()), secret: Secret::new(secret) };
        self.with_ticket(rank, world_size, &ticket)
    }

    /// Meets through a channel that the caller already has.
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`].
    pub fn by_exchange(
        self,
        rank: usize,
        world_size: usize,
        exchange: &mut dyn Exchange,
    ) -> Result<Communicator, FabricError> {
        let ticket = exchange_ticket(exchange, rank)?;
        self.with_ticket(rank, world_size, &ticket)
    }

    /// Meets where the ticket says.
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`] when the ranks do not meet, [`FabricError::InvalidArgument`] for sizes beyond this
    /// machine.
    pub fn with_ticket(
        self,
        rank: usize,
        world_size: usize,
        ticket: &Ticket,
    ) -> Result<Communicator, FabricError> {
        let timeout = self.timeout.unwrap_or(Self::DEFAULT_TIMEOUT);
        let arena_bytes = self.arena_bytes.unwrap_or(Self::DEFAULT_ARENA_BYTES);
        let layout = Layout::new(world_size, arena_bytes).ok_or_else(|| {
            FabricError::invalid(format!(
                "{world_size} ranks with {arena_bytes} bytes each exceed the address space"
            ))
        })?;
        let card = Card {
            rank,
            world_size,
            pid: std::process::id(),
            pid_namespace: pid_namespace(),
            cores: allowed_cores(),
            arena_bytes,
            parent_rank: self.parent.as_ref().map(|parent| parent.rank),
        };
        let interrupted = || self.interrupt.as_ref().is_some_and(|interrupted| interrupted());
        let watch = || if interrupted() { Err(RendezvousError::Interrupted) } else { Ok(()) };
        let meeting = rendezvous::meet(ticket, card, layout.total(), timeout, &watch)?;
        let regions = Regions::new(meeting.memory, layout);
        let group =
            places(self.parent.as_deref(), &meeting.cards).inspect_err(|_| regions.control(rank).depart())?;
        let health = match (&self.parent, group) {
            // The handles that came along are not kept: the parent has them.
            (Some(parent), Some(group)) => Health::of_group(rank, parent, &group),
            _ => {
                let cards = meeting.cards.into_iter().zip(meeting.processes);
                let peer = |(card, process): (Card, _)| Peer {
                    process,
                    id: card.process(),
                    cores: card.cores.into(),
                };
                Health::of_world(rank, cards.map(peer).collect())
            }
        };
        let comm = Communicator::new(Endpoint::new(health, regions, timeout, self.interrupt));
        // A rank that died between joining and mapping the memory, or that joined and does nothing, is found now and not
        // by the first real call.
        let signature = Signature::new(Operation::Barrier);
        comm.own_rounds()?.exchange_within(timeout.min(PATIENCE), &signature)?;
        Ok(comm)
    }
}

/// The ranks' numbers in the parent, if they have one.
fn places(parent: Option<&Endpoint>, cards: &[Card]) -> Result<Option<Vec<usize>>, FabricError> {
    let without = cards.iter().find(|card| card.parent_rank.is_none());
    let with = cards.iter().find(|card| card.parent_rank.is_some());
    if let (Some(with), Some(without)) = (with, without) {
        return Err(FabricError::invalid(format!(
            "rank {} of the group gives a parent, and rank {} gives none",
            with.rank, without.rank
        )));
    }
    let Some(parent) = parent else { return Ok(None) };
    let places: Vec<_> = cards.iter().filter_map(|card| Some((card.parent_rank?, card.process()))).collect();
    let checked = parent.health.check_places(&places);
    checked.map_err(|problem| {
        FabricError::invalid(format!("the ranks of a group have different parents: {problem}"))
    })?;
    Ok(Some(places.into_iter().map(|(rank, _)| rank).collect()))
}
