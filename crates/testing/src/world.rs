//! Worlds whose ranks are processes: the test binary starts itself again, once per rank, as the test `rank_process` or as the one
//! that starts them.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use antiphon_fabric::{
    FabricError,
    engine::{EngineError, Ucx},
    rendezvous::RendezvousError,
};
use rustix::process::{Pid, Signal};

/// No test waits longer than this for anything.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// What marks the lines of a rank among those of the test harness.
const MARK: &str = "@@ ";
const ROLE: &str = "TEST_ROLE";

/// What this process is to do, if it is a rank. It does not outlive the process that started it.
pub fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    Some(role)
}

/// Tells the test something.
pub fn say(line: impl std::fmt::Display) {
    println!("\n{MARK}{line}");
}

/// Tells how the work ended, in a form that tests compare.
pub fn say_error(error: &FabricError) {
    match error {
        FabricError::PeerLost { .. } => say(format_args!("lost {}", error.lost_world_rank().unwrap())),
        FabricError::Timeout { missing, .. } => say(format_args!("timeout {missing:?}")),
        FabricError::Rendezvous(RendezvousError::Missing { missing, .. }) => {
            say(format_args!("missing {missing:?}"));
        }
        // The background may have heard of it before the foreground.
        FabricError::Failed(first) => say_error(first),
        other => say(other),
    }
}

/// The driver of GPUs, where processes on several nodes can be PEs of NVSHMEM; on one GPU if there is only one.
///
/// # Panics
/// If UCX is there and does not work.
pub fn pes() -> Option<&'static antiphon_device::cuda::Driver> {
    use crate::{Need, gpus, need, nvjitlink, nvrtc, nvshmem};
    let found = match Ucx::open(0, 1) {
        Err(error @ EngineError::Library(_)) => Err(error),
        opened => Ok(opened.unwrap()),
    };
    let driver = gpus(1)?;
    nvrtc().and(nvjitlink()).and(nvshmem()).and(need(Need::Ucx, found)).map(|_| driver)
}

/// A world of processes; all are killed when it is dropped.
pub struct World {
    ranks: Vec<Rank>,
    /// Where the ranks meet, if by path, and keep temporary files.
    folder: tempfile::TempDir,
}

struct Rank {
    child: Child,
    lines: mpsc::Receiver<(Instant, String)>,
    /// What the rank has written to standard error, which a failed test shows.
    errors: Arc<Mutex<String>>,
}

impl World {
    /// Starts the ranks and waits until each says "ready".
    pub fn start(world_size: usize, role: &str, by_path: bool, timeout: Duration) -> Self {
        Self::start_under(&[], world_size, role, by_path, timeout)
    }

    /// As [`start`](Self::start), of ranks that are the test `test` of this binary. They meet by path.
    pub fn of_test(test: &str, world_size: usize, timeout: Duration) -> Self {
        let start =
            Start { test, role: test, by_path: true, timeout, command: &|_, program| Command::new(program) };
        Self::start_ranks(&start, world_size)
    }

    /// As [`start`](Self::start), with a program and its arguments that start each rank, and pass its end on.
    pub fn start_under(
        launcher: &[&str],
        world_size: usize,
        role: &str,
        by_path: bool,
        timeout: Duration,
    ) -> Self {
        let command = |_, program: &Path| {
            let mut words = launcher.iter().map(OsStr::new).chain([program.as_os_str()]);
            let mut command = Command::new(words.next().unwrap());
            command.args(words);
            command
        };
        let start = Start { test: "rank_process", role, by_path, timeout, command: &command };
        Self::start_ranks(&start, world_size)
    }

    /// As [`start`](Self::start), by the command that `command` makes of a rank and this program.
    pub fn start_by(
        command: impl Fn(usize, &Path) -> Command,
        world_size: usize,
        role: &str,
        timeout: Duration,
    ) -> Self {
        Self::start_in("rank_process", command, world_size, role, timeout)
    }

    /// As [`start_by`](Self::start_by), of ranks that are the test `test` of this binary.
    pub fn start_in(
        test: &str,
        command: impl Fn(usize, &Path) -> Command,
        world_size: usize,
        role: &str,
        timeout: Duration,
    ) -> Self {
        let start = Start { test, role, by_path: false, timeout, command: &command };
        Self::start_ranks(&start, world_size)
    }

