//! # antiphon-fabric: ranks that meet, remember and signal
//!
//! A *world* is a number of ranks (processes, or threads) that act together. This crate brings them together and
//! gives them what every collective operation is made of:
//!
//! 1. **Meeting** ([`rendezvous`]). Ranks find each other through torchrun's environment, a path, or any channel the
//!    caller has, and prove to each other that they belong together.
//! 2. **Memory**. All ranks map one piece of anonymous shared memory, in which each has a region of its own:
//!    mailboxes, message rings, and an arena of symmetric buffers
//!    ([`Communicator::create_shared_buffer`]) that lie at the same offset on every rank.
//! 3. **Signals**. In a *round* ([`Rounds`]) every rank posts a packet and waits for everybody's; in a *message* one
//!    rank sends to another. A packet's stamp is written with release order and polled with acquire order, and data up
//!    to 40 bytes shares its cache line, so that one line carries everything.
//! 4. **The [`Communicator`]** that holds all this, with barriers, object exchange, splitting into groups, and a
//!    background for non-blocking work.
//! 5. **The [engine of the GPUs](gpu)**, which runs families of kernels that crates above write.
//!
//! ## What is promised
//!
//! *Nothing hangs.* Every wait has a deadline, and looks about every millisecond whether a peer has died, left or
//! given up; the error names the rank and the operation. *Nothing is confused.* Each packet carries the
//! [`Signature`] of the call it belongs to, and each rank compares it with its own before it touches the data. The cost
//! is two words in a cache line that travels anyway. *Nothing is left behind.* The memory has no name; a killed rank
//! leaves no file (but for the socket at a path, if rank 0 is killed while ranks meet there; the next run reclaims it).
//!
//! *A loss is not the end.* Who is left goes on by [`Communicator::shrink`], which takes milliseconds and no new meeting;
//! [`Monitor::abort`] ends the waits of all ranks from any thread. *A job that hangs can be asked.* A rank that waits and is sent
//! SIGUSR1 says on standard error in which call, since when and for whom, and what those ranks do; a program that has its own
//! handler keeps it. [`Job`](job::Job) reads the same of all ranks from outside, which `antiphon doctor --job` shows.
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
pub mod error;
#[cfg(not(loom))]
pub mod gpu;
mod health;
#[cfg(not(loom))]
pub mod job;
mod layout;
mod local;
mod members;
pub mod rendezvous;
mod signal;
mod signature;
mod symmetric;
mod waiting;

pub use antiphon_operation::Operation;
pub use communicator::{Builder, Communicator, Messenger, Monitor, Pending, Queue, Source};
pub use error::FabricError;
pub use local::LocalWorld;
pub use members::Members;
pub use signal::rounds::{Arenas, Rounds};
pub use signature::Signature;
#[cfg(not(loom))]
pub use symmetric::{CudaArena, RegisteredMemory};
pub use symmetric::{Mapped, SharedBuffer};
