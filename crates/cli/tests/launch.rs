//! The library's launcher with real processes.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use antiphon_cli::launch::{End, Launch, LaunchError, MAX_LINE, Outcome, Stream};

/// A shell script on every rank.
fn shell(ranks: usize, script: &str) -> Launch {
    Launch { args: vec!["-c".into(), script.into()], ..Launch::new("/bin/sh", ranks) }
}

type Written = BTreeMap<(usize, bool), Vec<Vec<u8>>>;

/// Runs it and collects the lines, by rank and whether they went to standard error.
fn collect(launch: &Launch) -> (Outcome, Written) {
    let mut written = Written::new();
    let outcome = launch.run(|rank, stream, line| {
        written.entry((rank, stream == Stream::Stderr)).or_default().push(line.to_vec());
        Ok(())
    });
    (outcome.unwrap(), written)
}

fn text(written: &Written, rank: usize) -> String {
    String::from_utf8(written[&(rank, false)].concat()).unwrap()
}

#[test]
fn every_rank_gets_the_environment_of_torchrun() {
    let script = "echo $RANK $LOCAL_RANK $ROLE_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $ROLE_WORLD_SIZE \
                  $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_NAME $MASTER_ADDR; \
                  echo $MASTER_PORT $TORCHELASTIC_RUN_ID $ANTIPHON_SECRET; echo $OMP_NUM_THREADS";
    let (outcome, written) = collect(&shell(3, script));
    assert!(outcome.success(), "{}", outcome.report());
    let texts: Vec<String> = (0..3).map(|rank| text(&written, rank)).collect();
    let shared: Vec<Vec<&str>> = texts.iter().map(|text| text.lines().collect()).collect();
    for (rank, lines) in shared.iter().enumerate() {
        assert_eq!(lines[0], format!("{rank} {rank} {rank} 3 3 3 0 1 default 127.0.0.1"));
        assert_eq!(lines[1], shared[0][1], "all ranks share port, id and secret");
        assert!(!lines[2].is_empty());
    }
    let [port, run, secret] = shared[0][1].split(' ').collect::<Vec<_>>()[..] else { panic!("{texts:?}") };
    assert!(port.parse::<u16>().unwrap() > 0);
    assert_eq!((run.len(), secret.len()), (32, 64));
}

#[test]
fn secrets_are_fresh_and_own_variables_win() {
    let script = "echo $ANTIPHON_SECRET; echo $MASTER_PORT; echo $ROLE_NAME";
    let mut launch = shell(1, script);
    launch.port = Some(29_500);
    launch.env.push(("ROLE_NAME".into(), "bench".into()));
    let secrets = [0, 1].map(|_| {
        let text = text(&collect(&launch).1, 0);
        let (secret, rest) = text.split_once('\n').unwrap();
        assert_eq!(rest, "29500\nbench\n");
        secret.to_owned()
    });
    assert_ne!(secrets[0], secrets[1]);
}

#[test]
fn bytes_pass_and_a_last_line_without_end_is_not_lost() {
    let (_, written) = collect(&shell(1, r"printf 'one\n\377\200\nlast'; printf 'oops' >&2"));
    assert_eq!(written[&(0, false)], [&b"one\n"[..], b"\xff\x80\n", b"last"]);
    assert_eq!(written[&(0, true)], [b"oops"]);
}

#[test]
fn much_output_on_both_streams_arrives_whole() {
    const BYTES: usize = 10 << 20;
    let script =
        format!("yes 'a line of text' | head -c {BYTES} & yes 'another one' | head -c {BYTES} >&2; wait");
    let (outcome, written) = collect(&shell(2, &script));
    assert!(outcome.success());
    assert_eq!(written.len(), 4);
    for lines in written.values() {
        assert_eq!(lines.iter().map(Vec::len).sum::<usize>(), BYTES);
        assert!(lines[..lines.len() - 1].iter().all(|line| *line == lines[0]));
    }
}

#[test]
fn an_endless_line_comes_in_pieces() {
    let (_, written) = collect(&shell(1, "head -c 3500000 /dev/zero"));
    let pieces = &written[&(0, false)];
    assert_eq!(pieces.iter().map(Vec::len).sum::<usize>(), 3_500_000);
    assert!(pieces.len() > 1 && pieces.iter().all(|piece| piece.len() <= MAX_LINE + (64 << 10)));
}

#[test]
fn an_output_that_fails_breaks_the_pipe() {
    let launch = Launch { grace: Duration::from_secs(60), ..shell(2, "exec yes") };
    let outcome = launch.run(|_, _, _| Err(io::ErrorKind::BrokenPipe.into())).unwrap();
    for report in &outcome.ranks {
        assert_eq!(report.end, End::Signal(13), "{report}");
    }
}

#[test]
fn a_program_left_behind_does_not_hold_the_launch() {
    let started = Instant::now();
    let (outcome, written) = collect(&shell(2, "sleep 30 & echo done; echo $!"));
    assert!(outcome.success());
    assert!(started.elapsed() < Duration::from_secs(15));
    for rank in 0..2 {
        let text = text(&written, rank);
        let left = text.strip_prefix("done\n").unwrap().trim();
        std::process::Command::new("kill").arg(left).status().unwrap();
    }
}