    /// As [`start_in`](Self::start_in), of ranks on nodes that have this many, each of which is a PE of NVSHMEM. The ranks get these
    /// variables, too.
    pub fn of_pes(
        test: &str,
        of_each: &[usize],
        role: &str,
        timeout: Duration,
        variables: &[(&str, &str)],
    ) -> Self {
        let port = crate::free_port().to_string();
        let nodes: Vec<usize> =
            of_each.iter().enumerate().flat_map(|(node, ranks)| std::iter::repeat_n(node, *ranks)).collect();
        let command = |rank: usize, program: &Path| {
            let mut command = Command::new(program);
            command
                .env("ANTIPHON_NODE", format!("node {}", nodes[rank]))
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port)
                .env("ANTIPHON_SECRET", "of the test")
                .env("ANTIPHON_LINK_TIMEOUT", "3")
                .env("NVSHMEM_DISABLE_NVLS", "1")
                .env("NVSHMEM_SYMMETRIC_SIZE", (64 << 20).to_string())
                .env("UCX_TLS", "tcp,self")
                .envs(variables.iter().copied());
            command
        };
        Self::start_in(test, command, nodes.len(), role, timeout)
    }

    fn start_ranks(start: &Start<'_>, world_size: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ranks = (0..world_size).map(|rank| start.rank(rank, world_size, folder.path())).collect();
        let world = Self { ranks, folder };
        for rank in 0..world_size {
            assert_eq!(world.hear(rank).1, "ready", "rank {rank}");
        }
        world
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// All ranks but one.
    pub fn others(&self, than: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.size()).filter(move |&rank| rank != than)
    }

    /// The next line that a rank [says](say), and when it came.
    ///
    /// # Panics
    /// If the rank ends or says nothing for 30 seconds: with what all ranks have written to standard error.
    #[track_caller]
    pub fn hear(&self, rank: usize) -> (Instant, String) {
        self.ranks[rank].lines.recv_timeout(LIMIT).unwrap_or_else(|error| {
            let how = if error == mpsc::RecvTimeoutError::Timeout { "hangs" } else { "has ended" };
            // It may hang because another one crashed.
            let errors = |rank: usize| self.ranks[rank].errors.lock().unwrap().clone();
            let errors: Vec<String> =
                (0..self.size()).map(|rank| format!("rank {rank}: {}", errors(rank))).collect();
            panic!("rank {rank} {how} and has not said what it should:\n{}", errors.join("\n"))
        })
    }

    /// Sends a signal to a rank, and returns when.
    pub fn signal(&self, rank: usize, signal: Signal) -> Instant {
        let now = Instant::now();
        rustix::process::kill_process(self.ranks[rank].pid(), signal).unwrap();
        now
    }

    /// A living rank shares memory, and nothing that it has mapped or open has a name that could stay behind.
    #[track_caller]
    pub fn assert_nameless(&self, rank: usize) {
        let process = format!("/proc/{}", self.ranks[rank].child.id());
        let mut names = std::fs::read_to_string(format!("{process}/maps")).unwrap();
        for entry in std::fs::read_dir(format!("{process}/fd")).unwrap() {
            // It may be closed by now.
            let target = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
            names += &format!("{}\n", target.display());
        }
        assert!(names.contains("/memfd:antiphon (deleted)"));
        for folder in [Path::new("/dev/shm"), self.folder.path()] {
            assert!(!names.contains(folder.to_str().unwrap()), "{names}");
        }
    }

    /// Waits for the processes, and finds nothing that they left: no process, no file, no shared memory. Ranks but
    /// those in `failed` have exited successfully.
    #[track_caller]
    pub fn end(mut self, failed: &[usize]) {
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let start = Instant::now();
            let status = loop {
                match rank.child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if start.elapsed() > LIMIT => panic!("rank {number} does not end"),
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            let errors = rank.errors.lock().unwrap().clone();
            assert_eq!(status.success(), !failed.contains(&number), "rank {number}: {status}\n{errors}");
        }
        assert_eq!(listing(self.folder.path()), [] as [&str; 0]);
        // Other programs have theirs there.
        assert!(!listing("/dev/shm").iter().any(|name| name.contains("antiphon")));
    }
}

/// How ranks are started.
struct Start<'a> {
    /// Starts the program as a rank, and passes its end on.
    command: &'a dyn Fn(usize, &Path) -> Command,
    /// The test of this binary that the rank runs.
    test: &'a str,
    role: &'a str,
    by_path: bool,
    timeout: Duration,
}

impl Start<'_> {
    fn rank(&self, rank: usize, world_size: usize, folder: &Path) -> Rank {
        let program = std::env::current_exe().unwrap();
        let mut command = (self.command)(rank, &program);
        command
            .args(["--exact", self.test, "--nocapture"])
            .env(ROLE, self.role)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("TORCHELASTIC_RUN_ID", folder)
            .env("TMPDIR", folder)
            .env("ANTIPHON_CACHE_DIR", program.with_file_name("cache"))
            .env("ANTIPHON_ARENA_BYTES", (16 << 20).to_string())
            .env("ANTIPHON_TIMEOUT", self.timeout.as_secs_f64().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if self.by_path {
            command.env("ANTIPHON_RENDEZVOUS", folder.join("meeting"));
        }
        let mut child = command.spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix(MARK) {
                    let _ = sender.send((Instant::now(), said.to_owned()));
                }
            }
        });
        let errors = Arc::new(Mutex::new(String::new()));
        let (mut stream, kept) = (child.stderr.take().unwrap(), errors.clone());
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut piece) {
                *kept.lock().unwrap() += &String::from_utf8_lossy(&piece[..length]);
            }
        });
        Rank { child, lines, errors }
    }
}

impl Rank {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listing(folder: impl AsRef<Path>) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
