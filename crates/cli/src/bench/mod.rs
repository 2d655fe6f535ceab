//! `antiphon bench`: verifies and times collectives between real processes.
//!
//! The command starts one worker process per rank (itself, with a hidden flag) and shows the rows that rank 0 measures.
//!
//! `antiphon-bench` says what is measured, and measures it; `tail` shows the rows of `--tail`.

mod tail;

use std::{
    fs::File,
    io::{self, Write},
    num::NonZeroUsize,
    path::PathBuf,
    sync::LazyLock,
    time::Duration,
};

use antiphon::{
    collectives::all_reduce::Algorithm,
    device::ReduceOp,
    tensor::{DType, TensorError},
};
use antiphon_bench::{Algorithms, Device, Found, Pace, Settings, Shape, Subject, TAIL_MOST_ROWS, Tail};
use clap::{ValueEnum, builder::PossibleValue};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{ExitStatus, FAILURE, SUCCESS};
use crate::{
    launch::{Launch, Outcome, Stream, World},
    machine,
    report::{Gpus, Machine, Row, Table, plot, write_json},
    sizes::Sizes,
};

/// Verify and time collectives between processes of this machine.
///
/// Every size is checked element by element against a reference in f64, before and after it is timed. The table reads
/// like that of nccl-tests: the size is that of the larger buffer of a rank, the time is the median over batches of the
/// slowest rank.
///
/// With --device cuda each rank has a GPU, and NCCL is timed beside ours in the same processes, size by size in turn: a
/// CUDA graph holds 100 calls (40 from 1 MiB on, 15 from 16 MiB on); before each replay a small all-reduce lines the GPUs
/// up; events around the replay tell the time. The time is the median over 9 replays of the slowest rank. NVLink
/// multicast is off in NCCL unless NCCL_NVLS_ENABLE says otherwise. The host's time is the mean over 200 eager calls.
///
/// Under `antiphon run` or torchrun, on one machine or several, the ranks of that launch are measured, and rank 0 shows them.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon bench
  antiphon bench all-reduce --ranks 4 --dtype bf16 --sizes 1K..64M
  antiphon bench all-reduce --algorithm both --json results.json --plot results.svg
  antiphon bench mixed --layout 2x2 --dtype bf16
  antiphon bench dispatch --ranks 2 --dtype bf16 --sizes 1M,16M
  antiphon bench memory --ranks 2 --sizes 16M,64M
  UCX_TLS=tcp antiphon bench engine
  antiphon bench --device cuda --dtype bf16 --json results.json
  antiphon bench --device cuda --tail --json tails.json
  antiphon run -n 2 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 -- antiphon bench all-reduce")]
pub struct Args {
    /// What to measure
    #[arg(value_enum, default_value = "all")]
    collective: Which,

    /// The device of the tensors and of the computation
    #[arg(long, value_enum, default_value = "host")]
    device: DeviceKind,

    /// How many ranks, each a process [default: one per core, at least 2 and at most 8; on cuda one per GPU]
    #[arg(short = 'n', long)]
    ranks: Option<usize>,

    /// The kind of elements: f64, f32, f16, bf16, i64, i32, i8, u8
    #[arg(long, default_value = "f32", value_parser = numeric)]
    dtype: DType,

    /// Message sizes in bytes: 1K..64M doubles, 1K..64M:4 quadruples, commas join
    /// [default: 4..64M:4 for one collective, 64..16M:8 for all; on cuda 1K..256M:4]
    #[arg(long)]
    sizes: Option<Sizes>,

    /// The reduction: sum, prod, min, max, avg; of integers also band, bor, bxor
    #[arg(long, default_value = "sum")]
    op: ReduceOp,

    /// For `mixed`: tensor parallel ranks of a group × groups; of several nodes those of a node, and behind a comma those of nodes, as in
    /// 1x2,2x1. The product is the number of ranks
    #[arg(long, value_name = "TPxDP[,TPxDP]", default_value = "2x2")]
    layout: Shape,

    /// How all-reduce is done [default: auto; on cuda all]
    #[arg(long, value_enum)]
    algorithm: Option<AlgorithmChoice>,

