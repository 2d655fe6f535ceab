//! Who can run, by priority.

use std::collections::VecDeque;

const WORD: u64 = 64;
/// Priorities: so many that most blocks have one of their own, and run with what the processor's caches have.
pub(super) const LEVELS: u64 = WORD * WORD;

/// A queue for each priority, and which of them are not empty.
pub(super) struct Levels<T> {
    queues: Vec<VecDeque<T>>,
    full: [u64; WORD as usize],
    any_full: u64,
}

impl<T> Levels<T> {
    pub(super) fn new() -> Self {
        let queues = (0..LEVELS).map(|_| VecDeque::new()).collect();
        Self { queues, full: [0; WORD as usize], any_full: 0 }
    }

    pub(super) fn push(&mut self, level: u64, what: T) {
        self.queues[level as usize].push_back(what);
        self.full[(level / WORD) as usize] |= 1 << (level % WORD);
        self.any_full |= 1 << (level / WORD);
    }

    /// The first of the highest priority.
    pub(super) fn pop(&mut self) -> Option<T> {
        let word = self.any_full.checked_ilog2()? as usize;
        let level = word * WORD as usize + self.full[word].ilog2() as usize;
        let what = self.queues[level].pop_front();
        if self.queues[level].is_empty() {
            self.is_empty(level);
        }
        what
    }

    /// Those of the lowest priority get the highest.
    pub(super) fn raise_lowest(&mut self) {
        if self.any_full == 0 {
            return;
        }
        let word = self.any_full.trailing_zeros() as usize;
        let lowest = word * WORD as usize + self.full[word].trailing_zeros() as usize;
        let all = std::mem::take(&mut self.queues[lowest]);
        self.is_empty(lowest);
        all.into_iter().for_each(|what| self.push(LEVELS - 1, what));
    }

    fn is_empty(&mut self, level: usize) {
        let (word, bit) = (level / WORD as usize, level % WORD as usize);
        self.full[word] &= !(1 << bit);
        if self.full[word] == 0 {
            self.any_full &= !(1 << word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LEVELS, Levels};

    #[test]
    fn the_highest_comes_first_and_the_lowest_is_raised() {
        let mut levels = Levels::new();
        for (level, what) in [(0, 'a'), (70, 'b'), (LEVELS - 1, 'c'), (70, 'd')] {
            levels.push(level, what);
        }
        assert_eq!(levels.pop(), Some('c'));
        levels.raise_lowest();
        assert_eq!(std::iter::from_fn(|| levels.pop()).collect::<String>(), "abd");
        levels.raise_lowest();
        assert_eq!(levels.pop(), None);
    }
}
