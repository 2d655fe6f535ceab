//! Offsets in an arena: a pure calculation that every rank does alike.

use std::collections::BTreeMap;

use crate::FabricError;

/// Buffers begin at multiples of this.
const PAGE: usize = 4096;

/// First fit over a sorted list of free pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allocator {
    capacity: usize,
    /// Free pieces, length by offset; no two touch.
    free: BTreeMap<usize, usize>,
    /// Buffers in use, length in whole pages by offset.
    used: BTreeMap<usize, usize>,
}

impl Allocator {
    pub(crate) fn new(capacity: usize) -> Self {
        let capacity = capacity - capacity % PAGE;
        let free = if capacity > 0 { BTreeMap::from([(0, capacity)]) } else { BTreeMap::new() };
        Self { capacity, free, used: BTreeMap::new() }
    }

    /// A place for `len` bytes. Even an empty buffer gets a page, so that offsets tell buffers apart.
    pub(crate) fn allocate(&mut self, len: usize) -> Result<usize, FabricError> {
        let pages = len.max(1).checked_next_multiple_of(PAGE).ok_or_else(|| self.full(len))?;
        let found = self.free.iter().find(|(_, size)| **size >= pages).map(|(offset, size)| (*offset, *size));
        let (offset, size) = found.ok_or_else(|| self.full(len))?;
        self.free.remove(&offset);
        if size > pages {
            self.free.insert(offset + pages, size - pages);
        }
        self.used.insert(offset, pages);
        Ok(offset)
    }

    /// Frees what was allocated at `offset`; returns its size in whole pages.
    ///
    /// # Panics
    /// When nothing is allocated there.
    pub(crate) fn free(&mut self, offset: usize) -> usize {
        let pages = self.used.remove(&offset).expect("a buffer is freed once");
        let (mut start, mut size) = (offset, pages);
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            (start, size) = (before, size + len);
        }
        if let Some(len) = self.free.remove(&(offset + pages)) {
            size += len;
        }
        self.free.insert(start, size);
        pages
    }

    fn full(&self, asked: usize) -> FabricError {
        FabricError::ArenaFull {
            asked,
            free: self.free.values().sum(),
            largest: self.free.values().copied().max().unwrap_or(0),
            capacity: self.capacity,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let mut allocator = Allocator::new(3 * PAGE);
        let (first, _second) = (allocator.allocate(1).unwrap(), allocator.allocate(PAGE).unwrap());
        allocator.free(first);
        let error = allocator.allocate(2 * PAGE).unwrap_err().to_string();
        assert!(error.contains("8192 bytes") && error.contains("largest piece has 4096"), "{error}");
        assert!(allocator.allocate(usize::MAX).is_err());
    }

    proptest! {
        /// Buffers never overlap, and freeing all of them in any order gives the whole arena back.
        #[test]
        fn buffers_are_apart(sizes in proptest::collection::vec(0..5 * PAGE, 1..40), order: prop::sample::Index) {
            let fresh = Allocator::new(100 * PAGE);
            let mut allocator = fresh.clone();
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (i, &size) in sizes.iter().enumerate() {
                if let Ok(offset) = allocator.allocate(size) {
                    for &(other, len) in &live {
                        prop_assert!(offset + size.max(1) <= other || other + len.max(1) <= offset);
                    }
                    prop_assert!(offset + size <= 100 * PAGE);
                    live.push((offset, size));
                }
                if i % 3 == 2 && !live.is_empty() {
                    let (offset, _) = live.swap_remove(order.index(live.len()));
                    allocator.free(offset);
                }
            }
            while !live.is_empty() {
                allocator.free(live.swap_remove(order.index(live.len())).0);
            }
            prop_assert_eq!(allocator, fresh);
        }
    }
}
