//! An engine between the threads of one process, for tests: a network that counts, delays, reorders, stops and cuts.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use antiphon_device::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

use super::{Engine, EngineError, Flight, Inbox, Lost, Message, owner::Owner};
use crate::endpoint::nanoseconds;

/// The bytes of the longest payload that is copied when it is sent. Longer payloads are read when they arrive, as real engines do: so
/// a test notices a sender that writes its buffer too early.
const EAGER: usize = 4096;

/// How an address of a twin begins.
const NAME: &[u8; 4] = b"twin";

/// The states of an end. One that has left never comes back.
const RUNNING: u32 = 0;
const STOPPED: u32 = 1;
const LEFT: u32 = 2;

/// What went from one peer to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// How many messages were sent.
    pub messages: u64,
    /// How many bytes their payloads have.
    pub bytes: u64,
}

/// The network between [twins](Twin), with its faults.
#[derive(Clone)]
pub struct Network(Arc<Shared>);

/// An engine's end of a [`Network`]: the engine of the peer whose number is its index.
pub struct Twin {
    network: Arc<Shared>,
    index: usize,
    address: Vec<u8>,
    inbox: Inbox,
    owner: Owner,
}

struct Shared {
    /// Tells networks apart.
    id: u64,
    ends: Vec<End>,
    /// The links, by sender and then by receiver.
    links: Vec<Link>,
    /// Chooses what arrives next, if messages are reordered.
    order: Mutex<Option<u64>>,
}

struct End {
    /// Held by the thread that moves this end's messages. It is taken before a queue's lock.
    moving: Mutex<()>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// [`RUNNING`], [`STOPPED`] or [`LEFT`].
    state: AtomicU32,
    /// Whether the peer of each number is lost.
    lost: Vec<AtomicU32>,
}

#[derive(Default)]
struct Queue {
    parcels: VecDeque<Parcel>,
    /// Flights of this end with a send that was delivered, and when this end hears of that.
    finished: Vec<(Instant, Arc<Flight>)>,
    /// The peers that left. They are lost when their last parcel has arrived.
    gone: Vec<usize>,
    connected: Vec<usize>,
    woken: bool,
}

#[derive(Default)]
struct Link {
    messages: AtomicU64,
    bytes: AtomicU64,
    /// In nanoseconds.
    delay: AtomicU64,
    /// In nanoseconds.
    completion_delay: AtomicU64,
    cut: AtomicU32,
    /// One more than how many messages it still carries; 0 if it carries all.
    carries: AtomicU64,
}

impl Link {
    /// Whether a message is lost, of which one less is carried afterwards.
    fn loses_next(&self) -> bool {
        match self.carries.load(Ordering::Relaxed) {
            0 => false,
            1 => true,
            carries => {
                self.carries.store(carries - 1, Ordering::Relaxed);
                false
            }
        }
    }
}

struct Parcel {
    from: usize,
    due: Instant,
    header: [u8; Message::HEADER],
    payload: Payload,
}

enum Payload {
    Copied(Vec<u8>),
    Borrowed(*const [u8], Arc<Flight>),
}

// SAFETY: a borrowed payload is valid on all threads, until its flight is complete or the sender is dropped, which takes it back.
unsafe impl Send for Parcel {}

impl Twin {
    /// A network and the engines of its `peers` peers, in the order of their numbers.
    pub fn network(peers: usize) -> (Network, Vec<Self>) {
        let end = || End {
            moving: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            state: AtomicU32::default(),
            lost: (0..peers).map(|_| AtomicU32::default()).collect(),
        };
        let id = super::Key::random().to_bytes();
        let network = Arc::new(Shared {
            id: u64::from_le_bytes(*id.first_chunk().expect("a key is longer")),
            ends: (0..peers).map(|_| end()).collect(),
            links: (0..peers * peers).map(|_| Link::default()).collect(),
            order: Mutex::default(),
        });
        let twin = |index| Self {
            address: network.address(index),
            network: network.clone(),
            index,
            inbox: Inbox::new(peers),
            owner: Owner::this(),
        };
        let twins = (0..peers).map(twin).collect();
        (Network(network), twins)
    }

