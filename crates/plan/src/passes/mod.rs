//! Turns the operations of a program into those of its thread blocks.
//!
//! Each pass is a function from plan to plan, independent of the others. A program's plan goes through them in this
//! order (as in MSCCL++ 0.9.0):
//!
//! 1. [`check_pairing`]: every signal has its wait.
//! 2. [`fuse`]: neighbours become one operation where one can do the work of both.
//! 3. [`insert_data_sync`]: threads synchronise where the program asks for it ([`DataSync`](crate::DataSync)).
//! 4. [`insert_dependency_sync`]: threads synchronise between operations of one block that access the same chunks.
//! 5. [`replicate`]: every thread block becomes `instances` of them, each with its part of every chunk.

mod data_sync;
mod dependency_sync;
mod fusion;
mod pairing;
mod replication;

pub use data_sync::insert_data_sync;
pub use dependency_sync::insert_dependency_sync;
pub use fusion::fuse;
pub use pairing::check_pairing;
pub use replication::{ReplicationPolicy, replicate};

use crate::op::Op;
use crate::plan::Plan;

/// The plan with every thread block's operations replaced.
fn each_block(mut plan: Plan, pass: impl Fn(Vec<Op>) -> Vec<Op>) -> Plan {
    for block in plan.gpus.iter_mut().flat_map(|gpu| &mut gpu.threadblocks) {
        block.ops = pass(std::mem::take(&mut block.ops));
    }
    plan
}
