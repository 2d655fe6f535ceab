//! What a rank waits for: a rank that gets SIGUSR1 reports it at the next look of a wait.
//!
//! Every rank keeps in its control block what it waits in, as of its last look. So the rank that was asked can also say what
//! those do that it waits for.

use std::time::Duration;

use antiphon_device::{
    host::process,
    sync::{AtomicU64, Ordering},
};

use crate::{Members, Signature, layout::Regions};

/// A rank that waits looks around about every millisecond. One that has not for so long does something else.
pub(crate) const FRESH: Duration = Duration::from_millis(500);

/// What a rank waits in.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Wait {
    /// When it last looked around, on the machine's clock, in nanoseconds; 0 before the first time.
    looked: AtomicU64,
    /// How long it had waited then, in nanoseconds.
    waited: AtomicU64,
    /// The operation.
    words: [AtomicU64; 2],
}

impl Wait {
    /// Notes a look. (Two threads of a rank may wait at once: what one sees may then be of both, which is for people to read.)
    pub(crate) fn note(&self, operation: Signature, waited: Duration) {
        for (word, value) in self.words.iter().zip(operation.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        self.waited.store(waited.as_nanos() as u64, Ordering::Relaxed);
        // Pairs with the acquire load in `current`.
        self.looked.store(now(), Ordering::Release);
    }

    /// The operation in which a rank waits at present, and for how long.
    fn current(&self) -> Option<(Signature, Duration)> {
        let age = now().saturating_sub(self.looked.load(Ordering::Acquire));
        let words = [0, 1].map(|word| self.words[word].load(Ordering::Relaxed));
        let waited = Duration::from_nanos(self.waited.load(Ordering::Relaxed).saturating_add(age));
        (age < FRESH.as_nanos() as u64).then_some((Signature::from_words(words)?, waited))
    }
}

/// The clock that all processes of the machine read.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A rank that is asked, and what it knows of the others.
pub(crate) struct Witness<'a> {
    pub(crate) rank: usize,
    pub(crate) members: &'a Members,
    pub(crate) regions: &'a Regions,
    /// The process of a rank, if it has a number here.
    pub(crate) pid: &'a dyn Fn(usize) -> Option<u32>,
}

impl Witness<'_> {
    /// One line for the rank itself, and one for each that it waits for.
    pub(crate) fn tell(&self, operation: Signature, missing: &[usize], waited: Duration) -> String {
        let all = self.regions.layout().world_size;
        let mut text = format!(
            "antiphon: {} {operation} waits since {waited:.1?} for {}\n",
            self.name(self.rank),
            self.members.names(missing, all)
        );
        for &rank in missing {
            text += &format!("antiphon:   {} {}\n", self.name(rank), self.activity(rank));
        }
        text
    }

    fn name(&self, rank: usize) -> String {
        let process = (self.pid)(rank).map_or(String::new(), |pid| format!(" (process {pid})"));
        format!("{}{process}", self.members.name(rank))
    }

    fn activity(&self, rank: usize) -> String {
        let process = (self.pid)(rank).and_then(process::activity);
        if let Some(stopped) = process.filter(|doing| doing.contains("stopped") || doing.contains("ended")) {
            return stopped.to_owned();
        }
        match (self.regions.control(rank).wait.0.current(), process) {
            (Some((operation, waited)), _) => format!("waits in {operation} since {waited:.1?}"),
            (None, Some(doing)) => format!("does not wait in this communicator: its process {doing}"),
            (None, None) => "does not wait in this communicator".to_owned(),
        }
    }
}
