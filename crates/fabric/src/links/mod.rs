//! What a rank of one node does for the ranks of other nodes.
//!
//! The memory of a node has a region for every rank of the communicator. Those of remote ranks are *mirrors*: what a remote rank
//! writes into its own region for others is written here too, by messages of the [engine](crate::engine). So all that a rank
//! reads of others it reads in the memory of its own node, wherever they are.
//!
//! A *post* (a packet of a [round](crate::Rounds)) reaches each other node once, along a rail, in pieces. The process that receives
//! them counts the bytes, and publishes the packet's head in the mirror when all are there, so the order of the pieces does not
//! matter. Why no piece overwrites what a rank still reads: a rank fills the packet of round `k` again for round `k + 2`, after
//! it has seen all packets of round `k + 1`. Their senders had finished round `k`, so this packet had arrived on every node, and
//! they had read it. The sender itself may still have to hear that its sends are complete, which it waits for
//! ([`Links::may_refill`]).
//!
//! A *packet* of a ring of messages goes straight to the process of its receiver, which says what it has consumed.
//!
//! A *word* (a departure, the reason of a failure) goes to each remote process, because the rail to a node may be gone. It says which rounds
//! its rank had posted, and how many packets it had sent to this process; it counts once these are there. It does not wait for posts that were
//! lost with the rank that takes them for this node.
//!
//! A *notice* (what a rank says that shrinks its communicator) goes to each remote process too, and counts at once, unless a newer one did.

mod mirror;
#[cfg(all(test, not(loom)))]
mod model;
mod written;

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use antiphon_device::{
    host::wait::{Doorbell, Patience, wait_for},
    sync::{AtomicU64, Mutex, Ordering},
};

pub(crate) use mirror::Mirror;
pub use written::Written;

use crate::{
    FabricError,
    communicator::shrink::Said,
    engine::{Flight, Message, Progress},
    layout::{LANES, RING, RING_BODY, Regions},
    nodes::Nodes,
};

/// The longest piece of a post, in bytes: pieces of this size had the best bandwidth over TCP.
const PIECE: usize = 64 << 10;
/// How long a rank that leaves waits for its sends.
const LAST_SENDS: Duration = Duration::from_secs(2);
/// Looks of a spinning rank between two looks at the clock are cheap; a look at the engine costs a tenth of a microsecond or more.
const POLLS_FOR_LOOK: u32 = 10;

/// The bits of a word's kind, in the number that it shares with the word's own number.
const KIND_BITS: u32 = 8;

/// The kinds of messages between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Kind {
    /// A piece of a packet of a round.
    Post = 1,
    /// A [`Word`].
    Word = 2,
    /// A packet of a ring of messages.
    Packet = 3,
    /// How many packets of a ring are consumed.
    Consumed = 4,
    /// What a rank says that shrinks its communicator.
    Notice = 5,
}

impl Kind {
    fn decode(number: u32) -> Option<Self> {
        let all = [Self::Post, Self::Word, Self::Packet, Self::Consumed, Self::Notice];
        all.into_iter().find(|&kind| kind as u32 == number)
    }
}

/// The facts that a rank announces to all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// It has dropped its communicator, and had sent `notices` notices to each rank.
    Departed { notices: u64 },
    /// Why it gave up; see `health`.
    Fault(u64),
    /// Why it gave up in a group.
    FaultInGroup(u64),
    /// It gave up in a round of a lane.
    GivenUp { lane: usize, round: u64 },
}

impl Word {
    /// Its kind and its value.
    fn encode(self) -> (usize, u64) {
        match self {
            Self::Departed { notices } => (0, notices),
            Self::Fault(fault) => (1, fault),
            Self::FaultInGroup(fault) => (2, fault),
            Self::GivenUp { lane, round } => (3 + lane, round),
        }
    }

