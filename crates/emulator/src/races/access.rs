//! Whether an access is ordered behind those that the shadow remembers, and what it remembers then.

use super::{
    clocks::{ENDED, Id, LANES, Time},
    grids::{Grid, Scope},
    late::{self, Older},
    report,
    shadow::{Cell, GRANULE, Locked, Page, Record, WORD, page},
    threads::{Block, Knowledge},
};

// What an access is, as in device/memory.hpp; its bytes are in the low byte.
pub(super) const READ: u32 = 1 << 8;
pub(super) const WRITE: u32 = 1 << 9;
pub(super) const STRONG: u32 = 1 << 10;
pub(super) const ACQUIRE: u32 = 1 << 11;
pub(super) const RELEASE: u32 = 1 << 12;
pub(super) const CONSTANT: u32 = 1 << 13;
/// Of a fence: `fence.sc`.
pub(super) const SEQUENTIAL: u32 = 1 << 18;
/// Not of device/memory.hpp: of a copy that is complete later, and of one in the async proxy.
pub(super) const COPY: u32 = 1 << 14;
pub(super) const ASYNC: u32 = 1 << 15;

/// In place of an instruction: the end of a thread, with which its shared memory may go.
pub(super) const END: u64 = 1;

/// In place of a reader: there were more than are remembered.
pub(super) const CROWD: Id = Id::MAX;

pub(super) fn scope_of(what: u32) -> Scope {
    (what >> 16 & 3) as Scope
}

/// An access of a thread, or of one of its copies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    pub id: Id,
    pub time: Time,
    pub pc: u64,
    pub what: u32,
}

impl Access {
    pub(super) fn is(&self, what: u32) -> bool {
        self.what & what != 0
    }

    /// The record of this access of some bytes of a word; `carries` says whether the word carries a release then.
    pub(super) fn record(&self, mask: u8, carries: bool) -> Record {
        let what = u64::from(self.what >> 8 & 0xFF) | u64::from(self.what >> 16 & 3) << 8;
        let above = u64::from(mask) | what << 4 | u64::from(carries) << 14;
        Record { id: self.id, time: self.time, word: self.pc & ((1 << 48) - 1) | above << 48 }
    }
}

impl Record {
    pub(super) fn pc(&self) -> u64 {
        self.word & ((1 << 48) - 1)
    }

    fn mask(&self) -> u8 {
        (self.word >> 48 & 0xF) as u8
    }

    /// As [`Access::what`], without the bytes.
    pub(super) fn what(&self) -> u32 {
        let above = (self.word >> 52) as u32;
        (above & 0xFF) << 8 | (above >> 8 & 3) << 16
    }

    pub(super) fn is(&self, what: u32) -> bool {
        self.what() & what != 0
    }

    pub(super) fn carries_release(&self) -> bool {
        self.word >> 62 & 1 != 0
    }

    /// Whether what it overwrote may still be read: see `late`.
    pub(super) fn has_history(&self) -> bool {
        self.word >> 63 != 0
    }

    /// The access, without what its word carries.
    pub(super) fn alone(&self) -> Self {
        Self { word: self.word & ((1 << 62) - 1), ..*self }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.word == 0
    }
}

/// Why two accesses race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    Edge,
    /// A relaxed load saw the release, and no fence of this scope is behind it.
    Acquire(Scope),
    /// Both are strong: the smaller scope, and the one that has both threads.
    Scope(Scope, Scope),
    ProxyFence,
    CopyWait,
    Constant,
}

pub(super) struct Race {
    pub first: Record,
    pub second: Access,
    pub at: usize,
    pub missing: Missing,
}

impl Block {
    /// An access of the running thread.
    pub(super) fn access(&mut self, at: usize, bytes: usize, pc: u64, what: u32) {
        let Some(page) = page(at) else { return };
        let thread = self.current();
        let access = Access { id: self.ids(thread)[0], time: self.lanes[thread].time, pc, what };
        self.range(page, at, bytes, access);
    }

    /// A copy of the running thread, which is complete later. Its number among the thread's copies.
    pub(super) fn copy(&mut self, [to, from]: [usize; 2], bytes: usize, pc: u64, is_bulk: bool) -> Time {
        let thread = self.current();
        self.lanes[thread].copies += 1;
        let time = self.lanes[thread].copies;
        let [_, writes, reads] = self.ids(thread);
        let proxy = if is_bulk { COPY | ASYNC } else { COPY };
        for (id, at, what) in [(reads, from, READ), (writes, to, WRITE)] {
            if let Some(page) = page(at) {
                self.range(page, at, bytes, Access { id, time, pc, what: what | proxy });
            }
        }
        time
    }

