//! The command `antiphon plan` on files: what one of its commands writes, the next one reads.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use antiphon_language::{
    Collective, DataSync, Options, Plan, Program, Protocol, ReduceOp, Result,
    library::{Setting, find},
};

/// Each of two ranks reduces its chunk of both inputs into both outputs. The ranks meet at the end if `ends_well`.
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

/// Rank 0 stores its input's first half at rank 1 as plain data, and announces it only by its second half, as packets.
fn announced_by_packets() -> Result<Plan> {
    let program = Program::new("announced", &Collective::all_gather(2, 2), Options::default());
    let (giver, taker) = (program.rank(0)?, program.rank(1)?);
    let (scratch, there) = (taker.scratch(4)?, program.memory_channel(1, 0)?);
    there.put(scratch.chunk(3)?, giver.input().chunk(0)?, 0)?;
    giver.barrier(&[0])?;
    there.put_packets(scratch.chunk(0)?, giver.input().chunk(1)?, 0)?;
    taker.unpack_packets(taker.output().chunk(1)?, scratch.chunk(0)?, 0)?;
    taker.barrier(&[0])?;
    taker.copy(taker.output().chunk(0)?, scratch.chunk(3)?, 0)?;
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
        let mut command = antiphon();
        command.current_dir(self.0.path()).arg("plan").args(arguments.split_whitespace());
        command.env("ANTIPHON_PYTHON", self.path("python")).output().unwrap()
    }

    /// `antiphon tune …` in this folder.
    fn tune(&self, arguments: &str) -> Output {
        let mut command = antiphon();
        command.current_dir(self.0.path()).arg("tune").args(arguments.split_whitespace()).output().unwrap()
    }

    /// What a command that succeeds prints.
    fn printed(&self, arguments: &str) -> String {
        let output = self.plan(arguments);
        assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
        text(&output.stdout)
    }
}

/// The command, which a bundle has in another place than Cargo: see scripts/emulated.py.
fn antiphon() -> Command {
    let built = env!("CARGO_BIN_EXE_antiphon").into();
    Command::new(std::env::var_os("CARGO_BIN_EXE_antiphon").unwrap_or(built))
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
fn a_plan_may_be_right_on_hosts_and_wrong_on_gpus() {
    let folder = Folder::with(&announced_by_packets().unwrap());
    let row = |index| {
        format!(
            r#"{{"rank": 1, "index": {index}, "size": 1, "op": "sum", "from": [{{"rank": 0, "index": {index}}}]}}"#
        )
    };
    fs::write(folder.path("rows.json"), format!("[{}, {}]", row(0), row(1))).unwrap();
    for host in ["", " --memory host"] {
        // Behind the warning that its ranks meet between launches.
        let proof = folder.printed(&format!("verify written.json --expect rows.json{host}"));
        assert!(proof.lines().any(|line| line.starts_with("proved")), "{proof}");
    }
    let proof = folder.plan("verify written.json --expect rows.json --memory device");
    assert_eq!(proof.status.code(), Some(1));
    assert!(
        text(&proof.stdout).contains("error: only announced: the second reads"),
        "{}",
        text(&proof.stdout)
    );
    let usage = folder.plan("verify written.json --memory gpu");
    assert_eq!(usage.status.code(), Some(2));
    assert!(text(&usage.stderr).contains("[possible values: host, device]"), "{}", text(&usage.stderr));
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

#[test]
fn names_from_files_do_not_reach_the_terminal_as_they_are() {
    // ESC [ 2 J clears the screen, and U+009B is ESC [ in one character.
    let (odd, shown) = ("\u{1b}[2J\u{9b}2J\nproved", r"\u{1b}[2J\u{9b}2J\nproved");
    let plan = Plan { name: Some(odd.into()), collective: odd.into(), ..two_shot(false).unwrap() };
    let folder = Folder::with(&plan);
    let cluster = folder.path("cluster.json");
    fs::write(
        &cluster,
        format!("{{\"base\": \"h200x2\", \"name\": {:?}}}", "NAME").replace("NAME", r"\u001b[2J\u009b"),
    )
    .unwrap();
    let unknown = folder.path("unknown.json");
    fs::write(&unknown, plan.to_json().replacen("\"name\"", "\"\u{9b}\\u001b\"", 1)).unwrap();
    let (written, cluster) = (folder.path("written.json"), cluster.to_str().unwrap().to_owned());
    let page = folder.path("page.html");
    let said = |arguments: &[&str], file: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        let output =
            command.arg("plan").args(&arguments[..1]).arg(file).args(&arguments[1..]).output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let control = |c: char| c.is_control() && c != '\n';
        assert!(!said.contains(control), "{arguments:?}: {said:?}");
        said
    };
    let table = said(&["simulate", "--sizes", "1K", "--cluster", &cluster], &written);
    let title = format!(r"{shown} ({shown}, 2 ranks) on \u{{1b}}[2J\u{{9b}}");
    assert_eq!(table.lines().next(), Some(&title[..]));
    let json = said(&["simulate", "--sizes", "1K", "--cluster", &cluster, "--json"], &written);
    let read: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&read["plan"], &read["collective"]), (&odd.into(), &odd.into()));
    said(&["verify"], &written);
    said(&["verify", "--json"], &written);
    said(&["run"], &written);
    let drawn = said(&["show", "--html", page.to_str().unwrap(), "--cluster", &cluster], &written);
    assert!(drawn.contains(r"on \u{1b}[2J\u{9b}, "), "{drawn}");
    let refused = said(&["verify"], &unknown);
    assert!(refused.contains(r"unknown field `\u{9b}\u{1b}`"), "{refused}");
}