    fn decode(kind: u64, value: u64) -> Option<Self> {
        Some(match usize::try_from(kind).ok()? {
            0 => Self::Departed { notices: value },
            1 => Self::Fault(value),
            2 => Self::FaultInGroup(value),
            kind if kind < 3 + LANES => Self::GivenUp { lane: kind - 3, round: value },
            _ => return None,
        })
    }
}

/// The ring of messages to one rank.
#[derive(Default)]
struct Ring {
    /// The sends of each packet.
    flights: [Arc<Flight>; RING],
    /// Packets sent.
    sent: AtomicU64,
}

const _: () = assert!(RING_BODY <= PIECE, "a packet of a ring is one message");

/// One rank's links to the ranks of other nodes, in one communicator.
pub(crate) struct Links {
    progress: Arc<Progress>,
    mirror: Arc<Mirror>,
    /// The communicator's number, equal on all ranks.
    communicator: u64,
    rank: usize,
    nodes: Nodes,
    /// The engine's numbers of the ranks.
    peers: Vec<usize>,
    /// The rails to the other nodes.
    rails: Vec<usize>,
    regions: Regions,
    /// The sends of each packet of rounds, by lane and parity.
    flights: [[Arc<Flight>; 2]; LANES],
    /// The packets of the ring to each rank on another node.
    rings: Vec<Option<Ring>>,
    /// The round of each lane that was posted last.
    posted: [AtomicU64; LANES],
    /// The number of the last word.
    words: Mutex<u64>,
    /// The number of the last notice.
    notices: Mutex<u64>,
    /// The process that this is of: in a forked child nothing moves.
    owner: u32,
}