    /// A copy that is not a bulk copy reads, when its thread waits for it: it is as late as may be.
    pub(super) fn copied(&mut self, from: usize, bytes: usize, pc: u64, number: Time) {
        let id = self.ids(self.current())[2];
        if let Some(page) = page(from) {
            self.range(page, from, bytes, Access { id, time: number, pc, what: READ | COPY });
        }
    }

    fn range(&mut self, first: &'static Page, at: usize, bytes: usize, access: Access) {
        let end = at + bytes;
        let mut from = at;
        while from < end {
            let to = end.min((from / GRANULE + 1) * GRANULE);
            let page = if from == at { Some(first) } else { page(from) };
            if let Some(page) = page {
                self.is_lost = false;
                self.granule(&mut Locked::new(page, from), from, to - from, 0, access);
            }
            from = to;
        }
    }

    /// An access within a granule, which stays locked. Of a load each `unit` bytes are one value; it returns what is there if that is 0.
    pub(super) fn locked(
        &mut self,
        at: usize,
        [bytes, unit]: [usize; 2],
        pc: u64,
        what: u32,
    ) -> Option<Locked> {
        let mut locked = Locked::new(page(at)?, at);
        (self.older, self.is_lost) = (Older::default(), false);
        let thread = self.current();
        let access = Access { id: self.ids(thread)[0], time: self.lanes[thread].time, pc, what };
        self.granule(&mut locked, at, bytes, unit, access);
        Some(locked)
    }

    fn granule(&mut self, locked: &mut Locked, at: usize, bytes: usize, unit: usize, access: Access) {
        let is_shared = locked.is_shared;
        let (mut seen, mut own, mut older, mut has_history) = (0, 0, 0, false);
        if access.is(STRONG) && late::is_on() && !is_shared {
            self.is_lost = access.is(WRITE) && self.loses(locked, at, bytes, &access);
            if self.is_lost {
                // Nobody ever reads it.
            } else if access.is(WRITE) {
                has_history = self.overwrite(locked, at, bytes, &access);
            } else {
                older = self.look_back(locked, at, bytes, unit, &access);
            }
        }
        for byte_at in (at / WORD * WORD..at + bytes).step_by(WORD) {
            let (from, to) = (at.max(byte_at) - byte_at, (at + bytes).min(byte_at + WORD) - byte_at);
            let mask = ((1u8 << to) - 1) & !((1u8 << from) - 1);
            let index = byte_at % GRANULE / WORD;
            let cell = &mut locked.cells()[index];
            if is_shared {
                self.forget_others(cell);
            }
            let (was_release, was_own) = (cell.writer.carries_release(), cell.writer.id == access.id);
            if let Some((first, missing)) = self.check(cell, mask, &access, is_shared) {
                report::race(&Race { first, second: access, at: byte_at, missing }, &self.grid);
            }
            // A thread that returns what was there before has not seen the last store.
            if self.is_lost || older >> index & 1 != 0 {
                continue;
            }
            self.remember(cell, mask, &access);
            if has_history {
                cell.writer.word |= 1 << 63;
            }
            seen |= u8::from(was_release) << index;
            own |= u8::from(was_release && was_own) << index;
        }
        if !self.is_lost && (access.is(STRONG) || seen != 0) {
            self.synchronise(locked, at, bytes, access, seen, own);
        }
    }

    /// Blocks of other clusters had this memory before, and have ended.
    fn forget_others(&self, cell: &mut Cell) {
        let size = self.grid.range.per_block * self.grid.cluster_size;
        let cluster = self.place.cluster..self.place.cluster + size;
        for record in std::iter::once(&mut cell.writer).chain(&mut cell.readers) {
            if record.id != CROWD && !cluster.contains(&record.id) {
                *record = Record::default();
            }
        }
    }

    fn check(&self, cell: &Cell, mask: u8, access: &Access, is_shared: bool) -> Option<(Record, Missing)> {
        let readers = if access.is(WRITE) { &cell.readers[..] } else { &[] };
        std::iter::once(&cell.writer)
            .chain(readers)
            .filter(|record| record.id != CROWD && !record.is_empty() && record.mask() & mask != 0)
            .filter_map(|record| self.missing(record, access, is_shared).map(|missing| (*record, missing)))
            .find(|(record, _)| !(record.is(WRITE) && self.is_observed(cell, record, access)))
    }

