//! The states that operations wait for.

use std::fmt;

use antiphon_plan::{ChannelId, ChannelType, Rank};

/// The state that an operation waited for, and the state that it saw.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waiting {
    /// A signal of a peer.
    Signal {
        /// The rank that signals.
        peer: Rank,
        /// Through which kind of channel.
        channel_type: ChannelType,
        /// Through which of this rank's channels of the kind.
        channel: ChannelId,
        /// How many signals there should be, since the plan was loaded.
        expected: u64,
        /// How many there are.
        seen: u64,
    },
    /// A packet in scratch.
    Packet {
        /// The flag that it should carry.
        expected: u32,
        /// The flag that it carries.
        seen: u32,
        /// How many bytes of the operation are done.
        byte: usize,
    },
    /// A semaphore of the rank.
    Semaphore {
        /// Its number.
        semaphore: usize,
    },
    /// Thread blocks of the rank.
    Barrier {
        /// How many have come.
        arrived: u32,
        /// How many should.
        expected: u32,
    },
    /// A copy engine of the rank's own GPU.
    Engine {
        /// How many requests should be done, since the plan was loaded.
        expected: u64,
        /// How many are.
        seen: u64,
    },
}

impl Waiting {
    /// The rank that could end the wait, if it is known.
    pub fn peer(&self) -> Option<Rank> {
        match self {
            Waiting::Signal { peer, .. } => Some(*peer),
            _ => None,
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Waiting::Signal { peer, channel_type, channel, expected, seen } => {
                let kind = format!("{channel_type:?}").to_lowercase();
                write!(
                    f,
                    "waits for signal {expected} of rank {peer} on {kind} channel {channel}, has {seen}"
                )
            }
            Waiting::Packet { expected, seen, byte } => {
                write!(f, "waits at byte {byte} for a packet of launch {expected}, sees one of {seen}")
            }
            Waiting::Semaphore { semaphore } => write!(f, "waits for semaphore {semaphore}, which is 0"),
            Waiting::Barrier { arrived, expected } => {
                write!(f, "waits at a barrier for {expected} thread blocks, of which {arrived} have come")
            }
            Waiting::Engine { expected, seen } => {
                write!(f, "waits for request {expected} to its copy engine, of which {seen} are done")
            }
        }
    }
}
