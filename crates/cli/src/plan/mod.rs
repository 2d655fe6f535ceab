//! `antiphon plan`: execution plans of collective algorithms, from program to proof, prediction, picture and run.
//!
//! Each of its commands has a file; the work on plans is in `antiphon-plan` and the crates above it.

mod build;
mod compile;
mod run;
mod show;
mod simulate;
mod verify;

pub(crate) use run::enough_gpus;
use std::io::{self, Write};
use std::path::Path;

use antiphon_plan::verify::{Memory, Options, VerifiedPlan};
use antiphon_plan::{Plan, PlanError};
use clap::Subcommand;
use serde::Serialize;

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
    Compile(compile::Args),
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
        Command::Compile(args) => compile::execute(args),
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
pub(crate) fn read(file: &Path) -> Result<Plan> {
    Ok(Plan::from_file(file).map_err(|error| about(file, error))?)
}

/// A proof of the plan for a memory, or what is wrong with it.
pub(crate) fn prove(plan: &Plan, memory: Memory) -> Result<VerifiedPlan> {
    let options = Options { memory, ..Options::default() };
    Ok(VerifiedPlan::new(plan.clone(), &options).map_err(|report| report.to_string())?)
}

/// An error in a file, with the file's name.
fn about(file: &Path, error: PlanError) -> String {
    match error {
        PlanError::File { .. } => error.to_string(),
        error => format!("{}: {error}", file.display()),
    }
}

/// Writes JSON to standard output. The control characters that JSON may hold as they are, DEL and those from 80 to 9F, are
/// escaped as well.
fn print_json(value: &impl Serialize) -> Result<()> {
    struct Printable<W>(W);

    impl<W: Write> Write for Printable<W> {
        /// serde_json writes each piece of a string at once, so no character is cut.
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            match std::str::from_utf8(text) {
                Ok(piece) if piece.contains(|c| ('\u{7f}'..='\u{9f}').contains(&c)) => {
                    for c in piece.chars() {
                        match c {
                            '\u{7f}'..='\u{9f}' => write!(self.0, "\\u{:04x}", c as u32)?,
                            c => write!(self.0, "{c}")?,
                        }
                    }
                }
                _ => self.0.write_all(text)?,
            }
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    let mut out = Printable(io::BufWriter::new(io::stdout()));
    serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from)?;
    writeln!(out)?;
    Ok(out.flush()?)
}
