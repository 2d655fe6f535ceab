//! # antiphon-fabric: communicators, symmetric memory and signals
//!
//! A *world* is a number of ranks (processes, or threads) that work together. This crate connects the ranks and
//! has the parts of which every collective operation consists:
//!
//! 1. **Rendezvous** ([`rendezvous`]). Ranks find each other through torchrun's environment, a path, or a channel of the
//!    caller, and prove to each other that they know the world's secret.
//! 2. **Memory**. All ranks map one piece of anonymous shared memory, in which each rank has a region of its own:
//!    mailboxes, message rings, and an arena of symmetric buffers
//!    ([`Communicator::symmetric`]) that lie at the same offset on every rank.
//! 3. **Signals**. In a *round* ([`Rounds`]) every rank posts a packet and waits for the packets of all ranks; in a
//!    *message* one rank sends to another. A packet's stamp is written with release order and polled with acquire order.
//!    Data of up to 40 bytes is in the stamp's cache line, so that one line carries the whole packet.
//! 4. **The [`Communicator`]**, which holds these parts, with barriers, object exchange, splitting into groups, and a
//!    background thread for non-blocking operations.
//! 5. **The [engine of the GPUs](gpu)**, which runs the kernel families of higher crates.
//! 6. **The [engine between machines](engine)**, which sends messages to ranks that share no memory with this one.
//!
//! ## Guarantees
//!
//! *No call hangs.* Every wait has a deadline, and checks about every millisecond whether a peer has died, left or
//! given up; the error names the rank and the operation. *Time-outs are symmetric.* A rank that gives up says so before its call
//! returns, and a rank that ends the same call after that fails too; only a rank that ended it before keeps its result, which no
//! protocol can take back. *Calls are never confused.* Each packet carries the
//! [`Signature`] of its call, and each rank compares it with its own before it accesses the data. The cost
//! is two words in a cache line that is transferred anyway. *No leftovers.* The memory has no name; a killed rank
//! leaves no file, except a socket at a path if rank 0 is killed during the rendezvous; the next run reclaims it.
//!
//! *Surviving ranks can continue* by [`Communicator::shrink`], which takes milliseconds and no new rendezvous.
//! [`Monitor::abort`] ends the waits of all ranks from any thread. *A hanging job can be inspected.* On SIGUSR1 a waiting rank
//! reports on standard error its call, the duration of its wait, the ranks that it waits for, and what those ranks do. A
//! program with its own handler of SIGUSR1 keeps it. [`Job`](job::Job) reads the same
//! of all ranks from outside, for `antiphon doctor --job`.
//!
//! ```
//! use antiphon_fabric::{FabricError, LocalWorld};
//!
//! let results = LocalWorld::run(2, |comm| {
//!     let mut token = [0u8];
//!     match comm.rank() {
//!         0 => comm.send(&[42u8], 1)?,
//!         _ => comm.recv(&mut token, 0)?,
//!     }
//!     comm.barrier()?;
//!     Ok::<_, FabricError>(token[0])
//! });
//! assert_eq!(results[1].as_ref().unwrap(), &42);
//! ```

mod communicator;
mod endpoint;
pub mod engine;
pub mod error;
#[cfg(not(loom))]
pub mod gpu;
#[cfg(not(loom))]
pub mod job;
mod layout;
mod links;
mod local;
mod members;
mod nodes;
mod notice;
pub mod rendezvous;
mod signal;
mod signature;
mod symmetric;
mod waiting;

pub use antiphon_operation::Operation;
pub use communicator::{Builder, Communicator, Messenger, Monitor, Pending, Queue};
pub use error::FabricError;
pub use links::Written;
pub use local::LocalWorld;
pub use members::Members;
pub use nodes::Nodes;
pub use signal::{
    arena_offsets::ArenaOffsets,
    matching::Source,
    rounds::{Arenas, Rounds},
};
pub use signature::Signature;
#[cfg(not(loom))]
pub use symmetric::{CudaArena, RegisteredMemory, RegisteredTensor, Registry};
pub use symmetric::{Mapped, SymmetricBuffer};
