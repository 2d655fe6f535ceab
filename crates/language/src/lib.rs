//! Collective algorithms as programs.
//!
//! A [`Program`] is written call by call: its [`Rank`]s have buffers, channels connect them ([`MemoryChannel`],
//! [`PortChannel`], [`SwitchChannel`]), and each operation names the thread block that does it. [`Program::plan`] makes the
//! program's execution plan. The terms are those of MSCCL++ 0.9.0's `mscclpp.language`, and the plans are the same.
//!
//! An all-gather of two ranks, each of which writes its part into the other's output:
//!
//! ```
//! use antiphon_language::{Collective, DataSync, Options, Program};
//!
//! let program = Program::new("all_gather", &Collective::all_gather(2, 1), Options::default());
//! for own in 0..2 {
//!     let peer = 1 - own;
//!     let (rank, channel) = (program.rank(own)?, program.memory_channel(peer, own)?);
//!     let part = u64::from(own);
//!     let there = program.rank(peer)?.output().chunk(part)?;
//!     // The peer's call has begun, so its output may be written.
//!     channel.relaxed_signal(0, DataSync::NONE)?;
//!     channel.relaxed_wait(0, DataSync::AFTER)?;
//!     channel.put(there, rank.input().chunk(0)?, 0)?;
//!     channel.signal(0, DataSync::BEFORE)?;
//!     rank.copy(rank.output().chunk(part)?, rank.input().chunk(0)?, 0)?;
//!     channel.wait(0, DataSync::AFTER)?;
//! }
//! let plan = program.plan()?;
//! let ops: Vec<_> = plan.gpus[0].threadblocks[0].ops.iter().map(|op| op.kind.name()).collect();
//! assert_eq!(ops, ["rlxsignal", "rlxwait", "nop", "put", "nop", "signal", "copy", "wait", "nop"]);
//! # Ok::<(), antiphon_language::LanguageError>(())
//! ```
//!
//! The usual algorithms are in the [`library`].
//!
//! [`DataSync`] sets on which sides of a signal, wait, flush, acquire or release the threads of the block synchronise.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod blocks;
mod buffer;
mod channel;
mod check;
mod collective;
mod error;
pub mod library;
mod program;
mod rank;
mod state;
mod switch;

pub use antiphon_plan::{
    BufferType, ChannelId, DataSync, Plan, Protocol, ReduceOp, SemaphoreId, passes::ReplicationPolicy,
};
pub use blocks::{Blocks, ThreadBlockGroup};
pub use buffer::{Buffer, Chunk};
pub use channel::{MemoryChannel, PortChannel};
pub use collective::{BufferChunks, Collective};
pub use error::{LanguageError, Result};
pub use program::{Options, Program};
pub use rank::{Rank, Semaphore};
pub use switch::{SwitchChannel, SwitchEnds, SwitchView};