    /// On cuda, all-gather and reduce-scatter: the number of tensors in one call, which share the bytes
    #[arg(long, value_name = "COUNT", default_value = "1")]
    tensors: NonZeroUsize,

    /// The kind of memory that the tensors are in
    #[arg(long, value_enum, default_value = "private")]
    buffers: Buffers,

    /// Seconds to spend on each row, about (on the host; with --tail for each contender)
    #[arg(long, default_value = "0.25", value_parser = positive_seconds)]
    seconds: Duration,

    /// Calls in each of the 11 batches, instead of as many as the seconds allow; on cuda, calls in a graph
    #[arg(long)]
    iterations: Option<u32>,

    /// On cuda: ranks that do not start together, alone and beside products of matrices; p50, p99, p99.9 and the maximum of
    /// many replays (at most --iterations), ours and NCCL's
    #[arg(long)]
    tail: bool,

    /// With --tail: put the calls, ours and NCCL's, into a stream of the highest priority, before the products'
    #[arg(long, requires = "tail")]
    priority: bool,

    /// With --tail: tokens of a tensor, each of 7168 elements, at most 2048
    #[arg(long, requires = "tail", value_delimiter = ',', default_value = "1,16,64,256,512,2048",
          value_parser = clap::value_parser!(u64).range(1..=TAIL_MOST_ROWS))]
    rows: Vec<u64>,

    /// With --tail: by how many microseconds a rank is late, at most 100,000
    #[arg(long, requires = "tail", value_delimiter = ',', default_value = "0,50,200,1000,5000",
          value_parser = clap::value_parser!(u64).range(..=100_000))]
    skews: Vec<u64>,

    /// With --tail: leave out the rows beside products of matrices
    #[arg(long, requires = "tail")]
    alone: bool,

    /// Bytes of each GPU's memory for data under way [default: what the library takes]
    #[arg(long, value_name = "BYTES", value_parser = one_size)]
    staging: Option<u64>,

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

/// What can be measured, by names as they are written on a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Which(Subject);

impl ValueEnum for Which {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Which>> = LazyLock::new(|| Subject::every().map(Which).collect());
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        static NAMES: LazyLock<Vec<(Which, String)>> = LazyLock::new(|| {
            Subject::every().map(|subject| (Which(subject), subject.name().replace('_', "-"))).collect()
        });
        let (_, name) = NAMES.iter().find(|(named, _)| named == self)?;
        let value = PossibleValue::new(name.as_str());
        Some(match self.0.about() {
            Some(help) => value.help(help),
            None => value,
        })
    }
}

/// The algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AlgorithmChoice {
    /// The one that the tables choose
    Auto,
    /// Every rank reduces everything
    OneShot,
    /// Every rank reduces a part
    TwoShot,
    /// Each of them, for comparison; on cuda, and the chosen one
    #[value(alias = "both")]
    All,
}

/// The kind of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceKind {
    /// Processes on the cores of this machine
    Host,
    /// Processes with a GPU each
    Cuda,
}

/// Memory of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Buffers {
    /// Each rank's own
    Private,
    /// Symmetric memory of the communicator (on cuda registered, and all-reduce alone)
    Symmetric,
}

fn one_size(text: &str) -> Result<u64, String> {
    match text.parse::<Sizes>().map_err(|error| error.to_string())?.0[..] {
        [bytes] => Ok(bytes),
        _ => Err(format!("{text:?} is more than one size")),
    }
}

/// The elements of a benchmark, which are computed with.
pub(crate) fn numeric(text: &str) -> Result<DType, String> {
    let dtype: DType = text.parse().map_err(|error: TensorError| error.to_string())?;
    dtype.numeric().map_err(|error| error.to_string())
}

fn positive_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!("{text} is not a positive number of seconds")),
    }
}

