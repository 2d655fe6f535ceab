//! Making a communicator.

use std::{path::PathBuf, sync::Arc, time::Duration};

use antiphon_device::host::{cpu::allowed_cores, process::pid_namespace};

use super::{Communicator, Messenger};
use crate::{
    FabricError, Nodes, Operation, Signature,
    endpoint::{Endpoint, Health, Interrupt, Peer, Remote},
    engine::{self, Engine, Key, Progress},
    layout::{Layout, Regions},
    links::Links,
    rendezvous::{
        self, Address, Card, Environment, Exchange, PATIENCE, Place, RendezvousError, Secret, Ticket,
    },
};

/// The number of the world among the communicators of an engine.
const WORLD: u64 = 0;

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
    node: Option<String>,
    link_timeout: Option<Duration>,
    engine: Option<Arc<dyn Engine>>,
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

    /// The name of this rank's node, where [ranks are on several](Address::Tcp): ranks with equal names share memory. What the builder says
    /// goes before `ANTIPHON_NODE`. The order of sums depends on which ranks share a node.
    pub fn node(mut self, name: impl Into<String>) -> Self {
        self.node = Some(name.into());
        self
    }

    /// How long a rank of another node may give no sign of life. What the builder says goes before `ANTIPHON_LINK_TIMEOUT`.
    pub fn link_timeout(mut self, timeout: Duration) -> Self {
        self.link_timeout = Some(timeout);
        self
    }

    /// The engine that connects nodes. With one, the ranks may be on several nodes wherever they meet.
    pub(crate) fn engine(mut self, engine: Arc<dyn Engine>) -> Self {
        self.engine = Some(engine);
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
        self.node = self.node.or(environment.node);
        self.link_timeout = self.link_timeout.or(environment.link_timeout);
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

    /// Meets through a channel that the caller already has. Ranks on different machines, or whose nodes have different
    /// [names](Self::node), are on several nodes.
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`], [`FabricError::Engine`].
    pub fn by_exchange(
        mut self,
        rank: usize,
        world_size: usize,
        exchange: &mut dyn Exchange,
    ) -> Result<Communicator, FabricError> {
        let machine = rendezvous::machine();
        self.node = self.node_of_parent().or(self.node).or_else(rendezvous::node_by_environment);
        let node = self.node.clone().unwrap_or_else(|| machine.clone());
        let (ticket, is_spread) = rendezvous::exchange_ticket(exchange, rank, [node, machine])?;
        let is_spread = is_spread && self.parent.as_ref().is_none_or(|parent| parent.nodes().count() > 1);
        self.join(rank, world_size, &ticket, is_spread.then_some(exchange))
    }

    /// Meets where the ticket says. Ranks on several nodes need an [address of TCP](Address::Tcp).
    ///
    /// # Errors
    /// [`FabricError::Rendezvous`] when the ranks do not meet, [`FabricError::InvalidArgument`] for sizes beyond this
    /// machine, and for ranks of several nodes of a [parent](Self::parent) that meet at a path.
    pub fn with_ticket(
        mut self,
        rank: usize,
        world_size: usize,
        ticket: &Ticket,
    ) -> Result<Communicator, FabricError> {
        self.node = self.node_of_parent().or(self.node);
        self.join(rank, world_size, ticket, None)
    }

    /// The node's name, if there is a parent: a group is on the nodes of its world.
    fn node_of_parent(&self) -> Option<String> {
        let parent = self.parent.as_ref()?;
        let nodes = parent.nodes();
        Some(nodes.name(nodes.of(parent.rank)).to_owned())
    }

    /// Meets where the ticket says, or, where ranks are on several nodes of which the exchange tells, by the exchange.
    fn join(
        self,
        rank: usize,
        world_size: usize,
        ticket: &Ticket,
        mut exchange: Option<&mut dyn Exchange>,
    ) -> Result<Communicator, FabricError> {
        let timeout = self.timeout.unwrap_or(Self::DEFAULT_TIMEOUT);
        let arena_bytes = self.arena_bytes.unwrap_or(Self::DEFAULT_ARENA_BYTES);
        let layout = Layout::new(world_size, arena_bytes).ok_or_else(|| {
            FabricError::invalid(format!(
                "{world_size} ranks with {arena_bytes} bytes each exceed the address space"
            ))
        })?;
        let is_spread =
            self.engine.is_some() || exchange.is_some() || matches!(ticket.address, Address::Tcp { .. });
        let parents = self.parent.as_ref().and_then(|parent| parent.links.as_ref());
        let given = self.engine.clone().or_else(|| parents.map(|links| links.progress().engine().clone()));
        let open = || engine::open(rank, world_size).map_err(|error| error.to_string());
        let engine = is_spread.then(|| given.map_or_else(open, Ok));
        let address = |engine: &Result<Arc<dyn Engine>, String>| match engine {
            Ok(engine) => Ok(engine.address().to_vec()),
            Err(problem) => Err(problem.clone()),
        };
        let card = Card {
            place: engine.as_ref().map(|engine| Place::here(self.node.as_deref(), address(engine))),
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
        let wait = rendezvous::Wait { timeout, watch: &watch };
        let (bytes, own) = (layout.total(), card.clone());
        let meeting = match &mut exchange {
            Some(exchange) => rendezvous::meet_by_exchange(*exchange, ticket, card, bytes, wait),
            None if is_spread => rendezvous::meet_on_nodes(ticket, card, bytes, wait),
            None => rendezvous::meet(ticket, card, bytes, wait),
        }?;
        let links = match (engine, meeting.key) {
            (Some(Ok(engine)), Some(key)) => Some((engine, key)),
            _ => None,
        };
        let regions = match links {
            None => Regions::new(meeting.memory, layout),
            Some(_) => Regions::on_node(meeting.memory, layout, meeting.nodes.clone(), rank),
        };
        let group = places(self.parent.as_deref(), &meeting.cards, is_spread)
            .inspect_err(|_| regions.control(rank).depart())?;
        let links = links.map(|(engine, key)| match (parents, &group) {
            (Some(parents), Some(group)) => {
                Ok(parents.of_group(key.number(), rank, group, meeting.nodes.clone(), regions.clone()))
            }
            _ => {
                let progress = Progress::new(engine, self.link_timeout.unwrap_or(Progress::LINK_TIMEOUT))?;
                connect(Arc::new(progress), key, rank, &meeting.nodes, &meeting.cards, &regions)
            }
        });
        let links = links.transpose().inspect_err(|_| regions.control(rank).depart())?;
        if let (Some(_), Some(_)) = (&links, &group) {
            // Before a rank sends, all have registered the group.
            let met = match exchange {
                Some(exchange) => rendezvous::exchange_nothing(exchange),
                None => rendezvous::meet_again(ticket, own, wait),
            };
            met.inspect_err(|_| regions.control(rank).depart())?;
        }
        let health = match (&self.parent, group) {
            // The handles that came along are not kept: the parent has them.
            (Some(parent), Some(group)) => Health::of_group(rank, parent, &group),
            _ => {
                let cards = meeting.cards.into_iter().zip(meeting.processes);
                let nodes = meeting.nodes;
                let peer = |(card, process): (Card, _)| {
                    // Processes and cores of other machines have the same numbers as those of this one.
                    let is_here = nodes.share_memory(rank, card.rank);
                    let cores = if is_here { card.cores.clone() } else { Vec::new() };
                    let remote = links.as_ref().filter(|_| !is_here).map(|links| Remote {
                        progress: links.progress().clone(),
                        number: card.rank,
                        node: nodes.of(card.rank),
                    });
                    Peer { process, id: card.process().filter(|_| is_here), cores: cores.into(), remote }
                };
                Health::of_world(rank, cards.map(peer).collect())
            }
        };
        let comm = Communicator::new(Endpoint::new(health, regions, timeout, self.interrupt, links));
        // A rank that died between joining and mapping the memory, or that joined and does nothing, is found now and not
        // by the first real call.
        let signature = Signature::new(Operation::Barrier);
        comm.own_rounds()?.exchange_within(timeout.min(PATIENCE), &signature)?;
        if let Some(links) = &comm.endpoint().links {
            links.progress().watch_all();
        }
        Ok(comm)
    }
}

/// The links of a world's rank to the ranks of other nodes.
fn connect(
    progress: Arc<Progress>,
    key: Key,
    rank: usize,
    nodes: &Nodes,
    cards: &[Card],
    regions: &Regions,
) -> Result<Links, FabricError> {
    for card in cards.iter().filter(|card| !nodes.share_memory(rank, card.rank)) {
        let address = card.place.as_ref().and_then(|place| place.engine.as_deref().ok());
        progress.engine().connect(card.rank, address.unwrap_or_default())?;
    }
    let peers = (0..cards.len()).collect();
    let links = Links::new(progress.clone(), WORLD, rank, nodes.clone(), peers, regions.clone());
    // What other ranks have sent by now waits in the engine for the key.
    progress.engine().inbox().open(key);
    Ok(links)
}

/// The ranks' numbers in the parent, if they have one; `is_spread` says whether they may be on several nodes.
fn places(
    parent: Option<&Endpoint>,
    cards: &[Card],
    is_spread: bool,
) -> Result<Option<Vec<usize>>, FabricError> {
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
    let nodes = parent.nodes();
    let is_elsewhere =
        |&(place, _): &(usize, _)| place < nodes.world_size() && !nodes.share_memory(place, parent.rank);
    if let (Some(rank), false) = (places.iter().position(is_elsewhere), is_spread) {
        return Err(FabricError::invalid(format!(
            "rank {rank} of the group is on another node: ranks of several nodes meet at an address of TCP, or by an exchange"
        )));
    }
    let checked = parent.health.check_places(&places);
    checked.map_err(|problem| {
        FabricError::invalid(format!("the ranks of a group have different parents: {problem}"))
    })?;
    Ok(Some(places.into_iter().map(|(rank, _)| rank).collect()))
}
