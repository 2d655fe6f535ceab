//! `antiphon tune`: measures which algorithm is fastest at which size, and keeps the result.

mod moe;
mod plans;

use std::io::{Write, stdout};

use antiphon::{
    collectives::{
        AlgorithmTable, Communicator, all_reduce,
        cuda::{self, CudaCollectives},
    },
    device::cuda::{Context, Driver},
    tuning::Table,
};

use crate::{ExitStatus, FAILURE, SUCCESS};
use crate::{
    bench::DeviceKind,
    launch::{Launch, World},
    machine::{Cores, Files},
    report::Gpus,
};

/// Measure which all-reduce is fastest at which size on this machine, and keep the answer.
///
/// The table goes into tuning.json in the cache folder (ANTIPHON_CACHE_DIR, else antiphon in XDG_CACHE_HOME or ~/.cache),
/// where every communicator with as many ranks finds it. The file holds all measurements and can be read and edited. A
/// folder or file that is a symbolic link, or that users other than you and root own or may write, is left unused with a
/// warning.
///
/// With --plans the plans of a folder are measured, each proved first, beside this library's own calls, and the table tells of each size what
/// does it and why. A collection of these plans and calls, in the same order (calls, then plans by the names of their files), finds the times.
///
/// With --moe dispatches and combines of mixtures of experts are measured with several numbers of multiprocessors, and the table tells how
/// many they take where the program leaves the number open.
///
/// Under `antiphon run` or torchrun, on one machine or several, the ranks of that launch are measured.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon tune
  antiphon tune --ranks 4
  antiphon tune --device cuda
  antiphon tune --device cuda --moe --hidden 7168 --tokens 16..4K
  antiphon tune --device cuda --plans plans --dtype bf16 --sizes 1K..4M")]
pub struct Args {
    /// The device of the tensors and of the computation
    #[arg(long, value_enum, default_value = "host")]
    device: DeviceKind,

    /// How many ranks, each a process [default: one per core, at least 2 and at most 8; on cuda one per GPU]
    #[arg(short = 'n', long)]
    ranks: Option<usize>,

    #[command(flatten)]
    plans: plans::Plans,

    #[command(flatten)]
    experts: moe::Experts,

    /// Be one of the ranks that the command starts
    #[arg(long, hide = true)]
    worker: bool,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs the command.
pub fn execute(args: Args) -> ExitStatus {
    let done = match (&args.plans.plans, args.device, args.worker) {
        _ if args.experts.moe && args.device == DeviceKind::Host => Err("--moe is for --device cuda".into()),
        _ if args.experts.moe && args.worker => moe::work(&args.experts),
        _ if args.experts.moe => start(&args),
        (None, device, true) => work(device),
        (None, _, false) => start(&args),
        (Some(_), DeviceKind::Host, _) => Err("--plans is for --device cuda".into()),
        (Some(folder), DeviceKind::Cuda, true) => plans::work(&args.plans, folder),
        (Some(folder), DeviceKind::Cuda, false) => plans::start(&args.plans, folder, args.ranks),
    };
    done.unwrap_or_else(|error| {
        eprintln!("antiphon tune: {error}");
        FAILURE
    })
}

fn start(args: &Args) -> Result<ExitStatus> {
    let cores = || Cores::count(&Files::system()).usable();
    let world = World::around(args.ranks)?;
    let asked = world.map(|world| world.local_size).or(args.ranks);
    let ranks = match args.device {
        DeviceKind::Host => asked.unwrap_or_else(|| cores().clamp(2, 8)),
        DeviceKind::Cuda => Gpus::of_ranks(asked)?.names.len(),
    };
    Ok(Launch::workers(ranks, world)?)
}

fn work(device: DeviceKind) -> Result<ExitStatus> {
    let comm = Communicator::from_env()?;
    let tuned = match device {
        DeviceKind::Host => all_reduce::tune(&comm, 64..=16 << 20)?,
        DeviceKind::Cuda => tune_gpus(&comm)?,
    };
    if comm.rank() == 0 {
        writeln!(stdout(), "{}kept in {}", describe(tuned.table()), tuned.origin)?;
    }
    Ok(SUCCESS)
}

fn tune_gpus(comm: &Communicator) -> Result<AlgorithmTable> {
    let context = Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let collectives = CudaCollectives::new(comm, &context)?;
    Ok(cuda::tune(comm, &collectives, 1 << 10..=256 << 20)?)
}

/// The medians of every size, and the choice.
fn describe(table: &Table) -> String {
    let mut text = format!("{:>10}", "bytes");
    for candidate in table.candidates() {
        text += &format!(" {:>12}", format!("{candidate} µs"));
    }
    text += "  chosen\n";
    for row in table.rows() {
        text += &format!("{:>10}", row.bytes);
        for timing in &row.timings {
            text +=
                &timing.as_ref().map_or(format!(" {:>12}", "-"), |t| format!(" {:>12.2}", t.median_ns / 1e3));
        }
        text += &format!("  {}\n", table.candidates()[table.choose(row.bytes)]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon::tuning::Timing;
    use clap::Parser;

    #[derive(Parser)]
    struct Tune {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn it_is_about_the_host_unless_told_otherwise() {
        let args = |text: &str| Tune::parse_from(["tune"].into_iter().chain(text.split_whitespace())).args;
        assert_eq!(args("").device, DeviceKind::Host);
        let args = args("--device cuda -n 4");
        assert_eq!((args.device, args.ranks), (DeviceKind::Cuda, Some(4)));
    }

    #[test]
    fn every_size_is_shown_with_its_times_and_the_choice() {
        let names = ["one-shot", "two-shot"].map(String::from).to_vec();
        let row = |bytes, times: [Option<f64>; 2]| {
            (bytes, times.map(|time| Timing::of(&time.map_or(vec![], |ns| vec![ns]))).to_vec())
        };
        let rows = vec![row(1024, [Some(2000.0), None]), row(2048, [Some(9000.0), Some(4560.0)])];
        let text = describe(&Table::from_timings(names, rows).unwrap());
        let expected = "     bytes  one-shot µs  two-shot µs  chosen\n      \
                        1024         2.00            -  one-shot\n      \
                        2048         9.00         4.56  two-shot\n";
        assert_eq!(text, expected);
    }
}
