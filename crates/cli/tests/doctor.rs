//! The command `antiphon doctor` on the machine that runs the tests.

use std::process::Command;

fn doctor(args: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_antiphon")).arg("doctor").args(args).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.code())
}

#[test]
fn the_table_has_every_section_and_no_colours_in_a_pipe() {
    let (text, code) = doctor(&[]);
    for heading in ["System\n", "\nProcessor\n", "\nMemory\n", "\nGPU\n", "\nOther machines\n"] {
        assert!(text.contains(heading), "{text}");
    }
    assert!(!text.contains('\x1b'));
    assert!(text.lines().last().unwrap().starts_with("This machine can run Antiphon"), "{text}");
    assert_eq!(code, Some(0));
}

#[test]
fn the_json_holds_every_check() {
    let (text, code) = doctor(&["--json"]);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&value["schema"], &value["healthy"], code), (&1.into(), &true.into(), Some(0)));
    let checks = value["checks"].as_array().unwrap();
    let status = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap()["status"].clone();
    for name in ["memfd_create", "file sealing", "shared futex", "pidfd_open", "fd passing"] {
        assert_eq!(status(name), "ok", "{name}");
    }
    for name in [
        "cores",
        "SIMD",
        "NUMA nodes",
        "caches",
        "RAM",
        "huge pages for shmem",
        "overcommit",
        "driver",
        "NVRTC",
        "NCCL",
        "UCX",
    ] {
        assert!(["ok", "warning", "missing"].contains(&status(name).as_str().unwrap()));
    }
    // A machine without GPUs is healthy, and its survey is whole.
    assert!(value["gpu"]["devices"].is_array() && value["gpu"]["driver"].is_object(), "{text}");
}
