//! The processes of the ranks.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getpid, getppid, getrlimit, kill_process_group,
    set_parent_process_death_signal, setrlimit, setsid, waitid,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::environment::Environment;
use super::placement;
use super::pump::Source;
use super::{Launch, LaunchError, RankReport, Stream};

/// Open files that the launcher needs beside two pipes for each rank.
const OTHER_FILES: u64 = 64;

/// The process of one rank. It leads a session and process group of its own, of the same number.
struct Rank {
    child: Child,
    pid: Pid,
    sent: Option<Signal>,
    ended: Option<RankReport>,
}

/// The processes of all ranks. Those that still run when this is dropped are killed.
pub(super) struct Children(Vec<Rank>);

impl Children {
    pub(super) fn start(launch: &Launch, environment: &Environment<'_>) -> Result<Self, LaunchError> {
        let files = launch.capture.then(|| allow_files(launch.ranks));
        let cores = launch.bind.then(|| placement::shares(launch.ranks));
        let cores = cores.transpose().map_err(LaunchError::Cores)?;
        let mut children = Self(Vec::with_capacity(launch.ranks));
        for rank in 0..launch.ranks {
            let mut command = Command::new(&launch.program);
            command.args(&launch.args);
            environment.apply(&mut command, rank);
            redirect(&mut command, launch, rank);
            on_start(&mut command, cores.as_ref().map(|shares| shares[rank]), files);
            let child = command.spawn().map_err(|source| explain(launch, rank, source))?;
            let pid = Pid::from_child(&child);
            children.0.push(Rank { child, pid, sent: None, ended: None });
        }
        Ok(children)
    }

    /// The reading ends of the ranks' outputs; none where they were not captured.
    pub(super) fn take_outputs(&mut self) -> Vec<Source> {
        let mut sources = Vec::with_capacity(2 * self.0.len());
        for (rank, Rank { child, .. }) in self.0.iter_mut().enumerate() {
            let stdout = child.stdout.take().map(|pipe| (Stream::Stdout, OwnedFd::from(pipe)));
            let stderr = child.stderr.take().map(|pipe| (Stream::Stderr, OwnedFd::from(pipe)));
            sources
                .extend([stdout, stderr].into_iter().flatten().map(|(s, pipe)| Source::new(rank, s, pipe)));
        }
        sources
    }

    pub(super) fn all_ended(&self) -> bool {
        self.0.iter().all(|rank| rank.ended.is_some())
    }

    /// Sends `signal` to every rank that still runs, and to the programs that it started.
    pub(super) fn signal(&mut self, signal: Signal) {
        for rank in self.0.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.sent = Some(signal);
            let _ = kill_process_group(rank.pid, signal); // it may have ended meanwhile
        }
    }

    /// Collects the ranks that have ended since the last call.
    pub(super) fn reap(&mut self, started: Instant) -> Result<Vec<RankReport>, LaunchError> {
        let mut ended = Vec::new();
        for (rank, process) in self.0.iter_mut().enumerate().filter(|(_, process)| process.ended.is_none()) {
            let pid = process.child.id();
            let report = process.reap(rank, started);
            ended.extend(report.map_err(|source| LaunchError::Wait { rank, pid, source })?);
        }
        Ok(ended)
    }

    /// The reports of the ranks that have ended.
    pub(super) fn take_reports(&mut self) -> Vec<RankReport> {
        self.0.drain(..).filter_map(|rank| rank.ended).collect()
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for rank in self.0.iter_mut().filter(|rank| rank.ended.is_none()) {
            let _ = kill_process_group(rank.pid, Signal::KILL);
            let _ = rank.child.wait();
        }
    }
}

impl Rank {
    fn reap(&mut self, rank: usize, started: Instant) -> io::Result<Option<RankReport>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Some(status) = waitid(WaitId::Pid(self.pid), look)? else { return Ok(None) };
        if status.exit_status() != Some(0) {
            // What a failed rank left running, such as the program of a killed wrapper script. Not yet
            // collected, the rank keeps its number, so that no other group can have it.
            let _ = kill_process_group(self.pid, Signal::TERM);
        }
        let end = self.child.wait()?.into();
        let (pid, sent) = (self.child.id(), self.sent.map(Signal::as_raw));
        self.ended = Some(RankReport { rank, pid, end, after: started.elapsed(), sent });
        Ok(self.ended)
    }
}

fn redirect(command: &mut Command, launch: &Launch, rank: usize) {
    if !(launch.stdin && rank == 0) {
        command.stdin(Stdio::null());
    }
    if launch.capture {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
}

/// Makes the process, before it becomes the program, end with the launcher, lead its own session, run on
/// `cores`, and have `files` as its limit of open files.
fn on_start(command: &mut Command, cores: Option<CpuSet>, files: Option<Rlimit>) {
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
        if let Some(files) = files {
            setrlimit(Resource::Nofile, files)?;
        }
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
    let needed = 2 * ranks as u64 + OTHER_FILES;
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
        _ if source.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => {
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
