//! What a collection knows of times.

use std::time::Duration;

use antiphon_collectives::AlgorithmTable;
use antiphon_tensor::DType;

/// The times of algorithms that may take each other's place.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) collective: String,
    pub(super) dtype: DType,
    /// The places of the table's algorithms.
    pub(super) places: Vec<usize>,
    /// Absent if the cache has none.
    pub(super) table: Option<AlgorithmTable>,
}

impl Measured {
    /// The place of the fastest one at a size.
    pub(super) fn fastest(&self, bytes: usize) -> Option<usize> {
        self.table.as_ref().map(|table| self.places[table.choose(bytes)])
    }

    /// The time of one, at the size below `bytes` that is closest.
    pub(super) fn time(&self, place: usize, bytes: usize) -> Option<Duration> {
        let rows = self.table.as_ref()?.table().rows();
        let row = rows.iter().rev().find(|row| row.bytes <= bytes).or(rows.first())?;
        let candidate = self.places.iter().position(|&one| one == place)?;
        row.timings[candidate].as_ref().map(|timing| Duration::from_nanos(timing.median_ns as u64))
    }
}
