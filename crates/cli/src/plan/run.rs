//! `antiphon plan run`: executes a plan on ranks of this machine, and checks every result.

use std::{
    io::{Write, stdout},
    path::PathBuf,
    time::Instant,
};

use antiphon::{
    collectives::Communicator,
    device::ReduceOp,
    operation::Operation,
    tensor::{DType, Element, with_dtype},
};
use antiphon_collectives::reference::{Expected, reduce_element};
use antiphon_executor::{LoadedPlan, Options, PacketKind};
use antiphon_plan::{
    OpKind, Plan,
    verify::{self, VerifiedPlan},
};
use clap::ValueEnum;

use super::Result;
use crate::{
    ExitStatus, FAILURE, SUCCESS,
    launch::Launch,
    machine::{Cores, Files, refuse_beyond_memory},
    report::algbw_gbs,
    sizes::Sizes,
};

/// Batches of calls; their median is the time.
const BATCHES: usize = 11;

/// Run a plan on ranks of this machine, check every element of the results, and tell the time.
///
/// The plan is proved first. A collective that is not one of the usual five has no known results: it is timed, and the
/// table says so.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan run two_shot.json --size 1M
  antiphon plan run two_shot.json --size 64K..16M:4 --dtype bf16 --symmetric")]
pub struct Args {
    /// The plan's file
    file: PathBuf,

    /// How many ranks, each a process [default: as many as the plan is for]
    #[arg(short = 'n', long)]
    ranks: Option<usize>,

    /// Message sizes in bytes, of the larger tensor of a rank: 1M, 64K..16M:4
    #[arg(long, default_value = "1M")]
    size: Sizes,

    /// The kind of elements: f64, f32, f16, bf16, i64, i32, i8, u8
    #[arg(long, default_value = "f32", value_parser = crate::bench::numeric)]
    dtype: DType,

    /// Calls in each of the 11 batches
    #[arg(long, default_value = "20")]
    iterations: u32,

    /// The form of packets
    #[arg(long, value_enum, default_value = "ll16")]
    packets: Packets,

    /// Keep the tensors in symmetric memory
    #[arg(long)]
    symmetric: bool,

    /// Be one of the ranks that the command starts
    #[arg(long, hide = true)]
    worker: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Packets {
    /// 4 bytes of data in 8
    Ll8,
    /// 8 bytes of data in 16
    Ll16,
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let plan = super::read(&args.file)?;
    match args.worker {
        true => work(&args, plan),
        false => start(&args, &plan),
    }
}

fn start(args: &Args, plan: &Plan) -> Result<ExitStatus> {
    let ranks = args.ranks.unwrap_or(plan.num_ranks());
    if ranks != plan.num_ranks() {
        return Err(format!("the plan is for {} ranks, not {ranks}", plan.num_ranks()).into());
    }
    prove(plan)?;
    for &bytes in &args.size.0 {
        let tensors = if args.symmetric { 4 } else { 2 };
        refuse_beyond_memory(bytes, ranks, u128::from(bytes) * tensors * ranks as u128)?;
    }
    let mut launch = Launch::again(ranks);
    launch.bind = ranks <= Cores::count(&Files::system()).usable();
    launch.capture = false;
    let outcome = launch.run(|_, _, _| Ok(()))?;
    if !outcome.success() {
        eprint!("{}", outcome.report());
    }
    Ok(outcome.exit_code())
}

fn prove(plan: &Plan) -> Result<VerifiedPlan> {
    Ok(VerifiedPlan::new(plan.clone(), &verify::Options::default()).map_err(|report| report.to_string())?)
}

fn work(args: &Args, plan: Plan) -> Result<ExitStatus> {
    let comm = Communicator::from_env()?;
    let packets = if args.packets == Packets::Ll8 { PacketKind::LL8 } else { PacketKind::LL16 };
    let mut loaded = LoadedPlan::load(&comm, &prove(&plan)?, Options { packets })?;
    if comm.rank() == 0 {
        let titles = ["bytes", "time µs", "alg GB/s", "bus GB/s"];
        writeln!(
            stdout(),
            "{:>12} {:>10} {:>12} {:>12}  results",
            titles[0],
            titles[1],
            titles[2],
            titles[3]
        )?;
    }
    let mut all_right = true;
    for &bytes in &args.size.0 {
        let row = with_dtype!(args.dtype, T => measure::<T>(&comm, &plan, &mut loaded, bytes, args)?);
        all_right &= row.wrong.is_none_or(|wrong| wrong == 0);
        if comm.rank() == 0 {
            writeln!(stdout(), "{}", row.text(&plan, comm.world_size()))?;
        }
    }
    Ok(if all_right { SUCCESS } else { FAILURE })
}

struct Row {
    bytes: u64,
    microseconds: f64,
    /// Elements that are wrong on any rank; none if it is not known what is right.
    wrong: Option<u64>,
}

impl Row {
    fn text(&self, plan: &Plan, ranks: usize) -> String {
        let algbw = algbw_gbs(self.bytes, self.microseconds);
        let busbw = plan
            .operation()
            .and_then(|operation| operation.row().bus_factor.among(ranks))
            .map_or("-".into(), |factor| format!("{:.2}", algbw * factor));
        let results = match self.wrong {
            None => format!("not checked: nothing is known of {:?}", plan.collective),
            Some(0) => "right".into(),
            Some(wrong) => format!("{wrong} elements are wrong"),
        };
        format!("{:>12} {:>10.1} {algbw:>12.2} {busbw:>12}  {results}", self.bytes, self.microseconds)
    }
}

fn measure<T: Element>(
    comm: &Communicator,
    plan: &Plan,
    loaded: &mut LoadedPlan,
    bytes: u64,
    args: &Args,
) -> Result<Row> {
    let counts = counts::<T>(plan, bytes)?;
    let (input, mut output) = (values::<T>(comm.rank(), counts[0]), vec![T::default(); counts[1]]);
    let buffers = counts
        .map(|count| comm.create_shared_buffer(if args.symmetric { count * size_of::<T>() } else { 0 }));
    let [from_buffer, to_buffer] = buffers;
    let (from_buffer, to_buffer) = (from_buffer?, to_buffer?);
    let (from, to): (&[T], &mut [T]) = match args.symmetric {
        // SAFETY: the others touch this rank's copies only within the calls.
        true => unsafe {
            let from = from_buffer.slice_mut::<T>(comm.rank());
            from.copy_from_slice(&input);
            (from, to_buffer.slice_mut(comm.rank()))
        },
        false => (&input, &mut output),
    };
    loaded.execute(comm, from, &mut *to)?;
    let mut times = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..args.iterations.max(1) {
            loaded.execute(comm, from, &mut *to)?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(args.iterations.max(1)));
    }
    let wrong = wrong::<T>(comm, plan, to, counts[0]);
    let all: Vec<(Vec<f64>, Option<u64>)> = comm.exchange_objects(&(times, wrong))?;
    let slowest = |batch: usize| all.iter().map(|(times, _)| times[batch]).fold(0.0, f64::max);
    let mut times: Vec<f64> = (0..BATCHES).map(slowest).collect();
    times.sort_by(f64::total_cmp);
    comm.free_shared_buffer(from_buffer)?;
    comm.free_shared_buffer(to_buffer)?;
    let bytes = (counts[0].max(counts[1]) * size_of::<T>()) as u64;
    Ok(Row { bytes, microseconds: times[BATCHES / 2], wrong: all.iter().map(|(_, wrong)| *wrong).sum() })
}

