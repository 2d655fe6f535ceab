//! The command `antiphon`.

use std::process::ExitCode;

use antiphon_cli::{doctor, run};
use clap::{Parser, Subcommand};

/// Antiphon: collectives between ranks, and the tools around them.
#[derive(Parser)]
#[command(name = "antiphon", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => run::execute(args),
        Command::Doctor(args) => doctor::execute(args),
    }
}
