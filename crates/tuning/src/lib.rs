//! Measured choice of the fastest implementation at each size, equal on all ranks.
//!
//! A collective has several implementations (*candidates*) with one result, and which one is fastest depends
//! on the number of bytes and on the machine. This crate measures the candidates and stores the results. It
//! is independent of the operation: the caller passes a closure that runs a candidate, and one by which the
//! ranks agree.
//!
//! * A [`Sweep`] lists the candidates and sizes to measure. [`Sweep::measure`] measures them and returns a table.
//! * A [`Table`] holds all measurements, and [`Table::choose`] picks the candidate for any size.
//! * A [`Cache`] keeps tables in one JSON file that a person can read, check and edit. A [`CacheFolder`] is the
//!   folder of all caches of the library: it ignores files that another user may have written.
//!
//! # Equal on all ranks
//!
//! Ranks that choose different algorithms for one call would wait for each other for ever. So no result of this crate depends on
//! information of one rank alone:
//!
//! * The number of runs is fixed by the sweep, never by a clock, because each run is a collective call.
//! * Every sample is replaced by the maximum over all ranks (the slowest rank is what a collective takes)
//!   before anything is derived from it, so all ranks derive the same table from the same numbers.
//! * The derivation uses only arithmetic that IEEE 754 defines to the last bit, so machines of different
//!   makes get the same table, and looking up a size compares integers.
//! * Before the ranks use a table from a cache, [`same_on_all_ranks`] checks that every rank has found the same
//!   table.
//!
//! # Example
//!
//! One-shot has less latency, two-shot moves fewer bytes. The times are computed instead of measured, and the example has one
//! rank, so `agree` has nothing to do.
//!
//! ```
//! use std::time::Duration;
//!
//! use antiphon_tuning::{Cache, Key, Sweep, TuningError, doubling, same_on_all_ranks};
//!
//! let candidates = ["one_shot", "two_shot"];
//! let run = |candidate: usize, bytes: usize| {
//!     let (latency_ns, bytes_per_ns) = [(4_000, 100), (9_000, 400)][candidate];
//!     Ok::<_, TuningError>(Some(Duration::from_nanos((latency_ns + bytes / bytes_per_ns) as u64)))
//! };
//! let mut agree = |_samples: &mut [f64]| Ok::<_, TuningError>(());
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("tuning.json");
//! let cache = Cache::at(&path);
//! let key = Key::new("all_reduce", "bf16", 8, "8x H200");
//!
//! // A missing or outdated table counts as not found on this rank.
//! let known = cache.get(&key, &candidates).unwrap_or_else(|why| {
//!     eprintln!("measuring again: {why}");
//!     None
//! });
//! let same = same_on_all_ranks(known.as_ref(), &mut agree)?;
//! let table = match known.filter(|_| same) {
//!     Some(table) => table,
//!     None => {
//!         let sweep = Sweep::new(candidates, doubling(1 << 10..=1 << 24))?;
//!         let table = sweep.measure(run, &mut agree)?;
//!         cache.put(&key, &table)?; // in a real program, on one rank of each machine
//!         table
//!     }
//! };
//!
//! // The lines 4000 + n/100 and 9000 + n/400 meet at 666667 bytes.
//! assert_eq!(table.choose(4_096), 0);
//! assert_eq!(table.choose(650_000), 0);
//! assert_eq!(table.choose(680_000), 1);
//! assert_eq!(cache.get(&key, &candidates)?, Some(table));
//! # Ok::<(), TuningError>(())
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod agreement;
mod cache;
mod checksum;
mod error;
mod key;
mod sweep;
mod table;
mod warning;

pub use agreement::same_on_all_ranks;
pub use cache::{Cache, CacheFolder, Entry, FORMAT, MAX_FILE_BYTES, cache_dir};
pub use error::TuningError;
pub use key::Key;
pub use sweep::{Sweep, doubling};
pub use table::{Choice, Row, STICKINESS, Table, Timing};
pub use warning::warn_once;
