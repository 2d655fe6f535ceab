//! The place of an operation in a plan.

use std::fmt;

use crate::ids::{Rank, ThreadBlockId};

/// The place of an operation in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The rank of the operation.
    pub rank: Rank,
    /// The thread block that does it.
    pub threadblock: ThreadBlockId,
    /// Its index among the block's operations.
    pub op: u32,
    /// Its index in that operation, if that is a pipeline.
    pub inner: Option<u32>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, thread block {}, op {}", self.rank, self.threadblock, self.op)?;
        match self.inner {
            Some(inner) => write!(f, ".{inner}"),
            None => Ok(()),
        }
    }
}
