//! The outcome of a launch.

use std::fmt::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use signal_hook::low_level::signal_name;

/// The exit code of a launch that ran out of time: that of the command `timeout`.
const TIMED_OUT: u8 = 124;

/// How a rank's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It returned or called exit with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl End {
    /// Whether this is an exit with code 0.
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }

    /// The code that a shell shows for it: the exit code, or 128 and the signal's number.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Code(code) => u8::try_from(code).unwrap_or(1),
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        }
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", SignalName(signal)),
        }
    }
}

/// A signal by its name, or by its number where it has none.
struct SignalName(i32);

impl fmt::Display for SignalName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match signal_name(self.0) {
            Some(name) => f.write_str(name),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// How one rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankReport {
    /// The rank, as the world numbers it.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub end: End,
    /// When it ended, counted from the start of the launch.
    pub after: Duration,
    /// The last signal that the launcher had sent it by then, its own or one passed on.
    pub sent: Option<i32>,
    /// Whether a signal such as SIGSTOP held it when another rank failed.
    pub stopped: bool,
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stopped = if self.stopped { "stopped when another rank failed, " } else { "" };
        write!(f, "pid {}, {stopped}{} after {:.3} s", self.pid, self.end, self.after.as_secs_f64())?;
        match self.sent {
            Some(signal) => write!(f, " (the launcher had sent {})", SignalName(signal)),
            None => Ok(()),
        }
    }
}

/// How a launch ended, once every rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// One report for each rank, in rank order.
    pub ranks: Vec<RankReport>,
    /// The rank that failed before all others, in the order in which the processes ended. If the first of them exited by
    /// itself while a signal held another rank stopped, it is that one: its peers give up because of it.
    pub first_failure: Option<usize>,
    /// The time limit, if it ended the launch.
    pub timed_out: Option<Duration>,
    /// Why some of what the ranks wrote could not be handed on, if it could not.
    pub unwritten: Option<String>,
}

impl Outcome {
    /// Whether every rank exited with code 0 within the time, and all that they wrote was handed on.
    pub fn success(&self) -> bool {
        self.first_failure.is_none() && self.timed_out.is_none() && self.unwritten.is_none()
    }

    /// The exit code for the whole: 0, that of the rank that failed first (128 and the number for a signal),
    /// 124 when the time ran out before any failed, or 1 if output was lost.
    pub fn exit_code(&self) -> u8 {
        match (self.timed_out, self.first_failure) {
            (Some(_), _) => TIMED_OUT,
            (None, Some(rank)) => self.of(rank).end.exit_code(),
            (None, None) => u8::from(self.unwritten.is_some()),
        }
    }

    /// The report of a rank. The first that there is may have another number than 0 where there are several nodes.
    fn of(&self, rank: usize) -> &RankReport {
        &self.ranks[rank - self.ranks[0].rank]
    }

    /// One line for each rank and, last, the rank that failed first; empty after a success.
    pub fn report(&self) -> String {
        if self.success() {
            return String::new();
        }
        let mut text = String::new();
        for report in &self.ranks {
            let _ = writeln!(text, "  rank {}: {report}", report.rank); // a String takes all
        }
        let _ = match (self.timed_out, self.first_failure) {
            (Some(limit), _) => writeln!(text, "timed out after {:.3} s", limit.as_secs_f64()),
            (None, Some(rank)) => {
                writeln!(text, "rank {rank} failed first: {}{}", self.of(rank), self.left_before(rank))
            }
            (None, None) => Ok(()),
        };
        if let Some(why) = &self.unwritten {
            let _ = writeln!(text, "what the ranks wrote could not be handed on: {why}");
        }
        text
    }

