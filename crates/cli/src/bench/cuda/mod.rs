//! The benchmark on GPUs: ours beside NCCL, in the same processes, size by size in turn.
//!
//! * `contender` is an implementation that is compared: an algorithm of Antiphon, or NCCL.
//! * `mixed` has the contenders of a mixed layout, in groups of its ranks too.
//! * `moe` has the contenders of dispatch and combine.
//! * `forms` has the low-latency and the hybrid form of these.
//! * `timing` measures them: graphs of many calls, with the ranks' GPUs synchronised before.
//! * `tail` is another benchmark: ranks that do not start together, and the slowest of many replays.
//! * `worker` is the work of a rank: it verifies and times each size.

mod contender;
mod forms;
mod mixed;
mod moe;
pub(super) mod tail;
mod timing;
mod worker;

use std::io;

use antiphon::{
    collectives::{
        Communicator,
        cuda::{Algorithm, CudaCollectives},
    },
    device::cuda::{Context, CudaError, Driver, Nccl, Nvml, Nvrtc},
    operation::Operation,
};
use clap::ValueEnum;

use super::{AlgorithmChoice, Args, Buffers, Collective, case::Case};
use crate::{launch::Launch, report::Gpus};

use mixed::Variant;
pub(super) use worker::execute;

/// Replays of the graph for one time.
const REPLAYS: usize = 9;

pub(super) const SIZES: &str = "1K..256M:4";

/// Calls in one graph: enough that neither the graph's launch nor what is left of the ranks' skew shows.
fn calls(bytes: u64) -> u32 {
    match bytes {
        0..0x10_0000 => 100,
        0x10_0000..0x100_0000 => 40,
        _ => 15,
    }
}

/// Everything to measure, in order. Every rank makes the same list.
fn cases(args: &Args) -> Vec<Case> {
    let collectives = args.collectives().into_iter();
    collectives
        .flat_map(|collective| args.sizes().into_iter().map(move |bytes| args.case(collective, bytes)))
        .collect()
}

/// The rows of a collective at one size; `None` is what we choose ourselves.
fn algorithms(args: &Args, collective: Collective) -> Vec<Option<Algorithm>> {
    // Nothing chooses registered memory by itself.
    let is_registered = args.buffers == Buffers::Symmetric;
    let choice = match args.algorithm {
        None => AlgorithmChoice::All,
        Some(AlgorithmChoice::Auto) if is_registered => AlgorithmChoice::All,
        Some(choice) => choice,
    };
    if collective != Collective::ALL_REDUCE || choice == AlgorithmChoice::Auto {
        return vec![None];
    }
    let name = choice.to_possible_value().expect("no value is hidden");
    let wanted =
        |algorithm: &Algorithm| choice == AlgorithmChoice::All || name.matches(algorithm.name(), false);
    let given = Algorithm::ALL.into_iter().filter(wanted).map(Some);
    (choice == AlgorithmChoice::All && !is_registered).then_some(None).into_iter().chain(given).collect()
}

/// How many rows there will be.
pub(super) fn rows(args: &Args) -> usize {
    let rows = |case: &Case| match case.collective {
        Collective::Mixed(mixed) => Variant::all(mixed).count(),
        collective => algorithms(args, collective).len(),
    };
    cases(args).iter().map(rows).sum()
}

/// An argument that does not suit GPUs.
pub(super) fn refuse(args: &Args) -> Result<(), String> {
    if args.tail {
        return match tail::measures(args) && args.sizes.is_none() && args.plot.is_none() {
            true => Ok(()),
            false => Err(
                "--tail measures all-reduce, all-gather, all-to-all, mixed, dispatch and combine at its own sizes, and draws \
                 nothing"
                    .into(),
            ),
        };
    }
    let other = args.collectives().into_iter().find(|&collective| collective != Collective::ALL_REDUCE);
    if let (Buffers::Symmetric, Some(other)) = (args.buffers, other) {
        return Err(format!("--buffers symmetric on GPUs is for all-reduce alone, not for {}", other.name()));
    }
    let listed = [Operation::AllGather, Operation::ReduceScatter].map(Collective::Of);
    let other = args.collectives().into_iter().find(|collective| !listed.contains(collective));
    if let (2.., Some(other)) = (args.tensors.get(), other) {
        return Err(format!("--tensors is for all-gather and reduce-scatter, not for {}", other.name()));
    }
    let is_known = |of: &Collective| {
        matches!(*of, Collective::SEND_RECV | Collective::Mixed(_))
            || of.is_of_experts()
            || of.operation().is_some_and(CudaCollectives::has_operation)
    };
    match args.collectives().into_iter().find(|collective| !is_known(collective)) {
        Some(other) => Err(format!("{} is for --device host: there is none on GPUs yet", other.name())),
        None => Ok(()),
    }
}