    fn end(&self) -> &End {
        &self.network.ends[self.index]
    }

    /// Puts a message into the receiver's queue.
    fn post(&self, peer: usize, message: &Message, payload: Payload) -> Result<(), EngineError> {
        self.owner.check()?;
        let Some(key) = self.inbox.key() else { return Err(EngineError::Closed) };
        if !self.end().queue().connected.contains(&peer) {
            return Err(EngineError::NotConnected { peer });
        }
        let (len, flight) = match &payload {
            Payload::Copied(bytes) => (bytes.len(), None),
            Payload::Borrowed(bytes, flight) => (bytes.len(), Some(flight.clone())),
        };
        if let Some(flight) = &flight {
            let _queue = self.end().queue();
            flight.start();
        }
        let end = &self.network.ends[peer];
        let mut queue = end.queue();
        let link = self.network.link(self.index, peer);
        let is_lost = || message.kind < Message::ENGINES_OWN && link.loses_next();
        if end.state() == LEFT || self.end().state() == LEFT || is_lost() {
            drop(queue);
            let _queue = self.end().queue();
            flight.iter().for_each(|flight| flight.finish());
            return Ok(());
        }
        // Nobody counts beside this: only this end sends on the link, under the receiver's lock.
        link.messages.store(link.messages.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        link.bytes.store(link.bytes.load(Ordering::Relaxed) + len as u64, Ordering::Relaxed);
        let due = Instant::now() + Duration::from_nanos(link.delay.load(Ordering::Relaxed));
        queue.parcels.push_back(Parcel { from: self.index, due, header: message.encode(key), payload });
        end.changed.notify_all();
        Ok(())
    }

    /// The next message to be delivered.
    fn next(&self) -> Option<Parcel> {
        let mut queue = self.end().queue();
        let now = Instant::now();
        let deliverable: Vec<usize> = (0..queue.parcels.len())
            .filter(|&at| {
                let parcel = &queue.parcels[at];
                parcel.due <= now && !self.network.is_cut(parcel.from, self.index)
            })
            .collect();
        let at = self.network.choose(&deliverable)?;
        queue.parcels.remove(at)
    }

    fn deliver(&self, parcel: Parcel) {
        let payload: *const [u8] = match &parcel.payload {
            Payload::Copied(bytes) => &raw const **bytes,
            Payload::Borrowed(bytes, _) => *bytes,
        };
        if let Some(landing) = self.inbox.admit(&parcel.header, payload.len()) {
            // SAFETY: the parcel has a copy, or borrows what the sender keeps until the flight is complete.
            unsafe { landing.store(payload.cast()) };
        }
        if let Payload::Borrowed(_, flight) = parcel.payload {
            let sender = &self.network.ends[parcel.from];
            let delay = self.network.link(parcel.from, self.index).completion_delay.load(Ordering::Relaxed);
            sender.queue().finished.push((Instant::now() + Duration::from_nanos(delay), flight));
            sender.changed.notify_all();
        }
    }

    /// Completes the sends that were delivered, as far as this end has heard of it. Whether there was one.
    fn finish_flights(&self) -> bool {
        let mut queue = self.end().queue();
        let before = queue.finished.len();
        let now = Instant::now();
        queue.finished.retain(|(due, flight)| {
            let is_due = *due <= now;
            if is_due {
                flight.finish();
            }
            !is_due
        });
        queue.finished.len() < before
    }

    /// How long nothing will move, unless something changes.
    fn until_something_moves(&self, queue: &Queue) -> Duration {
        if queue.woken || queue.gone.iter().any(|&peer| queue.has_all_of(peer)) {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let parcels = queue.parcels.iter().filter(|parcel| !self.network.is_cut(parcel.from, self.index));
        let finished = queue.finished.iter().map(|(due, _)| *due);
        let due = parcels.map(|parcel| parcel.due).chain(finished).min();
        due.map_or(Duration::MAX, |due| due.saturating_duration_since(now))
    }

    /// Marks the peers as lost that left, and of which nothing is under way any more. Whether there was one.
    fn notice_lost(&self) -> bool {
        let mut queue = self.end().queue();
        let (lost, waiting): (Vec<_>, _) = queue.gone.iter().partition(|&&peer| queue.has_all_of(peer));
        queue.gone = waiting;
        lost.iter().for_each(|&peer| self.end().lost[peer].store(1, Ordering::Release));
        !lost.is_empty()
    }
}

impl Engine for Twin {
    fn name(&self) -> &'static str {
        "twin"
    }

    fn rank(&self) -> usize {
        self.index
    }

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn connect(&self, peer: usize, address: &[u8]) -> Result<(), EngineError> {
        self.owner.check()?;
        if peer >= self.network.ends.len() || address != self.network.address(peer) {
            return Err(EngineError::Address { engine: self.name(), len: address.len() });
        }
        let connected = &mut self.end().queue().connected;
        if connected.contains(&peer) {
            return Err(EngineError::Connected { peer });
        }
        connected.push(peer);
        Ok(())
    }

    unsafe fn send(
        &self,
        peer: usize,
        message: &Message,
        payload: *const [u8],
        flight: &Arc<Flight>,
    ) -> Result<(), EngineError> {
        if payload.len() > EAGER {
            return self.post(peer, message, Payload::Borrowed(payload, flight.clone()));
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe { &*payload };
        self.post(peer, message, Payload::Copied(bytes.to_vec()))
    }

    fn tell(&self, peer: usize, message: &Message) -> Result<(), EngineError> {
        self.post(peer, message, Payload::Copied(Vec::new()))
    }

    fn progress(&self) -> bool {
        if !self.owner.is_this() || self.inbox.key().is_none() || self.end().state() != RUNNING {
            return false;
        }
        let _moving = match self.end().moving.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let mut moved = self.finish_flights();
        // What arrives meanwhile is for the next call.
        let waiting = self.end().queue().parcels.len();
        for _ in 0..waiting {
            let Some(parcel) = self.next() else { break };
            self.deliver(parcel);
            moved = true;
        }
        self.notice_lost() | moved
    }

    fn sleep(&self, limit: Duration) {
        if !self.owner.is_this() {
            return;
        }
        let mut queue = self.end().queue();
        let wait = match self.end().state() {
            RUNNING => self.until_something_moves(&queue).min(limit),
            _ => limit,
        };
        if !wait.is_zero() {
            // Woken for nothing is as good: the caller looks again.
            queue = match self.end().changed.wait_timeout(queue, wait) {
                Ok((queue, _)) => queue,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        queue.woken = false;
    }

    fn wake(&self) {
        if self.owner.is_this() {
            self.end().queue().woken = true;
            self.end().changed.notify_all();
        }
    }

    fn lost(&self, peer: usize) -> Option<Lost> {
        let lost = self.end().lost.get(peer)?;
        (lost.load(Ordering::Acquire) != 0).then_some(Lost::Reset)
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        if self.owner.is_this() {
            self.network.leave(self.index);
        }
    }
}

impl End {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic comes from a receiver, which no queue's lock is held for.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }
}

impl Queue {
    /// Whether nothing is under way from this peer.
    fn has_all_of(&self, peer: usize) -> bool {
        self.parcels.iter().all(|parcel| parcel.from != peer)
    }
}

impl Shared {
    fn address(&self, index: usize) -> Vec<u8> {
        [&NAME[..], &self.id.to_le_bytes(), &(index as u64).to_le_bytes()].concat()
    }

    /// # Panics
    /// If there is no such peer.
    fn link(&self, from: usize, to: usize) -> &Link {
        let peers = self.ends.len();
        assert!(from < peers && to < peers, "{from} and {to} are not both below {peers}");
        &self.links[from * peers + to]
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.link(from, to).cut.load(Ordering::Acquire) != 0
    }

    /// One of these: the first, or any if messages are reordered.
    fn choose(&self, candidates: &[usize]) -> Option<usize> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = &mut *order else { return candidates.first().copied() };
        // The generator SplitMix64: https://doi.org/10.1145/2714064.2660195
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut random = *state;
        random = (random ^ (random >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        random = (random ^ (random >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let count = candidates.len().max(1) as u64;
        candidates.get(((random ^ (random >> 31)) % count) as usize).copied()
    }

    /// The peer sends and receives no more. What it has sent and was copied still arrives.
    fn leave(&self, peer: usize) {
        self.ends[peer].state.store(LEFT, Ordering::Release);
        for (_, end) in self.ends.iter().enumerate().filter(|&(index, _)| index != peer) {
            // Nobody reads what the peer lent.
            let _moving = end.moving.lock().unwrap_or_else(PoisonError::into_inner);
            let mut queue = end.queue();
            queue
                .parcels
                .retain(|parcel| parcel.from != peer || matches!(parcel.payload, Payload::Copied(_)));
            if !queue.gone.contains(&peer) && end.lost[peer].load(Ordering::Acquire) == 0 {
                queue.gone.push(peer);
            }
            end.changed.notify_all();
        }
        // What the others lent to it is theirs again.
        let parcels = std::mem::take(&mut self.ends[peer].queue().parcels);
        for parcel in parcels {
            if let Payload::Borrowed(_, flight) = parcel.payload {
                let sender = &self.ends[parcel.from];
                sender.queue().finished.push((Instant::now(), flight));
                sender.changed.notify_all();
            }
        }
    }

    fn notify_all(&self) {
        for end in &self.ends {
            // Under the lock: a sleeper has either seen the change, or hears of it.
            let _queue = end.queue();
            end.changed.notify_all();
        }
    }
}

impl Network {
    /// What was sent from one peer to another so far.
    ///
    /// # Panics
    /// This and all other methods: if there is no such peer.
    pub fn traffic(&self, from: usize, to: usize) -> Traffic {
        let link = self.0.link(from, to);
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Traffic { messages: read(&link.messages), bytes: read(&link.bytes) }
    }

    /// Lets what is sent from now on take so long.
    pub fn delay(&self, from: usize, to: usize, delay: Duration) {
        self.0.link(from, to).delay.store(nanoseconds(delay), Ordering::Relaxed);
    }

    /// Lets a sender hear so much later than the receiver that a payload has arrived which was not copied.
    pub fn delay_completions(&self, from: usize, to: usize, delay: Duration) {
        self.0.link(from, to).completion_delay.store(nanoseconds(delay), Ordering::Relaxed);
    }

    /// Delivers the messages that wait in an order that this number determines, instead of the order in which they were sent.
    pub fn reorder(&self, seed: u64) {
        *self.0.order.lock().unwrap_or_else(PoisonError::into_inner) = Some(seed);
    }

    /// Loses what one peer sends to another from now on, but for a number of messages and signs of life.
    pub fn lose_after(&self, from: usize, to: usize, messages: u64) {
        self.0.link(from, to).carries.store(messages + 1, Ordering::Relaxed);
    }

    /// Cuts the link between two peers: what is under way waits, in both directions, and nobody is told.
    pub fn cut(&self, a: usize, b: usize) {
        self.set_cut(a, b, 1);
    }

    /// Ends a [`cut`](Self::cut).
    pub fn mend(&self, a: usize, b: usize) {
        self.set_cut(a, b, 0);
    }

    fn set_cut(&self, a: usize, b: usize, cut: u32) {
        for (from, to) in [(a, b), (b, a)] {
            self.0.link(from, to).cut.store(cut, Ordering::Release);
        }
        self.0.notify_all();
    }

    /// Lets the engine of a peer move nothing until [`resume`](Self::resume), as if its process was stopped.
    pub fn stop(&self, peer: usize) {
        self.0.ends[peer].state.store(STOPPED, Ordering::Release);
    }

    /// Ends a [`stop`](Self::stop).
    pub fn resume(&self, peer: usize) {
        self.0.ends[peer].state.store(RUNNING, Ordering::Release);
        self.0.notify_all();
    }

    /// Ends the connections of a peer, as if its process was killed.
    pub fn kill(&self, peer: usize) {
        self.0.leave(peer);
    }
}
