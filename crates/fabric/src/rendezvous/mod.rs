//! The rendezvous, in which the ranks of a world find each other.
//!
//! Every rendezvous uses a [`Ticket`]: a socket's address and a secret. Rank 0 listens. The other ranks connect, prove that they
//! know the secret, and identify themselves ([`Card`]). When all have joined, rank 0 sends each of them
//! all cards and the descriptor of the shared memory, and closes the socket. The ticket has one of these sources:
//!
//! | source | ticket |
//! | --- | --- |
//! | [`Environment`]: torchrun, `antiphon run` | named after MASTER_ADDR, MASTER_PORT and the run id; secret from `ANTIPHON_SECRET`, or a file of the user |
//! | [`Address::Path`] | a path that the ranks agree on |
//! | [`Exchange`]: a caller's own channel (MPI, a torch process group, a key-value store) | random, made by rank 0 and passed to the others by the caller |
//! | threads of one process ([`LocalWorld`](crate::LocalWorld)) | random |
//!
//! Ranks that may be on several nodes meet twice: all of them, over TCP or by the caller's exchange, to tell each other where they are
//! ([`Place`]), and then those of each node, over a Unix socket, to share memory.
//!
//! Other peers may connect: processes without the secret, port scanners, clients that send nothing, even thousands of them.
//! Rank 0 closes their connections, and they do not keep any rank from joining. It reads only from processes of the same user.

mod address;
mod connection;
mod environment;
mod exchange;
pub mod frame;
mod member;
mod places;
mod root;
mod secret;
mod strangers;
mod user_secret;

use std::{path::PathBuf, sync::Arc, time::Duration};

use antiphon_device::{
    DeviceError,
    host::{memory::SharedMemory, process::ProcessWatch},
};

use rustix::event::Timespec;

use crate::nodes::Nodes;

pub use address::Address;
pub use environment::Environment;
pub(crate) use environment::node_by_environment;
pub use exchange::Exchange;
pub(crate) use exchange::{exchange_nothing, exchange_ticket};
pub use frame::{Card, Place};
pub(crate) use places::{Meeting, machine, meet_by_exchange, meet_on_nodes};
pub use secret::Secret;
pub(crate) use secret::{random_hex, random_word};
pub use strangers::TurnedAway;

/// How long both sides wait before they look again for something that gives no signal.
const RETRY: Duration = Duration::from_millis(2);

/// The longest sleep between two looks at the clock.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// How long one that is there may take to answer. (One that is not there may come until the deadline.)
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Everything a rank needs to find its world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Where rank 0 listens.
    pub address: Address,
    /// What proves that a rank belongs to the world.
    pub secret: Secret,
}

impl Ticket {
    /// A random ticket, for ranks to which the caller can pass it.
    pub fn random() -> Self {
        Self {
            address: Address::Abstract(format!("antiphon-{}", secret::random_hex())),
            secret: Secret::random(),
        }
    }
}

/// Why ranks did not meet.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Not all ranks came in time.
    #[error(
        "rank {rank} of {world_size} waited {waited:.1?} at {address}: ranks {missing:?} never arrived{}{turned_away}",
        last_word(.last_refusal)
    )]
    Missing {
        /// The rank that waited.
        rank: usize,
        /// How many ranks there should be.
        world_size: usize,
        /// Where.
        address: Address,
        /// How long.
        waited: Duration,
        /// The missing ranks, as far as this rank knows.
        missing: Vec<usize>,
        /// What rank 0 last said, if it said anything.
        last_refusal: Option<String>,
        /// Whom this rank turned away meanwhile; nobody if it is not rank 0.
        turned_away: TurnedAway,
    },
    /// Rank 0 turned this rank away.
    #[error("rank {rank} was turned away at {address}: {reason}")]
    Refused {
        /// The refused rank.
        rank: usize,
        /// Where.
        address: Address,
        /// Why.
        reason: String,
    },
    /// Rank 0 could not prove that it knows the secret.
    #[error("the process that listens at {address} is not rank 0 of this world: {problem}")]
    Impostor {
        /// Where.
        address: Address,
        /// How it gave itself away.
        problem: String,
    },
    /// Rank 0 ended after this rank had joined.
    #[error("rank 0 ended while ranks were meeting at {address}")]
    RootLost {
        /// Where.
        address: Address,
    },
    /// This rank's program asked to stop waiting.
    #[error("interrupted while ranks were meeting")]
    Interrupted,
    /// The socket could not be used.
    #[error("socket {address}: {source}")]
    Socket {
        /// Which.
        address: Address,
        /// The system's word.
        source: Arc<std::io::Error>,
    },
    /// Another process holds the name at which rank 0 would listen.
    #[error("{address} is held by {holder}: choose another name (MASTER_PORT, or ANTIPHON_RENDEZVOUS)")]
    NameTaken {
        /// The name.
        address: Address,
        /// The holder, as far as it is known.
        holder: String,
    },
    /// The path for the socket is taken.
    #[error("{} exists and is not a socket: choose another path to meet at", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The file that holds the user's secret cannot be used.
    #[error("the user's secret {}: {problem} (or set ANTIPHON_SECRET, to the same on all ranks)", path.display())]
    UserSecret {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The rank does not exist in a world of that size.
    #[error("rank {rank} is not below the world size {world_size}")]
    InvalidRank {
        /// The rank asked for.
        rank: usize,
        /// The world size asked for.
        world_size: usize,
    },
    /// An environment variable is missing or senseless.
    #[error(
        "environment variable {name}: {problem} (start the program with `antiphon run -n RANKS -- PROGRAM`, or with torchrun)"
    )]
    Environment {
        /// Its name.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A launcher of MPI or Slurm has started several ranks, and none of them knows how to meet the others.
    #[error(
        "{name}={value} says that MPI or Slurm has started several ranks, and RANK and WORLD_SIZE are not set: pass rank, world_size \
         and a way to meet (with mpi4py exchange=MPI.COMM_WORLD.allgather), or start the program with `antiphon run -n RANKS -- PROGRAM`"
    )]
    ForeignLauncher {
        /// The variable that says it.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// Ranks of one node do not share a machine.
    #[error(
        "node {node:?} is on two machines: ranks {:?} are on {}, ranks {:?} on {} (ANTIPHON_NODE must differ between machines)",
        .machines[0].1, .machines[0].0, .machines[1].1, .machines[1].0
    )]
    NodeOnTwoMachines {
        /// The name of the node.
        node: String,
        /// Two of its machines, with the node's ranks there.
        machines: Box<[(String, Vec<usize>); 2]>,
    },
    /// A rank cannot be reached from other nodes.
    #[error("rank {rank} cannot be reached from other nodes: {problem}")]
    NoEngine {
        /// The rank.
        rank: usize,
        /// Why.
        problem: String,
    },
    /// The caller's exchange failed, or carried something else.
    #[error("the caller's exchange: {0}")]
    Exchange(String),
    /// The shared memory could not be made or mapped.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn last_word(refusal: &Option<String>) -> String {
    refusal.as_ref().map_or(String::new(), |reason| format!(" (last answer: {reason})"))
}

