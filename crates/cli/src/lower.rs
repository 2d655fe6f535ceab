//! `antiphon lower`: the rewritten collectives of a compiler's graph, and the reasons.

use std::path::{Path, PathBuf};

use antiphon_lowering::{
    Arithmetic, Costs, Device, Graph, Kind, Numerics, Options, Plan, Tensor, World, check, interpret, lower,
};
use antiphon_plan::{escaped, read_text};
use clap::ValueEnum;

use crate::{ExitStatus, FAILURE, SUCCESS};

/// Fuse, order and place the collectives of a compiler's graph, and prove that it computes what it did.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The graph.
    file: PathBuf,
    /// What the file holds [default: text for .txt, else json]
    #[arg(long, value_enum)]
    from: Option<Form>,
    /// The ranks of every group, instead of what the graph says.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    world: Option<u32>,
    /// The machine whose times are predicted: host or h200.
    #[arg(long, default_value = "host")]
    device: Device,
    /// How much may be rounded otherwise.
    #[arg(long, value_enum, default_value = "close")]
    numerics: Rounding,
    /// What to write to standard output [default: the report]
    #[arg(long, value_enum)]
    emit: Option<Emit>,
    /// Write the report to standard error as well.
    #[arg(long)]
    report: bool,
    /// Lower nothing, but prove that under a plan another graph computes what the file's does.
    #[arg(long, num_args = 2, value_names = ["PLAN", "AFTER"])]
    check: Option<Vec<PathBuf>>,
    /// Run both graphs on numbers that follow from this seed, and compare what they return.
    #[arg(long, value_name = "SEED")]
    run: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    Torch,
    Json,
    Text,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Rounding {
    Same,
    Close,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Emit {
    Text,
    Json,
    Plan,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs the command. A graph that is refused, or a proof that fails, is a failure.
pub fn execute(args: Args) -> ExitStatus {
    run(&args).unwrap_or_else(|error| {
        eprintln!("antiphon lower: {}", escaped(&error.to_string()));
        FAILURE
    })
}

fn run(args: &Args) -> Result<ExitStatus> {
    let mut before = read(&args.file, args.from)?;
    if let Some(world) = args.world {
        before.groups.iter_mut().for_each(|group| group.size = world);
    }
    if let Some([plan, after]) = args.check.as_deref() {
        let plan = Plan::from_json(&read_text(plan)?).map_err(|error| about(plan, error))?;
        let findings = check(&before, &plan, &read(after, args.from)?);
        findings.iter().for_each(|finding| println!("{}", escaped(&finding.to_string())));
        return Ok(if findings.is_empty() { SUCCESS } else { FAILURE });
    }
    let numerics = match args.numerics {
        Rounding::Same => Numerics::Same,
        Rounding::Close => Numerics::Close,
    };
    let world = World { device: args.device, groups: None };
    let lowered =
        lower(&before, &world, &Costs::of(args.device), &Options { numerics, ..Options::default() });
    match args.emit {
        None => println!("{}", lowered.report),
        Some(Emit::Text) => print!("{}", lowered.graph.to_text()),
        Some(Emit::Json) => println!("{}", lowered.graph.to_json()),
        Some(Emit::Plan) => println!("{}", lowered.plan.to_json()),
    }
    if args.report && args.emit.is_some() {
        eprintln!("{}", lowered.report);
    }
    if let Some(seed) = args.run {
        let worst = difference(&before, &lowered.graph, seed)?;
        eprintln!("results differ by at most {worst:e} of themselves, or of 1 where they are smaller");
    }
    Ok(if lowered.report.findings.is_empty() { SUCCESS } else { FAILURE })
}

fn read(file: &Path, form: Option<Form>) -> Result<Graph> {
    let text = read_text(file)?;
    let is_text = file.extension().is_some_and(|extension| extension == "txt");
    let graph = match form.unwrap_or(if is_text { Form::Text } else { Form::Json }) {
        Form::Torch => Graph::from_torch(&text),
        Form::Json => Graph::from_json(&text),
        Form::Text => Graph::from_text(std::str::from_utf8(&text).map_err(|error| about(file, error))?),
    };
    Ok(graph.map_err(|error| about(file, error))?)
}

fn about(file: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", file.display())
}

/// By how much two graphs differ on the same numbers, at most.
fn difference(before: &Graph, after: &Graph, seed: u64) -> Result<f64> {
    let world = before.groups.iter().map(|group| group.size as usize).max().unwrap_or(1);
    let mut state = seed;
    let mut number = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f64 / f64::from(1u32 << 29) - 2.0
    };
    let hint = |name: &str| before.syms.iter().find(|sym| sym.name == name)?.hint;
    let mut tensor = |op: &antiphon_lowering::Op| {
        let ty = before.ty(op.outs[0]);
        let size =
            |size: &antiphon_lowering::SymExpr| size.value(&hint).and_then(|size| usize::try_from(size).ok());
        let shape = ty.shape.iter().map(size).collect::<Option<Vec<_>>>().ok_or("a size without a hint")?;
        let count = shape
            .iter()
            .try_fold(1usize, |count, size| count.checked_mul(*size).filter(|count| *count < 1 << 26));
        let count = count.ok_or("inputs too large to be run")?;
        // Sixteenths are numbers of every dtype.
        let data = (0..count).map(|_| (number() * 16.0).round() / 16.0).collect();
        Ok::<_, &str>(Tensor { dtype: ty.dtype, shape, data })
    };
    let inputs = |op: &&antiphon_lowering::Op| matches!(op.kind, Kind::Input | Kind::Constant);
    let rank: Vec<Tensor> =
        before.ops.iter().filter(inputs).map(&mut tensor).collect::<std::result::Result<_, _>>()?;
    let ranks = vec![rank; world];
    let [old, new] = [before, after].map(|graph| interpret(graph, &ranks, Arithmetic::Kernels));
    let (old, new) = (old?, new?);
    let pairs = old.iter().flatten().zip(new.iter().flatten()).flat_map(|(x, y)| x.data.iter().zip(&y.data));
    Ok(pairs.map(|(x, y)| if x == y { 0.0 } else { (x - y).abs() / x.abs().max(1.0) }).fold(0.0, f64::max))
}
