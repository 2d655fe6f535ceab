//! The state of the peers, for callers whose waits are elsewhere, for example on a GPU.

use std::{sync::Arc, time::Duration};

use antiphon_device::host::wait::Patience;

use super::Communicator;
use crate::{
    FabricError, Signature,
    endpoint::{Endpoint, Presence},
};

/// Whether the ranks of a communicator are still there: for work that does not wait in the communicator itself.
///
/// Any thread may ask. It takes part as long as it lives, as its [`Communicator`] does.
///
/// ```
/// use antiphon_fabric::{FabricError, LocalWorld, Operation, Signature};
///
/// LocalWorld::run(2, |comm| {
///     let monitor = comm.monitor();
///     monitor.check(Signature::new(Operation::Barrier))?;
///     comm.barrier() // no rank leaves before all have asked
/// });
/// ```
#[derive(Clone)]
pub struct Monitor {
    pub(super) presence: Arc<Presence>,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Monitor {{ rank: {}, world_size: {} }}", self.rank(), self.world_size())
    }
}

impl Communicator {
    /// A look at the peers from elsewhere.
    pub fn monitor(&self) -> Monitor {
        Monitor { presence: self.messenger.presence.clone() }
    }
}

impl Communicator {
    /// Ends all waits of this communicator; see [`Monitor::abort`], which any thread may call.
    pub fn abort(&self) {
        self.monitor().abort();
    }
}

impl Monitor {
    /// Ends all waits of the communicator, of this rank and of the others, with
    /// [`AbortCalled`](FabricError::AbortCalled), within milliseconds. It fails for good, as after a loss, and can be
    /// [shrunk](Communicator::shrink) to the ranks that are there. Nothing happens if it has failed before. The communicator's
    /// parent and groups continue.
    ///
    /// ```
    /// use antiphon_fabric::{FabricError, LocalWorld};
    ///
    /// LocalWorld::run(2, |comm| {
    ///     if comm.rank() == 1 {
    ///         comm.recv(&mut [0u8], 0).unwrap_err(); // which never comes
    ///         return Ok::<_, FabricError>(());
    ///     }
    ///     let watchdog = comm.monitor();
    ///     std::thread::spawn(move || watchdog.abort());
    ///     assert!(matches!(comm.recv(&mut [0u8], 1), Err(FabricError::AbortCalled { by: 0, .. } | FabricError::Failed(_))));
    ///     Ok(())
    /// });
    /// ```
    pub fn abort(&self) {
        self.endpoint().report(&self.endpoint().health.aborted_here());
    }

    fn endpoint(&self) -> &Endpoint {
        &self.presence.0
    }

    /// This rank, from 0.
    #[inline]
    pub fn rank(&self) -> usize {
        self.endpoint().rank
    }

    /// How many ranks there are.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.endpoint().world_size
    }

    /// How long a call waits for a peer before it fails.
    pub fn timeout(&self) -> Duration {
        self.endpoint().timeout()
    }

    /// Changes how long a call of this rank waits for a peer before it fails, also for waits under way. Groups that were split
    /// off before keep theirs.
    pub fn set_timeout(&self, timeout: Duration) {
        self.endpoint().set_timeout(timeout);
    }

    /// Whether the communicator has not failed before.
    ///
    /// # Errors
    /// [`FabricError::Failed`].
    #[inline]
    pub fn check_usable(&self) -> Result<(), FabricError> {
        self.endpoint().health.check_usable()
    }

    /// Whether all peers are there, and none has given up; `doing` is what an error says this rank was doing. It takes a
    /// system call for every peer.
    ///
    /// # Errors
    /// [`FabricError::PeerLost`], [`FabricError::Aborted`].
    pub fn check(&self, doing: Signature) -> Result<(), FabricError> {
        let Endpoint { rank, world_size, health, regions, .. } = self.endpoint();
        let peers = || (0..*world_size).filter(|peer| peer != rank).collect();
        match health.check(regions, doing, peers, Duration::ZERO, Duration::MAX) {
            Err(FabricError::Timeout { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether no peer has given up in this communicator: for calls that ended elsewhere with all they waited for. A rank that gave up
    /// has no result of them, and so this rank has none. It takes a load for every peer.
    ///
    /// # Errors
    /// As [`check`](Self::check), for a peer that gave up and not for one that is gone.
    #[inline]
    pub fn check_given_up(&self, doing: Signature) -> Result<(), FabricError> {
        self.endpoint().health.find_given_up(&self.endpoint().regions, doing).map_or(Ok(()), Err)
    }

    /// Says on standard error that this rank waits, if it was asked to by SIGUSR1 since the last time: for work that waits
    /// elsewhere, at each look around.
    pub fn answer(&self, doing: Signature, missing: impl Fn() -> Vec<usize>, waited: Duration) {
        self.endpoint().look_around(doing, &missing, waited);
    }

    /// Whether this rank's program does not want to stop waiting (see [`Builder::interrupt`](crate::Builder::interrupt)).
    ///
    /// # Errors
    /// [`FabricError::Interrupted`].
    pub fn check_interrupt(&self, doing: Signature) -> Result<(), FabricError> {
        self.endpoint().check_interrupt(doing)
    }

    /// How patiently a wait for a peer spins, which depends on whether each rank has a core of its own.
    pub fn patience(&self) -> Patience {
        self.endpoint().patience
    }

    /// The error for peers that did not come in time, for work that waits elsewhere.
    pub fn timed_out(&self, doing: Signature, waited: Duration, missing: Vec<usize>) -> FabricError {
        self.endpoint().health.timed_out(doing, waited, missing)
    }

    /// The error for a peer that does something else than this rank.
    pub fn disagreement(&self, mine: Signature, peer: usize, theirs: Signature) -> FabricError {
        self.endpoint().health.disagreement(mine, peer, theirs)
    }

    /// The error for two calls of this rank that ran at the same time.
    pub fn overlap(&self, doing: Signature) -> FabricError {
        self.endpoint().health.overlap(doing)
    }

    /// Makes the communicator unusable because of something that went wrong elsewhere, and lets the peers know.
    pub fn report(&self, error: &FabricError) {
        self.endpoint().report(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LocalWorld, Operation};

    #[test]
    fn who_left_is_named_and_what_is_reported_spreads() {
        let doing = Signature::new(Operation::AllReduce);
        let errors = LocalWorld::run(3, |comm| {
            let monitor = comm.monitor();
            comm.barrier()?;
            match comm.rank() {
                0 => {
                    monitor.report(&FabricError::invalid("a kernel failed"));
                    Ok(comm.barrier().unwrap_err().to_string())
                }
                1 => loop {
                    match monitor.check(doing) {
                        Ok(()) => std::thread::yield_now(),
                        Err(error) => break Ok(error.to_string()),
                    }
                },
                _ => Ok::<_, FabricError>(comm.barrier().unwrap_err().to_string()),
            }
        });
        let texts: Vec<_> = errors.into_iter().map(Result::unwrap).collect();
        assert!(texts[0].contains("failed earlier") && texts[0].contains("a kernel failed"), "{texts:?}");
        assert!(texts[1].contains("all_reduce"), "{texts:?}");
        assert!(texts[2].contains("rank"), "{texts:?}");
    }
}
