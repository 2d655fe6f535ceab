//! `antiphon plan run`: executes a plan on ranks of this machine, and checks every result.

use std::{
    io::{Write, stdout},
    path::PathBuf,
};

use antiphon::{collectives::Communicator, tensor::DType};
use antiphon_bench::{
    algbw_gbs,
    host::plan::{Ran, measure},
};
use antiphon_executor::{LoadedPlan, Options, PacketKind};
use antiphon_plan::{
    Plan,
    verify::{self, VerifiedPlan},
};
use clap::ValueEnum;

use super::Result;
use crate::{ExitStatus, FAILURE, SUCCESS, launch::Launch, machine::refuse_beyond_memory, sizes::Sizes};

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
    Ok(Launch::workers(ranks)?)
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
        let (size, iterations) = ((bytes, args.dtype), args.iterations.max(1));
        let ran = measure(&comm, &plan, &mut loaded, size, args.symmetric, iterations)?;
        all_right &= ran.wrong.is_none_or(|wrong| wrong == 0);
        if comm.rank() == 0 {
            writeln!(stdout(), "{}", text(&ran, &plan, comm.world_size()))?;
        }
    }
    Ok(if all_right { SUCCESS } else { FAILURE })
}

/// A line of the table.
fn text(ran: &Ran, plan: &Plan, ranks: usize) -> String {
    let algbw = algbw_gbs(ran.bytes, ran.latency_us);
    let busbw = plan
        .operation()
        .and_then(|operation| operation.row().bus_factor.among(ranks))
        .map_or("-".into(), |factor| format!("{:.2}", algbw * factor));
    let results = match ran.wrong {
        None => format!("not checked: nothing is known of {:?}", plan.collective),
        Some(0) => "right".into(),
        Some(wrong) => format!("{wrong} elements are wrong"),
    };
    format!("{:>12} {:>10.1} {algbw:>12.2} {busbw:>12}  {results}", ran.bytes, ran.latency_us)
}
