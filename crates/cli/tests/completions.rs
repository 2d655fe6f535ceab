//! `antiphon completions`: each shell reads its script, and the script has every command.

use std::process::{Command, Output};

use antiphon_testing::program;

fn completions(shell: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_antiphon")).args(["completions", shell]).output().unwrap()
}

#[test]
fn every_command_is_in_every_script() {
    for shell in ["bash", "zsh", "fish"] {
        let output = completions(shell);
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{shell}");
        for command in ["bench", "run", "doctor", "tune", "plan", "lower", "completions"] {
            assert!(script.contains(command), "{command} is not in the script of {shell}");
        }
    }
}

/// What bash itself offers after `antiphon do`.
#[test]
fn bash_completes_a_command() {
    let Some(()) = program("bash") else { return };
    let script = String::from_utf8(completions("bash").stdout).unwrap();
    let ask =
        "\nCOMP_WORDS=(antiphon do); COMP_CWORD=1; _antiphon antiphon do antiphon; echo \"${COMPREPLY[*]}\"";
    let output = Command::new("bash").args(["--norc", "-c", &(script + ask)]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "doctor", "{output:?}");
}

#[test]
fn an_unknown_shell_is_refused_with_those_that_are_known() {
    let output = completions("tcsh");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("tcsh") && said.contains("bash, zsh, fish"), "{said}");
}
