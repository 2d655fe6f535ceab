//! The thread that watches the peers of waiting kernels.

use std::{
    mem::ManuallyDrop,
    process,
    sync::{Arc, OnceLock, PoisonError, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use antiphon_device::{
    cuda::{GaveUp, WaitBoard, WaitReport},
    sync::Mutex,
};

use crate::{FabricError, Monitor, Operation, Signature};

/// How often the watch looks for reports and for peers that are gone. A look is a system call for each peer.
const LOOK: Duration = Duration::from_millis(10);

/// What happens at once when a kernel has given up, while this rank's program may be making no call at all: replaying a graph,
/// say, whose launches tell it nothing. In any case one line on standard error names the rank, the operation and the cause, and
/// this communicator's next call returns the error.
#[derive(Default)]
pub enum OnFailure {
    /// Nothing else.
    #[default]
    Error,
    /// A thread of this crate calls a function with the error, once.
    Callback(Box<dyn FnOnce(&FabricError) + Send>),
    /// The process is aborted, so that whatever started the ranks ends the job.
    Abort,
}

impl OnFailure {
    /// The environment variable that says what a communicator begins with: `error`, which is the default, or `abort`.
    pub const VARIABLE: &str = "ANTIPHON_ON_FAILURE";

    /// The action that the environment sets.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for other words.
    pub fn from_env() -> Result<Self, FabricError> {
        match std::env::var_os(Self::VARIABLE) {
            Some(word) => word.to_string_lossy().parse(),
            None => Ok(Self::Error),
        }
    }
}

impl std::str::FromStr for OnFailure {
    type Err = FabricError;

    fn from_str(word: &str) -> Result<Self, FabricError> {
        match word {
            "" | "error" => Ok(Self::Error),
            "abort" => Ok(Self::Abort),
            _ => Err(FabricError::invalid(format!("{} is {word:?}, not error or abort", Self::VARIABLE))),
        }
    }
}

impl std::fmt::Debug for OnFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Error => "Error",
            Self::Callback(_) => "Callback",
            Self::Abort => "Abort",
        })
    }
}

/// A thread that makes waiting kernels give up as soon as a peer is lost, and not only at the deadline; and that tells the
/// peers, and this rank's program, when one has given up.
pub(super) struct Watch {
    lost: Arc<OnceLock<FabricError>>,
    on_failure: Arc<Mutex<OnFailure>>,
    /// None once the watch is to end.
    stop: ManuallyDrop<Option<mpsc::Sender<()>>>,
    thread: ManuallyDrop<Option<JoinHandle<()>>>,
    /// The process that has the thread.
    process: u32,
}

