//! The errors between ranks.

use std::{sync::Arc, time::Duration};

use antiphon_device::DeviceError;
#[cfg(not(loom))]
use antiphon_device::cuda::CudaError;

use crate::{Members, Signature, engine::EngineError, rendezvous::RendezvousError};

/// How a peer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Its process ended: it crashed, or was killed.
    ProcessEnded,
    /// It dropped its communicator while others still needed it.
    Left,
    /// Another rank saw that it was lost.
    Reported {
        /// The rank that reported it.
        by: usize,
    },
    /// It gives no sign of life: it, its machine or the network does not work.
    Unreachable {
        /// Its node.
        node: usize,
    },
    /// It went because it had lost a rank of the world that is not in this group.
    Followed {
        /// The rank that was lost first, as the world numbers it.
        world_rank: usize,
    },
}

impl Loss {
    fn told(self, members: &Members) -> String {
        match self {
            Self::ProcessEnded => "its process ended".into(),
            Self::Left => "it dropped its communicator".into(),
            Self::Unreachable { node } => format!("node {node} gives no sign of life"),
            Self::Reported { by } => format!("as {} reported", members.subject(by).trim_end_matches(',')),
            Self::Followed { world_rank } => {
                format!("it went because rank {world_rank} of the world was lost")
            }
        }
    }
}

/// Why an operation between ranks failed. After [`PeerLost`](Self::PeerLost), [`Timeout`](Self::Timeout),
/// [`Mismatch`](Self::Mismatch), [`Aborted`](Self::Aborted), [`AbortCalled`](Self::AbortCalled), [`Panicked`](Self::Panicked) and an operation that was
/// [`Interrupted`](Self::Interrupted) the ranks are no longer in
/// step, and the communicator answers every further call with [`Failed`](Self::Failed), but for
/// [`shrink`](crate::Communicator::shrink); after the others it stays usable.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The ranks did not meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The machine refused a resource.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine between machines refused something.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// NVSHMEM cannot be used: on all ranks of the call.
    #[error("Failed to initialize nvshmem: {0}")]
    Nvshmem(String),
    /// A peer is gone.
    #[error("{} was lost during {operation}: {}", members.subject(*rank), how.told(members))]
    PeerLost {
        /// The lost rank.
        rank: usize,
        /// What this rank was doing.
        operation: Signature,
        /// How it is known.
        how: Loss,
        /// The ranks of the communicator.
        members: Members,
    },
    /// The deadline has passed.
    #[error(
        "{operation} timed out ({waited:.1?} is the timeout of the wait): still waiting for {}",
        members.names(missing, *world_size)
    )]
    Timeout {
        /// What this rank was doing.
        operation: Signature,
        /// How long it waited.
        waited: Duration,
        /// The missing ranks.
        missing: Vec<usize>,
        /// How many ranks there are.
        world_size: usize,
        /// Which.
        members: Members,
    },
    /// Ranks called different things.
    #[error(
        "ranks disagree: {} called {mine}, but {} called {theirs}",
        members.subject(*rank), members.subject(*peer)
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// What it called.
        mine: Signature,
        /// A rank that called something else.
        peer: usize,
        /// What that one called.
        theirs: Signature,
        /// The ranks of the communicator.
        members: Members,
    },
    /// On a GPU of this rank two calls ran at the same time that use the same memory: a graph was launched beside a call, or beside
    /// another graph.
    #[error(
        "{operation} ran at the same time as another call of {}: a graph was launched that is not ordered behind it, or it \
         behind the graph; launch them on one stream, or put an event between their streams",
        members.subject(*rank)
    )]
    Overlap {
        /// One of the calls.
        operation: Signature,
        /// This rank.
        rank: usize,
        /// The ranks of the communicator.
        members: Members,
    },
    /// Another rank gave up.
    #[error("{operation} was aborted: {} {reason}", members.subject(*by))]
    Aborted {
        /// What this rank was doing.
        operation: Signature,
        /// The rank that gave up.
        by: usize,
        /// Why.
        reason: String,
        /// The ranks of the communicator.
        members: Members,
    },
    /// The program of a rank, perhaps of this one, [aborted](crate::Monitor::abort) the communicator.
    #[error(
        "{} was aborted: {} called abort",
        operation.map_or("the communicator".to_owned(), |o| o.to_string()), members.subject(*by)
    )]
    AbortCalled {
        /// This rank's call; none on the rank that called abort.
        operation: Option<Signature>,
        /// The calling rank.
        by: usize,
        /// The ranks of the communicator.
        members: Members,
    },
    /// Living ranks did not call [`shrink`](crate::Communicator::shrink), or did not complete it.
    #[error("shrink timed out after {waited:.1?}: still waiting for {}", members.names(missing, *world_size))]
    ShrinkTimeout {
        /// How long this rank waited.
        waited: Duration,
        /// The peer of the message.
        missing: Vec<usize>,
        /// How many ranks there were.
        world_size: usize,
        /// Which.
        members: Members,
    },
    /// A rank gave up [shrinking](crate::Communicator::shrink) the communicator, for a reason that it knows.
    #[error("shrink was aborted: {} gave up", members.subject(*by))]
    ShrinkAborted {
        /// The rank.
        by: usize,
        /// The ranks of the communicator.
        members: Members,
    },
    /// This rank's program asked to stop waiting; see [`Builder::interrupt`](crate::Builder::interrupt).
    #[error("{} was interrupted", operation.map_or("the wait for earlier calls".to_owned(), |o| o.to_string()))]
    Interrupted {
        /// This rank's call; none if it still waited behind earlier calls.
        operation: Option<Signature>,
    },
    /// The communicator failed earlier.
    #[error("this communicator failed earlier: {0}")]
    Failed(Arc<FabricError>),
    /// Work given to the background panicked.
    #[error("the work in the background panicked")]
    Panicked,
    /// The symmetric memory is used up.
    #[error(
        "{asked} bytes of symmetric memory do not fit: {free} of {capacity} bytes are free, the largest piece has \
         {largest} (raise ANTIPHON_ARENA_BYTES or Builder::arena_bytes)"
    )]
    ArenaFull {
        /// Bytes asked for.
        asked: usize,
        /// Bytes free in all.
        free: usize,
        /// Bytes in the largest free piece.
        largest: usize,
        /// Bytes of the arena.
        capacity: usize,
    },
    /// An argument makes no sense here.
    #[error("{0}")]
    InvalidArgument(String),
    /// What was asked for does not exist yet.
    #[error("{0} is not implemented yet")]
    NotImplemented(String),
    /// Ranks exchanged something that is not what it should be.
    #[error("the object of rank {rank} cannot be read: {problem}")]
    Object {
        /// The rank whose object it is.
        rank: usize,
        /// What is wrong with it.
        problem: String,
    },
}

