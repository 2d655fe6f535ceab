//! The command `antiphon`.

use std::process::ExitCode;

use antiphon_cli::{bench, doctor, run, tune};
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
    Bench(bench::Args),
    Run(run::Args),
    Doctor(doctor::Args),
    Tune(tune::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Bench(args) => bench::execute(args),
        Command::Run(args) => run::execute(args),
        Command::Doctor(args) => doctor::execute(args),
        Command::Tune(args) => tune::execute(args),
    }
}