/// What a meeting at one address gives a rank.
struct Met {
    /// The cards of all ranks, in order.
    cards: Vec<Card>,
    /// The processes of all ranks, where they are others than this one and can be watched.
    processes: Vec<Option<Arc<ProcessWatch>>>,
    /// Mapped by all ranks, if they were to share any.
    memory: Option<SharedMemory>,
    /// What rank 0 has drawn for this meeting.
    random: frame::Nonce,
}

/// How long a rank waits for the others.
#[derive(Clone, Copy)]
pub(crate) struct Wait<'a> {
    pub(crate) timeout: Duration,
    /// Asked now and then while ranks meet: an error ends the meeting.
    pub(crate) watch: &'a dyn Fn() -> Result<(), RendezvousError>,
}

/// Meets the other ranks and shares `bytes` of memory with them, all of which are on one node.
pub(crate) fn meet(
    ticket: &Ticket,
    card: Card,
    bytes: usize,
    wait: Wait<'_>,
) -> Result<Meeting, RendezvousError> {
    let Met { cards, processes, memory, .. } = meet_at(ticket, card, Some(bytes), wait)?;
    let memory = memory.expect("it was asked for");
    Ok(Meeting { nodes: Nodes::one(cards.len()), cards, processes, memory, key: None })
}

/// Waits until all ranks have come to the ticket's address once more.
pub(crate) fn meet_again(ticket: &Ticket, card: Card, wait: Wait<'_>) -> Result<(), RendezvousError> {
    meet_at(ticket, card, None, wait).map(drop)
}

/// Meets the other ranks at one address, and shares `bytes` of memory with them, if there are any to share.
fn meet_at(
    ticket: &Ticket,
    card: Card,
    bytes: Option<usize>,
    wait: Wait<'_>,
) -> Result<Met, RendezvousError> {
    if card.rank >= card.world_size {
        return Err(RendezvousError::InvalidRank { rank: card.rank, world_size: card.world_size });
    }
    if card.world_size == 1 {
        let memory = bytes.map(SharedMemory::create).transpose()?.map(|(memory, _)| memory);
        return Ok(Met { cards: vec![card], processes: vec![None], memory, random: random_hex() });
    }
    ticket.address.check()?;
    if card.rank == 0 {
        root::await_all(ticket, card, bytes, wait)
    } else {
        member::join(ticket, card, bytes, wait)
    }
}

/// The process of each rank, given a handle for the first rank of each that is watched.
fn processes(cards: &[Card], handles: Vec<(usize, Arc<ProcessWatch>)>) -> Vec<Option<Arc<ProcessWatch>>> {
    let of = |rank: usize| {
        let is_its = |first: usize| first == rank || cards[first].is_of_process(&cards[rank]);
        handles
            .iter()
            .find(|(first, _)| *first < cards.len() && is_its(*first))
            .map(|(_, watch)| watch.clone())
    };
    (0..cards.len()).map(of).collect()
}
