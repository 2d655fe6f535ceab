//! The command `antiphon plan` with plans of the library.

use std::path::Path;
use std::process::{Command, Output};

fn plan(arguments: &[&str], file: Option<&Path>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
    command.arg("plan").args(arguments).args(file).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_library_is_listed_built_proved_simulated_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let list = plan(&["build", "--list"], None);
    assert!(text(&list.stdout).lines().any(|line| line.starts_with("two-shot-all-reduce ")), "{list:?}");
    let file = folder.path().join("plan.json");
    let what =
        ["build", "--library", "two-shot-all-reduce", "--ranks", "2", "--op", "max", "--in-place", "-o"];
    assert!(plan(&what, Some(&file)).status.success());
    let json = std::fs::read_to_string(&file).unwrap();
    assert!(json.contains(r#""inplace": true"#) && json.contains(r#""reduce_op": "max""#), "{json}");
    let proved = plan(&["verify"], Some(&file));
    assert!(proved.status.success() && text(&proved.stdout).starts_with("proved"), "{proved:?}");
    assert!(plan(&["simulate", "--sizes", "1M"], Some(&file)).status.success());
    let ran = plan(&["run", "--size", "64K", "--iterations", "1"], Some(&file));
    assert!(ran.status.success() && text(&ran.stdout).contains("65536"), "{ran:?}");
    assert!(text(&ran.stdout).contains("right"), "{ran:?}");
}

#[test]
fn what_is_sent_and_received_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    assert!(plan(&["build", "--library", "port-send-recv", "-n", "2", "-o"], Some(&file)).status.success());
    let ran = plan(&["run", "--size", "64K", "--iterations", "1"], Some(&file));
    assert!(ran.status.success() && text(&ran.stdout).contains("right"), "{ran:?}");
}

#[test]
fn what_cannot_be_built_is_refused() {
    let refused = |arguments: &[&str], says: &str| {
        let output = plan(&[&["build"], arguments].concat(), None);
        let errors = text(&output.stderr);
        assert!(!output.status.success() && errors.contains(says), "{arguments:?}: {errors}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    };
    refused(&[], "<SCRIPT>");
    refused(&["--library", "ring-all-reduce"], "--ranks");
    refused(&["--ranks", "4", "script.py"], "cannot be used with");
    refused(&["--library", "ring-all-reduce", "--ranks", "4", "--", "4"], "cannot be used with");
    refused(&["--library", "three-shot", "--ranks", "4"], "--list");
    refused(&["--library", "ring-all-reduce", "--ranks", "1"], "needs 2 ranks, and there are 1");
    refused(&["--library", "ring-all-reduce", "--ranks", "4294967295"], "at most");
    refused(&["--library", "send-recv", "--ranks", "2", "--in-place"], "does not work in place");
}
