//! The command `antiphon run` with real processes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use antiphon_testing::{Need, need, program};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const PATIENCE: Duration = Duration::from_secs(30);

fn run(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
    command.arg("run").args(options).args(["--", "/bin/sh", "-c", script]).stdin(Stdio::null());
    command
}

/// Whether SIGINT is heeded. What a script starts with `&` ignores it, and then the launcher rightly does too.
fn heeds_interrupts() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignores = u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (Signal::INT.as_raw() - 1) != 0;
    need(Need::Interrupts, if ignores { Err("it is ignored here") } else { Ok(()) }).is_some()
}

fn output(options: &[&str], script: &str) -> Output {
    run(options, script).output().unwrap()
}

fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// A launch whose ranks have said a first line each.
struct Ready {
    launcher: Child,
    stdout: BufReader<ChildStdout>,
    lines: Vec<String>,
}

fn ready(mut command: Command, ranks: usize) -> Ready {
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(launcher.stdout.take().unwrap());
    let lines = (0..ranks).map(|_| {
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    });
    let lines = lines.collect();
    Ready { launcher, stdout, lines }
}

impl Ready {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.launcher), signal).unwrap();
    }

    /// The exit status, standard error, and what else was said.
    fn end(mut self) -> (std::process::ExitStatus, String, String) {
        let (mut errors, mut rest) = (String::new(), String::new());
        self.launcher.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        self.stdout.read_to_string(&mut rest).unwrap();
        (self.launcher.wait().unwrap(), errors, rest)
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn alive(pid: i32) -> bool {
    let exists = Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid).is_ok());
    // A process that has ended, but whose parent has not collected it, is not alive.
    exists && !fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[test]
