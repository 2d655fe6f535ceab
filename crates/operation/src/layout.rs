//! The elements of a tensor that belong to each rank.

use std::ops::Range;

use crate::Extent;

/// How the input of a call falls into what goes to each rank, or its output into what comes from each.
///
/// A block goes whole to every rank; a row has a block of its own for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout<'a> {
    pub(crate) extent: Extent,
    /// Elements of a block.
    pub(crate) block: usize,
    /// Elements of each rank's part.
    pub(crate) counts: &'a [usize],
    /// The rank whose tensor it is.
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

impl Layout<'_> {
    /// The elements that go to a peer, or come from it.
    #[inline]
    pub fn piece(&self, peer: usize) -> Range<usize> {
        match self.extent {
            Extent::Row => peer * self.block..(peer + 1) * self.block,
            Extent::Part => 0..self.counts[self.rank],
            Extent::Parts => {
                let start = total(&self.counts[..peer]);
                start..start + self.counts[peer]
            }
            Extent::Nothing => 0..0,
            Extent::Block | Extent::Planned => 0..self.block,
        }
    }

    /// Whether each rank has elements of its own in the tensor.
    #[inline]
    pub fn is_divided(&self) -> bool {
        matches!(self.extent, Extent::Row | Extent::Parts)
    }

    /// The elements of the whole tensor.
    pub fn elements(&self) -> usize {
        self.piece(if self.is_divided() { self.world_size - 1 } else { 0 }).end
    }

    /// The elements of the longest block or part of any rank, as far as this rank knows them.
    pub fn longest(&self) -> usize {
        match self.extent {
            Extent::Part | Extent::Parts => self.counts.iter().copied().max().unwrap_or(0),
            _ => self.block,
        }
    }
}

/// The sum; one that overflows is larger than any tensor.
pub(crate) fn total(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_one_behind_the_other() {
        let counts = [3, 0, 5];
        let of = |extent| Layout { extent, block: 4, counts: &counts, rank: 2, world_size: 3 };
        let pieces = |extent| [0, 1, 2].map(|peer| of(extent).piece(peer));
        assert_eq!(pieces(Extent::Block), [0..4, 0..4, 0..4]);
        assert_eq!(pieces(Extent::Row), [0..4, 4..8, 8..12]);
        assert_eq!(pieces(Extent::Part), [0..5, 0..5, 0..5]);
        assert_eq!(pieces(Extent::Parts), [0..3, 3..3, 3..8]);
        let elements = [Extent::Block, Extent::Row, Extent::Part, Extent::Parts].map(|e| of(e).elements());
        assert_eq!(elements, [4, 12, 5, 8]);
        assert_eq!((of(Extent::Row).longest(), of(Extent::Part).longest()), (4, 5));
    }
}
