//! `antiphon plan verify`: proves a plan, or says what is wrong with it.

use std::io::Write;
use std::path::{Path, PathBuf};

use antiphon_plan::verify::{Expectation, Expected, Memory, Options, verify};
use antiphon_plan::{escaped, read_text};

use super::Result;
use crate::{ExitStatus, FAILURE, SUCCESS};

/// Prove that a plan does what its collective must do, or show what is wrong.
///
/// Bounds, pairing of signals and waits, deadlocks, races and, for all-gather, all-reduce, reduce-scatter, all-to-all and
/// send/receive, what the outputs hold; and whether launches may follow back to back, without a meeting of the ranks. The exit code is 0
/// if all is proved.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan verify plan.json
  antiphon plan verify plan.json --json
  antiphon plan verify plan.json --expect outputs.json

A file for --expect is a list of what outputs must hold, in chunks:
  [{\"rank\": 0, \"index\": 0, \"size\": 1, \"op\": \"sum\", \"from\": [{\"rank\": 0, \"index\": 0}, {\"rank\": 1, \"index\": 0}]}]")]
pub struct Args {
    /// The plan
    file: PathBuf,

    /// A table of what the outputs must hold, instead of the collective's own
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,

    /// The memory that the plan is proved for: in that of GPUs packets carry nothing but themselves
    #[arg(long, value_enum, default_value = "host")]
    memory: MemoryKind,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum MemoryKind {
    Host,
    Device,
}

impl From<MemoryKind> for Memory {
    fn from(kind: MemoryKind) -> Self {
        match kind {
            MemoryKind::Host => Memory::Host,
            MemoryKind::Device => Memory::Device,
        }
    }
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let plan = super::read(&args.file)?;
    let expectation = args.expect.as_deref().map(table).transpose()?;
    let report = verify(&plan, &Options { expectation, memory: args.memory.into() });
    match args.json {
        true => super::print_json(&report.to_json())?,
        false => writeln!(std::io::stdout(), "{report}")?,
    }
    Ok(if report.proved { SUCCESS } else { FAILURE })
}

fn table(file: &Path) -> Result<Expectation> {
    let text = read_text(file).map_err(|error| super::about(file, error))?;
    let rows: Vec<Expected> = serde_json::from_slice(&text)
        .map_err(|error| format!("{}: {}", file.display(), escaped(&error.to_string())))?;
    Ok(Expectation::Table(rows))
}
