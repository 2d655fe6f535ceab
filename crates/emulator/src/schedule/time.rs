//! When the clock of the GPUs goes on.
//!
//! It goes on by a nanosecond for each access. When all fibers wait for memory and the host does nothing but wait for the GPUs, it leaps ahead, in
//! larger and larger steps: nothing but a deadline can follow. While the host does something it stands still, and while a
//! thread of the host sleeps it goes on as that thread's does.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    fibers::Pace,
    host::{self, State},
    trace,
};

/// Rounds in which all fibers look again before time goes on.
const RESTS: u32 = 4;
/// A host that is busy for longer may be waiting for a kernel that waits.
const BUSY: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(1);
/// When nothing has moved for so long, there is a report: in nanoseconds of the clock.
const LONG: u64 = 2_000_000_000;

/// What follows when all fibers wait.
pub(super) enum Next {
    /// The host has submitted something.
    Submission,
    /// Nobody has a deadline, and only the host can do something.
    Never,
    /// They look again; and nothing has moved for long, from this step on.
    Step { is_long: bool },
}

/// A wait of this length has no deadline.
const MOST: u64 = 4 * 3600 * 1_000_000_000;

static NOW: AtomicU64 = AtomicU64::new(0);

/// The time of the GPUs, for events.
pub(crate) fn now() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    if super::is_on() { start + Duration::from_nanos(NOW.load(Ordering::Relaxed)) } else { Instant::now() }
}

pub(super) struct Clock {
    pub pace: Box<Pace>,
    /// Rounds since something was done, and when that was.
    rests: u32,
    since: u64,
    is_busy_since: Option<Instant>,
}

impl Clock {
    pub(super) fn new() -> Self {
        now();
        let pace = Box::new(Pace { left: 0, clock: 1_000_000_000, moves: 0, works: 0, writes: [0; 256] });
        let since = pace.clock;
        Self { pace, rests: 0, since, is_busy_since: None }
    }

    pub(super) fn pass(&mut self, nanoseconds: u64) {
        self.pace.clock += nanoseconds;
        NOW.store(self.pace.clock, Ordering::Relaxed);
    }

    /// Something was done.
    pub(super) fn goes_on(&mut self) {
        (self.rests, self.since, self.is_busy_since) = (0, self.pace.clock, None);
    }

    /// All fibers wait: for what the host submits, or for time.
    pub(super) fn still(&mut self, step: u64) -> Next {
        self.rests += 1;
        if self.rests <= RESTS {
            return Next::Step { is_long: false };
        }
        let still = self.pace.clock - self.since;
        if still > MOST {
            return if trace::wait_for_host(LOOK) { Next::Submission } else { Next::Never };
        }
        let passed = match trace::recorded_time(step) {
            Some(Ok(recorded)) => recorded,
            Some(Err(())) => return Next::Submission,
            None => {
                let Some(passed) = self.of_host(still) else { return Next::Submission };
                trace::record_time(step, passed);
                passed
            }
        };
        self.pass(passed);
        Next::Step { is_long: still < LONG && still + passed >= LONG }
    }

    /// How long the host's state says that nothing will happen; none if it has submitted something.
    fn of_host(&mut self, still: u64) -> Option<u64> {
        loop {
            if trace::has_submission() {
                return None;
            }
            let mut state = host::state();
            if state == State::Busy && self.is_busy_since.get_or_insert_with(Instant::now).elapsed() > BUSY {
                state = State::Sleeps;
            }
            match state {
                State::Waits => {
                    self.is_busy_since = None;
                    return Some((still / 32).max(1000));
                }
                State::Sleeps => {
                    let is_new = trace::wait_for_host(LOOK);
                    return if is_new { None } else { Some(LOOK.as_nanos() as u64) };
                }
                State::Busy => _ = trace::wait_for_host(LOOK),
            }
        }
    }
}