    /// A strong store is ordered before what comes behind a strong load of it, whatever else it releases: causality order goes over the
    /// observation order. So is one that a copy has seen, where a line says why that copy may race.
    fn is_observed(&self, cell: &Cell, store: &Record, access: &Access) -> bool {
        let place = |id| Grid::of(id).map(|grid| grid.place(id));
        store.is(STRONG)
            && cell.readers.iter().any(|load| {
                let is_strong = || {
                    let scope = place(store.id).zip(place(load.id)).map_or(3, |(a, b)| a.scope_with(b));
                    scope_of(store.what()).min(scope_of(load.what())) >= scope
                };
                let has_seen = || match load.is(COPY) {
                    true => report::may_race(load.pc()),
                    false => load.is(STRONG) && is_strong(),
                };
                load.id == CROWD
                    || !load.is_empty()
                        && store.mask() & !load.mask() == 0
                        && self.knows(load, access)
                        && has_seen()
            })
    }

    fn knows(&self, record: &Record, access: &Access) -> bool {
        record.id == access.id || self.lanes[self.current()].known.all.time(record.id) >= record.time
    }

    /// What is missing between an access that was and this one, if something is.
    fn missing(&self, record: &Record, access: &Access, is_shared: bool) -> Option<Missing> {
        let lane = &self.lanes[self.current()];
        if access.is(CONSTANT) || record.is(CONSTANT) {
            let is_over = match access.is(CONSTANT) {
                true => lane.origin.all.time(record.id) >= record.time,
                false => lane.known.all.time(record.id) == ENDED,
            };
            return (!is_over).then_some(Missing::Constant);
        }
        if !access.is(COPY) && record.id == access.id {
            return None;
        }
        let is_known = |knowledge: &Knowledge| knowledge.all.time(record.id) >= record.time;
        let is_same_block =
            self.place.block <= record.id && record.id < self.place.block + self.grid.range.per_block;
        let knows = is_known(&lane.known) || (record.id == self.ids(self.current())[0] && access.is(COPY));
        if access.is(ASYNC) && !(record.is(ASYNC) && is_same_block) {
            let fenced = &lane.known.fenced[usize::from(is_shared)];
            if fenced.time(record.id) >= record.time {
                return None;
            }
            if knows {
                return Some(Missing::ProxyFence);
            }
        } else if knows {
            return None;
        }
        let scope = Grid::of(record.id).map_or(3, |grid| grid.place(record.id).scope_with(self.place));
        if record.is(STRONG) && access.is(STRONG) {
            let least = scope_of(record.what()).min(scope_of(access.what));
            return (least < scope).then_some(Missing::Scope(least, scope));
        }
        if record.is(COPY) && is_same_block {
            // The thread whose copy it is.
            let own = self.place.block + (record.id - self.place.block) % (self.warps() * LANES);
            if own == access.id || lane.known.all.time(own) > 0 {
                return Some(Missing::CopyWait);
            }
        }
        let observed = (0..=3).find(|&of| is_known(&lane.observed[of]));
        Some(observed.map_or(Missing::Edge, Missing::Acquire))
    }

    fn remember(&self, cell: &mut Cell, mask: u8, access: &Access) {
        if access.is(WRITE) {
            cell.writer = access.record(mask, false);
            cell.readers = Default::default();
            return;
        }
        // A reader that is ordered before this one needs no place of its own, if what races with it races with this one too.
        let is_ordered = |record: &Record| {
            record.mask() & !mask == 0
                && record.is(STRONG) == access.is(STRONG)
                && (!record.is(CONSTANT) || access.is(CONSTANT))
                && record.is(COPY) == access.is(COPY)
                && record.is(ASYNC) == access.is(ASYNC)
                && self.knows(record, access)
        };
        let at = cell
            .readers
            .iter()
            .position(|record| record.id != CROWD && (record.is_empty() || is_ordered(record)));
        let record = access.record(mask, false);
        match at {
            Some(at) => cell.readers[at] = record,
            // Without room the last place says so, and one of the others is forgotten.
            None => {
                let last = cell.readers.len() - 1;
                cell.readers[last] = Record { id: CROWD, time: 0, word: 1 };
                cell.readers[(access.time ^ access.id) as usize % last] = record;
            }
        }
    }
}
