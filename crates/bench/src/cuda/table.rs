//! The table of times on GPUs: for each size all contenders are verified and timed in turn.

use antiphon::device::cuda::GraphExec;

use super::{
    Contenders, Families, OnStream, Rank,
    timing::{Clock, graph},
};
use crate::{
    Found, OnGpu, Result, Row, Wrong,
    case::Case,
    host::{Measured, slowest, sorted, total},
};

/// Replays of the graph for one time.
const REPLAYS: usize = 9;
/// The largest message for which the host's time is taken: beyond, the GPU's hides it.
const HOST_BYTES: u64 = 1 << 20;

/// Calls in one graph: enough that neither the graph's launch nor what is left of the ranks' skew shows.
fn calls(bytes: u64) -> u32 {
    match bytes {
        0..0x10_0000 => 100,
        0x10_0000..0x100_0000 => 40,
        _ => 15,
    }
}

/// A contender with its measurements so far.
struct Run<'a> {
    contender: OnStream<'a>,
    graph: GraphExec,
    wrong: Wrong,
    /// Microseconds of one call on this rank, by replay.
    times: Vec<f64>,
    /// The same without a line-up.
    free_times: Vec<f64>,
    host_us: Option<f64>,
}

/// What was found of one.
struct Timed {
    measured: Measured,
    free_us: f64,
    host_us: Option<f64>,
}

struct Bench<'a> {
    rank: &'a Rank<'a>,
    clock: Clock<'a>,
    launch_us: f64,
}

pub(super) fn run(rank: &Rank<'_>) -> Result<()> {
    let clock = Clock::new(rank.comm, rank.ours, rank.stream)?;
    let launch_us = slowest(rank.comm, &[clock.host_launch()?])?[0];
    let bench = Bench { rank, clock, launch_us };
    let families = Families::new(rank)?;
    for cases in rank.settings.cases().chunk_by(|a, b| (a.collective, a.bytes) == (b.collective, b.bytes)) {
        for row in bench.compare(cases[0], families.contenders(cases)?)? {
            rank.report(Found::Row(row));
        }
    }
    Ok(())
}

impl Bench<'_> {
    /// Verifies and times contenders.
    fn compare(&self, case: Case, Contenders { ours, nccl }: Contenders<'_>) -> Result<Vec<Row>> {
        let calls = self.rank.settings.pace.iterations.unwrap_or_else(|| calls(case.bytes)).max(1);
        let mut runs = Vec::new();
        for contender in ours {
            runs.push(self.start(contender, &case, calls)?);
        }
        let has_nccl = nccl.is_some();
        if let Some(contender) = nccl {
            let run = self.start(contender, &case, calls)?;
            self.rank.note_wrong("NCCL", case.collective.name(), run.wrong);
            runs.push(run);
        }
        // In turn, so that whatever drifts hits all alike.
        for _ in 0..REPLAYS {
            for run in &mut runs {
                for (lined_up, times) in [(true, &mut run.times), (false, &mut run.free_times)] {
                    // SAFETY: the contenders live until the replay has been waited for.
                    times.push(unsafe { self.clock.replay(&run.graph, lined_up) }? / f64::from(calls));
                }
            }
        }
        let mut timed = runs.into_iter().map(|run| self.timed(run)).collect::<Result<Vec<_>>>()?;
        let nccl = if has_nccl { timed.pop() } else { None };
        let comm = self.rank.comm;
        let rows = timed.into_iter().map(|Timed { measured, free_us, host_us }| {
            let gpu = OnGpu {
                calls,
                host_us,
                free_us,
                launch_us: self.launch_us,
                nccl_us: nccl.as_ref().map(|nccl| nccl.measured.latency_us()),
                nccl_free_us: nccl.as_ref().map(|nccl| nccl.free_us),
                nccl_host_us: nccl.as_ref().and_then(|nccl| nccl.host_us),
            };
            Row { gpu: Some(gpu), ..measured.row(comm, case, case.ordered_counts(comm).1) }
        });
        Ok(rows.collect())
    }

    /// Makes the graph, and checks what it computes.
    fn start<'b>(&self, mut contender: OnStream<'b>, case: &Case, calls: u32) -> Result<Run<'b>> {
        let stream = self.rank.stream.borrow();
        contender.call(stream)?; // NCCL connects the ranks on the first call, which should not be captured
        stream.synchronize()?;
        let graph = graph(self.rank.stream, calls, |stream| contender.call(stream))?;
        contender.prepare(stream)?;
        // SAFETY: the contender lives until the replay has been waited for.
        unsafe { self.clock.replay(&graph, true) }?;
        let wrong = total(self.rank.comm, contender.check(stream)?)?;
        // This depends on the case and not on this rank's tensors, so either all ranks do it or none.
        let small = case.bytes <= HOST_BYTES;
        let host_us = small.then(|| self.clock.host(|stream| contender.call(stream))).transpose()?;
        Ok(Run { contender, graph, wrong, times: Vec::new(), free_times: Vec::new(), host_us })
    }

    /// The times of the slowest rank.
    fn timed(&self, run: Run<'_>) -> Result<Timed> {
        let comm = self.rank.comm;
        let times = sorted(comm, &run.times)?;
        let free = sorted(comm, &run.free_times)?;
        let host = slowest(comm, &Vec::from_iter(run.host_us))?;
        let measured = Measured { name: run.contender.name()?, times, wrong: run.wrong };
        drop(run.graph); // before the memory that it reads and writes
        run.contender.finish()?;
        Ok(Timed { measured, free_us: free[free.len() / 2], host_us: host.first().copied() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_always_holds_at_least_fifteen_calls() {
        assert_eq!([1 << 10, 1 << 20, 1 << 24, 1 << 30].map(calls), [100, 40, 15, 15]);
    }
}
