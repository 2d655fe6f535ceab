//! Sums that are rounded at every step.

use crate::{
    all_reduce::{InOrder, Reduce},
    chunked::copy,
};

/// Bytes of a running sum: they stay in L1.
const TILE: usize = 4 << 10;

/// A sum over the ranks that is rounded to its dtype after every addition: sums of two, which round once. The additions are those of the
/// [order](InOrder) of the communicator.
pub(super) struct RoundedSum {
    sum: InOrder,
    size: usize,
}

impl RoundedSum {
    /// Rounds after each addition, by `sum`, which rounds once. An element has `size` bytes.
    pub(super) fn new(sum: InOrder, size: usize) -> Self {
        Self { sum, size }
    }

    /// Adds up `elements` of some sources from the byte `start` on.
    ///
    /// # Safety
    /// The sum and every source are valid for `elements` elements from the byte `start` on. There is at least one source.
    unsafe fn add_up(
        &self,
        sum: *mut u8,
        mut sources: impl Iterator<Item = *const u8>,
        start: usize,
        elements: usize,
    ) {
        let first = sources.next().expect("a sum has a source");
        // SAFETY: the caller vouches for the elements.
        unsafe {
            self.sum.reducer.run(sum, &[first.add(start)], elements);
            for source in sources {
                self.sum.reducer.run(sum, &[sum, source.add(start)], elements);
            }
        }
    }
}

impl Reduce for RoundedSum {
    unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize) {
        let mut tiles = [[0u64; TILE / size_of::<u64>()]; 2];
        let [sum, of_node] = tiles.each_mut().map(|tile| tile.as_mut_ptr().cast::<u8>());
        for start in (0..count * self.size).step_by(TILE) {
            let len = TILE.min(count * self.size - start);
            let elements = len / self.size;
            // SAFETY: the caller vouches for `count` elements. The destination may be a source, whose tile has been read
            // when it is written.
            unsafe {
                match &self.sum.nodes {
                    None => self.add_up(sum, sources.iter().copied(), start, elements),
                    Some(nodes) => {
                        let of = |node| nodes.ranks(node).iter().map(|&rank| sources[rank]);
                        self.add_up(sum, of(0), start, elements);
                        for node in 1..nodes.count() {
                            self.add_up(of_node, of(node), start, elements);
                            self.sum.reducer.run(sum, &[sum, of_node], elements);
                        }
                    }
                }
                copy(sum, destination.add(start), len);
            }
        }
    }

    /// Every step is rounded, and so are the sums of nodes.
    fn sum_size(&self) -> usize {
        self.size
    }

    unsafe fn accumulate(&self, sums: *mut u8, sources: &[*const u8], count: usize) {
        // SAFETY: passed on; the sums are apart from the sources.
        unsafe { self.add_up(sums, sources.iter().copied(), 0, count) }
    }

    unsafe fn conclude(&self, destination: *mut u8, sums: &[*const u8], count: usize) {
        // SAFETY: passed on; the destination is apart from the sums.
        unsafe { self.add_up(destination, sums.iter().copied(), 0, count) }
    }
}
