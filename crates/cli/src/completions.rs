//! `antiphon completions`: what a shell completes of this command.

use std::io::{self, Write};

use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;

use crate::{Cli, ExitStatus, FAILURE, SUCCESS};

/// Print what a shell needs to complete this command's words.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  source <(antiphon completions bash)                                    in ~/.bashrc
  antiphon completions zsh > ~/.zfunc/_antiphon                          a folder of $fpath
  antiphon completions fish > ~/.config/fish/completions/antiphon.fish")]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Name,
}

/// The shells whose completions are tested.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    Bash,
    Zsh,
    Fish,
}

/// Runs the command.
pub fn execute(args: Args) -> ExitStatus {
    let shell = match args.shell {
        Name::Bash => Shell::Bash,
        Name::Zsh => Shell::Zsh,
        Name::Fish => Shell::Fish,
    };
    let mut script = Vec::new(); // as the generator panics where it cannot write
    clap_complete::generate(shell, &mut Cli::command(), "antiphon", &mut script);
    match io::stdout().write_all(&script).and_then(|()| io::stdout().flush()) {
        Ok(()) => SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "antiphon completions: {error}");
            FAILURE
        }
    }
}
