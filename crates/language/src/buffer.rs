//! Buffers, and the chunks of them.

use std::ops::{Bound, RangeBounds};

use antiphon_plan::{BufferType, Rank};

use crate::error::{LanguageError, Result};

/// Chunks `index .. index + size` of a buffer of a rank.
pub use antiphon_plan::RankChunk as Chunk;

/// A buffer of a rank, or the part of its scratch that one call set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    /// The rank whose memory it is.
    pub rank: u32,
    /// Which.
    pub buffer: BufferType,
    /// Its first chunk.
    pub offset: u64,
    /// Its number of chunks.
    pub size: u64,
}

impl Buffer {
    /// Some chunks, counted from the buffer's start: `buffer.chunks(2..4)`, `buffer.chunks(..)`. There may be none.
    ///
    /// # Errors
    /// [`LanguageError::BackwardRange`] or [`LanguageError::BeyondBuffer`].
    pub fn chunks(&self, range: impl RangeBounds<u64>) -> Result<Chunk> {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&end) => end.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.size,
        };
        if start > end {
            return Err(LanguageError::BackwardRange { start, end });
        }
        match self.offset.checked_add(start) {
            Some(index) if end <= self.size => {
                Ok(Chunk { rank: Rank(self.rank), buffer: self.buffer, index, size: end - start })
            }
            _ => {
                let Buffer { rank, buffer, size, .. } = *self;
                Err(LanguageError::BeyondBuffer { rank, buffer, start, end, size })
            }
        }
    }

    /// One chunk, counted from the buffer's start.
    ///
    /// # Errors
    /// [`LanguageError::BeyondBuffer`].
    pub fn chunk(&self, index: u64) -> Result<Chunk> {
        self.chunks(index..index.saturating_add(1))
    }
}