#[test]
fn a_file_that_is_too_long_or_has_no_end_is_refused() {
    let folder = Folder::with(&packets().unwrap());
    let long = folder.path("long.json");
    fs::File::create(&long).unwrap().set_len(antiphon_plan::MAX_TEXT_BYTES + 1).unwrap();
    let written = folder.path("written.json");
    let (written, zeros) = (written.to_str().unwrap(), "/dev/zero");
    let commands = [
        &["verify", zeros][..],
        &["verify", long.to_str().unwrap()],
        &["simulate", zeros],
        &["run", zeros],
        &["verify", written, "--expect", zeros],
    ];
    for arguments in commands {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        let output = command.arg("plan").args(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        let limit = "the plan's text is longer than 67108864 bytes, the most that is read\n";
        assert!(said.ends_with(limit), "{arguments:?}: {said}");
    }
}

/// Ranks that are processes with a GPU each, eager and in graphs, beside the all-reduce by hand.
#[test]
fn plans_run_between_gpus() {
    if antiphon_testing::gpus(2).is_none() {
        return;
    }
    let folder = Folder::with(&two_shot(true).unwrap());
    for options in
        ["--size 64,4K", "--size 64,4K --dtype bf16 --graph --beside all-reduce", "--size 64,4K --registered"]
    {
        let ran = folder.printed(&format!("run written.json --device cuda --iterations 2 {options}"));
        assert_eq!(ran.lines().filter(|line| line.ends_with("right")).count(), 2, "{options}: {ran}");
        assert_eq!(ran.contains("all-reduce µs"), options.contains("beside"), "{ran}");
    }
    let shared = folder.printed("run written.json --device cuda --iterations 1 --ranks-per-gpu 2 --size 1K");
    assert!(shared.trim_end().ends_with("right"), "{shared}");
}

/// Blocks and engines do the work of ports.
#[test]
fn ports_of_both_kinds_run_between_gpus() {
    if antiphon_testing::gpus(2).is_none() {
        return;
    }
    let plan = find("port-send-recv").unwrap().plan(&Setting::new(2)).unwrap();
    let folder = Folder::with(&plan);
    for options in ["--ports blocks", "--ports engines", "--ports engines --graph --form interpreted"] {
        let ran =
            folder.printed(&format!("run written.json --device cuda --iterations 2 --size 1K {options}"));
        assert!(ran.trim_end().ends_with("right"), "{options}: {ran}");
    }
}

#[test]
fn collections_are_tuned_between_gpus() {
    if antiphon_testing::gpus(2).is_none() {
        return;
    }
    let folder = Folder::with(&two_shot(true).unwrap());
    fs::create_dir(folder.path("plans")).unwrap();
    fs::rename(folder.path("written.json"), folder.path("plans/two_shot.json")).unwrap();
    fs::write(folder.path("plans/packets.json"), packets().unwrap().to_json()).unwrap();
    let output = folder.tune("--device cuda --plans plans --sizes 1K..2K --dtype f32 --allow-other-bits");
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    // The built-in calls reduce as the first plan does: `packets` by max, and so the sum of `two_shot` is another thing.
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], "allreduce of f32, 2 ranks");
    assert!(lines[1].contains("built-in µs") && lines[1].contains("packets µs"), "{said}");
    assert!(
        !lines[1].contains("two_shot") && lines[2].contains("1024") && lines[3].contains("2048"),
        "{said}"
    );
    assert!(lines[4].starts_with("two_shot was not measured: it has other results than"), "{said}");
    assert!(said.trim_end().ends_with("tuning.json"), "{said}");
    let shared = folder.tune("--device cuda --plans plans --sizes 1K --ranks-per-gpu 2");
    assert!(shared.status.success(), "{}", text(&shared.stderr));
}

