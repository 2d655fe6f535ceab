//! The command `antiphon` as a library. [`main`] is the whole command, for its binary and for `python -m antiphon`; the
//! modules are public for tests.
//!
//! * [`launch`] starts a program on every rank and supervises it; [`run`] is its command.
//! * [`mod@bench`] verifies and times collectives; [`tune`] measures which algorithm is fastest at which size.
//! * [`plan`] has the tools for execution plans; [`lower`] those for compilers' graphs.
//! * [`doctor`] reports the features that this machine supports, and those that it lacks.
//! * [`completions`] prints what shells complete.
//! * [`report`] writes measured rows as a table, a JSON file and a plot.
//! * [`sizes`] reads message sizes such as `1K..64M`.
//! * [`machine`] reads the machine's properties from Linux.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

pub mod bench;
pub mod completions;
pub mod doctor;
pub mod launch;
pub mod lower;
pub mod machine;
pub mod plan;
pub mod report;
pub mod run;
pub mod sizes;
pub mod tune;

/// An exit status.
pub type ExitStatus = u8;

const SUCCESS: ExitStatus = 0;
const FAILURE: ExitStatus = 1;

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
    Plan(plan::Args),
    Lower(lower::Args),
    Completions(completions::Args),
}

/// Runs the command with the arguments that follow its name, and returns its exit status. Commands that start ranks
/// start this very process's command line on each.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitStatus {
    survive_file_limits();
    match Cli::try_parse_from(std::iter::once("antiphon".into()).chain(arguments)) {
        Ok(cli) => match cli.command {
            Command::Bench(args) => bench::execute(args),
            Command::Run(args) => run::execute(args),
            Command::Doctor(args) => doctor::execute(args),
            Command::Tune(args) => tune::execute(args),
            Command::Plan(args) => plan::execute(args),
            Command::Lower(args) => lower::execute(args),
            Command::Completions(args) => completions::execute(args),
        },
        Err(error) => {
            // Help goes to standard output. If that takes none, nothing is left to tell but that it failed.
            let asked = error.exit_code() as ExitStatus;
            error.print().map_or(FAILURE, |()| asked)
        }
    }
}

/// The Python that runs scripts: the one that has this package, where the package itself is the command.
fn python() -> OsString {
    std::env::var_os("ANTIPHON_PYTHON").unwrap_or_else(|| "python3".into())
}

/// A file, or a shared memory, that would grow beyond RLIMIT_FSIZE makes the kernel send SIGXFSZ, which kills without a
/// word. With a handler that does nothing the write fails, and the error is reported. Programs that this one starts get the
/// default back, as from every handler.
fn survive_file_limits() {
    // SAFETY: the handler does nothing at all.
    let registered = unsafe { signal_hook::low_level::register(signal_hook::consts::SIGXFSZ, || {}) };
    // Without it the limit kills, as it does other programs.
    drop(registered);
}