impl Args {
    fn settings(&self) -> Settings {
        Settings {
            subject: self.collective.0,
            device: if self.device == DeviceKind::Cuda { Device::Cuda } else { Device::Host },
            ranks: self.ranks,
            dtype: self.dtype,
            sizes: self.sizes.clone().map(|sizes| sizes.0),
            op: self.op,
            layout: self.layout,
            algorithms: self.algorithm.map(|choice| match choice {
                AlgorithmChoice::Auto => Algorithms::Auto,
                AlgorithmChoice::OneShot => Algorithms::Only(Algorithm::OneShot),
                AlgorithmChoice::TwoShot => Algorithms::Only(Algorithm::TwoShot),
                AlgorithmChoice::All => Algorithms::All,
            }),
            tensors: self.tensors,
            symmetric: self.buffers == Buffers::Symmetric,
            pace: Pace { seconds: self.seconds, iterations: self.iterations },
            tail: self.tail.then(|| Tail {
                priority: self.priority,
                rows: self.rows.clone(),
                skews: self.skews.clone(),
                alone: self.alone,
            }),
            staging: self.staging,
        }
    }
}

/// Runs the command: 0 when every element was right, 1 when one was not, else how the ranks failed.
pub fn execute(args: Args) -> ExitStatus {
    if args.worker {
        return match antiphon_bench::run(&args.settings(), &tell) {
            Ok(()) => SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                FAILURE
            }
        };
    }
    match measure(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("antiphon bench: {error}");
            FAILURE
        }
    }
}

/// A worker's findings: a row is a line of JSON on standard output, and everything for people is on standard error.
fn tell(found: Found) {
    let line = match found {
        Found::Row(row) => serde_json::to_string(&row),
        Found::Tail(row) => serde_json::to_string(&row),
        Found::Note(text) => {
            // When no process reads any more, the launcher has ended, and this process ends too; below too.
            let _ = writeln!(io::stderr(), "{text}");
            return;
        }
    };
    let _ = writeln!(io::stdout(), "{}", line.expect("a row is plain data"));
}

fn measure(args: &Args) -> Result<ExitStatus, Box<dyn std::error::Error>> {
    let (settings, mut machine) = (args.settings(), Machine::this());
    settings.refuse(args.plot.is_some())?;
    let world = World::around(settings.fixed_ranks())?;
    let asked = world.map(|world| world.local_size).or(settings.fixed_ranks());
    if args.device == DeviceKind::Cuda {
        machine.gpus = Some(Gpus::of_ranks(asked)?);
    }
    let on_host = || asked.unwrap_or(machine.cores.clamp(2, 8));
    // Of this machine, and of all.
    let here = machine.gpus.as_ref().map_or_else(on_host, |gpus| gpus.names.len());
    let ranks = world.map_or(here, |world| world.size);
    for (size, bytes) in settings.memory(ranks) {
        machine::refuse_beyond_memory(size, here, bytes * here as u128 / ranks.max(1) as u128)?;
    }
    let launch = launch(args, &machine, here, world);
    if world.is_some_and(|world| world.rank != 0) {
        let outcome = launch.run(|_, _, line| io::stderr().write_all(line))?; // it has no rows
        return Ok(outcome.exit_code());
    }
    // Files that cannot be written should be known before the minutes of measuring.
    let json = args.json.as_ref().map(create).transpose()?;
    if args.tail {
        return tail::measure(launch, &machine, json);
    }
    let svg = args.plot.as_ref().map(create).transpose()?;
    let mut show = Show::new(&machine, settings.rows() as u64)?;
    let outcome = launch.run(|rank, stream, line| show.line(rank, stream, line))?;
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

/// The same command on every rank, as workers; in a `world` on this process's own.
fn launch(args: &Args, machine: &Machine, ranks: usize, world: Option<World>) -> Launch {
    let mut launch = Launch::again(ranks, world);
    launch.bind = world.is_none() && !args.no_bind && ranks <= machine.cores;
    // A benchmark that waits longer than this for a peer is broken, whatever the environment says.
    launch.env.push(("ANTIPHON_TIMEOUT".into(), "60".into()));
    if machine.gpus.is_some() {
        // NCCL uses multicast wherever the GPUs have it, and Antiphon does not. A user who wants NCCL to use it sets the variable.
        const MULTICAST: &str = "NCCL_NVLS_ENABLE";
        if std::env::var_os(MULTICAST).is_none() {
            launch.env.push((MULTICAST.into(), "0".into()));
        }
    }
    launch
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
