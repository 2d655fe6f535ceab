//! Checks of the order of accesses: every access of a kernel is seen, and two that PTX's memory model does not order are reported.
//!
//! `ANTIPHON_EMULATOR_RACES=first` reports the first race and ends the process; `all` reports each pair of places once. docs/design/emulator.md has
//! the model as a table.
//!
//! | file | part |
//! | --- | --- |
//! | [`clocks`] | vector clocks, as trees |
//! | [`shadow`] | what is remembered of each word of memory |
//! | [`grids`] | grids, and where their threads run |
//! | [`threads`] | what the threads of a block know; fences and barriers |
//! | [`access`] | whether an access is ordered behind those before it |
//! | [`messages`] | releases that memory carries |
//! | [`late`] | stores that come late: what a strong load may return |
//! | [`order`] | streams, events and the host |
//! | [`hooks`] | what kernels call |
//! | [`report`] | the text of a race |

mod access;
mod clocks;
pub(crate) mod grids;
mod hooks;
mod late;
#[cfg(test)]
pub(crate) mod litmus;
mod messages;
pub(crate) mod order;
mod report;
pub(crate) mod shadow;
pub(crate) mod threads;

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

pub(crate) use hooks::{CHECKS, Checks};
pub(crate) use report::{allow, line_of};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Off,
    /// The process ends with the first report.
    First,
    All,
}

/// What `ANTIPHON_EMULATOR_RACES` says; this crate's own tests check always.
pub(crate) fn mode() -> Mode {
    static MODE: OnceLock<Mode> = OnceLock::new();
    *MODE.get_or_init(|| match std::env::var("ANTIPHON_EMULATOR_RACES").as_deref() {
        Ok("first") => Mode::First,
        Ok("all") => Mode::All,
        Ok("") | Err(_) => {
            if cfg!(test) {
                Mode::All
            } else {
                Mode::Off
            }
        }
        Ok(other) => panic!("ANTIPHON_EMULATOR_RACES is first or all, not {other}"),
    })
}

/// Whether programs are compiled with checks.
pub(crate) fn is_on() -> bool {
    mode() != Mode::Off
}

static IS_BLIND: AtomicBool = AtomicBool::new(false);

/// Whether accesses are checked: not if other processes have a part in them.
fn is_checking() -> bool {
    is_on() && !IS_BLIND.load(Ordering::Relaxed)
}

/// Memory of another process has been mapped, whose accesses are not seen here.
pub(crate) fn stop_checking() {
    if is_on() && !IS_BLIND.swap(true, Ordering::Relaxed) {
        eprintln!("emulator: this process shares memory with others, so races are not checked");
    }
}
