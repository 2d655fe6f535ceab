//! `antiphon bench`: verifies and times collectives between real processes.
//!
//! The command starts one worker process per rank (itself, with a hidden flag) and shows the rows that rank 0 measures.
//!
//! * `case` says what is measured: which collective, with which buffers.
//! * `pattern` makes inputs, and computes every element of the outputs.
//! * `mixed` is a layout of tensor and data parallel ranks, with the operations that it has.
//! * `moe` measures dispatch and combine of a mixture of experts.
//! * `engine` measures messages between two ranks by the engine between machines.
//! * `worker` is the work of a rank: it verifies, times, and verifies again.
//! * `cuda` is the same on GPUs, beside NCCL.

mod case;
mod cuda;
mod engine;
mod mixed;
mod moe;
mod pattern;
mod worker;

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
    operation::Operation,
    tensor::{DType, TensorError},
};
use clap::{ValueEnum, builder::PossibleValue};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{ExitStatus, FAILURE, SUCCESS};
use crate::{
    launch::{Launch, Outcome, Stream},
    machine,
    report::{Machine, Row, Table, plot, write_json},
    sizes::Sizes,
};

use case::Case;
pub use case::Collective;
pub(crate) use cuda::gpus;

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
  antiphon bench --device cuda --tail --json tails.json")]
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

    /// For `mixed`: tensor parallel ranks of a group × groups; the product is the number of ranks
    #[arg(long, value_name = "TPxDP", default_value = "2x2")]
    layout: mixed::Shape,

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
          value_parser = clap::value_parser!(u64).range(1..=cuda::tail::MOST_ROWS))]
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

/// One collective, the usual five, or those of a mixed layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    All,
    Mixed,
    One(Collective),
}

impl ValueEnum for Which {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Which>> = LazyLock::new(|| {
            [Which::All, Which::Mixed].into_iter().chain(Collective::all().map(Which::One)).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        /// Names as they are written on a command line.
        static NAMES: LazyLock<Vec<(Collective, String)>> = LazyLock::new(|| {
            Collective::all().map(|collective| (collective, collective.name().replace('_', "-"))).collect()
        });
        let help = match self {
            Self::All => "All-reduce, all-gather, reduce-scatter, all-to-all and broadcast",
            Self::Mixed => {
                "Sums in groups of tensor parallel ranks with a gather or a scatter between them, of a --layout, in every mode"
            }
            Self::One(Collective::SEND_RECV) => "A tensor from rank 0 to rank 1 and back",
            Self::One(Collective::DISPATCH) => {
                "Tokens to the ranks of their experts: of 8 for each rank, two for each token; counts are exchanged in each call"
            }
            Self::One(Collective::COMBINE) => "What those ranks made of tokens, back and summed",
            Self::One(Collective::Memory) => {
                "The floor of any all-reduce: every rank reads its input and writes its output, all at once"
            }
            Self::One(Collective::Engine) => {
                "A message between two ranks by the engine between machines (UCX): the time one way, the bandwidth of 16 under way"
            }
            Self::One(_) => "",
        };
        let name = match self {
            Self::All => "all",
            Self::Mixed => "mixed",
            Self::One(collective) => &NAMES.iter().find(|(named, _)| named == collective)?.1,
        };
        let value = PossibleValue::new(name);
        Some(if help.is_empty() { value } else { value.help(help) })
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
    fn collectives(&self) -> Vec<Collective> {
        use Operation::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
        match self.collective {
            Which::All => {
                [AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast].map(Collective::Of).into()
            }
            Which::Mixed => self.layout.all().map(Collective::Mixed).collect(),
            Which::One(collective) => vec![collective],
        }
    }

    fn sizes(&self) -> Vec<u64> {
        let default = match (self.device, self.collective) {
            (DeviceKind::Cuda, _) => cuda::SIZES,
            (DeviceKind::Host, Which::All | Which::Mixed) => "64..16M:8",
            (DeviceKind::Host, Which::One(_)) => "4..64M:4",
        };
        self.sizes.clone().unwrap_or_else(|| default.parse().expect("the default reads well")).0
    }

    /// A case of a collective and size, as it is chosen.
    fn case(&self, collective: Collective, bytes: u64) -> Case {
        Case {
            collective,
            bytes,
            algorithm: None,
            mode: None,
            dtype: self.dtype,
            op: self.op,
            tensors: self.tensors.get(),
        }
    }

    /// All-reduce has a row per algorithm, the others one.
    fn algorithms(&self, collective: Collective) -> Vec<Option<Algorithm>> {
        match (collective, self.algorithm.unwrap_or(AlgorithmChoice::Auto)) {
            (Collective::ALL_REDUCE, AlgorithmChoice::OneShot) => vec![Some(Algorithm::OneShot)],
            (Collective::ALL_REDUCE, AlgorithmChoice::TwoShot) => vec![Some(Algorithm::TwoShot)],
            (Collective::ALL_REDUCE, AlgorithmChoice::All) => Algorithm::ALL.map(Some).to_vec(),
            _ => vec![None],
        }
    }

    /// Everything to measure, in order. Every rank makes the same list.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for collective in self.collectives() {
            for bytes in self.sizes() {
                let case = self.case(collective, bytes);
                match collective {
                    Collective::Mixed(mixed) => {
                        cases.extend(mixed.modes().map(|mode| Case { mode, ..case }));
                    }
                    _ => {
                        let algorithms = self.algorithms(collective).into_iter();
                        cases.extend(algorithms.map(|algorithm| Case { algorithm, ..case }));
                    }
                }
            }
        }
        cases
    }

