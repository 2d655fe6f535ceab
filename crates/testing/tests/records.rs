//! What a test leaves behind that needs what the machine has not. The inner tests run in a process of their own.

use antiphon_testing::{Need, need, program};
use std::{fs, path::Path, process::Command};

/// Runs one of the inner tests; whether it passed, and the record.
fn run(test: &str, record: &Path, required: &str) -> (bool, String) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--test-threads", "1"])
        .env("ANTIPHON_SKIPPED", record)
        .env("ANTIPHON_REQUIRE", required)
        .env("ANTIPHON_TEST_INNER", "1")
        .output()
        .unwrap()
        .status;
    (status.success(), fs::read_to_string(record).unwrap_or_default())
}

fn is_inner() -> bool {
    std::env::var_os("ANTIPHON_TEST_INNER").is_some()
}

#[test]
fn inner_without_root() {
    if is_inner() {
        assert_eq!(need(Need::Root, Err::<(), _>("the user is\tnobody\n")), None);
    }
}

#[test]
fn inner_with_root() {
    if is_inner() {
        assert_eq!(need(Need::Root, Ok::<_, &str>(7)), Some(7));
    }
}

#[test]
fn inner_without_a_program() {
    if is_inner() {
        assert_eq!(program("no-such-program"), None);
        assert_eq!(program("false"), None);
        assert_eq!(program("true"), Some(()));
    }
}

#[test]
fn a_program_that_is_not_there_or_fails_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("skipped");
    let (passed, text) = run("inner_without_a_program", &record, "");
    let found: Vec<_> =
        text.lines().map(|line| line.split('\t').take(2).collect::<Vec<_>>().join(" ")).collect();
    assert!(passed);
    assert_eq!(found, ["skipped program no-such-program", "skipped program false", "ran program true"]);
    assert!(!run("inner_without_a_program", &record, "program").0);
}

#[test]
fn what_ran_and_what_did_not_is_appended_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("skipped");
    assert!(run("inner_without_root", &record, "").0);
    let (passed, text) = run("inner_with_root", &record, "root");
    assert!(passed);
    let expected = "skipped\troot\ttesting-records::inner_without_root\tthe user is nobody \n\
                    ran\troot\ttesting-records::inner_with_root\t\n";
    assert_eq!(text, expected);
}

#[test]
fn what_is_required_and_not_there_fails() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("skipped");
    let (passed, text) = run("inner_without_root", &record, "gpus,root");
    assert!(!passed);
    assert!(text.starts_with("skipped\troot\t"), "{text}");
    assert!(run("inner_without_root", &record, "gpus").0);
}

#[test]
fn a_record_that_cannot_be_written_fails() {
    assert!(!run("inner_with_root", Path::new("/nowhere/skipped"), "").0);
}