/// The GPUs that the ranks will use, one each.
pub(crate) fn gpus(ranks: Option<usize>) -> Result<Gpus, Box<dyn std::error::Error>> {
    let driver = Driver::load()?;
    let devices = driver.devices()?;
    let ranks = ranks.unwrap_or(devices.len());
    if ranks < 2 || ranks > devices.len() {
        let text =
            format!("{ranks} ranks: from 2 to {}, a GPU for each that this process sees", devices.len());
        return Err(text.into());
    }
    let names = devices[..ranks].iter().map(|device| Ok(device.properties()?.name));
    Ok(Gpus {
        names: names.collect::<Result<_, CudaError>>()?,
        driver: Nvml::load().and_then(Nvml::driver_version).ok(),
        cuda: driver.version().to_string(),
        nvrtc: Nvrtc::load().map(|nvrtc| nvrtc.version().to_string()).ok(),
        nccl: Nccl::load().map(|nccl| nccl.version().to_string()).ok(),
    })
}

/// The environment of the ranks' processes.
pub(super) fn prepare(launch: &mut Launch) {
    // NCCL uses multicast wherever the GPUs have it, and Antiphon does not. A user who wants NCCL to use it sets the variable.
    const MULTICAST: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(MULTICAST).is_none() {
        launch.env.push((MULTICAST.into(), "0".into()));
    }
}

/// Ours, with as much staging as was asked for.
fn collectives(args: &Args, comm: &Communicator, context: &Context) -> Result<CudaCollectives> {
    let builder = CudaCollectives::builder(comm, context);
    let builder = match args.staging {
        Some(bytes) => builder.staging_bytes(usize::try_from(bytes)?),
        None => builder,
    };
    Ok(builder.build()?)
}

/// The result of a step of a rank.
type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// A note for people, from one rank.
fn note(rank: usize, text: impl std::fmt::Display) {
    if rank == 0 {
        // When no process reads any more, the launcher has ended, and this process ends too.
        let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("{text}\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon::operation::Operation;
    use clap::Parser;

    #[derive(Parser)]
    struct Bench {
        #[command(flatten)]
        args: Args,
    }

    fn args(text: &str) -> Args {
        Bench::parse_from(["bench", "--device", "cuda"].into_iter().chain(text.split_whitespace())).args
    }

    fn names(text: &str) -> Vec<&'static str> {
        let all = algorithms(&args(text), Collective::ALL_REDUCE);
        all.into_iter().map(|algorithm| algorithm.map_or("auto", Algorithm::name)).collect()
    }

    #[test]
    fn all_algorithms_are_compared_unless_one_is_asked_for() {
        assert_eq!(names("")[..3], ["auto", "one-shot", "two-shot"]);
        assert_eq!(names("--algorithm both"), names(""));
        assert_eq!(names("--algorithm auto"), ["auto"]);
        assert_eq!(names("--algorithm two-shot"), ["two-shot"]);
        assert_eq!(algorithms(&args("--algorithm two-shot"), Collective::Of(Operation::AllGather)), [None]);
        assert_eq!(names("--buffers symmetric"), ["one-shot", "two-shot"]);
        assert_eq!(names("--buffers symmetric --algorithm auto"), ["one-shot", "two-shot"]);
        assert_eq!(names("--buffers symmetric --algorithm two-shot"), ["two-shot"]);
    }

    #[test]
    fn sizes_times_collectives_times_algorithms_are_the_rows() {
        let args = args("--sizes 4K,1M");
        assert_eq!(cases(&args).len(), 2 * 5);
        assert_eq!(rows(&args), 2 * (names("").len() + 4));
    }

    #[test]
    fn a_graph_always_holds_at_least_fifteen_calls() {
        assert_eq!([1 << 10, 1 << 20, 1 << 24, 1 << 30].map(calls), [100, 40, 15, 15]);
    }

    #[test]
    fn what_gpus_cannot_do_is_refused_by_name() {
        assert_eq!(refuse(&args("")), Ok(()));
        assert_eq!(refuse(&args("send-recv")), Ok(()));
        assert_eq!(["dispatch", "combine"].map(|of| refuse(&args(of))), [Ok(()), Ok(())]);
        let error = refuse(&args("memory")).unwrap_err();
        assert_eq!(error, "memory is for --device host: there is none on GPUs yet");
        let error = refuse(&args("--buffers symmetric")).unwrap_err();
        assert_eq!(error, "--buffers symmetric on GPUs is for all-reduce alone, not for all_gather");
        assert_eq!(refuse(&args("all-reduce --buffers symmetric")), Ok(()));
        assert_eq!(refuse(&args("all-gather --tail")), Ok(()));
        assert!(refuse(&args("broadcast --tail")).unwrap_err().contains("combine at its own sizes"));
        assert!(refuse(&args("--tail --sizes 1M")).is_err());
    }
}