    /// Ranks that had exited with code 0 before this one failed: it may have failed because they left, which only they
    /// know.
    fn left_before(&self, failed: usize) -> String {
        const SHOWN: usize = 4;
        let first = self.of(failed);
        let before =
            |report: &&RankReport| report.end.success() && !first.stopped && report.after <= first.after;
        let mut left: Vec<&RankReport> = self.ranks.iter().filter(before).collect();
        left.sort_by_key(|report| report.after);
        let Some(earliest) = left.first() else { return String::new() };
        let mut names: Vec<String> = left.iter().take(SHOWN).map(|report| report.rank.to_string()).collect();
        if left.len() > SHOWN {
            names.push(format!("{} more", left.len() - SHOWN));
        }
        let (names, after) = (names.join(", "), earliest.after.as_secs_f64());
        let ranks = if left.len() == 1 { "rank" } else { "ranks" };
        format!("; before it, {ranks} {names} left with exit code 0 (the first after {after:.3} s)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, end: End, sent: Option<i32>) -> RankReport {
        let after = Duration::from_millis(1234);
        RankReport { rank, pid: 100 + rank as u32, end, after, sent, stopped: false }
    }

    #[test]
    fn the_report_ends_with_the_rank_that_failed_first() {
        let ranks = vec![rank(0, End::Code(1), Some(15)), rank(1, End::Signal(9), None)];
        let outcome = Outcome { ranks, first_failure: Some(1), timed_out: None, unwritten: None };
        assert_eq!(outcome.exit_code(), 137);
        assert_eq!(
            outcome.report(),
            "  rank 0: pid 100, exit code 1 after 1.234 s (the launcher had sent SIGTERM)\n  \
               rank 1: pid 101, killed by SIGKILL after 1.234 s\n\
             rank 1 failed first: pid 101, killed by SIGKILL after 1.234 s\n"
        );
    }

    #[test]
    fn success_says_nothing_and_a_time_limit_says_so() {
        let ranks = vec![rank(0, End::Code(0), None)];
        let mut outcome = Outcome { ranks, first_failure: None, timed_out: None, unwritten: None };
        assert_eq!((outcome.exit_code(), outcome.report().as_str()), (0, ""));
        outcome.timed_out = Some(Duration::from_millis(1500));
        assert_eq!(outcome.exit_code(), 124);
        assert!(outcome.report().ends_with("timed out after 1.500 s\n"));
    }

    #[test]
    fn output_that_was_lost_is_a_failure() {
        let ranks = vec![rank(0, End::Code(0), None)];
        let unwritten = Some("No space left on device (os error 28)".into());
        let outcome = Outcome { ranks, first_failure: None, timed_out: None, unwritten };
        assert_eq!((outcome.success(), outcome.exit_code()), (false, 1));
        let last = "what the ranks wrote could not be handed on: No space left on device (os error 28)\n";
        assert!(outcome.report().ends_with(last), "{}", outcome.report());
    }

    #[test]
    fn ranks_that_had_left_before_the_first_failure_are_named() {
        let mut ranks: Vec<_> = (0..7).map(|at| rank(at, End::Code(0), None)).collect();
        ranks[2].end = End::Code(1);
        ranks[5].after = Duration::from_millis(1000);
        ranks[6].after = Duration::from_millis(9000);
        let mut outcome = Outcome { ranks, first_failure: Some(2), timed_out: None, unwritten: None };
        let said = "rank 2 failed first: pid 102, exit code 1 after 1.234 s; before it, ranks 5, 0, 1, 3, 1 more left with \
                    exit code 0 (the first after 1.000 s)\n";
        assert!(outcome.report().ends_with(said), "{}", outcome.report());
        outcome.ranks[2].stopped = true;
        let said =
            "rank 2 failed first: pid 102, stopped when another rank failed, exit code 1 after 1.234 s\n";
        assert!(outcome.report().ends_with(said), "{}", outcome.report());
    }

    #[test]
    fn signals_without_a_name_show_their_number() {
        assert_eq!(End::Signal(40).to_string(), "killed by signal 40");
        assert_eq!(End::Signal(40).exit_code(), 168);
    }
}