#[cfg(not(loom))]
impl From<CudaError> for FabricError {
    fn from(error: CudaError) -> Self {
        match error.is_implicit_capture() {
            // Nothing has happened.
            true => Self::invalid(
                "the legacy default stream waits for a stream that is being captured, so no call can be made on it, or ordered behind \
                 one that was: capture a stream that was made as a non-blocking one, or make the calls on another stream",
            ),
            false => DeviceError::from(error).into(),
        }
    }
}

impl FabricError {
    /// An [`InvalidArgument`](Self::InvalidArgument).
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::InvalidArgument(message.into())
    }

    /// The [`InvalidArgument`](Self::InvalidArgument) for a rank that does not exist; `role` says what the rank was meant to be,
    /// such as `root`.
    pub fn no_such_rank(role: &str, rank: usize, world_size: usize) -> Self {
        Self::InvalidArgument(format!("{role} rank {rank} is not below the world size {world_size}"))
    }

    /// The rank whose loss began it, as the world numbers it, if a lost rank did.
    pub fn lost_world_rank(&self) -> Option<usize> {
        match self {
            Self::PeerLost { how: Loss::Followed { world_rank }, .. } => Some(*world_rank),
            Self::PeerLost { rank, members, .. } => Some(members.world_rank(*rank)),
            Self::Failed(first) => first.lost_world_rank(),
            _ => None,
        }
    }

    /// The same, as seen by a rank that was doing `doing`: for work whose watch does not know what it watches.
    pub fn during(mut self, doing: Signature) -> Self {
        match &mut self {
            Self::PeerLost { operation, .. }
            | Self::Timeout { operation, .. }
            | Self::Aborted { operation, .. } => *operation = doing,
            Self::AbortCalled { operation, .. } => *operation = Some(doing),
            _ => {}
        }
        self
    }
}
