//! `antiphon bench`: verifies and times collectives between real processes.
//!
//! The command starts one worker process per rank (itself, with a hidden flag) and shows the rows that rank 0 measures.
//!
//! * `case` says what is measured: which collective, with which buffers.
//! * `pattern` makes inputs and knows every element of the outputs.
//! * `worker` is what a rank does: verify, time, verify again.

mod case;
mod pattern;
mod worker;

use std::{
    fs::File,
    io::{self, Write},
    path::PathBuf,
    time::Duration,
};

use antiphon::{collectives::all_reduce::Algorithm, device::ReduceOp, tensor::DType};
use clap::{ValueEnum, builder::PossibleValue};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{ExitStatus, FAILURE, SUCCESS};
use crate::{
    launch::{Launch, Outcome, Stream},
    machine::{Cores, Files},
    report::{Machine, Row, Table, plot, write_json},
    sizes::Sizes,
};

pub use case::Collective;

/// Verify and time collectives between processes of this machine.
///
/// Every size is checked element by element against a reference in f64, before and after it is timed. The table reads
/// like that of nccl-tests: the size is that of the larger buffer of a rank, the time is the median over batches of the
/// slowest rank.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon bench
  antiphon bench all-reduce --ranks 4 --dtype bf16 --sizes 1K..64M
  antiphon bench all-reduce --algorithm both --json results.json --plot results.svg
  antiphon bench memory --ranks 2 --sizes 16M,64M")]
pub struct Args {
    /// What to measure
    #[arg(value_enum, default_value = "all")]
    collective: Which,

    /// How many ranks, each a process [default: one per core, at least 2 and at most 8]
    #[arg(short = 'n', long)]
    ranks: Option<usize>,

    /// The kind of elements: f64, f32, f16, bf16, i64, i32, i8, u8
    #[arg(long, default_value = "f32")]
    dtype: DType,

    /// Message sizes in bytes: 1K..64M doubles, 1K..64M:4 quadruples, commas join
    /// [default: 4..64M:4 for one collective, 64..16M:8 for all]
    #[arg(long)]
    sizes: Option<Sizes>,

    /// The reduction: sum, prod, min, max, avg
    #[arg(long, default_value = "sum")]
    op: ReduceOp,

    /// How all-reduce is done
    #[arg(long, value_enum, default_value = "auto")]
    algorithm: AlgorithmChoice,

    /// Where the tensors are
    #[arg(long, value_enum, default_value = "private")]
    buffers: Buffers,

    /// Seconds to spend on each row, about
    #[arg(long, default_value = "0.25", value_parser = positive_seconds)]
    seconds: Duration,

    /// Calls in each of the 11 batches, instead of as many as the seconds allow
    #[arg(long)]
    iterations: Option<u32>,

    /// Let ranks wander between cores; they are bound when each can have its own
    #[arg(long)]
    no_bind: bool,

    /// Write the rows to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Draw the rows into this file as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,

    /// Be one of the ranks that the command starts
    #[arg(long, hide = true)]
    worker: bool,
}

/// One collective, or the usual five.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    All,
    One(Collective),
}

impl ValueEnum for Which {
    fn value_variants<'a>() -> &'a [Self] {
        use Collective::*;
        const ALL: &[Which] = &[
            Which::All,
            Which::One(AllReduce),
            Which::One(AllGather),
            Which::One(ReduceScatter),
            Which::One(AllToAll),
            Which::One(Broadcast),
            Which::One(Reduce),
            Which::One(Gather),
            Which::One(Scatter),
            Which::One(SendRecv),
            Which::One(Memory),
        ];
        ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::All => {
                let usual = "All-reduce, all-gather, reduce-scatter, all-to-all and broadcast";
                Some(PossibleValue::new("all").help(usual))
            }
            Self::One(collective) => collective.to_possible_value(),
        }
    }
}

/// Which all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AlgorithmChoice {
    /// The one that the tables choose
    Auto,
    /// Everyone reduces everything
    OneShot,
    /// Everyone reduces a part
    TwoShot,
    /// One-shot and two-shot, for comparison
    Both,
}

/// Memory of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Buffers {
    /// Each rank's own
    Private,
    /// Symmetric memory of the communicator
    Symmetric,
}

fn positive_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!("{text} is not a positive number of seconds")),
    }
}

impl Which {
    fn collectives(self) -> Vec<Collective> {
        use Collective::*;
        match self {
            Self::All => vec![AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast],
            Self::One(collective) => vec![collective],
        }
    }
}

impl Args {
    fn sizes(&self) -> Vec<u64> {
        let default = if self.collective == Which::All { "64..16M:8" } else { "4..64M:4" };
        self.sizes.clone().unwrap_or_else(|| default.parse().expect("the default reads well")).0
    }

