//! Messages between ranks that share no memory.
//!
//! An [`Engine`] connects a rank to its peers, and sends them active messages: the arrival of a message stores the payload in the
//! receiver's memory, and then releases the signal ([`Receiver::arrived`]). There is no other way to write a peer's memory. No
//! order is promised, not even between messages to one peer.
//!
//! | part | content |
//! | --- | --- |
//! | [`Message`], [`Key`] | what a message says beside its payload, and the key without which it is dropped |
//! | [`Inbox`], [`Receiver`] | where arriving messages go; every check of what a peer sends is there |
//! | [`Progress`] | who moves messages: the caller that waits, or a thread while none spins |
//! | [`Ucx`] | the engine of clusters: InfiniBand, RoCE, TCP, shared memory |
//! | [`Twin`] | an engine between the threads of one process, which counts, delays, reorders, stops and cuts |
//!
//! ```
//! use std::{ptr::NonNull, sync::{Arc, mpsc}};
//!
//! use antiphon_fabric::engine::{Engine, Key, Message, Receiver, Twin};
//!
//! /// It has no memory for payloads: its messages are words.
//! struct Words(mpsc::Sender<u64>);
//!
//! // SAFETY: there is no region.
//! unsafe impl Receiver for Words {
//!     fn region(&self, _sender: usize) -> Option<NonNull<[u8]>> {
//!         None
//!     }
//!
//!     fn arrived(&self, message: &Message, _len: usize) {
//!         self.0.send(message.words[0]).unwrap();
//!     }
//! }
//!
//! # fn main() -> Result<(), antiphon_fabric::engine::EngineError> {
//! let (_network, ends) = Twin::network(2);
//! let (words, arrived) = mpsc::channel();
//! let key = Key::random();
//! ends[1].inbox().register(7, Arc::new(Words(words)));
//! ends.iter().for_each(|end| end.inbox().open(key));
//! ends[0].connect(1, ends[1].address())?;
//! ends[0].tell(1, &Message { communicator: 7, words: [42, 0, 0, 0, 0], ..Message::default() })?;
//! while !ends[1].progress() {}
//! assert_eq!(arrived.recv(), Ok(42));
//! # Ok(())
//! # }
//! ```

mod error;
mod flight;
mod inbox;
mod message;
#[cfg(all(test, loom))]
mod model;
mod owner;
mod progress;
mod twin;
#[cfg(not(loom))]
mod ucx;

use std::{sync::Arc, time::Duration};

pub use error::EngineError;
pub use flight::Flight;
pub use inbox::{Dropped, Inbox, Receiver};
pub use message::{Key, Message, fuzz};
pub use progress::Progress;
pub use twin::{Network, Traffic, Twin};
#[cfg(not(loom))]
pub use ucx::{Survey, Ucx};

/// How a peer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Its connection was closed or reset: its process ended, or dropped its engine.
    Reset,
    /// It gives no sign of life.
    Unreachable,
}

/// A rank's connections to its peers, which have the numbers of their ranks in the world.
///
/// Any thread may call any method. In a forked child, whose parent owns the connections, sends fail with
/// [`EngineError::Forked`], and all else does nothing.
pub trait Engine: Send + Sync {
    /// What engine it is.
    fn name(&self) -> &'static str;

    /// Its own number among the peers.
    fn rank(&self) -> usize;

    /// What peers need to [`connect`](Self::connect) to this engine: some hundred bytes that only the engine understands.
    fn address(&self) -> &[u8];

    /// Where arriving messages go.
    fn inbox(&self) -> &Inbox;

    /// Prepares messages to `peer`, whose engine has this address. It does not wait for the peer.
    ///
    /// # Errors
    /// [`EngineError::Address`] if no engine of this kind has such an address, [`EngineError::Connected`] if there is a
    /// connection to this peer, [`EngineError::NoRoute`] if there is no way to it; [`EngineError::Forked`], [`EngineError::Call`].
    fn connect(&self, peer: usize, address: &[u8]) -> Result<(), EngineError>;

    /// Sends a message to `peer`. Its payload, which may be empty, is read until `flight` [is complete](Flight::is_complete).
    ///
    /// A message to a [lost](Self::lost) peer is dropped, and complete.
    ///
    /// # Errors
    /// [`EngineError::NotConnected`]; [`EngineError::Closed`] before the inbox is [open](Inbox::open);
    /// [`EngineError::Forked`], [`EngineError::Call`].
    ///
    /// # Safety
    /// `payload` is valid for reading, and nobody writes it, until the flight is complete or the engine is dropped.
    unsafe fn send(
        &self,
        peer: usize,
        message: &Message,
        payload: *const [u8],
        flight: &Arc<Flight>,
    ) -> Result<(), EngineError>;

    /// Sends a message without a payload.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    fn tell(&self, peer: usize, message: &Message) -> Result<(), EngineError>;

    /// Moves messages: what arrived goes to the [inbox](Self::inbox), what was sent goes on. Whether anything moved. It moves nothing
    /// before the inbox [has its key](Inbox::open), nor while another thread moves messages.
    fn progress(&self) -> bool;

    /// Sleeps until there may be something to move, or until [`wake`](Self::wake), for `limit` at most. One thread at a time does.
    fn sleep(&self, limit: Duration);

    /// Ends the [`sleep`](Self::sleep) of another thread, or the next one.
    fn wake(&self);

    /// Whether the connection to `peer` is lost, after all that arrived from it. One load.
    fn lost(&self, peer: usize) -> Option<Lost>;
}

/// Opens the engine for the connections of rank `rank` of `world_size`.
///
/// # Errors
/// Those of [`Ucx::open`].
#[cfg(not(loom))]
pub fn open(rank: usize, world_size: usize) -> Result<Arc<dyn Engine>, EngineError> {
    Ok(Arc::new(Ucx::open(rank, world_size)?))
}

/// Models under loom run in one process, and open no library.
#[cfg(loom)]
pub fn open(_rank: usize, _world_size: usize) -> Result<Arc<dyn Engine>, EngineError> {
    Err(EngineError::Closed)
}
