//! Loom explores what the callers and the thread of [`Progress`](super::Progress) share, by the very code of production: the thread's steps,
//! [`Shared::hand_over`], and [`Flight`]. The engine is a small one of loom's parts. Each rule is also broken on purpose, and must be caught.
//!
//! A sleep of the thread has no limit here: whoever is not woken is a deadlock, which loom reports. Naps are real ones at the
//! [`Doorbell`](antiphon_device::host::wait::Doorbell), which end by themselves.

use std::{sync::Arc, time::Duration};

use loom::{
    cell::UnsafeCell,
    sync::{Condvar, Mutex},
    thread,
};

use super::{Engine, EngineError, Flight, Inbox, Lost, Message, progress::Shared};

/// An engine whose messages arrive where they are sent. Sending leaves work behind that progress completes.
struct Small {
    inbox: Inbox,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether a hand-over wakes the sleeper, as it must.
    wakes: bool,
    /// What the thread must move so that the waiting caller goes on.
    moved: Mutex<u32>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    /// Messages that were sent and not moved.
    waiting: u32,
    /// Messages of which the event descriptor tells.
    events: u32,
    woken: bool,
}

impl Small {
    fn new(wakes: bool) -> Arc<Self> {
        Arc::new(Self {
            inbox: Inbox::new(1),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            wakes,
            moved: Mutex::new(0),
            arrived: Condvar::new(),
        })
    }

    /// Local work, of which no event tells: a send that was begun.
    fn begin(&self) {
        self.state.lock().unwrap().waiting += 1;
    }

    /// A message from the network, of which the descriptor tells.
    fn arrive(&self) {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        state.events += 1;
        self.changed.notify_all();
    }

    /// Sleeps until `count` messages have been moved.
    fn wait_for(&self, count: u32) {
        let mut moved = self.moved.lock().unwrap();
        while *moved < count {
            moved = self.arrived.wait(moved).unwrap();
        }
    }
}

impl Engine for Small {
    fn name(&self) -> &'static str {
        "small"
    }

    fn rank(&self) -> usize {
        0
    }

    fn address(&self) -> &[u8] {
        &[]
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn connect(&self, _peer: usize, _address: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }

    unsafe fn send(
        &self,
        _peer: usize,
        _message: &Message,
        _payload: *const [u8],
        _flight: &Arc<Flight>,
    ) -> Result<(), EngineError> {
        unreachable!("the models send by themselves")
    }

    fn tell(&self, _peer: usize, _message: &Message) -> Result<(), EngineError> {
        unreachable!("the models send by themselves")
    }

    fn progress(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else { return false };
        let count = std::mem::take(&mut state.waiting);
        state.events = 0;
        drop(state);
        if count > 0 {
            *self.moved.lock().unwrap() += count;
            self.arrived.notify_all();
        }
        count > 0
    }

    fn sleep(&self, _limit: Duration) {
        let mut state = self.state.lock().unwrap();
        while !state.woken && state.events == 0 {
            state = self.changed.wait(state).unwrap();
        }
        state.woken = false;
    }

    fn wake(&self) {
        if self.wakes {
            self.state.lock().unwrap().woken = true;
            self.changed.notify_all();
        }
    }

    fn lost(&self, _peer: usize) -> Option<Lost> {
        None
    }
}

fn explore(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 10_000;
    builder.check(model);
}

/// The thread of `Progress`, without its signs of life.
fn run(shared: &Shared) {
    while !shared.has_ended() {
        shared.nap_while_polled(|| ());
        shared.move_until_polled(Duration::MAX, || ());
    }
}

/// A caller sends, spins for a moment, and falls asleep until the thread has moved what it left.
fn leaves_a_send(polls: usize, hands_over: bool, wakes: bool) {
    explore(Some(3), move || {
        let engine = Small::new(wakes);
        let shared = Arc::new(Shared::new(engine.clone()));
        let moves = shared.clone();
        let thread = thread::spawn(move || run(&moves));
        for _ in 0..polls {
            shared.poll();
        }
        engine.begin();
        if hands_over {
            shared.hand_over();
        }
        engine.wait_for(1);
        engine.wake_for_the_end(&shared);
        thread.join().unwrap();
    });
}

impl Small {
    /// Ends the thread, whatever was broken.
    fn wake_for_the_end(&self, shared: &Shared) {
        shared.end();
        self.state.lock().unwrap().woken = true;
        self.changed.notify_all();
    }
}

#[test]
fn what_a_caller_leaves_is_moved() {
    leaves_a_send(0, true, true);
    leaves_a_send(1, true, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_caller_that_sleeps_without_handing_over_is_caught() {
    leaves_a_send(1, false, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_hand_over_that_does_not_wake_is_caught() {
    leaves_a_send(0, true, false);
}

/// One caller spins and leaves, another sleeps, a message arrives at any moment: whoever moves it, the sleeper gets it.
#[test]
fn a_message_for_a_sleeper_is_moved_whoever_spins() {
    explore(Some(2), || {
        let engine = Small::new(true);
        let shared = Arc::new(Shared::new(engine.clone()));
        let moves = shared.clone();
        let thread = thread::spawn(move || run(&moves));
        let network = engine.clone();
        let arrival = thread::spawn(move || network.arrive());
        shared.poll();
        shared.hand_over();
        engine.wait_for(1);
        arrival.join().unwrap();
        shared.end();
        thread.join().unwrap();
    });
}

/// A caller refills a buffer as soon as its flight is complete, while the thread reads it for two sends. An engine that is broken says
/// that a send has read the buffer before it does.
fn refills(finishes_early: bool) {
    explore(None, move || {
        let flight = Arc::new(Flight::default());
        let buffer = Arc::new(UnsafeCell::new(1u64));
        let lock = Arc::new(Mutex::new(0u32));
        for _ in 0..2 {
            let mut sends = lock.lock().unwrap();
            flight.start();
            *sends += 1;
        }
        let (theirs, read, engine) = (flight.clone(), buffer.clone(), lock.clone());
        let moves = thread::spawn(move || {
            for _ in 0..2 {
                let read = || {
                    // SAFETY: loom reports a write at the same time.
                    assert_eq!(read.with(|value| unsafe { *value }), 1);
                };
                let mut sends = engine.lock().unwrap();
                *sends -= 1;
                if finishes_early {
                    theirs.finish();
                    read();
                } else {
                    read();
                    theirs.finish();
                }
            }
        });
        // One look would not do: loom forgets it when the thread itself loads the counter, and tries no other order.
        while !flight.is_complete() {
            thread::yield_now();
        }
        // SAFETY: likewise.
        buffer.with_mut(|value| unsafe { *value = 2 });
        moves.join().unwrap();
    });
}

#[test]
fn a_buffer_is_refilled_after_it_was_read() {
    refills(false);
}

#[test]
#[should_panic(expected = "Concurrent")]
fn a_send_that_is_complete_before_it_has_read_is_caught() {
    refills(true);
}