impl Links {
    /// The links of a rank in a communicator of this number, whose [`Mirror`] this registers with the engine; that is connected, or will be
    /// before the first message, to those of `peers` that are on other nodes.
    pub(crate) fn new(
        progress: Arc<Progress>,
        communicator: u64,
        rank: usize,
        nodes: Nodes,
        peers: Vec<usize>,
        regions: Regions,
    ) -> Self {
        let mirror = Arc::new(Mirror::new(rank, nodes.clone(), regions.clone()));
        progress.engine().inbox().register(communicator, mirror.clone());
        let own = nodes.of(rank);
        let rails =
            (0..nodes.count()).filter(|&node| node != own).map(|node| nodes.rail(rank, node)).collect();
        let flights = std::array::from_fn(|_| std::array::from_fn(|_| Arc::new(Flight::new())));
        let ring = |peer| (!nodes.share_memory(rank, peer)).then(Ring::default);
        Self {
            rings: (0..nodes.world_size()).map(ring).collect(),
            mirror,
            progress,
            communicator,
            rank,
            nodes,
            peers,
            rails,
            regions,
            flights,
            posted: std::array::from_fn(|_| AtomicU64::new(0)),
            words: Mutex::new(0),
            notices: Mutex::new(0),
            owner: std::process::id(),
        }
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// What moves the messages.
    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// The links of a rank of a group of these ranks, if they are on several nodes.
    pub(crate) fn of_group(
        &self,
        number: u64,
        rank: usize,
        group: &[usize],
        nodes: Nodes,
        regions: Regions,
    ) -> Self {
        let peers = group.iter().map(|&member| self.peers[member]).collect();
        Self::new(self.progress.clone(), number, rank, nodes, peers, regions)
    }

    /// Sends a packet of this rank to all other nodes; `written` says what of it is for each of them.
    pub(crate) fn post(
        &self,
        lane: usize,
        round: u64,
        words: [u64; 2],
        written: impl Fn(usize) -> Written,
    ) -> Result<(), FabricError> {
        let parity = (round % 2) as usize;
        let flight = &self.flights[lane][parity];
        self.posted[lane].store(round, Ordering::Relaxed);
        for &rail in &self.rails {
            let peer = self.peers[rail];
            let written = written(self.nodes.of(rail));
            let payload = self.regions.mailbox(self.rank, lane, parity).payload(written.len());
            let total = written.total() as u64;
            let words = [(2 * lane + parity) as u64, round, words[0], words[1], total];
            let message = |start: usize| self.message(Kind::Post, payload.wrapping_add(start), words);
            if total == 0 {
                self.progress.engine().tell(peer, &message(0))?;
            }
            for range in written.ranges() {
                for start in range.clone().step_by(PIECE) {
                    let len = PIECE.min(range.end - start);
                    // SAFETY: the range lies within the payload, which this rank does not fill again before the flight is
                    // complete; the mapping outlives the flight, see `drop`.
                    unsafe {
                        let piece = std::ptr::slice_from_raw_parts(payload.add(start).cast_const(), len);
                        self.progress.engine().send(peer, &message(start), piece, flight)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn message(&self, kind: Kind, payload: *const u8, words: [u64; 5]) -> Message {
        let place = payload as usize - self.regions.region(self.rank).as_ptr() as usize;
        let (communicator, sender) = (self.communicator, self.rank as u32);
        Message { communicator, sender, kind: kind as u32, place: place as u64, words }
    }

    /// A message without a payload.
    fn tell_one(&self, rank: usize, kind: Kind, words: [u64; 5]) -> Result<(), FabricError> {
        let message = self.message(kind, self.regions.region(self.rank).as_ptr(), words);
        Ok(self.progress.engine().tell(self.peers[rank], &message)?)
    }

    /// Sends the packet at a place of the ring to a rank, if that is on another node: the packet with this stamp, which has a payload of
    /// `len` bytes.
    pub(crate) fn send_packet(
        &self,
        to: usize,
        index: usize,
        stamp: u64,
        words: [u64; 2],
        len: usize,
    ) -> Result<(), FabricError> {
        let Some(ring) = &self.rings[to] else { return Ok(()) };
        ring.sent.store(stamp, Ordering::Relaxed);
        let payload = self.regions.ring(self.rank, to, index).payload(len).cast_const();
        let message =
            self.message(Kind::Packet, payload, [index as u64, stamp, words[0], words[1], len as u64]);
        let (engine, peer) = (self.progress.engine(), self.peers[to]);
        if len == 0 {
            return Ok(engine.tell(peer, &message)?);
        }
        // SAFETY: the packet has a payload of `len` bytes, which this rank does not fill again before the flight is complete; the
        // mapping outlives the flight, see `drop`.
        Ok(unsafe {
            engine.send(peer, &message, std::ptr::slice_from_raw_parts(payload, len), &ring.flights[index])
        }?)
    }

    /// Whether the packet at a place of the ring to a rank can be filled, as far as its send is concerned.
    pub(crate) fn has_sent(&self, to: usize, index: usize) -> bool {
        self.rings[to].as_ref().is_none_or(|ring| ring.flights[index].is_complete())
    }

    /// Tells a rank, if it is on another node, how many packets of its ring are consumed, and, if one was refused, what was expected.
    pub(crate) fn tell_consumed(
        &self,
        from: usize,
        count: u64,
        expected: [u64; 2],
    ) -> Result<(), FabricError> {
        if self.rings[from].is_none() {
            return Ok(());
        }
        self.tell_one(from, Kind::Consumed, [count, expected[0], expected[1], 0, 0])
    }

    /// Whether this rank's packet for a round can be filled: its sends of two rounds before are complete.
    #[inline]
    pub(crate) fn may_refill(&self, lane: usize, round: u64) -> bool {
        self.flights[lane][(round % 2) as usize].is_complete()
    }

    /// Leaves the rest to the thread, if the packet of this round is not wholly sent: this rank does something else now.
    #[inline]
    pub(crate) fn leave(&self, lane: usize, round: u64) {
        if !self.may_refill(lane, round) {
            self.progress.hand_over();
        }
    }

    /// As [`leave`](Self::leave), behind messages to a rank.
    pub(crate) fn leave_messages(&self, to: usize) {
        let Some(ring) = &self.rings[to] else { return };
        if !ring.flights.iter().all(|flight| flight.is_complete()) {
            self.progress.hand_over();
        }
    }

    /// Tells all ranks of other nodes a word, in so far as the engine can reach them.
    pub(crate) fn tell(&self, word: Word) {
        let (kind, value) = word.encode();
        // Several threads of a rank may fail at once.
        let mut number = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        *number += 1;
        let posted = self.posted.each_ref().map(|round| round.load(Ordering::Relaxed));
        for (rank, ring) in self.rings.iter().enumerate() {
            let Some(ring) = ring else { continue };
            let sent = ring.sent.load(Ordering::Relaxed);
            let words = [kind as u64 | *number << KIND_BITS, value, posted[0], posted[1], sent];
            // A rank that cannot be reached is lost, which its peers notice by themselves.
            let _ = self.tell_one(rank, Kind::Word, words);
        }
    }

    /// Tells all ranks of other nodes that this rank has dropped its communicator.
    pub(crate) fn depart(&self) {
        let notices = *self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        self.tell(Word::Departed { notices });
    }

    /// Tells all ranks of other nodes what this rank says, and whom it has lost. It waits for nothing else: what a word waits for may have been
    /// lost with a rank.
    pub(crate) fn tell_notice(&self, said: Said, lost: Option<usize>) {
        let mut number = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        *number += 1;
        let [state, decided] = said.encode();
        let lost = lost.map_or(0, |rank| rank as u64 + 1);
        for rank in self.nodes.elsewhere(self.rank) {
            // As in `tell`.
            let _ = self.tell_one(rank, Kind::Notice, [*number, state, decided, lost, 0]);
        }
    }

    /// The communicator's number.
    pub(crate) fn communicator(&self) -> u64 {
        self.communicator
    }

    /// The ranks of other nodes to which this rank's posts go.
    pub(crate) fn rails(&self) -> &[usize] {
        &self.rails
    }

    /// The rank of this node that takes what a rank of another node posts, if it is one.
    pub(crate) fn rail_from(&self, rank: usize) -> Option<usize> {
        let node = self.nodes.of(self.rank);
        (self.nodes.of(rank) != node).then(|| self.nodes.rail(rank, node))
    }

    /// Lets words count that wait for posts which ranks of this node would have taken that are gone.
    pub(crate) fn forget_rails(&self, is_gone: impl Fn(usize) -> bool) {
        let mates = self.nodes.ranks(self.nodes.of(self.rank)).iter().copied();
        mates
            .filter(|&mate| mate != self.rank && is_gone(mate))
            .for_each(|mate| self.mirror.forget_rail(mate));
    }

    /// Moves messages.
    #[inline]
    pub(crate) fn poll(&self) {
        self.progress.poll();
    }

    /// As [`wait_for`](antiphon_device::host::wait::wait_for): the rank moves messages while it spins, and leaves that to the
    /// thread before it sleeps.
    pub(crate) fn wait_for<T, E>(
        &self,
        bell: &Doorbell,
        patience: Patience,
        mut ready: impl FnMut() -> Option<T>,
        check: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<T, E> {
        let spins = (patience.polls + patience.pauses).div_ceil(POLLS_FOR_LOOK);
        for spin in 0..spins + patience.yields {
            if let Some(value) = ready() {
                return Ok(value);
            }
            self.poll();
            if spin >= spins {
                std::thread::yield_now();
            }
        }
        self.progress.hand_over();
        wait_for(bell, Patience { polls: 1, pauses: 0, yields: 0 }, ready, check)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        let rings = || self.rings.iter().flatten().flat_map(|ring| &ring.flights);
        let is_complete = || self.flights.iter().flatten().chain(rings()).all(|flight| flight.is_complete());
        let start = Instant::now();
        while !is_complete() && start.elapsed() < LAST_SENDS {
            self.poll();
            std::thread::yield_now();
        }
        self.progress.engine().inbox().remove(self.communicator);
        if !is_complete() {
            // The engine may still read what it was given.
            std::mem::forget(self.regions.clone());
        }
    }
}