    /// All-reduce has a row per algorithm, the others one.
    fn algorithms(&self, collective: Collective) -> Vec<Option<Algorithm>> {
        match (collective, self.algorithm) {
            (Collective::AllReduce, AlgorithmChoice::OneShot) => vec![Some(Algorithm::OneShot)],
            (Collective::AllReduce, AlgorithmChoice::TwoShot) => vec![Some(Algorithm::TwoShot)],
            (Collective::AllReduce, AlgorithmChoice::Both) => Algorithm::ALL.map(Some).to_vec(),
            _ => vec![None],
        }
    }

    /// Everything to measure, in order. Every rank makes the same list.
    fn cases(&self) -> Vec<case::Case> {
        let mut cases = Vec::new();
        for collective in self.collective.collectives() {
            for bytes in self.sizes() {
                for algorithm in self.algorithms(collective) {
                    cases.push(case::Case { collective, bytes, algorithm, dtype: self.dtype, op: self.op });
                }
            }
        }
        cases
    }

    fn ranks(&self, cores: usize) -> usize {
        self.ranks.unwrap_or(cores.clamp(2, 8))
    }
}

/// Runs the command: 0 when every element was right, 1 when one was not, else how the ranks failed.
pub fn execute(args: Args) -> ExitStatus {
    if args.worker {
        return worker::execute(&args);
    }
    match measure(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("antiphon bench: {error}");
            FAILURE
        }
    }
}

fn measure(args: &Args) -> Result<ExitStatus, Box<dyn std::error::Error>> {
    // Files that cannot be written should be known before the minutes of measuring.
    let json = args.json.as_ref().map(create).transpose()?;
    let svg = args.plot.as_ref().map(create).transpose()?;
    let machine = Machine::this();
    let mut show = Show::new(&machine, args.cases().len() as u64)?;
    let outcome = launch(args)?.run(|rank, stream, line| show.line(rank, stream, line))?;
    let rows = show.finish(&outcome)?;
    if !outcome.success() {
        eprint!("{}", outcome.report());
        return Ok(outcome.exit_code());
    }
    if let Some(file) = json {
        file.set_len(0)?;
        write_json(file, &machine, &rows)?;
    }
    if let Some(mut file) = svg {
        file.set_len(0)?;
        file.write_all(plot(&machine, &rows).as_bytes())?;
    }
    let wrong: u64 = rows.iter().map(|row| row.errors).sum();
    Ok(if wrong == 0 { SUCCESS } else { FAILURE })
}

fn create(path: &PathBuf) -> io::Result<File> {
    // What an earlier run has written stays until there is something to replace it.
    let open = File::options().write(true).create(true).truncate(false).open(path);
    open.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

/// The same command on every rank, as workers.
fn launch(args: &Args) -> io::Result<Launch> {
    let cores = Cores::count(&Files::system()).usable();
    let ranks = args.ranks(cores);
    let mut launch = Launch::again(ranks);
    launch.bind = !args.no_bind && ranks <= cores;
    // A benchmark that waits longer than this for a peer is broken, whatever the environment says.
    launch.env.push(("ANTIPHON_TIMEOUT".into(), "60".into()));
    Ok(launch)
}

/// Shows rows as they come, and how far it is.
struct Show {
    table: Table<io::Stdout>,
    rows: Vec<Row>,
    progress: ProgressBar,
}

impl Show {
    fn new(machine: &Machine, cases: u64) -> io::Result<Self> {
        let table = Table::new(io::stdout(), machine)?;
        // Drawn on standard error, and only if that is a terminal.
        let progress = ProgressBar::with_draw_target(Some(cases), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} rows, {eta} left");
        progress.set_style(style.expect("the template reads well"));
        progress.tick();
        Ok(Self { table, rows: Vec::new(), progress })
    }

    /// Rank 0 writes a row of JSON on each line; everything else is for people.
    fn line(&mut self, rank: usize, stream: Stream, line: &[u8]) -> io::Result<()> {
        let row = (rank == 0 && stream == Stream::Stdout).then(|| serde_json::from_slice::<Row>(line).ok());
        let Self { table, rows, progress } = self;
        progress.suspend(|| match row.flatten() {
            Some(row) => {
                let shown = table.row(&row);
                rows.push(row);
                shown
            }
            None => io::stderr().write_all(&[format!("[{rank}] ").as_bytes(), line].concat()),
        })?;
        progress.set_position(rows.len() as u64);
        Ok(())
    }

    /// Ends the table, unless there is nothing in it because the ranks failed.
    fn finish(self, outcome: &Outcome) -> io::Result<Vec<Row>> {
        self.progress.finish_and_clear();
        if outcome.success() || !self.rows.is_empty() {
            self.table.finish()?;
        }
        Ok(self.rows)
    }
}
