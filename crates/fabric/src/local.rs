//! A world inside one process.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use antiphon_device::sync::Mutex;

use crate::{
    Builder, Communicator,
    engine::{Network, Twin},
    rendezvous::Ticket,
};

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
        Self::run_built(world_size, timeout, |builder, _| builder, run)
    }

    /// As [`run_with`](Self::run_with) for ranks on several nodes: rank `r` is on the node that is called `nodes[r]`. Each node has memory of
    /// its own, and an engine inside this process carries what passes between nodes; `network` can disturb it. So the results have
    /// the bits of ranks on as many machines.
    ///
    /// ```
    /// use std::time::Duration;
    /// use antiphon_fabric::LocalWorld;
    ///
    /// let mates = LocalWorld::run_on_nodes(&["a", "b", "a"], Duration::from_secs(60), |_| (), |comm| {
    ///     comm.barrier()?;
    ///     Ok::<_, antiphon_fabric::FabricError>(comm.nodes().ranks(0).to_vec())
    /// });
    /// assert_eq!(mates[1].as_ref().unwrap(), &[0, 2]);
    /// ```
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_on_nodes<T: Send>(
        nodes: &[&str],
        timeout: Duration,
        network: impl FnOnce(&Network),
        run: impl Fn(Communicator) -> T + Sync,
    ) -> Vec<T> {
        let (net, ends) = Twin::network(nodes.len());
        network(&net);
        // Each rank owns its engine, which ends with its communicator.
        let ends: Vec<Mutex<Option<Twin>>> = ends.into_iter().map(|end| Mutex::new(Some(end))).collect();
        let build = |builder: Builder, rank: usize| {
            let end = ends[rank].lock().unwrap_or_else(PoisonError::into_inner).take();
            builder.node(nodes[rank]).engine(Arc::new(end.expect("each rank is built once")))
        };
        Self::run_built(nodes.len(), timeout, build, run)
    }

    fn run_built<T: Send>(
        world_size: usize,
        timeout: Duration,
        build: impl Fn(Builder, usize) -> Builder + Sync,
        run: impl Fn(Communicator) -> T + Sync,
    ) -> Vec<T> {
        assert!(world_size > 0, "a world has at least one rank");
        let ticket = Ticket::random();
        let (ticket, build, run) = (&ticket, &build, &run);
        std::thread::scope(|scope| {
            let spawn = |rank| {
                scope.spawn(move || {
                    let comm = build(Communicator::builder().timeout(timeout), rank)
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
