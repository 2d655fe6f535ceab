//! Stores that come late.
//!
//! A processor shows each store to all threads at once. PTX lets a strong load return any store that coherence and causality order allow. So
//! of each word in global memory the last stores are remembered, with what they overwrote, and a strong load may return that:
//! unless the thread knows of the store, has seen it or a later one, or knows a thread that had. A store is seen by all after a few looks.
//! And of two strong stores that nothing orders, either may be the one that stays.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    access::{Access, READ, STRONG, WRITE},
    clocks::{Id, Time},
    shadow::{Cell, GRANULE, Locked, Record, WORD},
    threads::{Block, Message},
};
use crate::{schedule::mixed, seed};

/// The stores of a granule that are remembered.
const MOST_STORES: usize = 6;
/// The threads of which is remembered that they have seen a store. With more of them, all see it.
const MOST_READERS: usize = 8;
/// A store that is late is seen by all after at most so many loads that have not returned it.
const MOST_LOOKS: u64 = 3;
/// The granules of a shard whose stores are remembered. With more of them, all stores of the shard are seen.
const MOST_GRANULES: usize = 256;
const WORDS: usize = GRANULE / WORD;

/// A strong store of whole words.
struct Store {
    /// Those of its words that nothing else has written since.
    words: u8,
    writer: Record,
    /// What it overwrote, and what that carried.
    before: [u32; WORDS],
    carried: Vec<(u8, Message)>,
    /// The threads that have seen words of it: which words, the thread, and its time at the first.
    seen: Vec<(u8, Id, Time)>,
    /// How many loads may yet not see it.
    left: u64,
}

/// The last stores of a granule, the oldest first.
#[derive(Default)]
pub(super) struct History(Vec<Store>);

/// Those of a shard, by the granule's first cell.
pub(super) type Histories = HashMap<usize, History>;

/// What a load returns in place of what is there: of each word of its granule.
pub(super) type Older = [Option<u32>; WORDS];

/// Whether stores come late: if there is a seed. This crate's own tests have late stores always.
pub(super) fn is_on() -> bool {
    cfg!(test) || seed() != 0
}

/// A number below this one. The seed decides, and the number of decisions before.
fn random(below: u64) -> u64 {
    static DECISIONS: AtomicU64 = AtomicU64::new(0);
    mixed(seed().wrapping_add(DECISIONS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9))) % below
}

/// The words of an access, as a mask.
fn words(at: usize, bytes: usize) -> u8 {
    let (from, to) = (at % GRANULE / WORD, (at % GRANULE + bytes).div_ceil(WORD));
    (1 << to) - (1 << from)
}

fn each(words: u8) -> impl Iterator<Item = usize> {
    (0..WORDS).filter(move |word| words >> word & 1 != 0)
}

impl Store {
    /// The thread of this access has seen the words.
    fn see(&mut self, words: u8, access: &Access) {
        if let Some((of, ..)) = self.seen.iter_mut().find(|(_, id, _)| *id == access.id) {
            // Words that it sees later count from the time of the first: it sees more than it must.
            *of |= words;
        } else if self.seen.len() == MOST_READERS {
            self.left = 0;
        } else {
            self.seen.push((words, access.id, access.time));
        }
    }
}

impl History {
    /// Forgets the stores of words that something else has written since, and those that all see.
    fn tidy(&mut self, cells: &[Cell; WORDS]) {
        let (mut checked, mut over) = (0, 0);
        for store in self.0.iter_mut().rev() {
            let last = each(store.words & !checked);
            over |= last
                .filter(|word| cells[*word].writer.alone() != store.writer)
                .fold(0, |all, word| all | 1 << word);
            checked |= store.words;
            over |= if store.left == 0 { store.words } else { 0 };
            store.words &= !over;
        }
        self.0.retain(|store| store.words != 0);
    }
}

impl Block {
    /// A strong store is about to overwrite these words. Whether they have a history then.
    pub(super) fn overwrite(&self, locked: &mut Locked, at: usize, bytes: usize, access: &Access) -> bool {
        let words = words(at, bytes);
        let has_history = each(words).any(|word| locked.cells()[word].writer.has_history());
        let left = random(2 * MOST_LOOKS).saturating_sub(MOST_LOOKS - 1);
        // All see it at once, and what it overwrites is over.
        if left == 0 || !at.is_multiple_of(WORD) || !bytes.is_multiple_of(WORD) {
            return false;
        }
        let carries = each(words).filter(|word| locked.cells()[*word].writer.carries_release());
        let carries = carries.fold(0u8, |all, word| all | 1 << word);
        let (messages, key) = locked.messages();
        let all = messages.get(&key).filter(|_| carries != 0).into_iter().flatten();
        let carried = all.filter(|(of, _)| of & carries != 0).cloned().collect();
        let granule = at / GRANULE * GRANULE;
        // SAFETY: memory that a kernel accesses now; the granule is locked.
        let before = |word| unsafe { ((granule + word * WORD) as *const u32).read_volatile() };
        let before = std::array::from_fn(|word| if words >> word & 1 != 0 { before(word) } else { 0 });
        let writer = access.record(0xF, false);
        let cells = *locked.cells();
        let (histories, key) = locked.histories();
        if histories.len() >= MOST_GRANULES && !histories.contains_key(&key) {
            histories.clear();
        }
        let history = histories.entry(key).or_default();
        if has_history {
            history.tidy(&cells);
        } else {
            history.0.iter_mut().for_each(|store| store.words &= !words);
        }
        if history.0.len() == MOST_STORES {
            history.0.remove(0);
        }
        history.0.push(Store { words, writer, before, carried, seen: Vec::new(), left });
        true
    }

