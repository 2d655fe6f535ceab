//! `antiphon plan build`: the plan of a program, or of an algorithm of the library.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use antiphon::language::library::{self, ALGORITHMS, Setting};
use antiphon::language::{Options, ReduceOp};
use antiphon_plan::Plan;
use clap::ValueEnum;

use super::Result;
use crate::{ExitStatus, SUCCESS};

/// Build a plan: run a script that prints one, written for antiphon.language or mscclpp.language, or take an algorithm of
/// the library.
///
/// The script is run by the Python that ANTIPHON_PYTHON names, else by python3; the package antiphon must be installed there.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan build examples/python/plans/all_gather_ring.py -o ring.json
  antiphon plan build ring.py -o ring.json -- --num_gpus 8
  antiphon plan build --list
  antiphon plan build --library two-shot-all-reduce --ranks 4 -o two_shot.json
  antiphon plan build --library hierarchical-all-reduce --ranks 16 --nodes 2 --in-place --instances 8")]
pub struct Args {
    /// The script
    #[arg(required_unless_present_any = ["library", "list"], conflicts_with = "Library")]
    script: Option<PathBuf>,

    #[command(flatten)]
    library: Library,

    /// Where the plan goes [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// The script's arguments
    #[arg(last = true, conflicts_with_all = ["library", "list"])]
    arguments: Vec<OsString>,
}

/// The algorithm of the library, and its setting.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "The library")]
struct Library {
    /// An algorithm of the library
    #[arg(long, value_name = "NAME", requires = "ranks")]
    library: Option<String>,

    /// List the algorithms
    #[arg(long, exclusive = true)]
    list: bool,

    /// How many ranks
    #[arg(short = 'n', long, requires = "library")]
    ranks: Option<u32>,

    /// On how many nodes, for hierarchical algorithms [default: 2]
    #[arg(long, requires = "library")]
    nodes: Option<u32>,

    /// Input and output share memory
    #[arg(long, requires = "library")]
    in_place: bool,

    /// How reductions reduce [default: sum]
    #[arg(long, requires = "library")]
    op: Option<Reduction>,

    /// How many of each thread block, each with its part of every chunk [default: 1]
    #[arg(long, requires = "library")]
    instances: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Reduction {
    Sum,
    Min,
    Max,
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    if args.library.list {
        write!(std::io::stdout(), "{}", list())?;
        return Ok(SUCCESS);
    }
    let plan = match &args.library.library {
        Some(name) => args.library.plan(name)?,
        None => {
            run(&args.script.ok_or("neither a script nor an algorithm of the library")?, &args.arguments)?
        }
    };
    let text = plan.to_json() + "\n";
    match &args.output {
        Some(file) => {
            std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        }
        None => std::io::stdout().write_all(text.as_bytes())?,
    }
    Ok(SUCCESS)
}

/// The output of a script.
fn run(script: &Path, arguments: &[OsString]) -> Result<Plan> {
    let python = crate::python();
    let mut command = Command::new(&python);
    command.args(["-m", "antiphon.compat", "run", "--peer", "mscclpp.language"]);
    command.arg(script).args(arguments);
    let ran = command.stderr(Stdio::inherit()).output();
    let ran = ran.map_err(|error| format!("{}: {error}", python.to_string_lossy()))?;
    let script = script.display();
    if !ran.status.success() {
        return Err(format!("{script} failed ({})", ran.status).into());
    }
    Ok(Plan::from_json(&ran.stdout).map_err(|error| format!("what {script} printed: {error}"))?)
}

impl Library {
    fn plan(&self, name: &str) -> Result<Plan> {
        let unknown =
            || format!("the library has no {name:?}; `antiphon plan build --list` shows what it has");
        let algorithm = library::find(name).ok_or_else(unknown)?;
        let defaults = Setting::new(self.ranks.unwrap_or_default());
        let instances = self.instances.unwrap_or(1);
        let setting = Setting {
            nodes: self.nodes.unwrap_or(defaults.nodes),
            inplace: self.in_place,
            op: match self.op {
                None | Some(Reduction::Sum) => ReduceOp::Sum,
                Some(Reduction::Min) => ReduceOp::Min,
                Some(Reduction::Max) => ReduceOp::Max,
            },
            options: Options { instances, ..Options::default() },
            ..defaults
        };
        Ok(algorithm.plan(&setting)?)
    }
}

fn list() -> String {
    let width = ALGORITHMS.iter().map(|algorithm| algorithm.name.len()).max().unwrap_or(0);
    let line = |algorithm: &library::Algorithm| format!("{:width$}  {}\n", algorithm.name, algorithm.summary);
    ALGORITHMS.iter().map(line).collect()
}
