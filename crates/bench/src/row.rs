//! What is found.

use serde::{Deserialize, Deserializer, Serialize};

/// What rank 0 tells.
#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    /// A row of the table.
    Row(Row),
    /// A row of ranks that do not start together.
    Tail(TailRow),
    /// Something for people.
    Note(String),
}

/// One measurement: one collective at one size with one algorithm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The collective, such as `all_reduce`.
    pub collective: String,
    /// The size that the bandwidths are computed from: that of the whole vector, as in nccl-tests.
    pub bytes: u64,
    /// The number of elements in it.
    pub count: u64,
    /// Their type.
    pub dtype: String,
    /// The reduction; `None` for a collective that does not reduce.
    pub op: Option<String>,
    /// The algorithm that ran.
    pub algorithm: String,
    /// How many ranks took part.
    pub ranks: usize,
    /// Microseconds for one call: the median over iterations of the slowest rank.
    #[serde(deserialize_with = "null_is_nan")]
    pub latency_us: f64,
    /// The fastest iteration.
    #[serde(deserialize_with = "null_is_nan")]
    pub min_us: f64,
    /// The slowest iteration.
    #[serde(deserialize_with = "null_is_nan")]
    pub max_us: f64,
    /// Algorithm bandwidth: bytes by time, in 10^9 bytes per second.
    #[serde(deserialize_with = "null_is_nan")]
    pub algbw_gbs: f64,
    /// Bus bandwidth: the same times the operation's [`BusFactor`](antiphon::operation::BusFactor).
    #[serde(deserialize_with = "null_is_nan")]
    pub busbw_gbs: f64,
    /// How many elements were wrong.
    pub errors: u64,
    /// The largest difference from the right value.
    #[serde(deserialize_with = "null_is_nan")]
    pub max_error: f64,
    /// The columns of GPUs alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<OnGpu>,
}

/// The further columns of a row measured on GPUs. Times are those of the slowest rank, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OnGpu {
    /// How many calls were in the graph that was timed.
    pub calls: u32,
    /// The host's time for one call that is not in a graph; `None` where the GPU's time hides it.
    pub host_us: Option<f64>,
    /// The time of one call where only the ranks' hosts have met before, and their GPUs are not lined up.
    pub free_us: f64,
    /// The host's time for launching an empty kernel.
    pub launch_us: f64,
    /// The time of NCCL for the same call in the same run; `None` without NCCL.
    pub nccl_us: Option<f64>,
    /// NCCL's without a line-up.
    pub nccl_free_us: Option<f64>,
    /// The host's time for NCCL's call.
    pub nccl_host_us: Option<f64>,
}

/// JSON has no NaN and no infinity: both are written as null.
fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Microseconds of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// Of a hundred the slowest.
    pub p99: f64,
    /// Of a thousand the slowest.
    pub p999: f64,
    /// The slowest of all.
    pub max: f64,
}

impl Quantiles {
    /// The statistics of one or more times.
    pub(crate) fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[((part * times.len() as f64) as usize).min(times.len() - 1)];
        Self { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

/// One measurement of ranks that do not start together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TailRow {
    /// What was called.
    pub operation: String,
    /// Tokens of a tensor.
    pub rows: usize,
    /// By how many microseconds a rank was late.
    pub skew_us: u64,
    /// Whether products of matrices ran on a second stream.
    pub beside_gemm: bool,
    /// How many replays of each contender were timed.
    pub replays: usize,
    /// The times of ours beyond the skew.
    pub ours: Quantiles,
    /// Those of NCCL; `None` without it.
    pub nccl: Option<Quantiles>,
}

/// Algorithm bandwidth in 10^9 bytes per second.
pub fn algbw_gbs(bytes: u64, latency_us: f64) -> f64 {
    bytes as f64 / latency_us / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_counts_decimal_gigabytes() {
        assert_eq!(algbw_gbs(1_000_000_000, 1e6), 1.0);
    }

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times: Vec<f64> = (0..1000).rev().map(f64::from).collect();
        assert_eq!(Quantiles::of(times), Quantiles { p50: 500.0, p99: 990.0, p999: 999.0, max: 999.0 });
        assert_eq!(Quantiles::of(vec![3.0]), Quantiles { p50: 3.0, p99: 3.0, p999: 3.0, max: 3.0 });
    }
}
