//! The memory that rows travel through.

use std::ops::Range;

use antiphon_fabric::{FabricError, Rounds, Signature, SymmetricBuffer, Written};

use crate::error::{MoeError, Result};

/// Records begin at multiples of this: whole vectors.
const ALIGNMENT: usize = 16;

/// A region of every rank, used half by half.
///
/// While ranks drain a piece in one half, others may fill the next piece into the other half. The halves alternate over all
/// calls: a rank that fills piece `n` has met all ranks at piece `n − 1`, to which each comes when it has drained piece `n − 2`,
/// which was in the same half.
pub(crate) struct Region {
    buffer: SymmetricBuffer,
    /// The number of the next piece. It is equal on all ranks.
    turn: u64,
}

impl Region {
    pub(crate) fn new(buffer: SymmetricBuffer) -> Self {
        Self { buffer, turn: 0 }
    }

    pub(crate) fn buffer(&self) -> &SymmetricBuffer {
        &self.buffer
    }

    pub(crate) fn into_buffer(self) -> SymmetricBuffer {
        self.buffer
    }

    fn half_bytes(&self) -> usize {
        self.buffer.len() / 2 / ALIGNMENT * ALIGNMENT
    }

    /// The number of records of `bytes` bytes that a half holds.
    ///
    /// # Errors
    /// [`MoeError::Region`] if it has none.
    pub(crate) fn records(&self, call: &'static str, bytes: usize) -> Result<usize> {
        let half = self.half_bytes();
        let record = bytes.next_multiple_of(ALIGNMENT);
        if record > half {
            return Err(MoeError::Region { call, needed: record, half, region_bytes: self.buffer.len() });
        }
        Ok(half / record)
    }

    /// Moves `length` records of `bytes` bytes, at most `records` at a time. If there are none, the ranks meet all the same.
    ///
    /// For each piece, `fill` writes records of the half, this rank's own or its peers', such that no two ranks write the
    /// same one; when all ranks have, `drain` reads them.
    pub(crate) fn in_pieces(
        &mut self,
        rounds: &mut Rounds,
        signature: &Signature,
        (records, bytes): (usize, usize),
        length: usize,
        mut fill: impl FnMut(&Half<'_>, Range<usize>),
        mut drain: impl FnMut(&Half<'_>, Range<usize>),
    ) -> Result<(), FabricError> {
        let mut start = 0;
        loop {
            let piece = start..length.min(start + records);
            let offset = (self.turn % 2) as usize * self.half_bytes();
            let record = bytes.next_multiple_of(ALIGNMENT);
            let half = Half { buffer: &self.buffer, offset, record, records };
            fill(&half, piece.clone());
            rounds.exchange(signature, Written::nothing(0))?;
            drain(&half, piece.clone());
            self.turn += 1;
            start = piece.end;
            if start >= length {
                return Ok(());
            }
        }
    }
}

/// Half of every rank's region, as records.
pub(crate) struct Half<'a> {
    buffer: &'a SymmetricBuffer,
    offset: usize,
    record: usize,
    records: usize,
}

impl Half<'_> {
    fn at(&self, rank: usize, index: usize) -> *mut u8 {
        assert!(index < self.records, "record {index} of {}", self.records);
        // SAFETY: `self.records` records lie in the half, which lies in the buffer.
        unsafe { self.buffer.as_mut_ptr(rank).add(self.offset + index * self.record) }
    }

    /// A record to read.
    ///
    /// # Safety
    /// No rank writes it while the slice lives: it is read while its piece is drained.
    pub(crate) unsafe fn get(&self, rank: usize, index: usize) -> &[u8] {
        // SAFETY: a record has `self.record` bytes, which are mapped as long as the buffer; the caller answers for the writers.
        unsafe { std::slice::from_raw_parts(self.at(rank, index), self.record) }
    }

    /// A record to write.
    ///
    /// # Safety
    /// No other code reads or writes it while the slice lives: it is this rank's to write while its piece is filled.
    #[allow(clippy::mut_from_ref)] // the memory belongs to all ranks; the caller answers for who uses it
    pub(crate) unsafe fn get_mut(&self, rank: usize, index: usize) -> &mut [u8] {
        // SAFETY: as in `get`.
        unsafe { std::slice::from_raw_parts_mut(self.at(rank, index), self.record) }
    }
}
