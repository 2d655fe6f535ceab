//! How long operations take.

mod choose;
mod clock;

use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use antiphon_tuning::{Cache, Key, Table, TuningError};
use serde::{Deserialize, Serialize};

use crate::{
    graph::{Graph, Op},
    op::{Coll, Kind, Prim},
    types::Type,
};
pub use choose::Call;
pub(crate) use clock::Clock;

/// The machines that there are built-in figures for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// Ranks that are processes on one CPU.
    #[default]
    Host,
    /// H200s of one machine.
    H200,
}

impl Device {
    /// Whether a table of `antiphon-tuning` was measured on such a machine, by the name that its [`Key`] has: processors are
    /// `8 × MODEL` there, GPUs have their own names.
    fn is_named(self, machine: &str) -> bool {
        match self {
            Self::Host => machine.contains(" × "),
            Self::H200 => machine.contains("H200"),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::H200 => "h200",
        })
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "host" => Ok(Self::Host),
            "h200" => Ok(Self::H200),
            _ => Err(format!("unknown device {text:?}: known are host, h200")),
        }
    }
}

/// Which measurements the times of calls come from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tables {
    /// The built-in figures, which are equal everywhere.
    #[default]
    BuiltIn,
    /// The tuning cache of this user, which `antiphon tune` writes.
    Cache,
    /// This file, in the format of the tuning cache.
    File(PathBuf),
}

/// How a call is made, as far as its time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Way {
    /// In stream order.
    Sync,
    /// With the operations that follow the sum.
    Fused,
    /// On a stream of its own.
    Async,
}

/// Times in nanoseconds, by ascending bytes of a rank's tensor.
type Points = Vec<(u64, u64)>;

/// Measured times of calls, and a roofline for the operations between them. All times are whole nanoseconds, computed from
/// integers alone, so that they are equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    device: Device,
    /// The built-in times of an all-reduce.
    built_in: BTreeMap<Way, Points>,
    /// The times that were measured, by the way of the call and the number of ranks.
    measured: BTreeMap<(Way, u32), Points>,
    /// The time of an operation that does nothing.
    launch: u64,
    /// Bytes of memory in a microsecond.
    bytes_per_us: u64,
    /// Floating-point operations in a microsecond.
    flops_per_us: u64,
    /// How much of the machine's computing power a collective takes that runs beside computation, in thousandths.
    share: u64,
}

impl Costs {
    /// The built-in figures of a machine. On H200s these are all-reduces of bf16 between 4 GPUs, measured at 7168 elements a
    /// token; on a host they are orders of magnitude.
    pub fn of(device: Device) -> Self {
        const TOKEN: u64 = 7168 * 2;
        let tokens =
            |points: &[(u64, u64)]| points.iter().map(|(tokens, ns)| (tokens * TOKEN, *ns)).collect();
        let measured = BTreeMap::new();
        match device {
            Device::H200 => {
                let fused = [
                    (1, 2_900),
                    (4, 3_200),
                    (16, 4_600),
                    (64, 7_400),
                    (256, 20_500),
                    (512, 37_900),
                    (2048, 137_000),
                ];
                let built_in = BTreeMap::from([
                    (Way::Fused, tokens(&fused)),
                    (Way::Sync, tokens(&[(1, 2_700), (64, 7_000), (2048, 130_000)])),
                    (Way::Async, tokens(&[(1, 14_000), (64, 18_000), (2048, 150_000)])),
                ]);
                let (bytes_per_us, flops_per_us) = (4_000_000, 600_000_000);
                Self { device, built_in, measured, launch: 1_500, bytes_per_us, flops_per_us, share: 120 }
            }
            Device::Host => {
                let built_in = BTreeMap::from([
                    (Way::Fused, vec![(1 << 10, 8_000), (1 << 20, 300_000)]),
                    (Way::Sync, vec![(1 << 10, 6_000), (1 << 20, 250_000)]),
                    (Way::Async, vec![(1 << 10, 30_000), (1 << 20, 320_000)]),
                ]);
                let (bytes_per_us, flops_per_us) = (10_000, 50_000);
                Self { device, built_in, measured, launch: 2_000, bytes_per_us, flops_per_us, share: 0 }
            }
        }
    }

    /// The built-in figures of a machine, with the measurements that were asked for in their place.
    ///
    /// # Errors
    /// Why the file of measurements, or one of its tables, cannot be used: those of [`Cache::open`] and [`Cache::entries`].
    /// A file that does not exist is an error if it was named; the user's cache may be missing.
    pub fn new(device: Device, tables: &Tables) -> Result<Self, TuningError> {
        match tables {
            Tables::BuiltIn => Ok(Self::of(device)),
            Tables::Cache => Self::of(device).with_cache(&Cache::open()?),
            Tables::File(path) => match path.metadata() {
                Ok(_) => Self::of(device).with_cache(&Cache::at(path)),
                Err(source) => Err(TuningError::Io { action: "read", path: path.clone(), source }),
            },
        }
    }

    /// With all tables of a cache that were measured on such a machine; of two for one number of ranks, the later one.
    ///
    /// # Errors
    /// As [`Cache::entries`], and the first entry's that cannot be used.
    pub fn with_cache(self, cache: &Cache) -> Result<Self, TuningError> {
        cache.entries()?.into_iter().try_fold(self, |costs, entry| {
            let entry = entry?;
            Ok(costs.with_table(&entry.key, &entry.table))
        })
    }

