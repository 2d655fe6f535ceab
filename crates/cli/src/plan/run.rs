//! `antiphon plan run`: executes a plan on ranks of this machine, and checks every result.

use std::{
    io::{Write, stdout},
    path::PathBuf,
};

use antiphon::{collectives::Communicator, device::cuda::Driver, operation::Operation, tensor::DType};
use antiphon_bench::{
    algbw_gbs,
    cuda::plan::{self as gpu, Compared},
    host::plan::{Ran, measure},
};
use antiphon_executor::{LoadedPlan, Options, PacketKind, cuda};
use antiphon_plan::{Plan, verify::Memory};
use clap::ValueEnum;

use super::{Result, prove};
use crate::{
    ExitStatus, FAILURE, SUCCESS,
    launch::{Launch, World},
    machine::refuse_beyond_memory,
    sizes::Sizes,
};

/// Run a plan on ranks of this machine, check every element of the results, and tell the time.
///
/// The plan is proved first, for the memory of the host or of GPUs. A collective that is not one of the usual five has no known results: it is timed, and the
/// table says so.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan run two_shot.json --size 1M
  antiphon plan run two_shot.json --size 64K..16M:4 --dtype bf16 --symmetric
  antiphon plan run two_shot.json --device cuda --registered --graph --beside all-reduce
  antiphon plan run two_shot.json --device cuda --form interpreted")]
pub struct Args {
    /// The plan's file
    file: PathBuf,

    /// Where the ranks are
    #[arg(long, value_enum, default_value = "host")]
    device: Device,

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

    /// On GPUs: the form of the plan's kernel
    #[arg(long, value_enum)]
    form: Option<Form>,

    /// On GPUs: what does the work of ports
    #[arg(long, value_enum)]
    ports: Option<Ports>,

    /// Keep the tensors in symmetric memory, on the host
    #[arg(long)]
    symmetric: bool,

    /// How many ranks share a GPU. Times mean something if NVIDIA's MPS is on
    #[arg(long, value_name = "N")]
    ranks_per_gpu: Option<std::num::NonZeroUsize>,

    /// On GPUs: make one graph of the calls of a batch
    #[arg(long)]
    graph: bool,

    /// On GPUs: keep the tensors in registered memory, which peers reach, so that nothing is staged
    #[arg(long)]
    registered: bool,

    /// On GPUs: verify and time this library's call on the same tensors
    #[arg(long, value_enum, value_name = "CALL")]
    beside: Option<Beside>,

