//! The predicted time of a plan on a cluster, by a discrete-event simulation of its thread blocks.
//!
//! [`simulate`] plays a checked plan for one message on a [`Cluster`]. It returns the begin and the end of every operation
//! ([`Simulation::spans`]), the total time, the chain of operations that determines it
//! ([`Simulation::critical_path`]) and the utilisation of each link. Equal input gives equal output, bit for bit.
//!
//! # The model
//!
//! * A thread block does its operations in order, each after the one before. All thread blocks begin when the kernel
//!   has been launched.
//! * Data that a thread block moves is fluid: a flow of bytes over the links it needs (the sender's outgoing and the
//!   receiver's incoming link, both GPUs' links in both directions together, the SMs' share of the link, or the GPU's
//!   own memory). Flows share a link max-min fairly, each up to what one thread block can do: a block's stores together
//!   have a cap, and its loads from each peer, since loads of several peers are in flight side by side.
//! * A signal waits until earlier stores are acknowledged (not if relaxed) and then takes a link's latency; a wait ends
//!   when its signal has arrived. Packets carry their flags, so they have twice the bytes and no fence. A reader
//!   of packets reads while they arrive and ends with the last one; if it forwards them, it begins then.
//! * A port channel's operations queue at the sender's engine, which takes one after the other: the copy engine to GPUs
//!   of the node, the network card to others. The thread block continues at once; a flush waits until the block's transfers
//!   have arrived.
//! * Barriers, semaphores and synchronisations of a block's threads take constant times.
//! * A switch channel is loads from and stores to each member; where the cluster has multicast, the switch reduces and
//!   replicates, and the member's link carries the bytes once.
//! * A pipeline does its operations as often as the message needs, on a piece of the bytes each time.
//!
//! # Outside the model
//!
//! Caches and memory channels (a local access costs the bandwidth of the GPU's memory, a remote one only the links);
//! whether all thread blocks fit on the GPU at once; threads per block (the caps were measured with 512); the arithmetic
//! of a reduction (it is faster than the memory); routing and congestion between nodes beyond the cards themselves;
//! skew between ranks, and noise.
//!
//! # Method
//!
//! Flows with the same links and the same cap always have the same rate, so they are one class with a counter of bytes
//! served to each flow, and a flow is done when the counter has risen by its bytes. When flows come or go, rates change only
//! in the classes that are connected through shared links; only those are computed anew, once per instant.

mod cluster;
mod cost;
mod engine;
mod error;
mod limits;
mod network;
mod port;
mod resources;
mod result;
mod sync;
mod wait;

use crate::plan::Plan;
pub use cluster::{BlockCosts, Cluster, Link, PortEngine};
pub use error::{SimulateError, Waiting};
pub use limits::STEPS;
pub use result::{Arrow, ArrowKind, Lane, LinkUse, Simulation, Span, SpanId, Step};

/// Plays a plan for a message of `bytes` bytes. The message is the output of `allgather`, and the input of all other collectives, as in
/// the plan's limits.
///
/// The plan may come from any source: besides a part that grows with the length of its text, a simulation takes at most 256 MiB and some seconds,
/// by the limits of [`SimulateError::TooLong`] ([`STEPS`]) and [`SimulateError::TooShared`].
///
/// # Errors
/// [`SimulateError`], also if the plan cannot end.
pub fn simulate(plan: &Plan, cluster: &Cluster, message_bytes: u64) -> Result<Simulation, SimulateError> {
    let (simulation, waiting) = play(plan, cluster, message_bytes)?;
    if waiting.is_empty() {
        return Ok(simulation);
    }
    let blocks = plan.gpus.iter().map(|gpu| gpu.threadblocks.len()).sum();
    Err(SimulateError::Deadlock { time_ns: simulation.end_ns(), blocks, waiting })
}

/// Like [`simulate`], but a plan that deadlocks is played up to the deadlock; the waiting blocks are returned
/// beside it.
///
/// # Errors
/// [`SimulateError`], all but [`SimulateError::Deadlock`].
pub fn play(
    plan: &Plan,
    cluster: &Cluster,
    message_bytes: u64,
) -> Result<(Simulation, Vec<Waiting>), SimulateError> {
    plan.check()?;
    cluster.check()?;
    let extent = limits::extent(plan, message_bytes)?;
    limits::length(plan, cluster, &extent)?;
    engine::Engine::new(plan, cluster, extent).run(message_bytes)
}

/// The smallest message of at least `bytes` bytes that divides into the plan's chunks.
pub fn fitting(plan: &Plan, bytes: u64) -> u64 {
    let unit = limits::chunks(plan).saturating_mul(plan.buffer_alignment).max(1);
    bytes.max(plan.min_message_size).checked_next_multiple_of(unit).unwrap_or(u64::MAX)
}