impl Watch {
    pub(super) fn start(monitor: Monitor, board: Arc<WaitBoard>) -> Result<Self, FabricError> {
        let (lost, on_failure) =
            (Arc::<OnceLock<_>>::default(), Arc::new(Mutex::new(OnFailure::from_env()?)));
        let (stop, stopped) = mpsc::channel::<()>();
        let (found, action) = (lost.clone(), on_failure.clone());
        let run = move || {
            while stopped.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
                if let Some(report) = board.report() {
                    let error = explain(&monitor, &report, found.get());
                    // The peers are informed, so that they do not wait for this rank's next call.
                    monitor.report(&error);
                    return act(monitor.rank(), &error, &action);
                }
                // The report has the kernels' call, if a kernel waited. A peer that leaves while no kernel waits is no failure.
                if found.get().is_none()
                    && let Err(error) = monitor.check(Signature::new(Operation::Barrier))
                {
                    found.get_or_init(|| error);
                    board.abort();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("antiphon-watch".into())
            .spawn(run)
            .map_err(|error| FabricError::invalid(format!("no thread to watch the peers: {error}")))?;
        let (stop, thread) = (ManuallyDrop::new(Some(stop)), ManuallyDrop::new(Some(thread)));
        Ok(Self { lost, on_failure, stop, thread, process: process::id() })
    }

    /// Why no peer should be waited for any more, if so.
    #[inline]
    pub(super) fn lost(&self) -> Option<&FabricError> {
        self.lost.get()
    }

    /// Sets the action that is taken when a kernel gives up.
    pub(super) fn on_failure(&self, action: OnFailure) {
        *self.on_failure.lock().unwrap_or_else(PoisonError::into_inner) = action;
    }

    /// Whether this process has the thread: a child that was forked has none.
    pub(super) fn is_here(&self) -> bool {
        self.process == process::id()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // In a forked child there is no thread to end, and the thread may have held the channel's locks at the fork.
        if !self.is_here() {
            return;
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Tells this rank's program of a failure.
fn act(rank: usize, error: &FabricError, action: &Mutex<OnFailure>) {
    eprintln!("antiphon: rank {rank}: {error}");
    match std::mem::take(&mut *action.lock().unwrap_or_else(PoisonError::into_inner)) {
        OnFailure::Error => {}
        OnFailure::Callback(call) => call(error),
        OnFailure::Abort => process::abort(),
    }
}

/// The error for what a kernel reported, given what the watch found.
#[cold]
pub(super) fn explain(monitor: &Monitor, report: &WaitReport, lost: Option<&FabricError>) -> FabricError {
    let unknown = Signature::new(Operation::Barrier);
    let mine = Signature::from_words(report.doing).unwrap_or(unknown);
    let peer = report.peer as usize;
    match (report.reason, lost) {
        (GaveUp::Disagreed, _) => {
            let theirs = Signature::from_words(report.seen).unwrap_or(unknown);
            monitor.disagreement(mine, peer, theirs)
        }
        (GaveUp::Overlapped, _) => monitor.overlap(mine),
        (
            _,
            Some(
                lost @ (FabricError::PeerLost { .. }
                | FabricError::Aborted { .. }
                | FabricError::AbortCalled { .. }),
            ),
        ) => lost.clone().during(mine),
        _ => monitor.timed_out(mine, Duration::from_nanos(report.waited_ns), vec![peer]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalWorld;

    #[test]
    fn what_happens_on_failure_is_said_by_one_word() {
        assert!(matches!("error".parse(), Ok(OnFailure::Error)));
        assert!(matches!("abort".parse(), Ok(OnFailure::Abort)));
        let error = "callback".parse::<OnFailure>().unwrap_err().to_string();
        assert!(error.contains("ANTIPHON_ON_FAILURE is \"callback\", not error or abort"), "{error}");
    }

    #[test]
    fn an_abort_is_what_ended_a_kernels_wait() {
        let texts = LocalWorld::run(2, |comm| {
            let (monitor, doing) = (comm.monitor(), Signature::new(Operation::AllGather));
            if comm.rank() == 0 {
                monitor.abort();
            }
            let lost = loop {
                match monitor.check(Signature::new(Operation::Barrier)) {
                    Ok(()) => std::thread::yield_now(),
                    Err(error) => break error,
                }
            };
            let report = WaitReport {
                reason: GaveUp::Aborted,
                rank: comm.rank() as u32,
                peer: 1,
                doing: doing.to_words(),
                block: 0,
                thread: 0,
                expected: 1,
                seen: [0; 2],
                waited_ns: 1,
            };
            let error = explain(&monitor, &report, Some(&lost));
            assert!(matches!(error, FabricError::AbortCalled { by: 0, .. }), "{error:?}");
            error.to_string()
        });
        assert!(
            texts.iter().all(|text| text.contains("all_gather(") && text.contains("rank 0 called abort")),
            "{texts:?}"
        );
    }

    #[test]
    fn a_failure_calls_back_once() {
        let (sender, heard) = mpsc::channel();
        let action = Mutex::new(OnFailure::Callback(Box::new(move |error: &FabricError| {
            sender.send(error.to_string()).unwrap();
        })));
        let error = FabricError::invalid("a kernel gave up");
        act(3, &error, &action);
        act(3, &error, &action);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [error.to_string()]);
    }
}
