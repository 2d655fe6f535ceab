//! What the ranks of a running job wait for, seen from outside. Nothing is sent to the ranks, and they need not be running.
//!
//! Each process with a communicator keeps a *board*: a page of anonymous memory. Every rank writes the call in which it waits
//! there, about every millisecond of a wait. A program of the same user reads the board through `/proc`.

mod board;
mod processes;

use std::collections::{BTreeMap, BTreeSet};

use antiphon_device::host::process;
use serde::Serialize;

pub(crate) use board::Entry;
use board::Record;
use processes::Process;

/// The communicators of a job, and what each of their ranks does.
#[derive(Debug, Clone, Serialize)]
pub struct Job {
    /// The processes that have a communicator, by their ids here, ascending.
    pub processes: Vec<u32>,
    /// The communicators: worlds before groups.
    pub communicators: Vec<JobCommunicator>,
}

/// A communicator of a job.
#[derive(Debug, Clone, Serialize)]
pub struct JobCommunicator {
    /// How many ranks it has.
    pub world_size: usize,
    /// Whether it was split off a world.
    pub is_group: bool,
    /// The ranks on this machine that this user may see, ascending.
    pub ranks: Vec<JobRank>,
}

/// A rank of a communicator of a job.
#[derive(Debug, Clone, Serialize)]
pub struct JobRank {
    /// Its number in the communicator.
    pub rank: usize,
    /// Its number in the world.
    pub world_rank: usize,
    /// The id of its process.
    pub process: u32,
    /// What the process does: `runs`, `sleeps`, `is stopped`, …; empty if that is not known.
    pub activity: &'static str,
    /// The rank's wait on the host, if it waits.
    pub wait: Option<JobWait>,
}

/// A wait of a rank.
#[derive(Debug, Clone, Serialize)]
pub struct JobWait {
    /// The call: `all_reduce(3 × f64, sum)`.
    pub call: String,
    /// How long it has waited.
    pub seconds: f64,
    /// For which ranks of the communicator. A rank above 1023 is not among them.
    pub missing: Vec<usize>,
}

/// Why a job cannot be seen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// There is no such process.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// Nothing of the process, or of those that it started, is a rank.
    #[error(
        "neither process {process} nor the {descendants} that it started have a communicator, or they belong to another user"
    )]
    NoCommunicator {
        /// The process.
        process: u32,
        /// How many processes it has started, and those, and so on.
        descendants: usize,
    },
}

impl Job {
    /// The job that a process belongs to: of a rank, or of what started the ranks, such as `antiphon run` or torchrun. The job
    /// has all processes of this machine that share a communicator with those that the process has started, or is.
    ///
    /// # Errors
    /// [`JobError`].
    pub fn of_process(id: u32) -> Result<Self, JobError> {
        let family = processes::family(id).ok_or(JobError::NoProcess(id))?;
        let all = processes::with_boards();
        let of_family = all.iter().filter(|process| family.contains(&process.id));
        let known: BTreeSet<u64> = of_family.flat_map(Process::communicators).collect();
        if known.is_empty() {
            return Err(JobError::NoCommunicator { process: id, descendants: family.len() - 1 });
        }
        Ok(Self::of(&all, &known))
    }

    fn of(all: &[Process], known: &BTreeSet<u64>) -> Self {
        let mut processes = BTreeSet::new();
        let mut communicators: BTreeMap<u64, JobCommunicator> = BTreeMap::new();
        for process in all {
            for record in process.records.iter().filter(|record| known.contains(&record.communicator)) {
                processes.insert(process.id);
                let communicator =
                    communicators.entry(record.communicator).or_insert_with(|| JobCommunicator {
                        world_size: record.world_size,
                        is_group: record.is_group,
                        ranks: Vec::new(),
                    });
                communicator.ranks.push(JobRank::new(process.id, record));
            }
        }
        let mut communicators: Vec<JobCommunicator> = communicators.into_values().collect();
        communicators.iter_mut().for_each(|one| one.ranks.sort_by_key(|rank| rank.rank));
        communicators.sort_by_key(|one| (one.is_group, one.ranks.first().map(|rank| rank.world_rank)));
        Self { processes: processes.into_iter().collect(), communicators }
    }
}

impl JobCommunicator {
    /// Whether a rank waits.
    pub fn has_waits(&self) -> bool {
        self.ranks.iter().any(|rank| rank.wait.is_some())
    }

    /// The ranks that others wait for and that do not wait themselves: where to look for the cause.
    pub fn holding_up(&self) -> Vec<usize> {
        let waits = |rank: &usize| self.ranks.iter().any(|one| one.rank == *rank && one.wait.is_some());
        let missing: BTreeSet<usize> = self
            .ranks
            .iter()
            .filter_map(|rank| rank.wait.as_ref())
            .flat_map(|wait| wait.missing.clone())
            .collect();
        missing.into_iter().filter(|rank| !waits(rank)).collect()
    }
}

impl JobRank {
    fn new(process: u32, record: &Record) -> Self {
        let activity = process::activity(process).unwrap_or("");
        // A stopped rank does not look around, and so its last wait is not current.
        let wait = record.wait().filter(|_| !activity.contains("stopped"));
        Self { rank: record.rank, world_rank: record.world_rank, process, activity, wait }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::LocalWorld;

    #[test]
    fn the_job_of_this_process_shows_who_waits_for_whom() {
        LocalWorld::run_with(3, Duration::from_secs(20), |comm| {
            let group = comm.split(Some(0), -(comm.rank() as i64)).unwrap().unwrap();
            match comm.rank() {
                0 => {
                    let start = Instant::now();
                    // Those of this world: other tests of this process have theirs.
                    let waiting = loop {
                        let job = Job::of_process(std::process::id()).unwrap();
                        assert!(job.processes.contains(&std::process::id()));
                        let is_it = |one: &JobCommunicator| one.holding_up() == [0] && !one.is_group;
                        let waits_at_barrier =
                            |rank: &&JobRank| rank.wait.as_ref().is_some_and(|wait| wait.call == "barrier");
                        let found = job.communicators.into_iter().find(|one| {
                            one.world_size == 3
                                && one.ranks.len() == 3
                                && is_it(one)
                                && one.ranks.iter().filter(waits_at_barrier).count() == 2
                        });
                        if let Some(found) = found {
                            break found;
                        }
                        assert!(start.elapsed() < Duration::from_secs(10), "the ranks do not wait");
                    };
                    assert_eq!(waiting.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1, 2]);
                    for rank in &waiting.ranks[1..] {
                        assert!(rank.wait.as_ref().unwrap().missing.contains(&0));
                    }
                    comm.barrier().unwrap();
                }
                _ => comm.barrier().unwrap(),
            }
            drop(group);
        });
    }

    #[test]
    fn what_is_no_job_is_refused() {
        // No process has that id: they end at 2²².
        assert_eq!(Job::of_process(u32::MAX).unwrap_err(), JobError::NoProcess(u32::MAX));
        let mut idle = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let error = Job::of_process(idle.id()).unwrap_err();
        idle.kill().unwrap();
        idle.wait().unwrap();
        assert_eq!(error, JobError::NoCommunicator { process: idle.id(), descendants: 0 });
    }
}
