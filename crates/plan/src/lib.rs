//! The execution plan of a collective algorithm: the operations of every thread block of every rank.
//!
//! A plan's operations copy, send and reduce *chunks*, signal and wait. The size of a chunk follows from the message, so one
//! plan serves many sizes. Programs written with `antiphon-language` become plans, and executors run plans. This crate defines
//! the meaning of plans and runs nothing:
//!
//! * [`Plan`] is plain data. Every number in it that refers to an object is typed ([`Rank`], [`ChannelIndex`], …).
//! * [`Plan::from_json`] and [`Plan::to_json`] read and write the format of MSCCL++ 0.9.0 (`ExecutionPlan`).
//! * [`Block`] resolves an operation's numbers to peers, buffers and chunks ([`Block::accesses`]).
//!   [`Wiring`] finds the counterpart of each channel.
//! * [`passes`] fuse, order and replicate the operations of a program.
//! * [`simulate`](mod@simulate) predicts the time of a plan on a cluster; [`picture`] draws the prediction as a page.
//! * [`Extent`] computes the offsets of chunks in bytes, for a message.
//!
//! ```
//! use antiphon_plan::Plan;
//!
//! let text = r#"{"name": "nothing", "collective": "custom", "gpus": []}"#;
//! let plan = Plan::from_json(text.as_bytes())?;
//! assert_eq!(plan.buffer_alignment, 16);
//! assert_eq!(Plan::from_json(plan.to_json().as_bytes())?, plan);
//!
//! let cut = Plan::from_json(&text.as_bytes()[..20]).unwrap_err();
//! assert_eq!(cut.to_string(), "the plan's text: EOF while parsing a value (line 1, column 20)");
//! # Ok::<(), antiphon_plan::PlanError>(())
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod check;
mod error;
mod extent;
mod ids;
mod json;
mod op;
pub mod passes;
pub mod picture;
mod place;
mod plan;
mod resolve;
pub mod simulate;
mod text;
pub mod verify;

pub use antiphon_operation::ReduceOp;
pub use error::PlanError;
pub use extent::Extent;
pub use ids::{
    BarrierId, ChannelId, ChannelIndex, OriginId, Rank, RemoteBufferId, RemoteBufferIndex, SemaphoreId,
    ThreadBlockId,
};
pub use op::{
    BufferType, ChannelType, Copy, CopyKind, DataSync, Get, GroupShare, LocalChunk, Notify, NotifyKind, Op,
    OpKind, Pipeline, Put, PutKind, REDUCE_OPS, RankChunk, Reduce, RemoteChunk, SemaphoreOp, SwitchBroadcast,
    SwitchChunk, SwitchReduce, SwitchReduceBroadcast,
};
pub use place::Place;
pub use plan::{
    ChannelRefs, Gpu, GpuChannels, Origin, Plan, Protocol, RemoteBuffer, RemoteBufferRefs, Semaphore,
    ThreadBlock,
};
pub use resolve::{Access, Block, Mode, Wiring};
pub use text::{MAX_TEXT_BYTES, escaped, read_text};
