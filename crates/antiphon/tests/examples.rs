//! The examples, as a new user runs them: as threads, and as processes.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

/// `cargo test` builds the examples beside the tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().unwrap().parent().unwrap();
    let path = target.join("examples").join(name);
    assert!(
        path.exists(),
        "{} is missing: run the tests with `cargo test`, which builds examples",
        path.display()
    );
    path
}

fn runs_as_threads_and_processes(name: &str) {
    let alone = Command::new(example(name)).env_remove("RANK").output().unwrap();
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    assert_eq!(alone.stdout.iter().filter(|&&b| b == b'\n').count(), 4, "a line from each of 4 threads");

    let world_size = 3;
    let start = |rank: usize| {
        Command::new(example(name))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("MASTER_PORT", format!("{name} {}", std::process::id()))
            .env("ANTIPHON_TIMEOUT", "30")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..world_size).map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.starts_with(&format!("rank {rank} of 3")), "{said}");
    }
}

#[test]
fn all_reduce() {
    runs_as_threads_and_processes("all_reduce");
}

#[test]
fn expert_parallel() {
    runs_as_threads_and_processes("expert_parallel");
}

#[test]
fn fused_all_reduce() {
    runs_as_threads_and_processes("fused_all_reduce");
}

#[test]
fn ring_send_recv() {
    runs_as_threads_and_processes("ring_send_recv");
}

#[test]
fn tensor_parallel_mlp() {
    runs_as_threads_and_processes("tensor_parallel_mlp");
}

#[test]
fn plan() {
    runs_as_threads_and_processes("plan");
}

#[test]
fn plan_collection() {
    runs_as_threads_and_processes("plan_collection");
}

/// It needs GPUs, and says so where there are none.
#[test]
fn session() {
    let output = Command::new(example("session")).env_remove("RANK").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout);
    let is_sum = |line: &str| line.starts_with("rank ") && line.contains("after 5 steps each activation is");
    assert!(said == "skipped: there is no GPU\n" || said.lines().all(is_sum), "{said}");
}
