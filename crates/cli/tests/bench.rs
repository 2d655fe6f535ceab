//! The command `antiphon bench` with real processes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

fn bench(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
    command.args(["bench", "all-reduce", "--ranks", "2", "--seconds", "0.01"]).args(arguments);
    command.envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn dispatch_and_combine_are_right_element_by_element() {
    for call in ["dispatch", "combine"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        command.args(["bench", call, "--ranks", "3", "--sizes", "4,100K", "--iterations", "1"]);
        let shown = command.output().unwrap();
        let said = String::from_utf8_lossy(&shown.stdout);
        assert_eq!(shown.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&shown.stderr));
        assert!(said.contains("Out of bounds values : 0 OK"), "{said}");
    }
}

#[test]
fn mixed_layouts_are_right_element_by_element_in_every_mode() {
    let table = |layout: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        command.args([
            "bench",
            "mixed",
            "--layout",
            layout,
            "--sizes",
            "24,100K",
            "--iterations",
            "1",
            "--dtype",
            "bf16",
        ]);
        let shown = command.output().unwrap();
        let said = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert_eq!(shown.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&shown.stderr));
        assert!(said.contains("Out of bounds values : 0 OK"), "{said}");
        said
    };
    let said = table("2x2");
    for word in [
        "all_reduce_all_gather, 4 ranks",
        "reduce_scatter_all_reduce, 4 ranks",
        "auto=waits",
        " bytes1",
        " composed",
    ] {
        assert!(said.contains(word), "{word} in {said}");
    }
    assert!(table("2x1").contains("# all_reduce, 2 ranks"));
    let said = table("1x2");
    assert!(said.contains("# all_gather, 2 ranks") && said.contains("# reduce_scatter, 2 ranks"), "{said}");
}

#[test]
fn a_mixed_layout_fits_the_ranks_and_sums() {
    let refused = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        let output = command.args(["bench", "mixed"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--ranks", "3"]).contains("--ranks 3, but a --layout of 2x2 has 4"));
    assert!(refused(&["--op", "max"]).contains("--op max is not for mixed, which sums"));
}

#[test]
fn a_cache_that_others_may_write_is_warned_of_and_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let cache = [("ANTIPHON_CACHE_DIR", folder.path().to_str().unwrap())];
    let silent = bench(&["--sizes", "64"], &cache);
    assert_eq!((silent.status.code(), &silent.stderr[..]), (Some(0), &b""[..]));
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let warned = bench(&["--sizes", "64,128"], &cache);
    let said = String::from_utf8_lossy(&warned.stderr);
    assert_eq!(warned.status.code(), Some(0), "{said}");
    let path = folder.path().display();
    let warning = format!(
        "antiphon: warning: the table of algorithms in {path}/tuning.json is not used: others may write {path} \
         (its mode is 0777): `chmod go-w` it"
    );
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort();
    assert_eq!(lines, [format!("[0] {warning}"), format!("[1] {warning}")], "once on each rank");
}

#[test]
fn sizes_that_no_memory_holds_are_refused_with_the_numbers() {
    // An input and an output for each rank, rounded down to whole floats and, of all-to-all, to a row of whole blocks.
    let most = ["18446744073709551615", "takes 737869762948382064"];
    for [size, takes] in [most, ["512T", "takes 2251799813685248 bytes (2 PiB or more)"]] {
        for collective in ["all-reduce", "all-to-all", "memory"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
            let output =
                command.args(["bench", collective, "--ranks", "2", "--sizes", size]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.starts_with("antiphon bench: a size of ") && said.contains(takes), "{said}");
            assert!(said.contains("of 2 ranks, and this machine has "), "{said}");
            assert_eq!(output.stdout, b"", "{said}");
        }
    }
}

/// A command with a limit on the size of files, in bytes.
fn limited(bytes: u32, arguments: &[&str]) -> Output {
    let mut command = Command::new("/bin/sh");
    // The shell's unit is 512 bytes.
    command.args([
        "-c",
        &format!("ulimit -f {}; exec \"$0\" \"$@\"", bytes / 512),
        env!("CARGO_BIN_EXE_antiphon"),
    ]);
    command.args(arguments).output().unwrap()
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_not_a_silent_end() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json");
    let build =
        ["plan", "build", "--library", "ring-all-reduce", "--ranks", "8", "-o", plan.to_str().unwrap()];
    let bench = ["bench", "all-reduce", "--ranks", "2", "--seconds", "0.01", "--sizes", "64"];
    for arguments in [&build[..], &bench] {
        let output = limited(512, arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("File too large"), "{said}");
    }
}

/// `antiphon run` with `options`, and in each rank this command with `arguments`.
fn in_a_world(options: &[&str], arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_antiphon");
    let mut command = Command::new(program);
    command.args(["run", "--no-prefix"]).args(options).args(["--", program]).args(arguments);
    command.env("ANTIPHON_CACHE_DIR", std::env::temp_dir()).output().unwrap()
}

#[test]
fn the_ranks_of_a_launcher_are_measured_and_rank_0_shows_them() {
    let quick = ["bench", "all-reduce", "--seconds", "0.01", "--sizes", "64"];
    let shown = in_a_world(&["-n", "3"], &quick);
    let said = String::from_utf8_lossy(&shown.stdout);
    assert_eq!(shown.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&shown.stderr));
    assert_eq!(said.matches("all_reduce, 3 ranks").count(), 1, "{said}");
    assert_eq!(said.matches("Out of bounds values : 0 OK").count(), 1, "{said}");

    let refused = in_a_world(&["-n", "2"], &[&quick[..], &["--ranks", "3"]].concat());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        said.contains("3 ranks were asked for, and the launcher around this process has started 2"),
        "{said}"
    );
}
