//! `antiphon lower`: the rewritten collectives of a compiler's graph, and the reasons.

use std::path::{Path, PathBuf};

use antiphon_lowering::{
    Costs, Decisions, Device, Graph, Numerics, Options, Realize, Tables, World, check, compare, lower, verify,
};
use antiphon_plan::{escaped, read_text};
use clap::ValueEnum;

use crate::{ExitStatus, FAILURE, SUCCESS};

/// Fuse, order and place the collectives of a compiler's graph, and prove that the result computes the same.
///
/// The report lists each rewrite, the reason for each rewrite that was not made, the calls, the predicted times and the bytes
/// of symmetric memory. The exit status is 1 if the graph is invalid, the result is not proved, or `--run` finds
/// a difference.
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
    /// Interpret both graphs on numbers that follow from this seed; the exit status is 1 if a result differs by more than the
    /// numerics allow, and the output is named
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
    let mut source = Source::read(&args.file, args.from)?;
    if let Some(world) = args.world {
        source.graph.groups.iter_mut().for_each(|group| group.size = world);
    }
    source.tell_what_makes_no_sense();
    let before = &source.graph;
    if let Some([decisions, after]) = args.check.as_deref() {
        let decisions =
            Decisions::from_json(&read_text(decisions)?).map_err(|error| about(decisions, error))?;
        let after = Source::read(after, args.from)?;
        after.tell_what_makes_no_sense();
        let findings = check(before, &decisions, &after.graph);
        findings.iter().for_each(|finding| println!("{}", escaped(&finding.to_string())));
        let agrees = agree(args.run, before, &after.graph, decisions.numerics)?;
        return Ok(if findings.is_empty() && agrees { SUCCESS } else { FAILURE });
    }
    let options = options(args);
    let costs = Costs::new(args.device, &options.tables)?;
    let lowered = lower(before, &World { device: args.device, groups: None }, &costs, &options);
    match args.emit {
        None => println!("{}", lowered.report),
        Some(Emit::Text) => print!("{}", lowered.graph.to_text()),
        Some(Emit::Json) => println!("{}", lowered.graph.to_json()),
        Some(Emit::Plan) => println!("{}", lowered.decisions.to_json()),
    }
    if args.report && args.emit.is_some() {
        eprintln!("{}", lowered.report);
    }
    let agrees = agree(args.run, before, &lowered.graph, options.numerics)?;
    Ok(if lowered.report.findings.is_empty() && agrees { SUCCESS } else { FAILURE })
}

/// Whether two graphs' results agree on numbers that follow from a seed, if one is given.
fn agree(seed: Option<u64>, before: &Graph, after: &Graph, numerics: Numerics) -> Result<bool> {
    let Some(seed) = seed else { return Ok(true) };
    let Some(found) = compare(before, after, numerics, seed)? else { return Ok(true) };
    let what = if found.is_too_large() { "the results differ" } else { "the results agree" };
    eprintln!("{what}: {}", escaped(&found.to_string()));
    Ok(!found.is_too_large())
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

/// A graph, and the file that it was read from.
struct Source<'f> {
    file: &'f Path,
    form: Form,
    text: Vec<u8>,
    graph: Graph,
}

impl<'f> Source<'f> {
    fn read(file: &'f Path, form: Option<Form>) -> Result<Self> {
        let text = read_text(file)?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let usual = match () {
            () if name.ends_with(".txt") => Form::Text,
            () if name.ends_with(".torch.json") => Form::Torch,
            () => Form::Json,
        };
        let form = form.unwrap_or(usual);
        let graph = match form {
            Form::Torch => Graph::from_torch(&text),
            Form::Json => Graph::from_json(&text),
            Form::Text => Graph::from_text(std::str::from_utf8(&text).map_err(|error| about(file, error))?),
        };
        Ok(Self { file, form, graph: graph.map_err(|error| about(file, error))?, text })
    }

    /// Prints what has no meaning, with its places in the file.
    fn tell_what_makes_no_sense(&self) {
        for finding in verify(&self.graph) {
            let text = match finding.ops.first().and_then(|op| self.place(op)) {
                Some(place) => format!("{place}: {finding}"),
                None => finding.to_string(),
            };
            eprintln!("antiphon lower: {}", escaped(&about(self.file, text)));
        }
    }

    /// Where an operation stands. In a graph of torch its name says so.
    fn place(&self, op: &str) -> Option<String> {
        let index = self.graph.ops.iter().position(|other| other.name == op)?;
        match self.form {
            Form::Text => {
                let line = Graph::line_of(std::str::from_utf8(&self.text).ok()?, index)?;
                Some(format!("line {line}"))
            }
            Form::Json => Some(format!("ops[{index}]")),
            Form::Torch => None,
        }
    }
}

fn about(file: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", file.display())
}
