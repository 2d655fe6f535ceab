//! Sums that are rounded at every step.

use antiphon_device::host::reduce::Reducer;

use crate::{all_reduce::Reduce, chunked::copy};

/// Bytes of a running sum: they stay in L1.
const TILE: usize = 4 << 10;

/// A sum over the ranks that is rounded to its dtype after every addition: sums of two, which round once.
pub(super) struct RoundedSum {
    sum: Reducer,
    size: usize,
}

impl RoundedSum {
    /// From the sum that rounds once, of elements of this size.
    pub(super) fn new(sum: Reducer, size: usize) -> Self {
        Self { sum, size }
    }
}

impl Reduce for RoundedSum {
    unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize) {
        let mut tile = [0u64; TILE / size_of::<u64>()];
        let tile = tile.as_mut_ptr().cast::<u8>();
        let (first, rest) = sources.split_first().expect("a sum has a source");
        for start in (0..count * self.size).step_by(TILE) {
            let len = TILE.min(count * self.size - start);
            let elements = len / self.size;
            // SAFETY: the caller vouches for `count` elements. The destination may be a source, whose tile has been read
            // when it is written.
            unsafe {
                self.sum.run(tile, &[first.add(start)], elements);
                for source in rest {
                    self.sum.run(tile, &[tile, source.add(start)], elements);
                }
                copy(tile, destination.add(start), len);
            }
        }
    }
}