    /// Decides whether a strong store comes before the one that is there, which it does not know: then the other one stays. Two stores
    /// that nothing orders may come in either order; nothing comes between the load and the store of an atomic operation. Of a store that
    /// somebody has read it is not remembered who was the first, and this one may be behind that load: it does not come before.
    pub(super) fn loses(&self, locked: &mut Locked, at: usize, bytes: usize, access: &Access) -> bool {
        let known = &self.lanes[self.current()].known.all;
        let knows = |record: &Record| record.id == access.id || known.time(record.id) >= record.time;
        let is_unordered = |cell: &Cell| {
            let store = &cell.writer;
            let is_plain = store.is(STRONG) && store.is(WRITE) && !store.is(READ);
            is_plain && !knows(store) && cell.readers.iter().all(Record::is_empty)
        };
        let words = words(at, bytes);
        let loses = !access.is(READ)
            && at.is_multiple_of(WORD)
            && bytes.is_multiple_of(WORD)
            && each(words).all(|word| is_unordered(&locked.cells()[word]))
            && random(2) == 0;
        if loses {
            // Neither its thread nor a thread that knows of it sees any more what was there before both stores.
            let (histories, key) = locked.histories();
            let stores = histories.get_mut(&key).into_iter().flat_map(|History(stores)| stores);
            stores.filter(|store| store.words & words != 0).for_each(|store| store.see(words, access));
        }
        loses
    }

    /// Decides what a strong load returns: of each `unit` bytes, which are one value, what was there before some store. Returns the
    /// words that are older than what is there, and acquires what they carried.
    pub(super) fn look_back(
        &mut self,
        locked: &mut Locked,
        at: usize,
        bytes: usize,
        unit: usize,
        access: &Access,
    ) -> u8 {
        if unit < WORD || !each(words(at, bytes)).any(|word| locked.cells()[word].writer.has_history()) {
            return 0;
        }
        let cells = *locked.cells();
        let (histories, key) = locked.histories();
        let Some(history) = histories.get_mut(&key) else { return 0 };
        history.tidy(&cells);
        let stores = &mut history.0;
        let mut older = 0;
        for words in (at..at + bytes).step_by(unit).map(|start| words(start, unit)) {
            let seen = stores
                .iter()
                .rposition(|store| store.words & words != 0 && self.must_see(store, words, access));
            let first = seen.map_or(0, |seen| seen + 1);
            let late = stores[first..].iter().filter(|store| store.words & words != 0).count();
            if late == 0 {
                continue;
            }
            // How many of those that may be late are seen.
            let mut sees = if random(2) == 0 { late } else { random(late as u64) as usize };
            let mut next = words;
            for (index, store) in stores.iter_mut().enumerate() {
                if index < first || store.words & words == 0 {
                    continue;
                }
                if sees > 0 {
                    sees -= 1;
                    store.see(words, access);
                    continue;
                }
                store.left -= 1;
                for word in each(store.words & next) {
                    self.older[word] = Some(store.before[word]);
                }
                for (of, message) in &store.carried {
                    if of & store.words & next != 0 {
                        self.acquire(message, access);
                    }
                }
                older |= store.words & next;
                next &= !store.words;
            }
        }
        older
    }

    /// Whether coherence or causality order has the store of these words ahead of this access.
    fn must_see(&self, store: &Store, words: u8, access: &Access) -> bool {
        let known = &self.lanes[self.current()].known.all;
        let knows = |id: Id, time: Time| id == access.id || known.time(id) >= time;
        store.left == 0
            || knows(store.writer.id, store.writer.time)
            || store.seen.iter().any(|(of, id, time)| of & words != 0 && knows(*id, *time))
    }

    /// What the last load returns, if it is older than what is there. Whether it is.
    pub(super) fn replace(&self, at: usize, value: &mut [u8]) -> bool {
        let mut is_older = false;
        for (index, bytes) in value.chunks_exact_mut(WORD).enumerate() {
            if let Some(older) = self.older[(at + index * WORD) % GRANULE / WORD] {
                bytes.copy_from_slice(&older.to_ne_bytes());
                is_older = true;
            }
        }
        is_older
    }
}