fn lines_carry_their_rank_and_stay_on_their_stream() {
    let output = output(&["-n", "3"], r#"echo "out $RANK"; echo "err $RANK" >&2; printf part"#);
    assert!(output.status.success());
    let expected = ["[0] out 0", "[0] part", "[1] out 1", "[1] part", "[2] out 2", "[2] part"];
    assert_eq!(sorted(&output.stdout), expected);
    assert_eq!(sorted(&output.stderr), ["[0] err 0", "[1] err 1", "[2] err 2"]);
}

#[test]
fn lines_of_different_ranks_never_mix() {
    let word = "x".repeat(200);
    let output =
        output(&["-n", "4"], &format!("i=0; while [ $i -lt 500 ]; do echo $RANK-{word}; i=$((i+1)); done"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 2000);
    for line in text.lines() {
        let rank = &line[1..2];
        assert_eq!(line, format!("[{rank}] {rank}-{word}"));
    }
}

#[test]
fn bytes_that_are_no_text_pass() {
    let output = output(&["-n", "1"], r"printf 'a\377b\n'");
    assert_eq!(output.stdout, b"[0] a\xffb\n");
}

#[test]
fn without_prefix_the_ranks_write_themselves() {
    let output = output(&["-n", "2", "--no-prefix"], "echo plain");
    assert_eq!(output.stdout, b"plain\nplain\n");
}

#[test]
fn terminals_get_colours_and_pipes_do_not() {
    let colored = run(&["-n", "1"], "echo x").env("CLICOLOR_FORCE", "1").output().unwrap();
    assert_eq!(colored.stdout, b"\x1b[36m[0]\x1b[0m x\n");
    assert_eq!(output(&["-n", "1"], "echo x").stdout, b"[0] x\n");
}

#[test]
fn rank_0_reads_standard_input_and_the_others_find_it_empty() {
    let mut command = run(&["-n", "2"], "cat");
    let mut launcher = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    launcher.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    assert_eq!(launcher.wait_with_output().unwrap().stdout, b"[0] hello\n");
}

#[test]
fn the_last_lines_name_the_rank_that_failed_first() {
    let script = "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 0.3; echo 'peer lost' >&2; exit 7";
    let output = output(&["-n", "3"], script);
    assert_eq!(output.status.code(), Some(137));
    let errors = String::from_utf8(output.stderr).unwrap();
    let last: Vec<&str> = errors.lines().rev().take(4).collect();
    assert!(last[0].starts_with("antiphon run: rank 1 failed first: pid "), "{errors}");
    assert!(last[0].contains(", killed by SIGKILL after 0."), "{errors}");
    assert!(last[1].starts_with("antiphon run:   rank 2: pid ") && last[1].contains("exit code 7 after "));
    assert!(last[3].starts_with("antiphon run:   rank 0: pid "));
}

#[test]
fn the_exit_code_is_that_of_the_first_failure() {
    assert_eq!(output(&["-n", "2"], "exit 0").status.code(), Some(0));
    assert_eq!(output(&["-n", "2"], "[ $RANK = 0 ] && exit 3; sleep 0.3").status.code(), Some(3));
    assert_eq!(output(&["-n", "1"], "kill -SEGV $$").status.code(), Some(139));
    assert_eq!(output(&["-n", "1", "--timeout", "0.2"], "sleep 60").status.code(), Some(124));
}

#[test]
fn signals_reach_every_rank_once() {
    let script = "trap 'echo got USR1' USR1; trap 'echo got TERM; exit 9' TERM; echo ready; \
                  while :; do sleep 0.05; done";
    let mut launch = ready(run(&["-n", "2"], script), 2);
    for signal in [Signal::USR1, Signal::TERM] {
        launch.signal(signal);
        if signal == Signal::USR1 {
            let mut line = String::new();
            launch.stdout.read_line(&mut line).unwrap();
            launch.stdout.read_line(&mut line).unwrap();
            assert_eq!(sorted(line.as_bytes()), ["[0] got USR1", "[1] got USR1"]);
        }
    }
    let (status, errors, rest) = launch.end();
    assert_eq!(sorted(rest.as_bytes()), ["[0] got TERM", "[1] got TERM"]);
    assert_eq!(status.code(), Some(9));
    assert!(
        errors.contains("exit code 9 after ") && errors.contains("(the launcher had sent SIGTERM)"),
        "{errors}"
    );
}

#[test]
fn an_interrupt_ends_ranks_and_launcher() {
    if !heeds_interrupts() {
        return;
    }
    let launch = ready(run(&["-n", "2"], "echo ready; exec sleep 60"), 2);
    launch.signal(Signal::INT);
    let (status, errors, _) = launch.end();
    assert_eq!(status.code(), Some(130));
    assert!(errors.contains("killed by SIGINT"), "{errors}");
}

#[test]
fn ignored_signals_stay_ignored() {
    let mut command = Command::new("/bin/sh");
    let launch = "trap '' HUP; exec \"$0\" run -n 1 -- /bin/sh -c 'echo ready; sleep 0.5; echo survived'";
    command.args(["-c", launch, env!("CARGO_BIN_EXE_antiphon")]);
    let launch = ready(command, 1);
    launch.signal(Signal::HUP);
    let (status, errors, rest) = launch.end();
    assert!(status.success(), "{errors}");
    assert_eq!(rest, "[0] survived\n");
}

#[test]
fn ranks_die_with_a_launcher_that_is_killed() {
    let launch = ready(run(&["-n", "4"], "echo $$; exec sleep 60"), 4);
    let pids: Vec<i32> = launch.lines.iter().map(|line| line[4..].parse().unwrap()).collect();
    assert!(pids.iter().all(|&pid| alive(pid)));
    launch.signal(Signal::KILL);
    assert_eq!(launch.end().0.signal(), Some(9));
    for pid in pids {
        wait_until("a rank outlived the launcher", || !alive(pid));
    }
}

#[test]
fn a_reader_that_leaves_ends_the_ranks() {
    let mut launch = ready(run(&["-n", "2", "--grace", "60"], "exec yes"), 1);
    launch.stdout = BufReader::new(unread());
    let (status, errors, _) = launch.end();
    assert_eq!(status.code(), Some(141), "{errors}");
}

/// A standard output with nothing in it, in exchange for one to be closed.
fn unread() -> ChildStdout {
    let mut child = Command::new("true").stdout(Stdio::piped()).spawn().unwrap();
    child.wait().unwrap();
    child.stdout.take().unwrap()
}

#[test]
fn a_reader_that_stalls_stops_no_signal() {
    if !heeds_interrupts() {
        return;
    }
    let mut launch = ready(run(&["-n", "2"], "echo $$; exec yes"), 1);
    std::thread::sleep(Duration::from_millis(300)); // the pipes are full now
    launch.signal(Signal::INT); // to the ranks
    let rank: i32 = launch.lines[0][4..].parse().unwrap();
    wait_until("the interrupt did not reach the ranks", || !alive(rank));
    // The launcher still holds lines that no process reads: the next interrupt ends the launcher itself.
    let deadline = Instant::now() + PATIENCE;
    while launch.launcher.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the launcher hangs");
        launch.signal(Signal::INT);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(launch.end().0.signal(), Some(2));
}

#[test]
fn usage_errors_name_the_number_and_the_program() {
    let antiphon = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_antiphon")).args(args).output().unwrap();
    for (args, code, said) in [
        (&["run", "-n", "0", "true"][..], 2, "0 ranks: must be from 1 to 4096"),
        (&["run", "-n", "5000", "true"], 2, "5000 ranks: must be from 1 to 4096"),
        (&["run", "-n", "2", "no-such-program"], 127, "cannot start \"no-such-program\": not found in PATH"),
        (&["run", "-n", "2", "/etc/passwd"], 126, "cannot execute \"/etc/passwd\""),
        (&["run", "-n", "2"], 2, "PROGRAM"),
        (&["run", "-n", "2", "--grace", "-1", "true"], 2, "--grace"),
        (&["run", "-n", "2", "--timeout", "soon", "true"], 2, "must be a number of seconds"),
    ] {
        let output = antiphon(args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(said), "{args:?}: {errors}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = run(&["-n", "2"], "echo lost").stdout(full).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let last =
        "antiphon run: what the ranks wrote could not be handed on: No space left on device (os error 28)\n";
    assert!(errors.ends_with(last), "{errors}");
    for arguments in [&["--help"][..], &["plan", "build", "--list"], &["doctor"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
        let output = command.args(arguments).stdout(full).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
        assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
    }
}

/// The last line of a launch that failed.
fn blamed(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    errors.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn the_rank_that_ended_first_is_named_however_late_the_launcher_looks() {
    // The launcher is stopped while rank 2 ends, then rank 0: it finds both at one look.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let script = format!(
        "echo $$ > {path}/part$RANK; mv {path}/part$RANK {path}/$RANK
         if [ $RANK = 2 ]; then kill -STOP $PPID; exit 3; fi
         until grep -qs '^State:.Z' /proc/$(cat {path}/2)/status; do :; done
         exit 1"
    );
    let launch = run(&["-n", "3"], &script).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let ended = |rank: u32| {
        let pid = fs::read_to_string(folder.path().join(rank.to_string())).unwrap_or_default();
        let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap_or_default();
        status.contains("State:\tZ")
    };
    wait_until("the ranks do not end", || (0..3).all(ended));
    kill_process(Pid::from_child(&launch), Signal::CONT).unwrap();
    let output = launch.wait_with_output().unwrap();
    let blamed = blamed(&output);
    assert!(blamed.starts_with("antiphon run: rank 2 failed first: pid "), "{blamed}");
    assert!(blamed.contains(", exit code 3 after "), "{blamed}");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_rank_that_is_stopped_failed_before_those_that_gave_it_up() {
    let script = "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 0.5; exit 4";
    let output = output(&["-n", "3", "--grace", "0.2"], script);
    let blamed = blamed(&output);
    let expected = ", stopped when another rank failed, killed by SIGKILL after ";
    assert!(
        blamed.starts_with("antiphon run: rank 1 failed first: pid ") && blamed.contains(expected),
        "{blamed}"
    );
    assert_eq!(output.status.code(), Some(137));
}

#[test]
fn a_rank_that_left_early_without_an_error_is_named_beside_the_first_failure() {
    let output = output(&["-n", "3"], "if [ $RANK = 1 ]; then exit 0; fi; sleep 0.3; exit $((RANK + 5))");
    let blamed = blamed(&output);
    assert!(blamed.contains(" failed first: pid "), "{blamed}");
    assert!(blamed.contains("; before it, rank 1 left with exit code 0 (the first after 0."), "{blamed}");
}

/// As torchrun, whether or not the script may be executed, and wherever it lies.
#[test]
fn a_script_of_python_is_run_by_python() {
    let Some(()) = program("python3") else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hello.py"), "import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])\n")
        .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
    command.args(["run", "-n", "2", "hello.py", "--lr", "1"]).current_dir(folder.path());
    let output = command.stdin(Stdio::null()).env_remove("ANTIPHON_PYTHON").output().unwrap();
    assert_eq!(sorted(&output.stdout), ["[0] 0 --lr 1", "[1] 1 --lr 1"], "{output:?}");
}

/// The options of one of two machines with two ranks each.
fn on_machine(rank: &str) -> Vec<&str> {
    let shared =
        ["-n", "2", "--nnodes", "2", "--master-addr", "::1", "--master-port", "29500", "--node-rank"];
    [&shared[..], &[rank]].concat()
}

#[test]
fn machines_share_a_world() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $ROLE_RANK/$ROLE_WORLD_SIZE \
                  $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $ANTIPHON_SECRET";
    for (machine, expected) in [
        ("0", ["[0] 0/4 0/2 0/4 0/2 ::1 29500 word", "[1] 1/4 1/2 1/4 0/2 ::1 29500 word"]),
        ("1", ["[2] 2/4 0/2 2/4 1/2 ::1 29500 word", "[3] 3/4 1/2 3/4 1/2 ::1 29500 word"]),
    ] {
        let output = run(&on_machine(machine), script).env("ANTIPHON_SECRET", "word").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(sorted(&output.stdout), expected);
    }
    let output = run(&on_machine("1"), "exit $RANK").env("ANTIPHON_SECRET", "word").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let failed = if output.status.code() == Some(2) { 2 } else { 3 };
    assert_eq!(output.status.code(), Some(failed), "{said}");
    assert!(
        said.contains(&format!("rank {failed} failed first")) && said.contains("  rank 2: pid"),
        "{said}"
    );
}

#[test]
fn the_secret_of_machines_may_stand_in_a_file() {
    let folder = std::env::temp_dir().join(format!("antiphon-secret-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let (file, empty) = (folder.join("secret"), folder.join("empty"));
    fs::write(&file, "of the file\n").unwrap();
    fs::write(&empty, "\n").unwrap();
    let with = |file: &std::path::Path| {
        let options = [on_machine("0"), vec!["--secret-file", file.to_str().unwrap()]].concat();
        run(&options, "echo $ANTIPHON_SECRET").env("ANTIPHON_SECRET", "of the variable").output().unwrap()
    };
    let found = with(&file);
    let refused = [with(&empty), with(&folder.join("none"))];
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(sorted(&found.stdout), ["[0] of the file", "[1] of the file"]);
    for output in refused {
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(folder.to_str().unwrap()), "{output:?}");
    }
}

#[test]
fn what_several_machines_lack_is_named() {
    let two = ["-n", "1", "--nnodes", "2"];
    let cases: [(&[&str], &str); 4] = [
        (&["--node-rank", "2"], "--node-rank 2 is not below --nnodes 2"),
        (&["--master-port", "29500"], "--master-addr"),
        (&["--master-addr", "host"], "--master-port"),
        (&["--master-addr", "host", "--master-port", "29500"], "--secret-file, or set ANTIPHON_SECRET"),
    ];
    for (options, said) in cases {
        let output =
            run(&[&two[..], options].concat(), "true").env_remove("ANTIPHON_SECRET").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(said), "{output:?}");
    }
}
