//! Waits for the ranks, passes signals on to them, and ends them when one has failed or the time is up.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::SIGCHLD;

use super::spawn::Children;
use super::{End, Launch, LaunchError, Outcome};

/// How far the end of the launch has come.
#[derive(Clone, Copy)]
enum Stage {
    /// No rank has failed; the time limit may be.
    Running(Option<Instant>),
    /// One has failed: the others may end by themselves until then.
    Grace(Instant),
    /// SIGTERM was sent: they may clean up until then.
    Terminated(Instant),
    /// SIGKILL was sent.
    Killed,
}

impl Stage {
    /// When the next stage begins.
    fn deadline(self) -> Option<Instant> {
        match self {
            Self::Running(limit) => limit,
            Self::Grace(until) | Self::Terminated(until) => Some(until),
            Self::Killed => None,
        }
    }
}

pub(super) struct Supervisor {
    children: Children,
    started: Instant,
    grace: Duration,
    timeout: Option<Duration>,
    stage: Stage,
    first_failure: Option<usize>,
    timed_out: bool,
}

impl Supervisor {
    pub(super) fn new(launch: &Launch, children: Children, started: Instant) -> Self {
        // A limit beyond what the clock can show is none.
        let limit = launch.timeout.and_then(|timeout| started.checked_add(timeout));
        Self {
            children,
            started,
            grace: launch.grace,
            timeout: launch.timeout,
            stage: Stage::Running(limit),
            first_failure: None,
            timed_out: false,
        }
    }

    /// Returns when every rank has ended. `signals` tells of children that ended and of signals to pass on.
    pub(super) fn run(&mut self, signals: &Receiver<i32>) -> Result<(), LaunchError> {
        loop {
            self.reap()?;
            if self.children.all_ended() {
                return Ok(());
            }
            match self.next(signals) {
                Some(SIGCHLD) => {}
                Some(signal) => self.forward(signal),
                None => self.escalate(),
            }
        }
    }

    /// The next signal; `None` when the stage's deadline passes first.
    fn next(&self, signals: &Receiver<i32>) -> Option<i32> {
        match self.stage.deadline() {
            None => signals.recv().ok(),
            Some(deadline) => signals.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok(),
        }
    }

    /// Takes note of the ranks that have ended since the last look.
    fn reap(&mut self) -> Result<(), LaunchError> {
        let ended = self.children.reap(self.started)?;
        if let Some(first) = ended.iter().find(|report| !report.end.success())
            && self.first_failure.is_none()
        {
            // A rank that is stopped makes the others give up, so it failed before one that exited. One that a signal
            // killed needed nobody for that.
            let stopped = matches!(first.end, End::Code(_)).then(|| self.children.note_stopped()).flatten();
            self.first_failure = Some(stopped.unwrap_or(first.rank));
            if let Stage::Running(_) = self.stage {
                self.stage = Stage::Grace(self.after_grace());
            }
        }
        Ok(())
    }

    fn forward(&mut self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.children.signal(signal);
        }
    }

    fn escalate(&mut self) {
        match self.stage {
            Stage::Running(_) => {
                self.timed_out = true;
                self.terminate();
            }
            Stage::Grace(_) => self.terminate(),
            Stage::Terminated(_) => {
                self.children.signal(Signal::KILL);
                self.stage = Stage::Killed;
            }
            Stage::Killed => {}
        }
    }

    fn terminate(&mut self) {
        self.children.signal(Signal::TERM);
        self.stage = Stage::Terminated(self.after_grace());
    }

    fn after_grace(&self) -> Instant {
        let day = Duration::from_secs(24 * 60 * 60); // an absurd grace must not overflow the clock
        let now = Instant::now();
        now.checked_add(self.grace).unwrap_or(now + day)
    }

    /// The outcome, once [`Supervisor::run`] has returned.
    pub(super) fn outcome(&mut self) -> Outcome {
        Outcome {
            ranks: self.children.take_reports(),
            first_failure: self.first_failure,
            timed_out: if self.timed_out { self.timeout } else { None },
            unwritten: None,
        }
    }
}
