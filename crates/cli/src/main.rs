//! The command `antiphon`.

use std::process::ExitCode;

fn main() -> ExitCode {
    antiphon_cli::main(std::env::args_os().skip(1)).into()
}
