//! Tables of the fastest algorithm at each size: equal on all ranks, and kept in a cache file.

use std::{ops::RangeInclusive, time::Duration};

use antiphon_fabric::{Communicator, FabricError};
use antiphon_tuning::{Cache, Key, Sweep, Table, TuningError, doubling, same_on_all_ranks, warn_once};

use crate::error::{CollectiveError, Result};

/// The fastest of an operation's algorithms at each size. Algorithms are in the order of their numbers.
///
/// A crate with algorithms of its own measures and keeps them by [`measure`](Self::measure) and [`cached`](Self::cached), too.
#[derive(Debug, Clone)]
pub struct AlgorithmTable {
    table: Table,
    /// Where the table comes from, for people: a cache file, or built in.
    pub origin: String,
}

impl AlgorithmTable {
    /// The measurements and choices.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The number of the algorithm for this many bytes: a search among a few integers.
    #[inline]
    pub fn choose(&self, bytes: usize) -> usize {
        self.table.choose(bytes)
    }

    /// Loads the table from the cache if all ranks find the same table there, and else makes one from thresholds. A threshold is a number
    /// of bytes from which on its algorithm is chosen. All ranks call it together.
    pub(crate) fn load(
        comm: &Communicator,
        key: &Key,
        algorithms: &[&'static str],
        built_in: &[(usize, usize)],
    ) -> Result<Self> {
        if let Some(cached) = Self::cached(comm, key, algorithms)? {
            return Ok(cached);
        }
        Ok(Self {
            table: Table::from_thresholds(algorithms.iter().copied(), built_in.iter().copied())?,
            origin: "built in".into(),
        })
    }

    /// The table in the cache, if all ranks find the same one for these algorithms there. A cache that cannot be used is reported in a
    /// warning. All ranks call it together.
    ///
    /// # Errors
    /// [`CollectiveError::Fabric`] for a rank that is lost or does not come.
    pub fn cached(comm: &Communicator, key: &Key, algorithms: &[impl AsRef<str>]) -> Result<Option<Self>> {
        let cached = Cache::open().ok().and_then(|cache| {
            let path = cache.path().display();
            let table = cache.get(key, algorithms).unwrap_or_else(|why| {
                warn_once(&format!("the table of algorithms in {path} is not used: {why}"));
                None
            });
            Some((table?, path.to_string()))
        });
        let same =
            same_on_all_ranks(cached.as_ref().map(|(table, _)| table), |numbers| maximum(comm, numbers))?;
        Ok(cached.filter(|_| same).map(|(table, origin)| Self { table, origin }))
    }

    /// Measures all algorithms over `sizes` in bytes, and writes the result to the cache file. `run(algorithm, bytes)` is the
    /// closure of [`Sweep::measure`]. All ranks call it together.
    ///
    /// # Errors
    /// Those of `run`; [`CollectiveError::Tuning`] for names that are not distinct, no sizes, a size that no algorithm serves, and a cache
    /// that cannot be written.
    pub fn measure<E: From<CollectiveError>>(
        comm: &Communicator,
        key: &Key,
        algorithms: &[impl AsRef<str>],
        sizes: RangeInclusive<usize>,
        mut run: impl FnMut(usize, usize) -> Result<Option<Duration>, E>,
    ) -> Result<Self, E> {
        let names = algorithms.iter().map(|name| name.as_ref().to_owned());
        let sweep = Sweep::new(names, doubling(sizes)).map_err(CollectiveError::from)?;
        let agree =
            |samples: &mut [f64]| maximum(comm, samples).map_err(|e| Of(CollectiveError::from(e).into()));
        let measured = sweep.measure(|algorithm, bytes| run(algorithm, bytes).map_err(Of), agree);
        let table = measured.map_err(|Of(error)| error)?;
        let kept = Cache::open().and_then(|cache| {
            if comm.rank() == 0 {
                cache.put(key, &table)?;
            }
            Ok(cache)
        });
        let cache = comm.agree("cannot keep the table of algorithms", kept.map_err(CollectiveError::from))?;
        Ok(Self { table, origin: cache.path().display().to_string() })
    }
}

/// The error of a measurement by whatever has errors of collectives.
struct Of<E>(E);

impl<E: From<CollectiveError>> From<TuningError> for Of<E> {
    fn from(error: TuningError) -> Self {
        Self(CollectiveError::from(error).into())
    }
}

/// The key of a table that was measured on this machine's processors.
pub(crate) fn host_key(operation: impl Into<String>, world_size: usize) -> Key {
    let machine = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        machine.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|m| m.1));
    // The machine's cores and not this rank's: ranks may be bound to different ones, or to none.
    let cores = machine.lines().filter(|line| line.starts_with("processor")).count();
    Key::new(operation, "", world_size, format!("{cores} × {}", model.unwrap_or("unknown CPU")))
}

/// Each number becomes its maximum over all ranks.
fn maximum(comm: &Communicator, numbers: &mut [f64]) -> Result<(), FabricError> {
    // As bits: JSON has no infinity, which stands for "does not serve".
    let bits: Vec<u64> = numbers.iter().map(|x| x.to_bits()).collect();
    for theirs in comm.exchange_objects(&bits)? {
        for (number, other) in numbers.iter_mut().zip(theirs) {
            *number = number.max(f64::from_bits(other));
        }
    }
    Ok(())
}

impl From<TuningError> for CollectiveError {
    fn from(error: TuningError) -> Self {
        Self::Tuning(std::sync::Arc::new(error))
    }
}
