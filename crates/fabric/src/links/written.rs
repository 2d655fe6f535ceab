//! Which bytes of its payload a rank has written.

use std::ops::Range;

/// The bytes of a payload that a rank has written for a round: only these travel to other nodes.
///
/// ```
/// use antiphon_fabric::Written;
///
/// // All bytes of a payload of 100 bytes but those from 40 to 60, which no other rank reads.
/// let written = Written::nothing(100).and(0..40).and(60..100);
/// assert_eq!(written.total(), 80);
/// assert_eq!(Written::all(8).total(), 8);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    len: usize,
    count: usize,
    ranges: [Range<usize>; Self::MOST],
}

impl Written {
    /// The most ranges.
    const MOST: usize = 3;

    /// Nothing of a payload of `len` bytes.
    #[inline]
    pub const fn nothing(len: usize) -> Self {
        Self { len, count: 0, ranges: [const { 0..0 }; Self::MOST] }
    }

    /// All of a payload of `len` bytes.
    #[inline]
    pub fn all(len: usize) -> Self {
        Self::nothing(len).and(0..len)
    }

    /// These and the bytes of a range.
    ///
    /// # Panics
    /// When the range lies outside of the payload, or is the fourth that is not empty.
    #[inline]
    #[must_use]
    pub fn and(mut self, range: Range<usize>) -> Self {
        if !range.is_empty() {
            assert!(range.end <= self.len, "{range:?} of {} bytes", self.len);
            self.ranges[self.count] = range;
            self.count += 1;
        }
        self
    }

    /// How many bytes the payload has: what [`outbox`](crate::Rounds::outbox) was asked for.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges[..self.count]
    }

    /// How many bytes are written.
    pub fn total(&self) -> usize {
        self.ranges().iter().map(Range::len).sum()
    }
}
