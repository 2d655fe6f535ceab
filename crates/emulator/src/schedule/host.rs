//! What the threads of the host are doing, as Linux says.

use std::{
    cell::Cell,
    collections::HashSet,
    fs,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use super::IS_SHARED;
use crate::lock;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// All threads wait for each other, or for the GPUs.
    Waits,
    /// One sleeps for some time, or waits for another process.
    Sleeps,
    /// One runs.
    Busy,
}

static COMPILING: AtomicU32 = AtomicU32::new(0);

/// While this is there, the host is busy: g++ runs for it.
pub(crate) struct Compiling(());

impl Compiling {
    pub(crate) fn new() -> Self {
        COMPILING.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Compiling {
    fn drop(&mut self) {
        COMPILING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The threads whose last call asked whether work is done, and heard that it is not.
static ASKING: Mutex<Option<HashSet<i32>>> = Mutex::new(None);

thread_local! {
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// This thread has asked whether work is done, and it was not; or has done something else.
pub(super) fn has_asked(is_asking: bool) {
    if IS_ASKING.replace(is_asking) != is_asking {
        // SAFETY: no memory is involved.
        let thread = unsafe { libc::gettid() };
        let mut asking = lock(&ASKING);
        let asking = asking.get_or_insert_default();
        if is_asking {
            asking.insert(thread)
        } else {
            asking.remove(&thread)
        };
    }
}

/// Whether this thread's last call asked, and heard that the work is not done.
pub(super) fn asks() -> bool {
    IS_ASKING.get()
}

/// The longest pause of a thread that asks again and again.
const SHORT_NANOSECONDS: i64 = 1_000_000;

/// The state of all threads but this one. A thread that comes or goes meanwhile may be missed.
pub(super) fn state() -> State {
    if COMPILING.load(Ordering::Relaxed) != 0 {
        return State::Busy;
    }
    if IS_SHARED.load(Ordering::Relaxed) {
        return State::Sleeps;
    }
    // SAFETY: no memory is involved.
    let own = unsafe { libc::gettid() };
    let mut all = State::Waits;
    for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let Some(thread) = task.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if thread == own {
            continue;
        }
        let Ok(text) = fs::read_to_string(task.path().join("syscall")) else { continue };
        match of_thread(thread, &text) {
            State::Busy => return State::Busy,
            State::Sleeps => all = State::Sleeps,
            State::Waits => {}
        }
    }
    all
}

/// The text is "running", or the number of a system call and its arguments.
fn of_thread(thread: i32, text: &str) -> State {
    let mut words = text.split_whitespace();
    let Some(Ok(call)) = words.next().map(str::parse::<i64>) else {
        return State::Busy;
    };
    let arguments: Vec<u64> =
        words.filter_map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()).collect();
    match call {
        libc::SYS_futex => State::Waits,
        libc::SYS_clock_nanosleep if is_asking(thread) && is_short(arguments.get(2)) => State::Waits,
        libc::SYS_nanosleep if is_asking(thread) && is_short(arguments.first()) => State::Waits,
        libc::SYS_sched_yield => State::Busy,
        _ => State::Sleeps,
    }
}

fn is_asking(thread: i32) -> bool {
    lock(&ASKING).as_ref().is_some_and(|asking| asking.contains(&thread))
}

/// Whether a pause is short, which another thread has on its stack.
fn is_short(at: Option<&u64>) -> bool {
    let mut pause = [0i64; 2];
    let bytes = size_of_val(&pause);
    let own = libc::iovec { iov_base: pause.as_mut_ptr().cast(), iov_len: bytes };
    let other = libc::iovec { iov_base: at.map_or(0, |at| *at) as *mut _, iov_len: bytes };
    // SAFETY: the system refuses an address that is not there.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const own, 1, &raw const other, 1, 0) };
    read == bytes as isize && pause[0] == 0 && pause[1] <= SHORT_NANOSECONDS
}

#[cfg(test)]
mod tests {
    use super::{State, of_thread};

    #[test]
    fn system_calls_tell_what_a_thread_does() {
        assert_eq!(of_thread(0, "running\n"), State::Busy);
        assert_eq!(of_thread(0, "202 0x7f0 0x189 0x0 0x0 0x0 0xffffffff 0x7ff 0x7ff\n"), State::Waits);
        assert_eq!(of_thread(0, "230 0x0 0x0 0x7ffc 0x7ffd 0x0 0x0 0x7ff 0x7ff\n"), State::Sleeps);
        assert_eq!(of_thread(0, "0 0x3 0x7f 0x2 0x0 0x0 0x0 0x7ff 0x7ff\n"), State::Sleeps);
    }
}
