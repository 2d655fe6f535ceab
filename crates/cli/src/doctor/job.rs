//! `antiphon doctor --job`: what the ranks of a running job wait for.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use antiphon::fabric::job::{Job, JobCommunicator, JobRank};

use crate::{ExitStatus, FAILURE, SUCCESS};

/// Shows the job of a process.
pub(super) fn execute(process: u32, as_json: bool) -> ExitStatus {
    let job = match Job::of_process(process) {
        Ok(job) => job,
        Err(error) => {
            eprintln!("antiphon: {error}");
            return FAILURE;
        }
    };
    let text = match as_json {
        true => {
            serde_json::to_string_pretty(&job).expect("strings and numbers can be written as JSON") + "\n"
        }
        false => text(&job),
    };
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => SUCCESS,
        Err(_) => FAILURE,
    }
}

fn text(job: &Job) -> String {
    let mut text = format!("{}, ", count(job.processes.len(), "process", "processes"));
    let _ = writeln!(text, "{}", count(job.communicators.len(), "communicator", "communicators")); // a String takes all, here and below
    let (waiting, idle): (Vec<_>, Vec<_>) = job.communicators.iter().partition(|one| needs_a_look(one));
    for communicator in &waiting {
        write_communicator(&mut text, communicator);
    }
    if !idle.is_empty() {
        let _ = writeln!(text, "\nno rank waits in {}", count(idle.len(), "communicator", "communicators"));
    }
    text
}

/// Whether a rank waits, or a process does not run.
fn needs_a_look(communicator: &JobCommunicator) -> bool {
    communicator.has_waits() || communicator.ranks.iter().any(|rank| rank.activity.contains("stopped"))
}

fn write_communicator(text: &mut String, communicator: &JobCommunicator) {
    let kind = if communicator.is_group { "group" } else { "world" };
    let _ = writeln!(text, "\n{kind} of {}", count(communicator.world_size, "rank", "ranks"));
    for rank in &communicator.ranks {
        let _ = writeln!(text, "  {} {}", name(communicator, rank), doing(rank));
    }
    let seen = |rank: &usize| communicator.ranks.iter().any(|one| one.rank == *rank);
    let unseen: Vec<usize> = (0..communicator.world_size).filter(|rank| !seen(rank)).collect();
    if !unseen.is_empty() {
        let _ = writeln!(text, "  ranks {unseen:?} have left, or belong to another user");
    }
    let holding_up = communicator.holding_up();
    if !holding_up.is_empty() {
        let _ = writeln!(text, "  waited for, and not waiting themselves: ranks {holding_up:?}");
    }
}

fn name(communicator: &JobCommunicator, rank: &JobRank) -> String {
    match communicator.is_group {
        false => format!("rank {} (process {})", rank.rank, rank.process),
        true => format!("rank {} ({} of the world, process {})", rank.rank, rank.world_rank, rank.process),
    }
}

fn doing(rank: &JobRank) -> String {
    match &rank.wait {
        Some(wait) => {
            format!("waits in {} for ranks {:?}, since {:.1} s", wait.call, wait.missing, wait.seconds)
        }
        None if rank.activity.contains("stopped") => rank.activity.to_owned(),
        None if rank.activity.is_empty() => "does not wait here".to_owned(),
        None => format!("does not wait here: its process {}", rank.activity),
    }
}

fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use antiphon::fabric::job::JobWait;

    use super::*;

    fn rank(rank: usize, activity: &'static str, missing: Option<Vec<usize>>) -> JobRank {
        let wait = missing.map(|missing| JobWait {
            call: "all_reduce(3 × f64, sum)".into(),
            seconds: 12.34,
            missing,
        });
        JobRank { rank, world_rank: rank, process: 4711 + rank as u32, activity, wait }
    }

    #[test]
    fn a_job_is_shown_with_who_holds_it_up() {
        let ranks =
            vec![rank(0, "sleeps", Some(vec![1, 2])), rank(1, "is stopped", None), rank(2, "runs", None)];
        let communicators = vec![
            JobCommunicator { world_size: 4, is_group: false, ranks },
            JobCommunicator { world_size: 1, is_group: true, ranks: vec![rank(0, "runs", None)] },
        ];
        let job = Job { processes: vec![4711, 4712, 4713], communicators };
        assert_eq!(
            text(&job),
            "\
3 processes, 2 communicators

world of 4 ranks
  rank 0 (process 4711) waits in all_reduce(3 × f64, sum) for ranks [1, 2], since 12.3 s
  rank 1 (process 4712) is stopped
  rank 2 (process 4713) does not wait here: its process runs
  ranks [3] have left, or belong to another user
  waited for, and not waiting themselves: ranks [1, 2]

no rank waits in 1 communicator
"
        );
    }
}
