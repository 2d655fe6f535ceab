//! A world inside one process.

use std::time::Duration;

use crate::{Communicator, rendezvous::Ticket};

/// A world whose ranks are threads of this process, over the same shared memory and the same code as processes: for
/// tests, examples, and engines that drive several devices from one process.
#[derive(Debug, Clone, Copy)]
pub struct LocalWorld;

impl LocalWorld {
    /// Runs `rank` on `world_size` threads, each with its communicator, and returns what they return, in rank order.
    ///
    /// ```
    /// let squares = antiphon_fabric::LocalWorld::run(4, |comm| comm.rank() * comm.rank());
    /// assert_eq!(squares, [0, 1, 4, 9]);
    /// ```
    ///
    /// # Panics
    /// When a rank panics: its communicator is dropped, the others get `PeerLost`, and then the panic resumes in the caller. Also
    /// when the world cannot be made.
    pub fn run<T: Send>(world_size: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
        Self::run_with(world_size, Duration::from_secs(60), rank)
    }

    /// As [`run`](Self::run), with a timeout for every wait.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_with<T: Send>(
        world_size: usize,
        timeout: Duration,
        run: impl Fn(Communicator) -> T + Sync,
    ) -> Vec<T> {
        assert!(world_size > 0, "a world has at least one rank");
        let ticket = Ticket::random();
        let (ticket, run) = (&ticket, &run);
        std::thread::scope(|scope| {
            let spawn = |rank| {
                scope.spawn(move || {
                    let comm = Communicator::builder()
                        .timeout(timeout)
                        .with_ticket(rank, world_size, ticket)
                        .unwrap_or_else(|e| panic!("rank {rank} of {world_size} could not join: {e}"));
                    run(comm)
                })
            };
            let ranks: Vec<_> = (0..world_size).map(spawn).collect();
            let results: Vec<_> = ranks.into_iter().map(|thread| thread.join()).collect();
            results.into_iter().map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}
