//! Everything that can go wrong between ranks.

use std::{sync::Arc, time::Duration};

use antiphon_device::DeviceError;

use crate::{Signature, rendezvous::RendezvousError};

/// How a peer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Its process ended: it crashed, or was killed.
    ProcessEnded,
    /// It dropped its communicator while others still needed it.
    Left,
    /// Another rank saw that it was lost.
    Reported {
        /// Who said so.
        by: usize,
    },
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ProcessEnded => f.write_str("its process ended"),
            Self::Left => f.write_str("it dropped its communicator"),
            Self::Reported { by } => write!(f, "as rank {by} reported"),
        }
    }
}

/// Why an operation between ranks failed. After [`PeerLost`](Self::PeerLost), [`Timeout`](Self::Timeout),
/// [`Mismatch`](Self::Mismatch), [`Aborted`](Self::Aborted), [`Panicked`](Self::Panicked) and an operation that was
/// [`Interrupted`](Self::Interrupted) the ranks are no longer in
/// step, and the communicator answers every further call with [`Failed`](Self::Failed); after the others it stays usable.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The ranks did not meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A resource of this machine could not be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A peer is gone.
    #[error("rank {rank} was lost during {operation}: {how}")]
    PeerLost {
        /// Who is gone.
        rank: usize,
        /// What this rank was doing.
        operation: Signature,
        /// How it is known.
        how: Loss,
    },
    /// The deadline has passed.
    #[error("{operation} timed out after {waited:.1?}: still waiting for ranks {missing:?} of {world_size}")]
    Timeout {
        /// What this rank was doing.
        operation: Signature,
        /// How long it waited.
        waited: Duration,
        /// Who did not come.
        missing: Vec<usize>,
        /// How many ranks there are.
        world_size: usize,
    },
    /// Ranks called different things.
    #[error("ranks disagree: rank {rank} called {mine}, but rank {peer} called {theirs}")]
    Mismatch {
        /// This rank.
        rank: usize,
        /// What it called.
        mine: Signature,
        /// A rank that called something else.
        peer: usize,
        /// What that one called.
        theirs: Signature,
    },
    /// Another rank gave up.
    #[error("{operation} was aborted: rank {by} {reason}")]
    Aborted {
        /// What this rank was doing.
        operation: Signature,
        /// Who gave up.
        by: usize,
        /// Why.
        reason: String,
    },
    /// This rank's program asked to stop waiting; see [`Builder::interrupt`](crate::Builder::interrupt).
    #[error("{} was interrupted", operation.map_or("the wait for earlier calls".to_owned(), |o| o.to_string()))]
    Interrupted {
        /// What this rank was doing: nothing yet, if earlier calls kept it waiting.
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
    /// Ranks exchanged something that is not what it should be.
    #[error("the object of rank {rank} cannot be read: {problem}")]
    Object {
        /// Whose.
        rank: usize,
        /// What is wrong with it.
        problem: String,
    },
}

impl FabricError {
    /// An [`InvalidArgument`](Self::InvalidArgument).
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::InvalidArgument(message.into())
    }
}
