//! Looking after kernels that wait.

use std::{
    sync::{Arc, OnceLock, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use antiphon_device::cuda::{GaveUp, WaitBoard, WaitReport};
use antiphon_fabric::{FabricError, Monitor, Operation, Signature};

/// How often the watch looks for peers that are gone. A look is a system call for each.
const LOOK: Duration = Duration::from_millis(10);

/// A thread that makes waiting kernels give up as soon as a peer is lost, and not only at the deadline; and that tells the
/// peers when one has given up.
pub(super) struct Watch {
    found: Arc<OnceLock<FabricError>>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(monitor: Monitor, board: Arc<WaitBoard>) -> Result<Self, FabricError> {
        let found = Arc::<OnceLock<_>>::default();
        let (stop, stopped) = mpsc::channel::<()>();
        let leave = found.clone();
        let run = move || {
            while stopped.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
                // The peers hear of a kernel that gave up, and do not wait for this rank's next call.
                if let Some(report) = board.report() {
                    return monitor.report(&explain(&monitor, &report, None));
                }
                // What kernels were doing is in their report, if any was.
                if let Err(error) = monitor.check(Signature::new(Operation::Barrier)) {
                    leave.get_or_init(|| error);
                    return board.abort();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("antiphon-watch".into())
            .spawn(run)
            .map_err(|error| FabricError::invalid(format!("no thread to watch the peers: {error}")))?;
        Ok(Self { found, stop: Some(stop), thread: Some(thread) })
    }

    /// Why no peer should be waited for any more, if so.
    #[inline]
    pub(super) fn found(&self) -> Option<&FabricError> {
        self.found.get()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
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
        (_, Some(lost @ (FabricError::PeerLost { .. } | FabricError::Aborted { .. }))) => {
            lost.clone().during(mine)
        }
        _ => monitor.timed_out(mine, Duration::from_nanos(report.waited_ns), vec![peer]),
    }
}
