//! The checks of an operation's chunks.

use antiphon_plan::BufferType;

use crate::buffer::Chunk;
use crate::error::{LanguageError, Result};

/// The chunks of one operation.
#[derive(Clone, Copy)]
pub(crate) struct Check {
    /// The operation, as the program calls it.
    pub op: &'static str,
}

impl Check {
    pub fn rank(self, what: &'static str, chunk: Chunk, expected: u32) -> Result<()> {
        match chunk.rank.0 == expected {
            true => Ok(()),
            false => Err(LanguageError::WrongRank { op: self.op, what, rank: chunk.rank.0, expected }),
        }
    }

    pub fn size(self, what: &'static str, chunk: Chunk, expected: u64) -> Result<()> {
        match chunk.size == expected {
            true => Ok(()),
            false => Err(LanguageError::SizesDiffer { op: self.op, what, size: chunk.size, expected }),
        }
    }

    pub fn scratch(self, what: &'static str, chunk: Chunk) -> Result<()> {
        self.scratch_buffer(what, chunk.buffer)
    }

    pub fn scratch_buffer(self, what: &'static str, buffer: BufferType) -> Result<()> {
        match buffer {
            BufferType::Scratch => Ok(()),
            _ => Err(LanguageError::NotScratch { op: self.op, what, buffer }),
        }
    }
}