#[test]
fn the_program_of_a_killed_script_is_ended_too() {
    // The shell waits for its child instead of becoming it.
    let (outcome, written) = collect(&shell(1, "sleep 60 & echo $!; kill -9 $$; wait"));
    assert_eq!(outcome.ranks[0].end, End::Signal(9));
    let child = text(&written, 0).trim().to_owned();
    let state = || std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !(state().is_empty() || state().contains(" Z ")) {
        assert!(Instant::now() < deadline, "the script's program outlived it");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_killed_rank_is_the_first_failure() {
    let script = "if [ $RANK = 2 ]; then sleep 0.1; kill -9 $$; fi; \
                  trap 'exit 3' TERM; sleep 0.4; exit 1";
    let (outcome, _) = collect(&shell(4, script));
    assert_eq!(outcome.first_failure, Some(2));
    assert_eq!(outcome.exit_code(), 137);
    for report in &outcome.ranks {
        let killed = report.rank == 2;
        assert_eq!(report.end, if killed { End::Signal(9) } else { End::Code(1) }, "{report}");
        assert!(report.after >= Duration::from_millis(100) && report.sent.is_none());
    }
    let last = outcome.report().lines().last().unwrap().to_owned();
    assert!(last.starts_with(&format!(
        "rank 2 failed first: pid {}, killed by SIGKILL after 0.",
        outcome.ranks[2].pid
    )));
}

#[test]
fn grace_then_sigterm_then_sigkill() {
    let script = "case $RANK in 0) exit 5;; 1) sleep 60;; 2) trap '' TERM; sleep 60; sleep 60;; esac";
    let launch = Launch { grace: Duration::from_millis(300), ..shell(3, script) };
    let (outcome, _) = collect(&launch);
    assert_eq!((outcome.first_failure, outcome.exit_code()), (Some(0), 5));
    let [_, polite, stubborn] = &outcome.ranks[..] else { panic!("three ranks") };
    assert_eq!((polite.end, polite.sent), (End::Signal(15), Some(15)));
    assert_eq!((stubborn.end, stubborn.sent), (End::Signal(9), Some(9)));
    assert!(polite.after >= Duration::from_millis(300) && stubborn.after >= Duration::from_millis(600));
    assert!(stubborn.after < Duration::from_secs(20));
}

#[test]
fn the_time_limit_ends_all() {
    let launch = Launch {
        timeout: Some(Duration::from_millis(200)),
        grace: Duration::from_millis(200),
        ..shell(2, "sleep 60")
    };
    let (outcome, _) = collect(&launch);
    assert_eq!(outcome.exit_code(), 124);
    assert_eq!(outcome.timed_out, launch.timeout);
    assert!(outcome.report().ends_with("timed out after 0.200 s\n"), "{}", outcome.report());
}

#[test]
fn ranks_bind_to_their_share() {
    let launch = Launch { bind: true, ..shell(3, "grep Cpus_allowed_list /proc/self/status") };
    let (outcome, written) = collect(&launch);
    assert!(outcome.success());
    let allowed = std::fs::read_to_string("/proc/self/status").unwrap();
    let cores = |status: &str| {
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        antiphon_cli::machine::cpu_list(list).unwrap()
    };
    let allowed = cores(&allowed);
    let owned: Vec<Vec<usize>> = (0..3).map(|rank| cores(&text(&written, rank))).collect();
    let least = allowed.len() / 3;
    for own in &owned {
        assert!(own.iter().all(|core| allowed.contains(core)), "{own:?} of {allowed:?}");
        assert!((least.max(1)..=least + 1).contains(&own.len()), "{own:?} of {allowed:?}");
    }
    let mut all = owned.concat();
    all.sort();
    all.dedup();
    assert_eq!(all, allowed, "every core has a rank");
}

#[test]
fn what_cannot_start_is_named() {
    let error = |launch: Launch| launch.run(|_, _, _| Ok(())).unwrap_err();
    let missing = error(Launch::new("no-such-program", 2));
    assert_eq!(missing.to_string(), r#"cannot start "no-such-program": not found in PATH"#);
    assert_eq!(missing.exit_code(), 127);
    let missing = error(Launch::new("/no/such/program", 2));
    assert_eq!(missing.to_string(), r#"cannot start "/no/such/program": no such file"#);
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let refused = error(Launch::new(&script, 1));
    assert!(matches!(refused, LaunchError::NotExecutable { .. }), "{refused}");
    assert_eq!(refused.exit_code(), 126);
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert!(error(Launch::new(&script, 1)).to_string().contains("the interpreter or loader"));
    for ranks in [0, 4097] {
        let refused = error(shell(ranks, "exit"));
        assert_eq!(refused.to_string(), format!("{ranks} ranks: must be from 1 to 4096"));
        assert_eq!(refused.exit_code(), 2);
    }
}

#[test]
fn launches_side_by_side_do_not_mix() {
    let totals = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for code in 1..5 {
            let totals = &totals;
            scope.spawn(move || {
                let (outcome, written) = collect(&shell(2, &format!("echo {code}; sleep 0.1; exit {code}")));
                totals.lock().unwrap().push((outcome.exit_code(), text(&written, 1)));
            });
        }
    });
    let mut totals = totals.into_inner().unwrap();
    totals.sort();
    let expected: Vec<(u8, String)> = (1..5).map(|code| (code, format!("{code}\n"))).collect();
    assert_eq!(totals, expected);
}

#[test]
fn a_panic_in_the_output_ends_the_ranks_and_goes_on() {
    let panicked = std::panic::catch_unwind(|| {
        let launch = Launch { grace: Duration::from_millis(100), ..shell(2, "while echo x; do :; done") };
        let _ = launch.run(|_, _, _| panic!("the output's own"));
    });
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"the output's own"));
}
