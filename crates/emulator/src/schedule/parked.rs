//! Fibers that wait for memory.

use std::collections::VecDeque;

use super::fibers::{Pace, Running, Watched};

/// A fiber that waits for memory. It may have gone on for another reason since: [`is_there`](Self::is_there).
pub(super) struct Parked {
    pub block: u32,
    pub thread: u16,
    /// Of the block, and how often the fiber had waited.
    pub number: u64,
    pub time: u32,
    /// The places that it has looked at, which its fiber has.
    pub looks: (*const Watched, usize),
}

impl Parked {
    fn is_there(&self, blocks: &[Option<Running>]) -> bool {
        let block = blocks[self.block as usize].as_ref();
        block.is_some_and(|block| block.number == self.number && block.is_parked(self.thread, self.time))
    }

    fn has_changed(&self) -> bool {
        // SAFETY: the fiber has these places, and does not run.
        let looks = unsafe { std::slice::from_raw_parts(self.looks.0, self.looks.1) };
        looks.iter().any(Watched::has_changed)
    }
}

/// The lists of [`Lot`], as many as [`Pace::writes`], and one for those of whom nobody knows what they wait for.
const LISTS: usize = 256;

/// All that wait, by the place at which they looked last: its offset in a page, as writes are counted.
pub(super) struct Lot {
    lists: Vec<VecDeque<Parked>>,
    writes: [u32; LISTS],
    moves: u64,
    /// Where the next look begins.
    first: usize,
    pub count: usize,
}

impl Lot {
    pub(super) fn new() -> Self {
        let lists = (0..=LISTS).map(|_| VecDeque::new()).collect();
        Self { lists, writes: [0; LISTS], moves: 0, first: 0, count: 0 }
    }

    /// The fiber looked there last; nowhere, if it waits for whatever is done.
    pub(super) fn add(&mut self, parked: Parked, at: usize, blocks: &[Option<Running>]) {
        let list = if at == 0 { LISTS } else { at / 16 % LISTS };
        self.count += 1;
        // Those that are not there any more are forgotten now and then.
        if self.lists[list].len() > 2 * self.count + 64 {
            self.lists[list].retain(|parked| parked.is_there(blocks));
        }
        self.lists[list].push_back(parked);
    }

    /// Some of those that can go on, as what they look at was written.
    pub(super) fn written(&mut self, pace: &Pace, blocks: &[Option<Running>]) -> Vec<(u32, u16)> {
        if self.moves != pace.moves {
            self.moves = pace.moves;
            let all = self.take(LISTS, blocks, |_| true);
            if !all.is_empty() {
                return all;
            }
        }
        for list in (self.first..LISTS).chain(0..self.first) {
            if !self.lists[list].is_empty() && self.writes[list] != pace.writes[list] {
                self.writes[list] = pace.writes[list];
                let some = self.take(list, blocks, Parked::has_changed);
                if !some.is_empty() {
                    self.first = (list + 1) % LISTS;
                    return some;
                }
            }
        }
        Vec::new()
    }

    /// All that can go on, also because of writes that were not counted: of plain stores, and of the host.
    pub(super) fn changed(&mut self, blocks: &[Option<Running>]) -> Vec<(u32, u16)> {
        (0..LISTS).flat_map(|list| self.take(list, blocks, Parked::has_changed)).collect()
    }

    pub(super) fn all(&mut self, blocks: &[Option<Running>]) -> Vec<(u32, u16)> {
        (0..=LISTS).flat_map(|list| self.take(list, blocks, |_| true)).collect()
    }

    fn take(
        &mut self,
        list: usize,
        blocks: &[Option<Running>],
        goes_on: impl Fn(&Parked) -> bool,
    ) -> Vec<(u32, u16)> {
        let mut taken = Vec::new();
        self.lists[list].retain(|parked| {
            let is_there = parked.is_there(blocks);
            let goes_on = is_there && goes_on(parked);
            if goes_on {
                taken.push((parked.block, parked.thread));
            }
            is_there && !goes_on
        });
        taken
    }
}