/// Elements of input and output.
fn counts<T: Element>(plan: &Plan, bytes: u64) -> Result<[usize; 2]> {
    let chunks = plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
    let larger = chunks[0].max(chunks[1]).max(1);
    let size = size_of::<T>() as u64;
    if !bytes.is_multiple_of(larger) || !(bytes / larger).is_multiple_of(size) {
        let dtype = T::DTYPE;
        return Err(format!("{bytes} bytes are not {larger} chunks of whole {dtype} elements").into());
    }
    let elements = bytes / larger / size;
    Ok(chunks.map(|chunks| (chunks * elements) as usize))
}

/// The input of a rank: multiples of 1/8 up to 2, or small numbers.
fn values<T: Element>(rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| value(rank, index)).collect()
}

fn value<T: Element>(rank: usize, index: usize) -> T {
    let step = (((index % 4093 + 1) * 2_654_435_761 + rank * 40_503) >> 7) % 33;
    T::from_f64(if T::DTYPE.is_float() { (step as f64 - 16.0) / 8.0 } else { step as f64 })
}

/// How many elements of this rank's output are not what the collective must give, if that is known.
fn wrong<T: Element>(comm: &Communicator, plan: &Plan, output: &[T], input: usize) -> Option<u64> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let op = reduction(plan);
    let reduced = |index: usize| {
        let column: Vec<T> = (0..ranks).map(|rank| value(rank, index)).collect();
        let expected = reduce_element(op, &column);
        // A plan may round at each of its reductions, so at most once for each contribution.
        Expected { tolerance: expected.tolerance * ranks as f64, ..expected }
    };
    let operation = plan.operation()?;
    if operation == Operation::Message {
        return Some(unlike_any(output, rank, ranks));
    }
    let copied = |from: usize, index| Expected { exact: value::<T>(from, index).to_f64(), tolerance: 0.0 };
    let block = (input / ranks).max(1);
    let expected = |index: usize| match operation {
        Operation::AllReduce => reduced(index),
        Operation::ReduceScatter => reduced(rank * block + index),
        Operation::AllGather => copied(index / input, index % input),
        _ => copied(index / block, rank * block + index % block),
    };
    let wrong = output.iter().enumerate().filter(|(index, value)| !expected(*index).accepts(value.to_f64()));
    Some(wrong.count() as u64)
}

/// How many elements differ from the input that is most like the output. That it is the right rank's, and that a rank to
/// that no rank sends keeps its zeros, is for the proof.
fn unlike_any<T: Element>(output: &[T], rank: usize, ranks: usize) -> u64 {
    let unlike = |expected: &dyn Fn(usize) -> f64| {
        output.iter().enumerate().filter(|(index, found)| found.to_f64() != expected(*index)).count() as u64
    };
    let untouched = unlike(&|_| 0.0);
    let sent = |from| unlike(&|index| value::<T>(from, index).to_f64());
    (0..ranks).filter(|&from| from != rank).map(sent).fold(untouched, u64::min)
}

/// How the plan reduces. One that is proved does so in one way.
fn reduction(plan: &Plan) -> ReduceOp {
    let inner = |op: &antiphon_plan::Op| match &op.kind {
        OpKind::Reduce(reduce) => Some(reduce.op),
        OpKind::SwitchReduce(reduce) => Some(reduce.op),
        OpKind::SwitchReduceBroadcast(reduce) => Some(reduce.op),
        _ => None,
    };
    let of = |op: &antiphon_plan::Op| match &op.kind {
        OpKind::Pipeline(pipeline) => pipeline.ops.iter().find_map(inner),
        _ => inner(op),
    };
    let mut ops = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    ops.find_map(of).unwrap_or(ReduceOp::Sum)
}
