//! Signals for the launches under way in this process.
//!
//! A signal handler stays installed: removing it would leave the signal ignored. So one thread receives the signals for the
//! life of the process. While no launch listens, the thread takes each signal's default action.

use std::fs;
use std::io;
use std::os::raw::c_int;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

const FORWARDED: [c_int; 6] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

struct Hub {
    started: bool,
    next: u64,
    listeners: Vec<(u64, Sender<c_int>)>,
}

static HUB: Mutex<Hub> = Mutex::new(Hub { started: false, next: 0, listeners: Vec::new() });

fn hub() -> MutexGuard<'static, Hub> {
    HUB.lock().unwrap_or_else(PoisonError::into_inner) // no update of the hub is ever half done
}

/// Listens until it is dropped.
pub(super) struct Subscription(u64);

impl Drop for Subscription {
    fn drop(&mut self) {
        hub().listeners.retain(|(id, _)| *id != self.0);
    }
}

/// Directs every forwarded signal, and SIGCHLD, to the returned receiver.
pub(super) fn subscribe() -> io::Result<(Receiver<c_int>, Subscription)> {
    let mut hub = hub();
    if !hub.started {
        start()?;
        hub.started = true;
    }
    let (sender, receiver) = channel();
    let id = hub.next;
    hub.next += 1;
    hub.listeners.push((id, sender));
    Ok((receiver, Subscription(id)))
}

fn start() -> io::Result<()> {
    let ignored = ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default());
    // A signal that the launcher was started to ignore (nohup, a shell's `&`) is not for the ranks either.
    let caught = FORWARDED.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals = Signals::new(caught.chain([SIGCHLD]))?;
    thread::Builder::new()
        .name("antiphon-signals".into())
        .spawn(move || signals.forever().for_each(deliver))
        .map(drop)
}

fn deliver(signal: c_int) {
    let hub = hub();
    if hub.listeners.is_empty() {
        drop(hub); // the default may be the end of this process
        if signal != SIGCHLD {
            let _ = emulate_default_handler(signal); // fails only for signals that it does not know
        }
        return;
    }
    for (_, listener) in &hub.listeners {
        let _ = listener.send(signal); // a listener that is just leaving
    }
}

/// The ignored signals in the text of /proc/self/status: signal n is bit n - 1.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        let status = "SigBlk:\t0000000000010000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert_eq!(ignored(status), 0x1001);
        assert_eq!(ignored("SigIgn:\tnonsense\n"), 0);
        assert_eq!(ignored(""), 0);
    }
}
