//! How long things take.

use std::{collections::BTreeMap, fmt, str::FromStr};

use antiphon_tuning::Table;
use serde::{Deserialize, Serialize};

use crate::{
    graph::{Graph, Op},
    op::{Kind, Prim},
    types::Type,
};

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

/// How a call is made, as far as its time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Way {
    /// In stream order.
    Sync,
    /// With what follows the sum.
    Fused,
    /// On a stream of its own.
    Async,
}

/// Measured times of calls, and a roofline for what is between them. All times are in whole nanoseconds, from integers
/// alone, so that they are equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    /// For each way of an all-reduce, ascending bytes with the time that they take.
    points: BTreeMap<Way, Vec<(u64, u64)>>,
    /// What an operation takes that does nothing.
    launch: u64,
    /// Bytes of memory in a microsecond.
    bytes_per_us: u64,
    /// Floating-point operations in a microsecond.
    flops_per_us: u64,
}

impl Costs {
    /// The built-in figures of a machine: of 4 H200s, all-reduces of bf16 as they were measured at 7168 elements a token; of
    /// a CPU, orders of magnitude.
    pub fn of(device: Device) -> Self {
        let row = |points: &[(u64, u64)]| points.to_vec();
        const TOKEN: u64 = 7168 * 2;
        match device {
            Device::H200 => Self {
                points: BTreeMap::from([
                    (
                        Way::Fused,
                        [
                            (1, 2_900),
                            (4, 3_200),
                            (16, 4_600),
                            (64, 7_400),
                            (256, 20_500),
                            (512, 37_900),
                            (2048, 137_000),
                        ]
                        .map(|(tokens, ns)| (tokens * TOKEN, ns))
                        .to_vec(),
                    ),
                    (Way::Sync, row(&[(TOKEN, 2_700), (64 * TOKEN, 7_000), (2048 * TOKEN, 130_000)])),
                    (Way::Async, row(&[(TOKEN, 14_000), (64 * TOKEN, 18_000), (2048 * TOKEN, 150_000)])),
                ]),
                launch: 1_500,
                bytes_per_us: 4_000_000,
                flops_per_us: 600_000_000,
            },
            Device::Host => Self {
                points: BTreeMap::from([
                    (Way::Fused, row(&[(1 << 10, 8_000), (1 << 20, 300_000)])),
                    (Way::Sync, row(&[(1 << 10, 6_000), (1 << 20, 250_000)])),
                    (Way::Async, row(&[(1 << 10, 30_000), (1 << 20, 320_000)])),
                ]),
                launch: 2_000,
                bytes_per_us: 10_000,
                flops_per_us: 50_000,
            },
        }
    }

    /// With measured times instead, of calls in stream order (`fused` or not): what the chosen candidate of a table took at
    /// each of its sizes. A table without measurements changes nothing.
    pub fn with_table(mut self, table: &Table, fused: bool) -> Self {
        let row = |row: &antiphon_tuning::Row| {
            let timing = row.timings[row.winner]?;
            Some((row.bytes as u64, timing.median_ns as u64))
        };
        let points: Vec<(u64, u64)> = table.rows().iter().filter_map(row).collect();
        if !points.is_empty() {
            self.points.insert(if fused { Way::Fused } else { Way::Sync }, points);
        }
        self
    }

    /// What a call of so many bytes takes, in nanoseconds: between measured sizes on the line, beyond the largest in proportion.
    pub(crate) fn call(&self, way: Way, bytes: u64) -> u64 {
        let points = &self.points[&way];
        let above = points.partition_point(|(size, _)| *size <= bytes);
        match (above.checked_sub(1).map(|below| points[below]), points.get(above)) {
            (None, Some((_, time))) => *time,
            (Some((low, start)), Some((high, end))) => {
                let share =
                    u128::from(end.saturating_sub(start)) * u128::from(bytes - low) / u128::from(high - low);
                start + share as u64
            }
            (Some((size, time)), None) => {
                (u128::from(time) * u128::from(bytes) / u128::from(size.max(1))) as u64
            }
            (None, None) => 0,
        }
    }

    /// What an operation takes, in nanoseconds.
    pub(crate) fn op(&self, graph: &Graph, op: &Op) -> u64 {
        let bytes = |ty: &Type| size_of(graph, ty);
        let all = || op.args.iter().chain(&op.outs).map(|value| bytes(graph.ty(*value))).sum::<u64>();
        let input = || op.args.iter().map(|value| bytes(graph.ty(*value))).sum::<u64>();
        match &op.kind {
            Kind::Input | Kind::Constant | Kind::View { .. } | Kind::Wait { .. } | Kind::Full { .. } => 0,
            Kind::Start { coll, .. } => self.call(Way::Async, input() * steps(coll.prim) / 2),
            Kind::Sync { coll } => self.call(Way::Sync, input() * steps(coll.prim) / 2),
            Kind::Fused { .. } => self.call(Way::Fused, bytes(graph.ty(op.args[0]))),
            Kind::MatMul => {
                let inner = graph.ty(op.args[0]).last().as_constant().unwrap_or(1).max(0) as u64;
                let outs = graph.ty(op.outs[0]).dtype.size() as u64;
                let flops = (bytes(graph.ty(op.outs[0])) / outs.max(1)).saturating_mul(2 * inner);
                self.launch + (flops / self.flops_per_us.max(1) * 1000).max(self.memory(all()))
            }
            // Neighbouring operations on elements become one kernel: what they move counts, not how many they are.
            _ => self.memory(all()),
        }
    }

    fn memory(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * 1000 / u128::from(self.bytes_per_us.max(1))) as u64
    }

    /// What a graph takes, one operation after the other but for collectives that have something to hide behind: those of a group
    /// one after the other.
    pub fn predict(&self, graph: &Graph) -> u64 {
        let (mut now, mut done, mut free) = (0u64, BTreeMap::new(), BTreeMap::<&str, u64>::new());
        for op in &graph.ops {
            let time = self.op(graph, op);
            match &op.kind {
                Kind::Start { coll, token } => {
                    let free = free.entry(&coll.group).or_default();
                    *free = now.max(*free).saturating_add(time);
                    done.insert(*token, *free);
                }
                Kind::Wait { tokens } => {
                    now = tokens.iter().filter_map(|token| done.get(token)).copied().fold(now, u64::max);
                }
                _ => now = now.saturating_add(time),
            }
        }
        now
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
