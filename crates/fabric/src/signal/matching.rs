//! Which receive gets which message: the first that fits, in the order in which they were asked for.
//!
//! Messages of one rank come in order, and each fits the receives with its tag, from that rank or from any. A message that
//! does not fit any receive, while another of the same rank is awaited behind it, goes to memory of its own.

use std::collections::VecDeque;

use super::channel::Transfer;
use crate::{FabricError, Signature, endpoint::Endpoint};

/// The sender of an awaited message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// This rank.
    Rank(usize),
    /// Any rank: the first message that fits.
    Any,
}

impl From<usize> for Source {
    fn from(rank: usize) -> Self {
        Self::Rank(rank)
    }
}

/// The messages to one rank; they go in order.
#[derive(Default)]
pub(super) struct Outgoing {
    /// Packets sent.
    pub(super) sequence: u64,
    pub(super) queue: VecDeque<Transfer>,
}

impl Outgoing {
    pub(super) fn remove(&mut self, id: u64) -> Option<Transfer> {
        remove(&mut self.queue, id)
    }
}

/// The messages from all ranks.
pub(super) struct Incoming {
    peers: Vec<Peer>,
    /// Receives from any rank, in the order in which they were asked for.
    from_any: VecDeque<Transfer>,
}

/// The messages from one rank.
#[derive(Default)]
struct Peer {
    /// Packets consumed.
    sequence: u64,
    /// The message to which the next packets belong.
    current: Option<Current>,
    /// Receives from this rank alone, in the order in which they were asked for.
    queue: VecDeque<Transfer>,
    /// Complete messages that no receive has taken yet, in the order of their arrival.
    unexpected: VecDeque<Transfer>,
}

enum Current {
    Awaited(Transfer),
    Unexpected(Transfer),
}

impl Incoming {
    pub(super) fn new(world_size: usize) -> Self {
        Self { peers: (0..world_size).map(|_| Peer::default()).collect(), from_any: VecDeque::new() }
    }

    /// Takes a receive.
    pub(super) fn expect(&mut self, source: Source, transfer: Transfer) {
        match source {
            Source::Rank(rank) => self.peers[rank].queue.push_back(transfer),
            Source::Any => self.from_any.push_back(transfer),
        }
    }

    pub(super) fn has(&self, id: u64) -> bool {
        let is_it = |transfer: &Transfer| transfer.id == id;
        self.from_any.iter().any(is_it)
            || self.peers.iter().any(|peer| {
                matches!(&peer.current, Some(Current::Awaited(transfer)) if is_it(transfer))
                    || peer.queue.iter().any(is_it)
            })
    }

    /// Forgets a receive.
    pub(super) fn remove(&mut self, id: u64) -> Option<Transfer> {
        let of_peer = |peer: &mut Peer| match peer.current.take() {
            Some(Current::Awaited(transfer)) if transfer.id == id => Some(transfer),
            other => {
                peer.current = other;
                remove(&mut peer.queue, id)
            }
        };
        remove(&mut self.from_any, id).or_else(|| self.peers.iter_mut().find_map(of_peer))
    }

    /// How many packets of a rank are consumed.
    pub(super) fn sequence(&self, peer: usize) -> u64 {
        self.peers[peer].sequence
    }

    pub(super) fn consume(&mut self, peer: usize) {
        self.peers[peer].sequence += 1;
    }

    /// The buffer of the packet that comes next from a rank, which names its message; none, if no receive awaits
    /// anything of that rank: then it stays where it is.
    pub(super) fn destination(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        words: [u64; 2],
        next_id: &mut u64,
    ) -> Result<Option<&mut Transfer>, FabricError> {
        if self.peers[peer].current.is_none() {
            let Some(next) = self.begin(endpoint, peer, words, next_id)? else { return Ok(None) };
            self.peers[peer].current = Some(next);
        }
        let Some(Current::Awaited(transfer) | Current::Unexpected(transfer)) = &mut self.peers[peer].current
        else {
            unreachable!("it was begun above")
        };
        if transfer.signature.to_words() != words {
            return Err(broken(endpoint, peer, transfer.signature, words));
        }
        Ok(Some(transfer))
    }

