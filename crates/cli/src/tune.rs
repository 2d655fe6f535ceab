//! `antiphon tune`: measures which algorithm is fastest at which size, and keeps the answer.

use antiphon::{
    collectives::{CollectiveError, Communicator, all_reduce},
    tuning::Table,
};

use crate::{ExitStatus, FAILURE, SUCCESS};
use crate::{
    launch::Launch,
    machine::{Cores, Files},
};

/// Measure which all-reduce is fastest at which size on this machine, and keep the answer.
///
/// The table goes into tuning.json in the cache folder (ANTIPHON_CACHE_DIR, else antiphon in XDG_CACHE_HOME or ~/.cache),
/// where every communicator with as many ranks finds it. The file holds all measurements and can be read and edited.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// How many ranks, each a process [default: one per core, at least 2 and at most 8]
    #[arg(short = 'n', long)]
    ranks: Option<usize>,

    /// Be one of the ranks that the command starts
    #[arg(long, hide = true)]
    worker: bool,
}

/// Runs the command.
pub fn execute(args: Args) -> ExitStatus {
    let done = if args.worker { work().map_err(Into::into) } else { start(&args) };
    done.unwrap_or_else(|error: Box<dyn std::error::Error>| {
        eprintln!("antiphon tune: {error}");
        FAILURE
    })
}

fn start(args: &Args) -> Result<ExitStatus, Box<dyn std::error::Error>> {
    let cores = Cores::count(&Files::system()).usable();
    let mut launch = Launch::again(args.ranks.unwrap_or(cores.clamp(2, 8)));
    launch.bind = launch.ranks <= cores;
    launch.capture = false;
    let outcome = launch.run(|_, _, _| Ok(()))?;
    if !outcome.success() {
        eprint!("{}", outcome.report());
    }
    Ok(outcome.exit_code())
}

fn work() -> Result<ExitStatus, CollectiveError> {
    let comm = Communicator::from_env()?;
    let tuned = all_reduce::tune(&comm, 64..=16 << 20)?;
    if comm.rank() == 0 {
        print!("{}", describe(tuned.table()));
        println!("kept in {}", tuned.origin);
    }
    Ok(SUCCESS)
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
