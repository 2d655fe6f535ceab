//! Which algorithm for which size: measured, and equal on all ranks.

use std::time::{Duration, Instant};

use antiphon_device::ReduceOp;
use antiphon_fabric::{Communicator, FabricError, Signature};
use antiphon_tensor::DType;
use antiphon_tuning::{Cache, Key, Plan, Table, TuningError, doubling, same_on_all_ranks};

use super::{Algorithm, run};
use crate::{
    arguments::Output,
    error::{CollectiveError, Result},
};

/// The table of a communicator: kept in it, found there by every call.
#[derive(Debug, Clone)]
pub struct AllReduceTable {
    table: Table,
    /// Where the table comes from, for people: a cache file, or built in.
    pub origin: String,
}

impl AllReduceTable {
    /// The measurements and choices.
    pub fn table(&self) -> &Table {
        &self.table
    }

    #[inline]
    fn choose(&self, bytes: usize) -> Algorithm {
        Algorithm::ALL[self.table.choose(bytes)]
    }
}

/// The algorithm for a call of this signature, which has none yet. The first call loads the table; ranks that disagree
/// about that very call must hear of the call and not of the table, so they meet for the call first.
#[inline]
pub(super) fn choose(comm: &Communicator, call: &Signature, bytes: usize) -> Result<Algorithm> {
    let meet_and_load = |comm: &Communicator| {
        // SAFETY: a round without payload.
        unsafe { comm.rounds()? }.exchange(call)?;
        load(comm)
    };
    Ok(comm.extension(meet_and_load)?.choose(bytes))
}

/// The algorithm for a size, without a call.
pub(super) fn look_up(comm: &Communicator, bytes: usize) -> Result<Algorithm> {
    Ok(comm.extension(load)?.choose(bytes))
}

/// The table in the cache if all ranks find the same there, else the built-in one.
fn load(comm: &Communicator) -> Result<AllReduceTable> {
    let cached = Cache::open().ok().and_then(|cache| {
        let table = cache.get(&key(comm.world_size()), &names()).ok().flatten()?;
        Some((table, cache.path().display().to_string()))
    });
    let same = same_on_all_ranks(cached.as_ref().map(|(table, _)| table), |numbers| maximum(comm, numbers))?;
    Ok(match cached {
        Some((table, origin)) if same => AllReduceTable { table, origin },
        _ => AllReduceTable { table: built_in(comm.world_size()), origin: "built in".into() },
    })
}

/// What was measured on machines with 2 and 16 cores (benches/results); `tune` finds what is true on another.
fn built_in(world_size: usize) -> Table {
    let from_two_shot = match world_size {
        0..=2 => 32 << 10,
        3..=4 => 4 << 10,
        _ => 1 << 10,
    };
    Table::from_thresholds(names(), [(0, 0), (from_two_shot, 1)]).expect("the thresholds ascend from 0")
}

fn names() -> [&'static str; 2] {
    Algorithm::ALL.map(Algorithm::name)
}

fn key(world_size: usize) -> Key {
    let machine = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        machine.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|m| m.1));
    // The machine's cores and not this rank's: ranks may be bound to different ones, or to none.
    let cores = machine.lines().filter(|line| line.starts_with("processor")).count();
    Key::new("all_reduce", "", world_size, format!("{cores} × {}", model.unwrap_or("unknown CPU")))
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

/// Measures both algorithms over `sizes` in bytes and writes the result to the cache file, from which every
/// communicator of this world size that is made on this machine from then on takes it. All ranks call it together.
///
/// # Errors
/// As an all-reduce; [`CollectiveError::Tuning`] when the file cannot be written.
pub fn tune(comm: &Communicator, sizes: std::ops::RangeInclusive<usize>) -> Result<AllReduceTable> {
    let plan = Plan::new(names(), doubling(sizes))?;
    let largest = plan.sizes().last().copied().unwrap_or(0);
    let mut buffer = vec![1f32; largest / size_of::<f32>() + 1];
    let batch = |candidate: usize, bytes: usize| -> Result<Option<Duration>> {
        let count = (bytes / size_of::<f32>()).max(1);
        let output = Output { data: buffer.as_mut_ptr().cast(), count, dtype: DType::F32 };
        let calls = (1 << 20) / (bytes + 1024) + 1; // about a megabyte, so that small calls are timed in numbers
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..calls {
            run(comm, output.as_input(), output, ReduceOp::Max, Some(Algorithm::ALL[candidate]))?;
        }
        Ok(Some(start.elapsed() / calls as u32))
    };
    let table = plan.measure(batch, |samples| Ok::<_, CollectiveError>(maximum(comm, samples)?))?;
    let cache = Cache::open()?;
    if comm.rank() == 0 {
        cache.put(&key(comm.world_size()), &table)?;
    }
    comm.barrier()?;
    Ok(AllReduceTable { table, origin: cache.path().display().to_string() })
}

impl From<TuningError> for CollectiveError {
    fn from(error: TuningError) -> Self {
        Self::Tuning(std::sync::Arc::new(error))
    }
}