    /// The receive that a new message is for, or memory for it if another is awaited.
    fn begin(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        words: [u64; 2],
        next_id: &mut u64,
    ) -> Result<Option<Current>, FabricError> {
        let first = self.peers[peer].queue.front().or(self.from_any.front()).map(|first| first.signature);
        let Some(mine) = first else { return Ok(None) };
        let Some(message) = Signature::from_words(words) else {
            return Err(broken(endpoint, peer, mine, words));
        };
        if let Some(receive) = self.take_receive(endpoint, peer, message)? {
            return Ok(Some(Current::Awaited(receive)));
        }
        let id = *next_id;
        *next_id += 1;
        let Some(unexpected) = Transfer::unexpected(id, message) else {
            let reason = format!("sent {message}, for which there is no memory here");
            return Err(endpoint.health.aborted(mine, peer, reason));
        };
        Ok(Some(Current::Unexpected(unexpected)))
    }

    /// The first receive that fits a message of a rank.
    fn take_receive(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        message: Signature,
    ) -> Result<Option<Transfer>, FabricError> {
        let fits = |transfer: &Transfer| transfer.signature.detail == message.detail;
        let Self { peers, from_any } = self;
        let queue = &mut peers[peer].queue;
        let places = [&*queue, &*from_any].map(|queue| queue.iter().position(fits));
        let (queue, place) = match places {
            [Some(own), Some(any)] if from_any[any].id < queue[own].id => (from_any, any),
            [Some(own), _] => (queue, own),
            [None, Some(any)] => (from_any, any),
            [None, None] => return Ok(None),
        };
        let mine = queue[place].signature;
        if mine != message {
            let (consumed, expected) = (endpoint.regions.consumed(peer, endpoint.rank), mine.to_words());
            consumed.refuse(expected);
            if let Some(links) = &endpoint.links {
                links.tell_consumed(peer, consumed.count(), expected)?;
            }
            return Err(endpoint.health.disagreement(mine, peer, message));
        }
        let receive = queue.remove(place);
        if let Some(origin) = receive.as_ref().and_then(|receive| receive.origin.as_ref()) {
            let _ = origin.set(peer); // once, as it is taken once
        }
        Ok(receive)
    }

    /// The receive for which a message of a rank lay ready, now filled.
    pub(super) fn take_unexpected(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
    ) -> Result<Option<Transfer>, FabricError> {
        for place in 0..self.peers[peer].unexpected.len() {
            let message = self.peers[peer].unexpected[place].signature;
            if let Some(mut receive) = self.take_receive(endpoint, peer, message)? {
                let arrived = self.peers[peer].unexpected.remove(place).expect("it was found there");
                receive.take(&arrived);
                return Ok(Some(receive));
            }
        }
        Ok(None)
    }

    /// Ends the message of a rank that has come whole: gives the receive, if it was for one.
    pub(super) fn finish(&mut self, peer: usize) -> Option<Transfer> {
        match self.peers[peer].current.take()? {
            Current::Awaited(receive) => Some(receive),
            Current::Unexpected(message) => {
                self.peers[peer].unexpected.push_back(message);
                None
            }
        }
    }
}

fn remove(queue: &mut VecDeque<Transfer>, id: u64) -> Option<Transfer> {
    let place = queue.iter().position(|transfer| transfer.id == id)?;
    queue.remove(place)
}

/// A packet that no rank of this version writes.
#[cold]
fn broken(endpoint: &Endpoint, peer: usize, mine: Signature, words: [u64; 2]) -> FabricError {
    endpoint.health.aborted(mine, peer, format!("wrote {words:x?}, which is no message"))
}
