//! The record of a run: what the host did, in its order, and at which step of the scheduler its submissions came. And the repetition of one.
//!
//! | line | meaning |
//! | --- | --- |
//! | `antiphon schedule 1 SEED` | the first line |
//! | `push STREAM` | a thread of the host has submitted work |
//! | `join WHAT` | it has waited for a stream or an event, or has heard that it is done |
//! | `busy WHAT COUNT` | it has asked so often, and heard that it is not done |
//! | `admit STEP HASH` | the scheduler has taken in the first work that it had not |
//! | `time STEP NANOSECONDS` | the clock has gone on although nobody did anything |

use std::{
    collections::{HashMap, VecDeque},
    ffi::{c_int, c_void},
    fs::{self, File},
    io::Write,
    path::PathBuf,
    sync::{
        Condvar, Mutex, MutexGuard, Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use super::{host, is_on, run, setting};
use crate::lock;

const HEAD: &str = "antiphon schedule 1 ";
/// After so long a repetition no longer waits for what the record has next.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the scheduler does when it takes in a submission.
type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Did {
    Push,
    Join,
    Busy,
}

enum Came {
    Work(u64),
    Time(u64),
}

/// What a repetition has still to come.
#[derive(Default)]
struct Replay {
    host: VecDeque<(Did, String, u64)>,
    device: VecDeque<(u64, Came)>,
    /// How often a thread has still to hear of something that it is not done. It learns nothing from that, and one that asks for some time asks
    /// more or less often than before: so nobody waits for it, and what is left is forgotten when the thread goes on.
    not_done: HashMap<String, u64>,
}

#[derive(Default)]
struct Trace {
    inbox: VecDeque<Work>,
    file: Option<File>,
    path: PathBuf,
    /// Answers of "not done", which are written with their number when another line follows.
    busy: Option<(String, u64)>,
    replay: Option<Replay>,
}

static TRACE: Mutex<Option<Trace>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();
static HAS_WORK: AtomicBool = AtomicBool::new(false);
/// The step of the next line of a repetition; 0 if there is none.
static NEXT: AtomicU64 = AtomicU64::new(0);
static STEPS: AtomicU64 = AtomicU64::new(0);
static HASH: AtomicU64 = AtomicU64::new(0);

/// The scheduler is there.
pub(super) fn at(steps: u64, hash: u64) {
    STEPS.store(steps, Ordering::Relaxed);
    HASH.store(hash, Ordering::Relaxed);
}

/// The seed of a record.
pub(super) fn seed_of(file: &str) -> Result<u64, String> {
    let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
    let seed =
        text.lines().next().and_then(|line| line.strip_prefix(HEAD)).and_then(|seed| seed.parse().ok());
    seed.ok_or_else(|| format!("its first line is not {HEAD}SEED"))
}

impl Replay {
    fn read(text: &str) -> Result<Self, String> {
        let mut all = Self::default();
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split(' ').collect();
            let malformed = || format!("a line of no meaning: {line}");
            let number = |at: usize| -> Result<u64, String> {
                words.get(at).and_then(|word| word.parse().ok()).ok_or_else(malformed)
            };
            let what = || words.get(1).map(|word| (*word).to_owned()).ok_or_else(malformed);
            match words[0] {
                "push" => all.host.push_back((Did::Push, what()?, 1)),
                "join" => all.host.push_back((Did::Join, what()?, 1)),
                "busy" => all.host.push_back((Did::Busy, what()?, number(2)?)),
                "admit" => all.device.push_back((number(1)?, Came::Work(number(2)?))),
                "time" => all.device.push_back((number(1)?, Came::Time(number(2)?))),
                _ => return Err(malformed()),
            }
        }
        Ok(all)
    }
}

impl Trace {
    fn new() -> Self {
        let setting = setting().expect("a schedule");
        static AT_EXIT: Once = Once::new();
        // SAFETY: a function of this library, which stays loaded.
        AT_EXIT.call_once(|| _ = unsafe { on_exit(exits, std::ptr::null_mut()) });
        if let Some(path) = &setting.replay {
            let text = fs::read_to_string(path).unwrap_or_default();
            let replay =
                Replay::read(&text).unwrap_or_else(|error| panic!("ANTIPHON_EMULATOR_REPLAY: {error}"));
            let trace = Self { path: path.clone(), replay: Some(replay), ..Self::default() };
            trace.set_next();
            return trace;
        }
        let path = std::env::temp_dir().join(format!("antiphon-schedule-{}.trace", std::process::id()));
        let mut file = File::create(&path).ok();
        file.iter_mut().for_each(|file| _ = writeln!(file, "{HEAD}{}", setting.seed));
        Self { path, file, ..Self::default() }
    }

    fn set_next(&self) {
        let next =
            self.replay.as_ref().and_then(|replay| replay.device.front()).map_or(0, |(step, _)| step + 1);
        NEXT.store(next, Ordering::Relaxed);
    }

    fn write(&mut self, line: &str) {
        let Some(file) = &mut self.file else { return };
        if let Some((what, count)) = self.busy.take() {
            let _ = writeln!(file, "busy {what} {count}");
        }
        if !line.is_empty() {
            let _ = writeln!(file, "{line}");
        }
    }

    /// The repetition has come to what the record has not.
    fn diverges(&mut self, what: &str) {
        eprintln!("emulator: the run is no longer that of {}: {what}", self.path.display());
        self.replay = None;
        self.set_next();
        CHANGED.notify_all();
    }

    /// Whether this is next, if it is a repetition; what is in its place if not.
    fn comes(&mut self, does: Did, what: &str) -> Option<Result<(), String>> {
        let replay = self.replay.as_mut()?;
        while let Some((Did::Busy, of, count)) = replay.host.front() {
            *replay.not_done.entry(of.clone()).or_default() += count;
            replay.host.pop_front();
        }
        let (did, of, _) = replay.host.front()?;
        Some(if (*did, &**of) == (does, what) { Ok(()) } else { Err(format!("{did:?} {of}")) })
    }

    /// Whether a thread that asks hears that it is not done, as it did, or because it goes on asking.
    fn is_not_done(&mut self, what: &str) -> bool {
        let Some(next) = self.comes(Did::Join, what) else { return false };
        let left = self.replay.as_mut().and_then(|replay| replay.not_done.get_mut(what));
        match left.filter(|left| **left > 0) {
            Some(left) => *left -= 1,
            None => return next.is_err() && host::asks(),
        }
        true
    }

    /// That was done.
    fn host_has_done_it(&mut self, what: &str) {
        if let Some(replay) = &mut self.replay {
            replay.host.pop_front();
            replay.not_done.remove(what);
            replay.not_done.remove(&format!("event-{what}"));
        }
        CHANGED.notify_all();
    }

    fn pop_device(&mut self) -> Option<Came> {
        let came = self.replay.as_mut()?.device.pop_front();
        self.set_next();
        came.map(|(_, came)| came)
    }
}

type Guard = MutexGuard<'static, Option<Trace>>;

fn trace(guard: &mut Guard) -> &mut Trace {
    guard.get_or_insert_with(Trace::new)
}

/// Waits for what comes next, for some time. Returns whether that has passed.
fn wait(guard: Guard, limit: Duration) -> (Guard, bool) {
    let (guard, waited) = CHANGED.wait_timeout(guard, limit).unwrap_or_else(|poisoned| poisoned.into_inner());
    (guard, waited.timed_out())
}

/// Waits in a repetition until this is the next thing of the record; so threads are in the same order.
fn pass(mut guard: Guard, does: Did, what: &str) -> Guard {
    while let Some(Err(other)) = trace(&mut guard).comes(does, what) {
        let left = |trace: &Trace| trace.replay.as_ref().map(|replay| replay.host.len());
        let before = left(trace(&mut guard));
        let (now, is_late) = wait(guard, PATIENCE);
        guard = now;
        let trace = trace(&mut guard);
        if is_late && left(trace) == before {
            trace.diverges(&format!("{does:?} {what} in place of {other}"));
        }
    }
    guard
}

/// A thread of the host submits work to a stream, which the scheduler takes in later. `work` says what it does then.
pub(crate) fn submit(stream: &str, work: impl FnOnce() -> Work) {
    host::has_asked(false);
    run::begin();
    let mut guard = pass(lock(&TRACE), Did::Push, stream);
    let work = work();
    let trace = trace(&mut guard);
    trace.host_has_done_it(stream);
    trace.write(&format!("push {stream}"));
    trace.inbox.push_back(work);
    HAS_WORK.store(true, Ordering::Relaxed);
    CHANGED.notify_all();
}

/// A thread of the host has waited for something, and learns what that has done.
pub(crate) fn joined(what: &str, learn: impl FnOnce()) {
    if !is_on() {
        return learn();
    }
    host::has_asked(false);
    let mut guard = pass(lock(&TRACE), Did::Join, what);
    let trace = trace(&mut guard);
    trace.host_has_done_it(what);
    trace.write(&format!("join {what}"));
    learn();
}

/// A thread of the host asks whether something is done, and learns what that has done. In a repetition it hears what it heard before.
pub(crate) fn answer(what: &str, is_done: impl Fn() -> bool, learn: impl FnOnce()) -> bool {
    let mut guard = lock(&TRACE);
    let is_repetition = trace(&mut guard).comes(Did::Join, what).is_some();
    let is_done_now = if is_repetition { !trace(&mut guard).is_not_done(what) } else { is_done() };
    if is_done_now {
        guard = pass(guard, Did::Join, what);
        while !is_done() {
            drop(guard);
            thread::sleep(Duration::from_micros(100));
            guard = lock(&TRACE);
        }
        learn();
        let trace = trace(&mut guard);
        trace.host_has_done_it(what);
        trace.write(&format!("join {what}"));
    } else if let Some((_, count)) = trace(&mut guard).busy.as_mut().filter(|(of, _)| of == what) {
        *count += 1;
    } else {
        let trace = trace(&mut guard);
        trace.write("");
        trace.busy = Some((what.to_owned(), 1));
    }
    drop(guard);
    host::has_asked(!is_done_now);
    is_done_now
}

/// The next submission, if it comes at this step.
pub(super) fn admit(steps: u64, hash: u64) -> Option<Work> {
    let next = NEXT.load(Ordering::Relaxed);
    if if next == 0 { !HAS_WORK.load(Ordering::Relaxed) } else { next != steps + 1 } {
        return None;
    }
    let mut guard = lock(&TRACE);
    loop {
        let trace = trace(&mut guard);
        let front = trace.replay.as_ref().and_then(|replay| replay.device.front());
        let is_late = match front {
            Some((step, Came::Work(of))) if *step == steps => {
                if *of != hash {
                    trace.diverges(&format!("step {steps} has hash {hash}"));
                } else if !trace.inbox.is_empty() {
                    trace.pop_device();
                    break;
                }
                let (now, is_late) = wait(guard, PATIENCE);
                guard = now;
                is_late
            }
            Some(_) => return None,
            None if trace.inbox.is_empty() => return None,
            None => break,
        };
        if is_late {
            self::trace(&mut guard).diverges("the host does not submit what it did");
        }
    }
    let trace = trace(&mut guard);
    trace.write(&format!("admit {steps} {hash}"));
    let work = trace.inbox.pop_front();
    HAS_WORK.store(!trace.inbox.is_empty(), Ordering::Relaxed);
    work
}

pub(super) fn has_submission() -> bool {
    HAS_WORK.load(Ordering::Relaxed)
}

/// Waits until the host does something, for some time. Returns whether it has submitted.
pub(super) fn wait_for_host(limit: Duration) -> bool {
    let guard = lock(&TRACE);
    if !has_submission() {
        drop(wait(guard, limit));
    }
    has_submission()
}

/// There is nothing to do without the host.
pub(super) fn wait_for_submission(steps: u64) {
    let mut guard = lock(&TRACE);
    let trace = trace(&mut guard);
    if NEXT.load(Ordering::Relaxed) > steps + 1 {
        trace.diverges(&format!("nothing is left to do at step {steps}"));
    }
    if trace.inbox.is_empty() {
        drop(wait(guard, PATIENCE));
    }
}

/// How the clock goes on at this step of a repetition; none in a run of its own, and an error where work comes.
pub(super) fn recorded_time(steps: u64) -> Option<Result<u64, ()>> {
    let next = NEXT.load(Ordering::Relaxed);
    if next == 0 {
        return None;
    }
    let mut guard = lock(&TRACE);
    let trace = trace(&mut guard);
    if next != steps + 1 {
        trace.diverges(&format!("all wait at step {steps}"));
        return None;
    }
    match trace.replay.as_ref()?.device.front()? {
        (_, Came::Work(_)) => Some(Err(())),
        (_, Came::Time(passed)) => {
            let passed = *passed;
            trace.pop_device();
            Some(Ok(passed))
        }
    }
}

pub(super) fn record_time(steps: u64, passed: u64) {
    trace(&mut lock(&TRACE)).write(&format!("time {steps} {passed}"));
}

/// Says how to repeat the run, behind a report of what went wrong.
pub(crate) fn failed() {
    let Some(setting) = setting() else { return };
    // The thread that fails may have the lock.
    let Ok(mut guard) = TRACE.try_lock() else { return };
    let Some(trace) = &mut *guard else { return };
    trace.write("");
    let (steps, hash) = (STEPS.load(Ordering::Relaxed), HASH.load(Ordering::Relaxed));
    eprintln!(
        "emulator: schedule {}, {steps} steps, hash {hash:016x}; ANTIPHON_EMULATOR_REPLAY={} repeats it",
        setting.seed,
        trace.path.display()
    );
}

unsafe extern "C" {
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// A record stays if the process fails, or is told to keep it.
extern "C" fn exits(status: c_int, _: *mut c_void) {
    if status != 0 || std::env::var_os("ANTIPHON_EMULATOR_KEEP").is_some() {
        return failed();
    }
    if let Ok(mut guard) = TRACE.try_lock()
        && let Some(trace) = &mut *guard
        && trace.file.take().is_some()
    {
        let _ = fs::remove_file(&trace.path);
    }
}
