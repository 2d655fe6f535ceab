//! A process's board: written by its ranks, read by processes that ask what the ranks do.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use antiphon_device::sync::Mutex;
use antiphon_device::{
    host::memory::SharedMemory,
    sync::{AtomicU64, Ordering},
};

use super::JobWait;
use crate::{
    Members, Signature,
    waiting::{FRESH, now},
};

/// The first bytes of a board; the last digits are the version of its layout.
const MAGIC: u64 = u64::from_le_bytes(*b"antiph01");
/// Bytes of a board.
pub(super) const BYTES: usize = 64 << 10;
/// Words of a record, and of the header.
const WORDS: usize = 32;
const RECORDS: usize = BYTES / 8 / WORDS - 1;

/// Words of the header.
const MAGIC_AT: usize = 0;
const PROCESS_AT: usize = 1;

/// Words of a record. Its communicator is 0 while no rank uses the record.
const COMMUNICATOR: usize = 0;
const RANK: usize = 1;
const WORLD_SIZE: usize = 2;
const WORLD_RANK: usize = 3;
const IS_GROUP: usize = 4;
/// When the rank last looked around, on the machine's clock, in nanoseconds, and how long it had waited then.
const LOOKED: usize = 5;
const WAITED: usize = 6;
/// The operation, in two words.
const CALL: usize = 7;
/// A bit for each missing rank.
const MISSING: usize = 9;
const MISSING_WORDS: usize = 16;

/// The memory of a process's board, with the descriptor through which others find it.
struct Board {
    memory: SharedMemory,
    process: u32,
    /// The records that no rank has.
    free: Mutex<Vec<usize>>,
    _found_by: OwnedFd,
}

/// The board of this process, while one of its ranks has an entry.
static BOARD: Mutex<Weak<Board>> = Mutex::new(Weak::new());

impl Board {
    /// This process's. A forked child has one of its own.
    fn get() -> Option<Arc<Self>> {
        let mut kept = BOARD.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some(board) = kept.upgrade().filter(|board| board.process == process) {
            return Some(board);
        }
        let (memory, found_by) = SharedMemory::create(BYTES).ok()?;
        let board = Arc::new(Self {
            memory,
            process,
            free: Mutex::new((1..=RECORDS).rev().collect()),
            _found_by: found_by,
        });
        board.word(PROCESS_AT).store(process.into(), Ordering::Relaxed);
        board.word(MAGIC_AT).store(MAGIC, Ordering::Release);
        *kept = Arc::downgrade(&board);
        Some(board)
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < BYTES / 8);
        // SAFETY: the memory has `BYTES / 8` words, begins with a page, and is read and written as atomics alone.
        unsafe { &*self.memory.base().as_ptr().cast::<AtomicU64>().add(index) }
    }
}

/// A rank's record on the board of its process. Without one, when there is no memory or no record left, nothing is written.
pub(crate) struct Entry(Option<(Arc<Board>, usize)>);

impl Entry {
    /// The entry of a rank of the communicator whose memory has this number.
    pub(crate) fn new(communicator: u64, rank: usize, world_size: usize, members: &Members) -> Self {
        let Some(board) = Board::get() else { return Self(None) };
        let Some(record) = board.free().pop() else { return Self(None) };
        let entry = Self(Some((board, record * WORDS)));
        entry.write(LOOKED, 0);
        entry.write(RANK, rank as u64);
        entry.write(WORLD_SIZE, world_size as u64);
        entry.write(WORLD_RANK, members.world_rank(rank) as u64);
        entry.write(IS_GROUP, members.is_group().into());
        entry.write(COMMUNICATOR, communicator);
        entry
    }

    /// Notes a look around: in which call the rank waits, since when, and for which ranks.
    pub(crate) fn note(&self, call: Signature, waited: Duration, missing: &[usize]) {
        if self.0.is_none() {
            return;
        }
        let mut bits = [0; MISSING_WORDS];
        for &rank in missing.iter().filter(|&&rank| rank < 64 * MISSING_WORDS) {
            bits[rank / 64] |= 1 << (rank % 64);
        }
        call.to_words().into_iter().zip(CALL..).for_each(|(word, at)| self.write(at, word));
        bits.into_iter().zip(MISSING..).for_each(|(word, at)| self.write(at, word));
        self.write(WAITED, waited.as_nanos() as u64);
        self.write(LOOKED, now());
    }

    fn write(&self, at: usize, value: u64) {
        if let Some((board, start)) = &self.0 {
            board.word(start + at).store(value, Ordering::Release);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // A forked child has the value, but the record is its parent's.
        if let Some((board, start)) = self.0.as_ref().filter(|(board, _)| board.process == std::process::id())
        {
            self.write(COMMUNICATOR, 0);
            board.free().push(start / WORDS);
        }
    }
}

/// A record as it was read.
pub(super) struct Record {
    pub(super) communicator: u64,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) world_rank: usize,
    pub(super) is_group: bool,
    words: [u64; WORDS],
}

impl Record {
    /// The process that wrote these bytes, by its id where it lives, and its records; nothing if they are no board.
    pub(super) fn all(bytes: &[u8]) -> Option<(u32, Vec<Self>)> {
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        if words.len() != BYTES / 8 || words[MAGIC_AT] != MAGIC {
            return None;
        }
        let records = words.chunks_exact(WORDS).skip(1).filter(|record| record[COMMUNICATOR] != 0);
        let read = |record: &[u64]| Self {
            communicator: record[COMMUNICATOR],
            rank: record[RANK] as usize,
            world_size: record[WORLD_SIZE] as usize,
            world_rank: record[WORLD_RANK] as usize,
            is_group: record[IS_GROUP] != 0,
            words: record.try_into().unwrap(),
        };
        Some((u32::try_from(words[PROCESS_AT]).ok()?, records.map(read).collect()))
    }

    /// The wait of the rank, if it has looked around lately.
    pub(super) fn wait(&self) -> Option<JobWait> {
        let age = now().saturating_sub(self.words[LOOKED]);
        if age >= FRESH.as_nanos() as u64 {
            return None;
        }
        let call = Signature::from_words([self.words[CALL], self.words[CALL + 1]])?.to_string();
        let waited = Duration::from_nanos(self.words[WAITED].saturating_add(age));
        let is_missing = |rank: &usize| self.words[MISSING + rank / 64] >> (rank % 64) & 1 == 1;
        let missing = (0..self.world_size.min(64 * MISSING_WORDS)).filter(is_missing).collect();
        Some(JobWait { call, seconds: waited.as_secs_f64(), missing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_board_is_not_read() {
        assert!(Record::all(&[]).is_none());
        assert!(Record::all(&vec![0; BYTES]).is_none());
        // Any words behind the header are read without a panic.
        let mut scribbled = vec![0xFF; BYTES];
        scribbled[..8].copy_from_slice(&MAGIC.to_le_bytes());
        scribbled[8..16].copy_from_slice(&7u64.to_le_bytes());
        let (process, records) = Record::all(&scribbled).unwrap();
        assert_eq!((process, records.len()), (7, RECORDS));
        records.iter().for_each(|record| drop(record.wait()));
    }
}
