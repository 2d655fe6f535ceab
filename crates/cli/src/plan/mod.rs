//! `antiphon plan`: execution plans of collective algorithms, from program to proof, prediction, picture and run.
//!
//! A file for each of its commands; all they know of plans is in `antiphon-plan` and the crates above it.

mod build;
mod run;
mod show;
mod simulate;
mod verify;

use std::path::Path;

use antiphon_plan::Plan;
use clap::Subcommand;

use crate::{ExitStatus, FAILURE};

/// Plans of collective algorithms: build, prove, predict, draw and run them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Subcommand)]
enum Command {
    Build(build::Args),
    Run(run::Args),
    Verify(verify::Args),
    Simulate(simulate::Args),
    Show(show::Args),
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs the command.
pub fn execute(args: Args) -> ExitStatus {
    let done: Result<ExitStatus> = match args.command {
        Command::Build(args) => build::execute(args),
        Command::Run(args) => run::execute(args),
        Command::Verify(args) => verify::execute(args),
        Command::Simulate(args) => simulate::execute(args),
        Command::Show(args) => show::execute(args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("antiphon plan: {error}");
        FAILURE
    })
}

/// Reads a plan's file.
fn read(file: &Path) -> Result<Plan> {
    let text = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(Plan::from_json(&text).map_err(|error| format!("{}: {error}", file.display()))?)
}