    /// Be one of the ranks that the command starts
    #[arg(long, hide = true)]
    worker: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// Processes on the cores of this machine
    Host,
    /// Processes on GPUs, one on each unless --ranks-per-gpu says more
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Beside {
    /// The all-reduce by the algorithm that the tables choose
    AllReduce,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Packets {
    /// 4 bytes of data in 8
    Ll8,
    /// 8 bytes of data in 16
    Ll16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Form {
    /// Compiled, unless the plan has more than 512 distinct operations
    Auto,
    /// A kernel for the plan's steps
    Compiled,
    /// A kernel that serves all plans
    Interpreted,
}

impl From<Form> for cuda::Form {
    fn from(form: Form) -> Self {
        match form {
            Form::Auto => Self::Auto,
            Form::Compiled => Self::Compiled,
            Form::Interpreted => Self::Interpreted,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Ports {
    /// The thread blocks, by stores
    Blocks,
    /// The copy engines, to which a thread of the host hands the blocks' requests
    Engines,
}

impl From<Ports> for cuda::Ports {
    fn from(ports: Ports) -> Self {
        match ports {
            Ports::Blocks => Self::Blocks,
            Ports::Engines => Self::Engines,
        }
    }
}

pub(super) fn kind(packets: Packets) -> PacketKind {
    match packets {
        Packets::Ll8 => PacketKind::LL8,
        Packets::Ll16 => PacketKind::LL16,
    }
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let plan = super::read(&args.file)?;
    match (args.worker, args.device) {
        (false, _) => start(&args, &plan),
        (true, Device::Host) => work(&args, plan),
        (true, Device::Cuda) => work_on_gpu(&args, &plan),
    }
}

fn start(args: &Args, plan: &Plan) -> Result<ExitStatus> {
    let ranks = args.ranks.unwrap_or(plan.num_ranks());
    if ranks != plan.num_ranks() {
        return Err(format!("the plan is for {} ranks, not {ranks}", plan.num_ranks()).into());
    }
    match args.device {
        Device::Host => {
            let of_gpus = [
                (args.ranks_per_gpu.is_some(), "--ranks-per-gpu"),
                (args.form.is_some(), "--form"),
                (args.ports.is_some(), "--ports"),
                (args.graph, "--graph"),
                (args.registered, "--registered"),
                (args.beside.is_some(), "--beside"),
            ];
            if let Some((_, option)) = of_gpus.iter().find(|(given, _)| *given) {
                return Err(format!("{option} is for --device cuda").into());
            }
            prove(plan, Memory::Host)?;
            for &bytes in &args.size.0 {
                let tensors = if args.symmetric { 4 } else { 2 };
                refuse_beyond_memory(bytes, ranks, u128::from(bytes) * tensors * ranks as u128)?;
            }
        }
        Device::Cuda => {
            if args.symmetric {
                return Err("--symmetric is for --device host".into());
            }
            if args.beside.is_some() && plan.operation() != Some(Operation::AllReduce) {
                let collective = &plan.collective;
                return Err(
                    format!("--beside all-reduce is for plans of allreduce, not of {collective:?}").into()
                );
            }
            prove(plan, Memory::Device)?;
            enough_gpus(ranks, ranks_per_gpu(args))?;
        }
    }
    Ok(Launch::workers(ranks, World::around(Some(ranks))?)?)
}

fn ranks_per_gpu(args: &Args) -> usize {
    args.ranks_per_gpu.map_or(1, |ranks| ranks.get())
}

/// Refuses ranks for which there are too few GPUs, before each of them does.
pub(crate) fn enough_gpus(ranks: usize, ranks_per_gpu: usize) -> Result<()> {
    let (needed, found) = (ranks.div_ceil(ranks_per_gpu), Driver::load()?.device_count()? as usize);
    match found < needed {
        false => Ok(()),
        true => Err(format!(
            "{ranks} ranks, {ranks_per_gpu} on each GPU, need {needed} GPUs, and there are {found}: --ranks-per-gpu puts more on each"
        )
        .into()),
    }
}

/// Whether nothing is wrong that is known to be.
fn is_right(ran: &Ran) -> bool {
    ran.wrong.is_none_or(|wrong| wrong == 0)
}

fn print_titles(beside: bool) -> std::io::Result<()> {
    let [bytes, time, algbw, busbw] = ["bytes", "time µs", "alg GB/s", "bus GB/s"];
    let beside = if beside { format!(" {:>14} {:>7}", "all-reduce µs", "ratio") } else { String::new() };
    writeln!(stdout(), "{bytes:>12} {time:>10} {algbw:>12} {busbw:>12}{beside}  results")
}

fn work(args: &Args, plan: Plan) -> Result<ExitStatus> {
    let comm = Communicator::from_env()?;
    let options = Options { packets: kind(args.packets) };
    let mut loaded = LoadedPlan::load(&comm, &prove(&plan, Memory::Host)?, options)?;
    if comm.rank() == 0 {
        print_titles(false)?;
    }
    let mut all_right = true;
    for &bytes in &args.size.0 {
        let (size, iterations) = ((bytes, args.dtype), args.iterations.max(1));
        let ran = measure(&comm, &plan, &mut loaded, size, args.symmetric, iterations)?;
        all_right &= is_right(&ran);
        if comm.rank() == 0 {
            writeln!(
                stdout(),
                "{}",
                text(&Compared { plan: ran, all_reduce: None }, &plan, comm.world_size())
            )?;
        }
    }
    Ok(if all_right { SUCCESS } else { FAILURE })
}

fn work_on_gpu(args: &Args, plan: &Plan) -> Result<ExitStatus> {
    let comm = Communicator::from_env()?;
    let (is_first, ranks) = (comm.rank() == 0, comm.world_size());
    let how = gpu::OnGpus {
        dtype: args.dtype,
        packets: kind(args.packets),
        form: args.form.map_or(cuda::Form::default(), Into::into),
        ports: args.ports.map_or(cuda::Ports::default(), Into::into),
        ranks_per_gpu: ranks_per_gpu(args),
        iterations: args.iterations,
        graph: args.graph,
        registered: args.registered,
        beside_all_reduce: args.beside.is_some(),
    };
    if is_first {
        print_titles(how.beside_all_reduce)?;
    }
    let mut all_right = true;
    gpu::run(&comm, &prove(plan, Memory::Device)?, &args.size.0, how, |compared| {
        all_right &= is_right(&compared.plan) && compared.all_reduce.as_ref().is_none_or(is_right);
        match is_first {
            true => writeln!(stdout(), "{}", text(&compared, plan, ranks)),
            false => Ok(()),
        }
    })?;
    Ok(if all_right { SUCCESS } else { FAILURE })
}

/// A line of the table.
fn text(compared: &Compared, plan: &Plan, ranks: usize) -> String {
    let ran = &compared.plan;
    let algbw = algbw_gbs(ran.bytes, ran.latency_us);
    let busbw = plan
        .operation()
        .and_then(|operation| operation.row().bus_factor.among(ranks))
        .map_or("-".into(), |factor| format!("{:.2}", algbw * factor));
    let results = match (ran.wrong, compared.all_reduce.and_then(|beside| beside.wrong)) {
        (None, _) => format!("not checked: nothing is known of {:?}", plan.collective),
        (Some(0), None | Some(0)) => "right".into(),
        (Some(0), Some(wrong)) => format!("{wrong} elements of all-reduce are wrong"),
        (Some(wrong), _) => format!("{wrong} elements are wrong"),
    };
    let beside = compared.all_reduce.map_or(String::new(), |beside| {
        format!(" {:>14.2} {:>7.2}", beside.latency_us, ran.latency_us / beside.latency_us)
    });
    format!("{:>12} {:>10.2} {algbw:>12.2} {busbw:>12}{beside}  {results}", ran.bytes, ran.latency_us)
}