    /// With a table's measurements: what the chosen candidate took at each size, for groups of as many ranks. Tables of
    /// `all_reduce` and `fused_all_reduce` are used. Tables of other operations or machines, and tables without
    /// measurements, change nothing.
    pub fn with_table(mut self, key: &Key, table: &Table) -> Self {
        let way = match key.operation.as_str() {
            "all_reduce" => Way::Sync,
            "fused_all_reduce" => Way::Fused,
            _ => return self,
        };
        let row = |row: &antiphon_tuning::Row| {
            let timing = row.timings[row.winner]?;
            Some((row.bytes as u64, timing.median_ns as u64))
        };
        let points: Points = table.rows().iter().filter_map(row).collect();
        if let (false, true, Ok(ranks)) =
            (points.is_empty(), self.device.is_named(&key.machine), u32::try_from(key.world_size))
        {
            self.measured.insert((way, ranks), points);
        }
        self
    }

    /// The time of an all-reduce of `bytes` bytes, in nanoseconds. A fused call that was not measured takes as much longer
    /// than the measured call in stream order as the built-in figures say.
    fn call(&self, way: Way, ranks: u32, bytes: u64) -> u64 {
        let built_in = |way| between(&self.built_in[&way], bytes);
        if let Some(points) = self.measured.get(&(way, ranks)) {
            return between(points, bytes);
        }
        match (way, self.measured.get(&(Way::Sync, ranks))) {
            (Way::Fused, Some(points)) => {
                let epilogue = built_in(Way::Fused).saturating_sub(built_in(Way::Sync));
                between(points, bytes).saturating_add(epilogue)
            }
            _ => built_in(way),
        }
    }

    /// The time of an operation, in nanoseconds: of a start, until its collective ends.
    pub(crate) fn op(&self, graph: &Graph, op: &Op) -> u64 {
        let bytes = |ty: &Type| size_of(graph, ty);
        let all = || {
            op.args.iter().chain(&op.outs).map(|value| bytes(graph.ty(*value))).fold(0, u64::saturating_add)
        };
        let input = || op.args.iter().map(|value| bytes(graph.ty(*value))).fold(0, u64::saturating_add);
        match &op.kind {
            Kind::Input | Kind::Constant | Kind::View { .. } | Kind::Wait { .. } | Kind::Full { .. } => 0,
            Kind::Start { coll, .. } => self.collective(Way::Async, graph, coll, input()),
            Kind::Sync { coll } => self.collective(Way::Sync, graph, coll, input()),
            Kind::Fused { fused } => {
                let ranks = graph.group(&fused.group).map_or(1, |group| group.size);
                self.call(Way::Fused, ranks, bytes(graph.ty(op.args[0])))
            }
            Kind::MatMul => {
                let inner = graph.ty(op.args[0]).last().as_constant().unwrap_or(1).max(0) as u64;
                let outs = graph.ty(op.outs[0]).dtype.size() as u64;
                let flops = (bytes(graph.ty(op.outs[0])) / outs.max(1)).saturating_mul(2 * inner);
                self.launch
                    + ((u128::from(flops) * 1000 / u128::from(self.flops_per_us.max(1))) as u64)
                        .max(self.memory(all()))
            }
            // Neighbouring operations on elements become one kernel: the bytes count, not the number of operations.
            _ => self.memory(all()),
        }
    }

    /// The time of a collective on a stream of its own whose tensors have `bytes` bytes together.
    pub(crate) fn start(&self, graph: &Graph, coll: &Coll, bytes: u64) -> u64 {
        self.collective(Way::Async, graph, coll, bytes)
    }

    fn collective(&self, way: Way, graph: &Graph, coll: &Coll, bytes: u64) -> u64 {
        let ranks = graph.group(&coll.group).map_or(1, |group| group.size);
        self.call(way, ranks, bytes.saturating_mul(steps(coll.prim)) / 2)
    }

    /// The time of a kernel that reads and writes `bytes` bytes in all, in nanoseconds.
    pub(crate) fn kernel(&self, bytes: u64) -> u64 {
        self.launch.saturating_add(self.memory(bytes))
    }

    fn memory(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * 1000 / u128::from(self.bytes_per_us.max(1))) as u64
    }

    /// The predicted time of a graph, in nanoseconds: one operation after the other, with started collectives beside them.
    pub fn predict(&self, graph: &Graph) -> u64 {
        let mut clock = Clock::new(self);
        graph.ops.iter().for_each(|op| clock.run(op, self.op(graph, op)));
        clock.now()
    }
}

/// The time at a size: between measured sizes on the line, beyond the largest in proportion.
fn between(points: &[(u64, u64)], bytes: u64) -> u64 {
    let above = points.partition_point(|(size, _)| *size <= bytes);
    match (above.checked_sub(1).map(|below| points[below]), points.get(above)) {
        (None, Some((_, time))) => *time,
        (Some((low, start)), Some((high, end))) => {
            let share =
                u128::from(end.saturating_sub(start)) * u128::from(bytes - low) / u128::from(high - low);
            start + share as u64
        }
        (Some((size, time)), None) => {
            u64::try_from(u128::from(time) * u128::from(bytes) / u128::from(size.max(1))).unwrap_or(u64::MAX)
        }
        (None, None) => 0,
    }
}

/// How many times a collective's input crosses the links, in relation to an all-reduce's two.
fn steps(prim: Prim) -> u64 {
    if prim == Prim::AllReduce { 2 } else { 1 }
}

/// The bytes of a type with all symbols at their hints, or at their least value.
pub(crate) fn size_of(graph: &Graph, ty: &Type) -> u64 {
    let hint = |name: &str| {
        let sym = graph.syms.iter().find(|sym| sym.name == name)?;
        Some(sym.hint.unwrap_or(sym.min))
    };
    let bytes = ty.bytes().and_then(|bytes| bytes.value(&hint));
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
}
