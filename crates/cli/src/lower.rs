//! `antiphon lower`: the rewritten collectives of a compiler's graph, and the reasons.

use std::path::{Path, PathBuf};

use antiphon_lowering::{
    Arithmetic, Costs, Device, Graph, Kind, Numerics, Options, Plan, Realize, Tables, Tensor, World, check,
    interpret, lower,
};
use antiphon_plan::{escaped, read_text};
use clap::ValueEnum;

use crate::{ExitStatus, FAILURE, SUCCESS};

/// Fuse, order and place the collectives of a compiler's graph, and prove that the result computes the same.
///
/// The report lists each rewrite, the reason for each rewrite that was not made, the calls, the predicted times and the bytes
/// of symmetric memory. The exit status is 1 if the graph is invalid or the result is not proved.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon lower examples/lowering/block.txt
  antiphon lower examples/lowering/block.torch.json --device h200 --numerics same
  antiphon lower examples/lowering/gradients.json --overlap --run 7
  antiphon lower graph.json --emit plan > plan.json
  antiphon lower graph.json --emit json > after.json
  antiphon lower graph.json --check plan.json after.json")]
pub struct Args {
    /// The graph
    file: PathBuf,
    /// The format of the files [default: text for .txt, torch for .torch.json, else json]
    #[arg(long, value_enum)]
    from: Option<Form>,
    /// The number of ranks of every group, instead of the numbers in the graph
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    world: Option<u32>,
    /// The machine whose times are predicted: host or h200
    #[arg(long, default_value = "host")]
    device: Device,
    /// Predict with measured tables: those of this file, or without FILE those of the tuning cache (`antiphon tune`)
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    tables: Option<Option<PathBuf>>,
    /// Whether every rounding stays where it is, or results may differ within the bounds that the report states
    #[arg(long, value_enum, default_value = "close")]
    numerics: Rounding,
    /// Run collectives beside computation: form buckets, start early and wait late
    #[arg(long)]
    overlap: bool,
    /// When tensors are placed in symmetric memory
    #[arg(long, value_enum, default_value = "measured")]
    realize: Placement,
    /// What to write to standard output [default: the report]
    #[arg(long, value_enum)]
    emit: Option<Emit>,
    /// Write the report to standard error as well
    #[arg(long)]
    report: bool,
    /// Lower nothing, but prove that under a plan another graph computes the same as this one
    #[arg(long, num_args = 2, value_names = ["PLAN", "AFTER"])]
    check: Option<Vec<PathBuf>>,
    /// Interpret both graphs on random numbers that follow from this seed, and compare their results
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
enum Placement {
    Measured,
    Always,
    Never,
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
    let options = options(args);
    let costs = Costs::new(args.device, &options.tables)?;
    let lowered = lower(&before, &World { device: args.device, groups: None }, &costs, &options);
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
        eprintln!(
            "the largest difference of a result is {worst:e}, relative to the larger of the result and 1"
        );
    }
    Ok(if lowered.report.findings.is_empty() { SUCCESS } else { FAILURE })
}

fn options(args: &Args) -> Options {
    let numerics = match args.numerics {
        Rounding::Same => Numerics::Same,
        Rounding::Close => Numerics::Close,
    };
    let realize = match args.realize {
        Placement::Measured => Realize::Measured,
        Placement::Always => Realize::Always,
        Placement::Never => Realize::Never,
    };
    let tables = match &args.tables {
        None => Tables::BuiltIn,
        Some(None) => Tables::Cache,
        Some(Some(file)) => Tables::File(file.clone()),
    };
    Options { numerics, realize, tables, overlap: args.overlap, ..Options::default() }
}

fn read(file: &Path, form: Option<Form>) -> Result<Graph> {
    let text = read_text(file)?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let usual = match () {
        () if name.ends_with(".txt") => Form::Text,
        () if name.ends_with(".torch.json") => Form::Torch,
        () => Form::Json,
    };
    let graph = match form.unwrap_or(usual) {
        Form::Torch => Graph::from_torch(&text),
        Form::Json => Graph::from_json(&text),
        Form::Text => Graph::from_text(std::str::from_utf8(&text).map_err(|error| about(file, error))?),
    };
    Ok(graph.map_err(|error| about(file, error))?)
}

fn about(file: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", file.display())
}

/// The most elements that the inputs of all simulated ranks have together.
const MOST_ELEMENTS: usize = 1 << 26;

/// The largest difference of two graphs' results on the same numbers, which differ from rank to rank.
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
        let count = count.ok_or("the inputs have too many elements to be interpreted")?;
        // Every floating-point dtype has multiples of 1/16.
        let data = (0..count).map(|_| (number() * 16.0).round() / 16.0).collect();
        Ok::<_, &str>(Tensor { dtype: ty.dtype, shape, data })
    };
    let inputs = |op: &&antiphon_lowering::Op| matches!(op.kind, Kind::Input | Kind::Constant);
    let elements = before.ops.iter().filter(inputs).try_fold(0usize, |sum, op| {
        let shape = &before.ty(op.outs[0]).shape;
        let sizes = shape.iter().map(|size| usize::try_from(size.value(&hint)?).ok());
        let count = sizes.into_iter().try_fold(1usize, |count, size| count.checked_mul(size?))?;
        sum.checked_add(count.max(1))
    });
    if elements
        .and_then(|elements| elements.checked_mul(world))
        .is_none_or(|elements| elements > MOST_ELEMENTS)
    {
        let found = elements.map_or("too many".into(), |elements| elements.to_string());
        let text = format!(
            "{found} elements of inputs on each of {world} ranks; at most {MOST_ELEMENTS} are interpreted"
        );
        return Err(text.into());
    }
    let mut rank = || before.ops.iter().filter(inputs).map(&mut tensor).collect();
    let ranks: Vec<Vec<Tensor>> = (0..world).map(|_| rank()).collect::<std::result::Result<_, _>>()?;
    let [old, new] = [before, after].map(|graph| interpret(graph, &ranks, Arithmetic::Kernels));
    let (old, new) = (old?, new?);
    let pairs = old.iter().flatten().zip(new.iter().flatten()).flat_map(|(x, y)| x.data.iter().zip(&y.data));
    Ok(pairs.map(|(x, y)| if x == y { 0.0 } else { (x - y).abs() / x.abs().max(1.0) }).fold(0.0, f64::max))
}
