//! One scheduler for all fibers of all blocks of all GPUs, on one thread of the operating system.
//!
//! With `ANTIPHON_EMULATOR_SCHEDULE=SEED` a seed decides where the scheduler switches and to whom, and time is virtual. What the host
//! submits comes when it comes, and is recorded; `ANTIPHON_EMULATOR_REPLAY=FILE` repeats a record. docs/design/emulator.md says more.
//!
//! | file | part |
//! | --- | --- |
//! | [`run`] | the scheduler: who runs, and until when |
//! | [`fibers`] | blocks of kernels |
//! | [`levels`] | who can run, by priority |
//! | [`parked`] | fibers that wait for memory |
//! | [`tasks`] | what streams do: code of this library that waits |
//! | [`time`] | when the clock of the GPUs goes on |
//! | [`host`] | what the threads of the host are doing |
//! | [`trace`] | the record of a run, and its repetition |

mod fibers;
mod host;
mod levels;
mod parked;
mod run;
mod tasks;
#[cfg(test)]
mod tests;
mod time;
mod trace;

use std::{
    path::PathBuf,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

pub(crate) use fibers::{Device, Pace, Start, Turn};
pub(crate) use host::Compiling;
pub(crate) use run::{accessed, start, wait_until};
pub(crate) use tasks::spawn;
pub(crate) use time::now;
pub(crate) use trace::{answer, failed, joined, submit};

/// What the environment asks for.
struct Setting {
    seed: u64,
    replay: Option<PathBuf>,
}

fn setting() -> Option<&'static Setting> {
    static SETTING: OnceLock<Option<Setting>> = OnceLock::new();
    let read = || {
        let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        if let Some(file) = given("ANTIPHON_EMULATOR_REPLAY") {
            let seed = trace::seed_of(&file)
                .unwrap_or_else(|error| panic!("ANTIPHON_EMULATOR_REPLAY={file}: {error}"));
            return Some(Setting { seed, replay: Some(file.into()) });
        }
        let seed = given("ANTIPHON_EMULATOR_SCHEDULE")?;
        let seed =
            seed.parse().unwrap_or_else(|_| panic!("ANTIPHON_EMULATOR_SCHEDULE is a number, not {seed}"));
        Some(Setting { seed, replay: None })
    };
    SETTING.get_or_init(read).as_ref()
}

/// Whether one scheduler runs everything.
pub(crate) fn is_on() -> bool {
    setting().is_some()
}

/// The seed of the schedule, if there is one.
pub(crate) fn seed() -> Option<u64> {
    setting().map(|setting| setting.seed)
}

static IS_SHARED: AtomicBool = AtomicBool::new(false);

/// Memory of another process has been mapped: its kernels are not of this schedule, and time goes on as theirs does.
pub(crate) fn is_shared_with_others() {
    if is_on() && !IS_SHARED.swap(true, Ordering::Relaxed) {
        eprintln!("emulator: this process shares memory with others, so its schedule cannot be repeated");
    }
}

/// Numbers that follow from a seed: splitmix64.
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mixed(self.0)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// A number that depends on each bit of this one.
pub(super) fn mixed(of: u64) -> u64 {
    let of = (of ^ of >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let of = (of ^ of >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    of ^ of >> 31
}