#[test]
fn what_tuning_plans_lacks_is_said() {
    let folder = Folder::with(&two_shot(true).unwrap());
    for (name, plan) in [("empty", None), ("wrong", Some(two_shot(false))), ("right", Some(two_shot(true)))] {
        fs::create_dir(folder.path(name)).unwrap();
        if let Some(plan) = plan {
            fs::write(folder.path(name).join("plan.json"), plan.unwrap().to_json()).unwrap();
        }
    }
    for (arguments, said) in [
        ("--plans right", "--plans is for --device cuda"),
        ("--device cuda --sizes 1K", "--plans"),
        ("--device cuda --plans nowhere", "nowhere: No such file or directory"),
        ("--device cuda --plans empty", "empty: there is no plan, no file *.json"),
        ("--device cuda --plans wrong", "wrong/plan.json: "),
        ("--device cuda --plans right -n 4", "right/plan.json: the plan is for 2 ranks, not 4"),
    ] {
        let output = folder.tune(arguments);
        assert!(!output.status.success() && text(&output.stderr).contains(said), "{arguments}: {output:?}");
    }
}

#[test]
fn what_a_run_on_gpus_lacks_is_said() {
    let folder = Folder::with(&announced_by_packets().unwrap());
    fs::write(folder.path("two_shot.json"), two_shot(true).unwrap().to_json()).unwrap();
    for (arguments, said) in [
        ("run two_shot.json --graph", "--graph is for --device cuda"),
        ("run two_shot.json --registered", "--registered is for --device cuda"),
        ("run two_shot.json --ranks-per-gpu 2", "--ranks-per-gpu is for --device cuda"),
        ("run two_shot.json --form compiled", "--form is for --device cuda"),
        ("run two_shot.json --ports engines", "--ports is for --device cuda"),
        ("run two_shot.json --device cuda --symmetric", "--symmetric is for --device host"),
        (
            "run written.json --device cuda --beside all-reduce",
            "is for plans of allreduce, not of \"allgather\"",
        ),
        ("run written.json --device cuda", "packet"), // the proof's finding, for want of one in device memory
        ("compile written.json", "packet"),
        (
            "compile two_shot.json --arch sm_1",
            "unknown architecture \"sm_1\": known are sm_80, sm_90a, sm_100a",
        ),
        ("compile two_shot.json --dtype f8e4m3", "f8e4m3"),
    ] {
        let output = folder.plan(arguments);
        assert!(!output.status.success() && text(&output.stderr).contains(said), "{arguments}: {output:?}");
    }
    let found = antiphon::device::cuda::Driver::load().and_then(|driver| driver.device_count());
    if !found.is_ok_and(|count| count >= 2) {
        let output = folder.plan("run two_shot.json --device cuda");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("libcuda") || said.contains("need 2 GPUs, and there are"), "{said}");
    }
}

#[test]
fn a_kernel_is_compiled_without_a_gpu() {
    let folder = Folder::with(&packets().unwrap());
    let source = |form| folder.printed(&format!("compile written.json --source --dtype bf16 --form {form}"));
    let (compiled, interpreted) = (source("compiled"), source("interpreted"));
    for source in [&compiled, &interpreted] {
        let has = |what: &str| source.matches(what).count() == 1;
        assert!(has("ELEMENT=bf16") && has("execute(const __grid_constant__"), "{source}");
    }
    let case = "DEVICE bool shape_0(block_steps& b) {";
    assert!(compiled.contains(case) && compiled == source("auto"), "{compiled}");
    assert!(compiled.contains("// Of ranks 0, 1, ") && !interpreted.contains(case), "{interpreted}");
    let Some(nvrtc) = antiphon_testing::nvrtc() else { return };
    for architecture in ["sm_80", "sm_90a", "sm_100a"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        command.args(["plan", "compile", "--arch", architecture]).arg(folder.path("written.json"));
        let output = command.env("ANTIPHON_NVRTC", nvrtc.path()).output().unwrap();
        let said = text(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(said.contains("2 of 512 threads, 1 on each of 132 multiprocessors"), "{said}");
        assert!(said.contains("compiled, f32, packets ll16") && said.contains("cases "), "{said}");
        let emulated = said.contains("the compiler does not say");
        let registers = said.lines().find_map(|line| line.strip_prefix("registers")).unwrap();
        let registers = registers.split_whitespace().next().unwrap().parse::<u32>();
        assert!(emulated || registers.is_ok_and(|registers| (16..=64).contains(&registers)), "{said}");
        assert!(emulated || said.contains("bytes stored"), "{said}");
    }
}
