//! `antiphon plan build`: a program's plan.

use std::env;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use antiphon_plan::Plan;

use super::Result;
use crate::{ExitStatus, FAILURE, SUCCESS};

/// Run a script that prints a plan, written for antiphon.language or mscclpp.language, and keep the plan.
///
/// The script is run by the Python that ANTIPHON_PYTHON names, else by python3; the package antiphon must be installed there.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan build examples/python/plans/all_gather_ring.py -o ring.json
  antiphon plan build ring.py -o ring.json -- --num_gpus 8")]
pub struct Args {
    /// The script
    script: PathBuf,

    /// Where the plan goes [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// What the script is called with
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let python = env::var_os("ANTIPHON_PYTHON").unwrap_or_else(|| "python3".into());
    let mut command = Command::new(&python);
    command.args(["-m", "antiphon.compat", "run", "--peer", "mscclpp.language"]);
    command.arg(&args.script).args(&args.arguments);
    let ran = command.stderr(Stdio::inherit()).output();
    let ran = ran.map_err(|error| format!("{}: {error}", python.to_string_lossy()))?;
    let script = args.script.display();
    if !ran.status.success() {
        eprintln!("antiphon plan build: {script} failed ({})", ran.status);
        return Ok(FAILURE);
    }
    let plan = Plan::from_json(&ran.stdout).map_err(|error| format!("what {script} printed: {error}"))?;
    let text = plan.to_json() + "\n";
    match &args.output {
        Some(file) => {
            std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        }
        None => std::io::stdout().write_all(text.as_bytes())?,
    }
    Ok(SUCCESS)
}
