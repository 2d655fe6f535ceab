//! The processes of the ranks.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getpid, getppid, getrlimit,
    kill_process_group, pidfd_open, set_parent_process_death_signal, setrlimit, setsid, waitid,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::environment::Environment;
use super::placement;
use super::pump::Source;
use super::{Launch, LaunchError, RankReport, Stream};

/// Open files that the launcher needs beside those for each rank.
const OTHER_FILES: u64 = 64;
/// Two pipes and a pidfd.
const FILES_PER_RANK: u64 = 3;

/// The process of one rank. It leads a session and process group of its own, of the same number.
struct Rank {
    child: Child,
    pid: Pid,
    /// Becomes readable when the process ends.
    end: OwnedFd,
    sent: Option<Signal>,
    stopped: bool,
    ended: Option<RankReport>,
}

/// The processes of all ranks. Those that still run when this is dropped are killed.
pub(super) struct Children {
    ranks: Vec<Rank>,
    /// The number of the first of them in the world.
    first: usize,
    /// Holds all ranks' ends, and tells them in the order in which they came: the launcher may look late, and peers of a rank
    /// that is gone end within microseconds.
    ends: OwnedFd,
}

impl Children {
    pub(super) fn start(launch: &Launch, environment: &Environment<'_>) -> Result<Self, LaunchError> {
        let files = allow_files(launch.ranks);
        let cores = launch.bind.then(|| placement::shares(launch.ranks));
        let cores = cores.transpose().map_err(LaunchError::Cores)?;
        let failed = |rank| {
            move |source: Errno| LaunchError::Spawn { rank, ranks: launch.ranks, source: source.into() }
        };
        let ends = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed(0))?;
        let mut children = Self { ranks: Vec::with_capacity(launch.ranks), first: launch.first_rank(), ends };
        for rank in 0..launch.ranks {
            let mut command = Command::new(&launch.program);
            command.args(&launch.args);
            environment.apply(&mut command, rank);
            redirect(&mut command, launch, rank);
            on_start(&mut command, cores.as_ref().map(|shares| shares[rank]), files);
            let mut child = command.spawn().map_err(|source| explain(launch, rank, source))?;
            let pid = Pid::from_child(&child);
            let end = watch(&children.ends, pid, rank).map_err(|source| {
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = child.wait();
                failed(rank)(source)
            })?;
            children.ranks.push(Rank { child, pid, end, sent: None, stopped: false, ended: None });
        }
        Ok(children)
    }

    /// The reading ends of the ranks' outputs; none where they were not captured.
    pub(super) fn take_outputs(&mut self) -> Vec<Source> {
        let mut sources = Vec::with_capacity(2 * self.ranks.len());
        for (rank, Rank { child, .. }) in self.ranks.iter_mut().enumerate() {
            let stdout = child.stdout.take().map(|pipe| (Stream::Stdout, OwnedFd::from(pipe)));
            let stderr = child.stderr.take().map(|pipe| (Stream::Stderr, OwnedFd::from(pipe)));
            sources
                .extend([stdout, stderr].into_iter().flatten().map(|(s, pipe)| Source::new(rank, s, pipe)));
        }
        sources
    }

    pub(super) fn all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    /// Sends `signal` to every rank that still runs, and to the programs that it started.
    pub(super) fn signal(&mut self, signal: Signal) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.sent = Some(signal);
            let _ = kill_process_group(rank.pid, signal); // it may have ended meanwhile
        }
    }

    /// Collects the ranks that have ended since the last call, in the order in which they ended.
    pub(super) fn reap(&mut self, started: Instant) -> Result<Vec<RankReport>, LaunchError> {
        let mut events = Vec::with_capacity(self.ranks.len());
        let now = Timespec::default();
        retry_on_intr(|| epoll::wait(&self.ends, spare_capacity(&mut events), Some(&now)))
            .map_err(|error| self.ranks[0].lost(0, error))?;
        let mut ended = Vec::new();
        for rank in events.iter().map(|event: &epoll::Event| event.data.u64() as usize) {
            let process = &mut self.ranks[rank];
            if let Some(report) =
                process.reap(self.first + rank, started).map_err(|error| process.lost(rank, error))?
            {
                ended.push(report);
                // Closing does not take it out while a process that another thread has just forked holds a copy.
                epoll::delete(&self.ends, &process.end).map_err(|error| process.lost(rank, error))?;
            }
        }
        Ok(ended)
    }

    /// Notes which ranks a signal holds stopped, and returns the first of them.
    pub(super) fn note_stopped(&mut self) -> Option<usize> {
        let running = self.ranks.iter_mut().enumerate().filter(|(_, rank)| rank.ended.is_none());
        let mut stopped = running.filter_map(|(number, rank)| {
            rank.stopped = is_stopped(rank.pid);
            rank.stopped.then_some(self.first + number)
        });
        let first = stopped.next();
        stopped.for_each(drop);
        first
    }

    /// The reports of the ranks that have ended.
    pub(super) fn take_reports(&mut self) -> Vec<RankReport> {
        self.ranks.drain(..).filter_map(|rank| rank.ended).collect()
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            let _ = kill_process_group(rank.pid, Signal::KILL);
            let _ = rank.child.wait();
        }
    }
}

