//! Who moves messages.
//!
//! A message of 8 bytes takes 4 µs if the waiting rank itself moves messages, and 16 to 26 µs if a thread does so beside it. So a caller
//! that spins [polls](Progress::poll), and the thread naps meanwhile. The thread takes over once no caller has polled during a whole nap, or at once
//! when a caller [hands over](Progress::hand_over): because it falls asleep, or because it leaves sends behind that are not complete.
//!
//! The thread also sends signs of life and counts those of the peers. No engine notices by itself that a cable is out.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use antiphon_device::{
    host::wait::Doorbell,
    sync::{AtomicU32, AtomicU64, Ordering},
};

use super::{Engine, EngineError, Lost, Message, inbox::LIVES, owner::Owner};

/// How many signs of life a peer may miss. Counting signs, and not time, is fair to peers if this process was stopped.
const SIGNS: u32 = 10;

/// The thread that moves an engine's messages while no caller does. It ends when this is dropped.
pub struct Progress {
    shared: Arc<Shared>,
    /// Taken when this is dropped.
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

/// What callers and the thread share.
pub(super) struct Shared {
    engine: Arc<dyn Engine>,
    /// How often callers have polled. Updates may be lost: it only has to change.
    polls: AtomicU64,
    /// Not 0 once a caller has handed over, until the thread has taken over.
    handed_over: AtomicU32,
    /// Where the thread naps.
    bell: Doorbell,
    ended: AtomicU32,
    /// Not 0 once all connected peers are watched.
    watches_all: AtomicU32,
    /// For each peer: not 0 if it has missed its signs of life.
    unreachable: Vec<AtomicU32>,
}

impl Progress {
    /// How long a peer may give no sign of life, if the user does not say it.
    pub const LINK_TIMEOUT: Duration = Duration::from_secs(10);

    /// Starts the thread for this engine. A peer is [unreachable](Lost::Unreachable) that gives no sign of life for `link_timeout`, after its
    /// first sign or after [`watch_all`](Self::watch_all).
    ///
    /// # Errors
    /// [`EngineError::System`].
    pub fn new(engine: Arc<dyn Engine>, link_timeout: Duration) -> Result<Self, EngineError> {
        let shared = Arc::new(Shared::new(engine));
        let moved = shared.clone();
        let thread = thread::Builder::new()
            .name("antiphon-engine".into())
            .spawn(move || moved.run(Life::new(&moved, link_timeout / SIGNS)))
            .map_err(|error| EngineError::System {
                what: "thread to move messages",
                reason: error.to_string(),
            })?;
        Ok(Self { shared, thread: Some(thread), owner: Owner::this() })
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.shared.engine
    }

    /// Moves messages, as a caller does that spins. Whether anything moved.
    #[inline]
    pub fn poll(&self) -> bool {
        self.shared.poll()
    }

    /// Lets the thread move messages from now on.
    pub fn hand_over(&self) {
        self.shared.hand_over();
    }

    /// Watches all connected peers from now on, also those that have given no sign yet: the caller has heard of them otherwise.
    pub fn watch_all(&self) {
        self.shared.watches_all.store(1, Ordering::Relaxed);
    }

    /// Whether a peer has given a sign of life: from then on it is watched.
    pub fn has_heard_of(&self, peer: usize) -> bool {
        self.shared.engine.inbox().signs_of_life(peer) > 0
    }

    /// Whether a peer is lost: its connection, or its signs of life. Two loads.
    pub fn lost(&self, peer: usize) -> Option<Lost> {
        self.shared.lost(peer)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if self.owner.is_this() {
            self.shared.end();
            // A panic of the thread has been printed.
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

impl Shared {
    pub(super) fn new(engine: Arc<dyn Engine>) -> Self {
        Self {
            polls: AtomicU64::default(),
            handed_over: AtomicU32::default(),
            bell: Doorbell::default(),
            ended: AtomicU32::default(),
            watches_all: AtomicU32::default(),
            unreachable: (0..engine.inbox().peers()).map(|_| AtomicU32::default()).collect(),
            engine,
        }
    }

    #[inline]
    pub(super) fn poll(&self) -> bool {
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.engine.progress()
    }

    pub(super) fn hand_over(&self) {
        self.handed_over.store(1, Ordering::Release);
        // The thread naps at the bell or sleeps in the engine.
        self.bell.ring();
        self.engine.wake();
    }

    pub(super) fn end(&self) {
        self.ended.store(1, Ordering::Release);
        self.hand_over();
    }

    fn lost(&self, peer: usize) -> Option<Lost> {
        let is_unreachable = || self.unreachable.get(peer)?.load(Ordering::Acquire).checked_sub(1);
        self.engine.lost(peer).or_else(|| is_unreachable().map(|_| Lost::Unreachable))
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) != 0
    }

    fn run(&self, mut life: Life) {
        while !self.has_ended() {
            self.nap_while_polled(|| life.look(self));
            self.move_until_polled(life.period, || life.look(self));
        }
    }

    /// Naps until no caller polls, or one hands over. `look` runs after each nap.
    pub(super) fn nap_while_polled(&self, mut look: impl FnMut()) {
        loop {
            let polls = self.polls.load(Ordering::Relaxed);
            self.bell.arm();
            if self.handed_over.load(Ordering::Acquire) != 0 {
                break;
            }
            self.bell.sleep();
            look();
            if self.has_ended() || self.polls.load(Ordering::Relaxed) == polls {
                break;
            }
        }
        // Whoever hands over after this finds a thread that has yet to move messages.
        self.handed_over.store(0, Ordering::Relaxed);
    }

    /// Moves messages, and sleeps while there are none, until a caller polls. `look` runs after each sleep, which takes `limit` at most.
    pub(super) fn move_until_polled(&self, limit: Duration, mut look: impl FnMut()) {
        let polls = self.polls.load(Ordering::Relaxed);
        let is_over = || self.has_ended() || self.polls.load(Ordering::Relaxed) != polls;
        loop {
            let moved = self.engine.progress();
            if is_over() {
                return;
            }
            if !moved {
                self.engine.sleep(limit);
                look();
                if is_over() {
                    return;
                }
            }
        }
    }
}

/// The signs of life of the peers, as the thread counts them.
struct Life {
    period: Duration,
    next: Instant,
    /// For each peer: the signs so far, and how many periods have passed since the last.
    peers: Vec<(u64, u32)>,
}

impl Life {
    fn new(shared: &Shared, period: Duration) -> Self {
        // A period of nothing would leave no time for anything else.
        let period = period.max(Duration::from_millis(1));
        Self { period, next: Instant::now(), peers: vec![(0, 0); shared.unreachable.len()] }
    }

    /// Once in a period: sends this rank's sign to all peers, and looks for theirs.
    fn look(&mut self, shared: &Shared) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + self.period;
        let engine = &shared.engine;
        let sign = Message { kind: LIVES, sender: engine.rank() as u32, ..Message::default() };
        for (peer, (seen, missed)) in self.peers.iter_mut().enumerate() {
            // One that is not connected is not watched.
            if peer == engine.rank() || shared.lost(peer).is_some() || engine.tell(peer, &sign).is_err() {
                continue;
            }
            let signs = engine.inbox().signs_of_life(peer);
            let is_watched = signs > 0 || shared.watches_all.load(Ordering::Relaxed) != 0;
            *missed = if is_watched && signs == *seen { *missed + 1 } else { 0 };
            *seen = signs;
            if *missed > SIGNS {
                shared.unreachable[peer].store(1, Ordering::Release);
            }
        }
    }
}
