//! `antiphon plan compile`: the kernel that executes a plan on GPUs, compiled without one.

use std::{
    io::{Write, stdout},
    path::PathBuf,
    time::Instant,
};

use antiphon::{
    device::cuda::{Architecture, Nvrtc},
    tensor::DType,
};
use antiphon_executor::cuda::{CudaOptions, PlanKernel};
use antiphon_plan::{
    Rank, escaped,
    verify::{Memory, VerifiedPlan},
};

use super::{
    Result, prove,
    run::{Form, Packets, Ports, kind},
};
use crate::{ExitStatus, SUCCESS};

const ARCHITECTURES: [Architecture; 3] = [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

/// Compile the kernels that execute a plan on GPUs, and tell what they need. NVRTC does it, and no GPU is necessary.
///
/// The plan is proved for the memory of GPUs first. Its kernel is made for the steps of a rank: ranks whose steps differ in places and peers
/// alone share one. Or the kernel interprets the plan, and serves all plans of as many ranks whose blocks have as many threads.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan compile two_shot.json
  antiphon plan compile two_shot.json --arch sm_100a --dtype bf16 --multiprocessors 148
  antiphon plan compile two_shot.json --form interpreted
  antiphon plan compile two_shot.json --source > kernel.cu")]
pub struct Args {
    /// The plan's file
    file: PathBuf,

    /// The architecture of the GPUs: sm_80, sm_90a, sm_100a
    #[arg(long, default_value = "sm_90a", value_parser = architecture)]
    arch: Architecture,

    /// The multiprocessors of a GPU; the more blocks a plan has for each, the smaller they are
    #[arg(long, default_value = "132")]
    multiprocessors: u32,

    /// The kind of elements: f64, f32, f16, bf16, i64, i32, i8, u8
    #[arg(long, default_value = "f32", value_parser = crate::bench::numeric)]
    dtype: DType,

    /// The form of packets
    #[arg(long, value_enum, default_value = "ll16")]
    packets: Packets,

    /// The form of the kernel
    #[arg(long, value_enum, default_value = "auto")]
    form: Form,

    /// What does the work of ports
    #[arg(long, value_enum, default_value = "blocks")]
    ports: Ports,

    /// Print the sources of the kernels and compile nothing
    #[arg(long)]
    source: bool,
}

fn architecture(text: &str) -> std::result::Result<Architecture, String> {
    let known = || ARCHITECTURES.map(|architecture| architecture.to_string()).join(", ");
    let found = ARCHITECTURES.into_iter().find(|architecture| architecture.to_string() == text);
    found.ok_or_else(|| format!("unknown architecture {text:?}: known are {}", known()))
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let plan = prove(&super::read(&args.file)?, Memory::Device)?;
    let (packets, form, ports) = (kind(args.packets), args.form.into(), args.ports.into());
    let options = CudaOptions { packets, form, ports, ..CudaOptions::default() };
    let kernels = kernels(&plan, &args, options)?;
    if args.source {
        for (kernel, ranks) in &kernels {
            let program = kernel.program(args.arch);
            writeln!(stdout(), "// Of {}, compiled with: {}", of(ranks), program.options().join(" "))?;
            writeln!(stdout(), "{}", program.source())?;
        }
        return Ok(SUCCESS);
    }
    let nvrtc = Nvrtc::load()?;
    let plan = plan.plan();
    let blocks = plan.gpus.iter().map(|gpu| gpu.threadblocks.len()).max().unwrap_or(0);
    let name = escaped(plan.name.as_deref().unwrap_or_default());
    line("plan", format!("{name}, {} ranks", plan.num_ranks()))?;
    for (kernel, ranks) in &kernels {
        let start = Instant::now();
        let needs = kernel.compile(nvrtc, args.arch)?;
        let seconds = start.elapsed().as_secs_f64();
        let how = format!("{}, packets {}, {}", args.dtype, packets.name(), args.arch);
        line("kernel", format!("{}, {how}, of {}", kernel.form(), of(ranks)))?;
        line("cases", format!("{}, with {} operations", kernel.cases(), kernel.operations()))?;
        let (threads, each) = (kernel.threads(), kernel.blocks_per_multiprocessor());
        let multiprocessors = args.multiprocessors;
        line(
            "blocks",
            format!("{blocks} of {threads} threads, {each} on each of {multiprocessors} multiprocessors"),
        )?;
        match needs {
            Some(needs) => {
                let [stores, loads] = needs.spilled_bytes;
                line("registers", format!("{} of {}", needs.registers, kernel.most_registers()))?;
                line(
                    "spills",
                    format!("{stores} bytes stored, {loads} loaded; {} bytes of stack", needs.stack_bytes),
                )?;
            }
            None => line("registers", "the compiler does not say".into())?,
        }
        line("compiled in", format!("{seconds:.2} s, by NVRTC {}", nvrtc.version()))?;
    }
    Ok(SUCCESS)
}

fn line(what: &str, text: String) -> std::io::Result<()> {
    writeln!(stdout(), "{what:12} {text}")
}

/// The different kernels of a plan's ranks, and which ranks have each.
fn kernels(plan: &VerifiedPlan, args: &Args, options: CudaOptions) -> Result<Vec<(PlanKernel, Vec<usize>)>> {
    let mut kernels: Vec<(PlanKernel, Vec<usize>)> = Vec::new();
    for rank in 0..plan.plan().num_ranks() {
        let kernel = PlanKernel::new(plan, Rank(rank as u32), args.dtype, options, args.multiprocessors)?;
        match kernels.iter_mut().find(|(known, _)| *known == kernel) {
            Some((_, ranks)) => ranks.push(rank),
            None => kernels.push((kernel, vec![rank])),
        }
    }
    Ok(kernels)
}

fn of(ranks: &[usize]) -> String {
    let all: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if all.len() == 1 { "" } else { "s" }, all.join(", "))
}