/// Adds the end of a process to those that are reported.
fn watch(ends: &OwnedFd, pid: Pid, rank: usize) -> Result<OwnedFd, Errno> {
    let end = pidfd_open(pid, PidfdFlags::empty())?;
    epoll::add(ends, &end, EventData::new_u64(rank as u64), EventFlags::IN)?;
    Ok(end)
}

impl Rank {
    /// The error of a rank whose state cannot be read.
    fn lost(&self, rank: usize, source: impl Into<io::Error>) -> LaunchError {
        LaunchError::Wait { rank, pid: self.child.id(), source: source.into() }
    }

    fn reap(&mut self, rank: usize, started: Instant) -> io::Result<Option<RankReport>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Some(status) = waitid(WaitId::Pid(self.pid), look)? else { return Ok(None) };
        if status.exit_status() != Some(0) {
            // What a failed rank left running, such as the program of a killed wrapper script. Not yet
            // collected, the rank keeps its number, so that no other group can have it.
            let _ = kill_process_group(self.pid, Signal::TERM);
        }
        let end = self.child.wait()?.into();
        let (pid, sent, stopped) = (self.child.id(), self.sent.map(Signal::as_raw), self.stopped);
        self.ended = Some(RankReport { rank, pid, end, after: started.elapsed(), sent, stopped });
        Ok(self.ended)
    }
}

/// Whether a signal such as SIGSTOP holds the process; one that a debugger holds is not meant.
fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    // The state stands behind the name, which may hold anything.
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

fn redirect(command: &mut Command, launch: &Launch, rank: usize) {
    if !(launch.stdin && launch.first_rank() + rank == 0) {
        command.stdin(Stdio::null());
    }
    if launch.capture {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
}

/// Makes the process, before it becomes the program, end with the launcher, lead its own session, run on
/// `cores`, and have `files` as its limit of open files.
fn on_start(command: &mut Command, cores: Option<CpuSet>, files: Rlimit) {
    let launcher = getpid();
    let prepare = move || {
        setsid()?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(launcher) {
            return Err(io::ErrorKind::BrokenPipe.into()); // the launcher died before the line above
        }
        if let Some(cores) = &cores {
            sched_setaffinity(None, cores)?;
        }
        setrlimit(Resource::Nofile, files)?;
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed. `prepare` makes plain system calls
    // through rustix, allocates nothing (an `io::Error` of a code or a kind holds no heap) and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Raises the soft limit of open files to what `ranks` ranks need, as far as the hard limit lets it. Returns
/// the limit that the ranks shall have: the one from before any launch.
fn allow_files(ranks: usize) -> Rlimit {
    static BEFORE: OnceLock<Rlimit> = OnceLock::new();
    let now = getrlimit(Resource::Nofile);
    let before = *BEFORE.get_or_init(|| now);
    let needed = FILES_PER_RANK * ranks as u64 + OTHER_FILES;
    if now.current.is_some_and(|current| current < needed) {
        let raised = now.maximum.map_or(needed, |maximum| maximum.min(needed));
        // Should this fail, the first rank beyond the limit cannot be started, and that error says so.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum: now.maximum });
    }
    before
}

fn explain(launch: &Launch, rank: usize, source: io::Error) -> LaunchError {
    let program = launch.program.clone();
    match source.kind() {
        io::ErrorKind::NotFound => LaunchError::NotFound { reason: missing(&program), program },
        io::ErrorKind::PermissionDenied => LaunchError::NotExecutable { program, source },
        _ if source.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => {
            LaunchError::NotExecutable { program, source }
        }
        _ => LaunchError::Spawn { rank, ranks: launch.ranks, source },
    }
}

/// The operating system reports a missing interpreter in the same words as a missing program.
fn missing(program: &OsString) -> &'static str {
    let path = Path::new(program);
    if path.components().count() < 2 && !program.as_encoded_bytes().contains(&b'/') {
        "not found in PATH"
    } else if path.exists() {
        "the interpreter or loader that it names does not exist"
    } else {
        "no such file"
    }
}
