//! The command `antiphon plan` on files: what one of its commands writes, the next one reads.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use antiphon_language::{Collective, DataSync, Options, Plan, Program, Protocol, ReduceOp, Result};

/// Of two ranks, each reduces its chunk of both inputs into both outputs. In the end they meet, or do not.
fn two_shot(ends_well: bool) -> Result<Plan> {
    let program = Program::new("two_shot", &Collective::all_reduce(2, 1), Options::default());
    let channels = [program.memory_channel(1, 0)?, program.memory_channel(0, 1)?];
    let meet = || {
        channels.iter().try_for_each(|channel| channel.signal(0, DataSync::BOTH))?;
        channels.iter().try_for_each(|channel| channel.wait(0, DataSync::BOTH))
    };
    meet()?;
    for own in [0, 1] {
        let (rank, peer, chunk) = (program.rank(own)?, program.rank(1 - own)?, u64::from(own));
        let (channel, mine) = (&channels[own as usize], rank.output().chunk(chunk)?);
        channel.reduce(rank.input().chunk(chunk)?, &[peer.input().chunk(chunk)?], 0, mine, ReduceOp::Sum)?;
        channel.put(peer.output().chunk(chunk)?, mine, 0)?;
    }
    if ends_well {
        meet()?;
    }
    program.plan()
}

/// Each of two ranks sends its input as packets, and reduces its own with what comes.
fn packets() -> Result<Plan> {
    let options = Options { protocol: Protocol::LL, use_double_scratch_buffer: true, ..Options::default() };
    let program = Program::new("packets", &Collective::all_reduce(2, 1), options);
    let scratch = [program.rank(0)?.scratch(2)?, program.rank(1)?.scratch(2)?];
    for own in [0, 1] {
        let (rank, peer) = (program.rank(own)?, 1 - own);
        let there = scratch[peer as usize].chunks(..)?;
        program.memory_channel(peer, own)?.put_packets(there, rank.input().chunks(..2)?, 0)?;
        let (come, sum) = (scratch[own as usize].chunks(..)?, rank.output().chunks(..2)?);
        rank.reduce_packets(rank.input().chunks(..2)?, &[come], 1, sum, ReduceOp::Max)?;
    }
    program.plan()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn with(plan: &Plan) -> Self {
        let folder = Folder(tempfile::tempdir().unwrap());
        fs::write(folder.path("written.json"), plan.to_json()).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `antiphon plan …` in this folder, with what stands for Python.
    fn plan(&self, arguments: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        command.current_dir(self.0.path()).arg("plan").args(arguments.split_whitespace());
        command.env("ANTIPHON_PYTHON", self.path("python")).output().unwrap()
    }

    /// What a command that succeeds prints.
    fn printed(&self, arguments: &str) -> String {
        let output = self.plan(arguments);
        assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
        text(&output.stdout)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A program that prints its last argument, a file, as a script of a plan prints the plan.
fn write_python(path: &Path) {
    fs::write(path, "#!/bin/sh\nfor last; do :; done\ncat \"$last\"\n").unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_plan_is_built_proved_predicted_run_and_drawn() {
    let plan = two_shot(true).unwrap();
    let folder = Folder::with(&plan);
    write_python(&folder.path("python"));
    folder.printed("build script.py -o plan.json -- written.json");
    assert_eq!(fs::read_to_string(folder.path("plan.json")).unwrap(), plan.to_json() + "\n");
    assert!(folder.printed("verify plan.json").starts_with("proved"));
    let predicted = folder.printed("simulate plan.json --sizes 64K,1M");
    assert!(predicted.contains("65536") && predicted.contains("1048576"), "{predicted}");
    let ran = folder.printed("run plan.json --ranks 2 --size 64K,1M --iterations 2");
    let rows: Vec<_> = ran.lines().filter(|line| line.ends_with("right")).collect();
    assert!(rows.len() == 2 && rows[0].contains("65536") && rows[1].contains("1048576"), "{ran}");
    folder.printed("show plan.json --html plan.html --size 64K");
    assert!(fs::read_to_string(folder.path("plan.html")).unwrap().starts_with("<!doctype html>"));
}

#[test]
fn a_plan_that_is_not_proved_does_not_run() {
    let folder = Folder::with(&two_shot(false).unwrap());
    let proof = folder.plan("verify written.json");
    assert!(!proof.status.success() && text(&proof.stdout).contains("error: "), "{}", text(&proof.stdout));
    let ran = folder.plan("run written.json --size 64K");
    assert!(!ran.status.success() && text(&ran.stderr).contains("error: "), "{}", text(&ran.stderr));
    assert_eq!(text(&ran.stdout), "");
}

/// Both forms of packets, of sizes that go in one launch and in several, in tensors of either kind.
#[test]
fn packets_travel_between_processes() {
    let folder = Folder::with(&packets().unwrap());
    for options in ["--packets ll8 --dtype bf16", "--packets ll16 --dtype i32 --symmetric"] {
        let ran = folder.printed(&format!("run written.json --size 4K,2M --iterations 1 {options}"));
        assert_eq!(ran.lines().filter(|line| line.ends_with("right")).count(), 2, "{options}: {ran}");
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let folder = Folder::with(&two_shot(true).unwrap());
    for (arguments, said) in [
        ("run written.json --ranks 3", "the plan is for 2 ranks, not 3"),
        ("run written.json --size 1M --dtype f99", "f99"),
        ("run nowhere.json", "nowhere.json"),
        ("verify python", "python"),
    ] {
        let output = folder.plan(arguments);
        assert!(!output.status.success() && text(&output.stderr).contains(said), "{arguments}: {output:?}");
    }
}