    fn rows(&self) -> usize {
        match self.device {
            DeviceKind::Host => self.cases().len(),
            DeviceKind::Cuda => cuda::rows(self),
        }
    }

    fn ranks(&self, cores: usize) -> usize {
        self.fixed_ranks().unwrap_or(cores.clamp(2, 8))
    }

    /// How many ranks there are, if the machine has no say.
    fn fixed_ranks(&self) -> Option<usize> {
        match self.collective {
            Which::Mixed => Some(self.layout.ranks()),
            Which::One(Collective::Engine) => Some(engine::RANKS),
            _ => self.ranks,
        }
    }
}

/// Runs the command: 0 when every element was right, 1 when one was not, else how the ranks failed.
pub fn execute(args: Args) -> ExitStatus {
    if args.worker {
        return match args.device {
            DeviceKind::Host => worker::execute(&args),
            DeviceKind::Cuda if args.tail => cuda::tail::execute(&args),
            DeviceKind::Cuda => cuda::execute(&args),
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

fn measure(args: &Args) -> Result<ExitStatus, Box<dyn std::error::Error>> {
    let mut machine = Machine::this();
    if args.tail && args.device == DeviceKind::Host {
        return Err("--tail is for --device cuda".into());
    }
    if args.tensors.get() > 1 && args.device == DeviceKind::Host {
        return Err("--tensors is for --device cuda".into());
    }
    if args.collective == Which::Mixed {
        mixed::refuse(args)?;
    }
    if args.collective == Which::One(Collective::Engine) {
        engine::refuse(args)?;
    }
    if args.device == DeviceKind::Cuda {
        cuda::refuse(args)?;
        machine.gpus = Some(cuda::gpus(args.fixed_ranks())?);
    }
    if args.buffers == Buffers::Symmetric
        && let Some(of) = args.collectives().into_iter().find(|of| of.is_of_experts())
    {
        return Err(format!("--buffers symmetric is not for {}", of.name()).into());
    }
    refuse_beyond_memory(args, &machine)?;
    // Files that cannot be written should be known before the minutes of measuring.
    let json = args.json.as_ref().map(create).transpose()?;
    if args.tail {
        return cuda::tail::measure(args, &machine, json);
    }
    let svg = args.plot.as_ref().map(create).transpose()?;
    let launch = launch(args, &machine);
    let mut show = Show::new(&machine, args.rows() as u64)?;
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

/// On how many ranks.
fn ranks(args: &Args, machine: &Machine) -> usize {
    machine.gpus.as_ref().map_or_else(|| args.ranks(machine.cores), |gpus| gpus.names.len())
}

/// Refuses sizes whose tensors do not fit the memory. On GPUs too: what goes there is made, and what comes back compared,
/// in the memory of the host.
fn refuse_beyond_memory(args: &Args, machine: &Machine) -> Result<(), String> {
    let ranks = ranks(args, machine);
    // A copy in symmetric memory stands beside the tensor that it is filled from.
    let copies = if args.buffers == Buffers::Symmetric { 2 } else { 1 };
    args.cases().into_iter().try_for_each(|case| {
        let (input, output) = case.counts(ranks.max(1) - 1, ranks.max(1)); // of the last rank, whose part is the longest
        let elements = (input as u128 + output as u128) * copies * ranks as u128;
        machine::refuse_beyond_memory(case.bytes, ranks, elements * case.dtype.size() as u128)
    })
}

/// The same command on every rank, as workers.
fn launch(args: &Args, machine: &Machine) -> Launch {
    let ranks = ranks(args, machine);
    let mut launch = Launch::again(ranks);
    launch.bind = !args.no_bind && ranks <= machine.cores;
    // A benchmark that waits longer than this for a peer is broken, whatever the environment says.
    launch.env.push(("ANTIPHON_TIMEOUT".into(), "60".into()));
    if machine.gpus.is_some() {
        cuda::prepare(&mut launch);
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
