//! Starts a program on every rank of this machine and watches over it until the last rank has ended.
//!
//! [`Launch`] says what to start; [`Launch::run`] starts it, hands every line that a rank writes to a
//! closure, passes signals on, and returns an [`Outcome`] that names the rank that failed first.
//!
//! ```no_run
//! use antiphon_cli::launch::Launch;
//!
//! let launch = Launch::new("./worker", 4);
//! let outcome = launch.run(|rank, _stream, line| {
//!     println!("{rank}: {}", String::from_utf8_lossy(line));
//!     Ok(())
//! })?;
//! assert!(outcome.success());
//! # Ok::<(), antiphon_cli::launch::LaunchError>(())
//! ```
//!
//! # What a rank gets
//!
//! * torchrun's environment, and `ANTIPHON_SECRET` (see [`Launch::env`]);
//! * a session of its own, so that a terminal's Ctrl-C reaches it once, through the launcher, and so that a
//!   signal reaches the programs that it started as well;
//! * the launcher's standard input if it is rank 0 and [`Launch::stdin`] is set, else `/dev/null`;
//! * SIGKILL if the launcher dies before it could end the rank. The signal reaches only the rank's own
//!   process: programs that a wrapper script started live on in this one case.
//!
//! # How a launch ends
//!
//! When a rank fails, the others have [`Launch::grace`] to end by themselves, because ranks that communicate
//! report a lost peer more precisely than a launcher can. Then they get SIGTERM, and after the same time
//! again SIGKILL. Programs that a successful rank leaves running are not ended.

mod environment;
mod lines;
mod outcome;
mod placement;
mod pump;
mod signals;
mod spawn;
mod supervisor;
mod world;

use std::ffi::OsString;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

pub use outcome::{End, Outcome, RankReport};
pub use world::World;

use environment::Environment;
use pump::Pump;
use spawn::Children;
use supervisor::Supervisor;

use crate::{
    ExitStatus,
    machine::{Cores, Files},
};

/// The most ranks that one launch starts.
pub const MAX_RANKS: usize = 4096;

/// A line longer than this many bytes is handed over in pieces, each a little longer than this.
pub const MAX_LINE: usize = 1 << 20;

/// The output stream to which a rank wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// The program to start, and how to end it. Begin with [`Launch::new`] and set the fields that differ.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program: a path, or a name looked up in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How many ranks, from 1 to [`MAX_RANKS`].
    pub ranks: usize,
    /// Variables for every rank, which win over the launcher's own: RANK, LOCAL_RANK, GROUP_RANK and
    /// ROLE_RANK, the four matching WORLD_SIZEs, ROLE_NAME, MASTER_ADDR, MASTER_PORT, the TORCHELASTIC ones,
    /// OMP_NUM_THREADS=1 and a random ANTIPHON_SECRET (the last two only where the launcher's own
    /// environment has none).
    pub env: Vec<(OsString, OsString)>,
    /// MASTER_PORT; a free one when `None`, which several nodes do not allow.
    pub port: Option<u16>,
    /// The part of this launch in one on several nodes.
    pub node: Option<Node>,
    /// The world in which this launch is one rank: that rank gets the variables of [`env`](Self::env) alone, beside those of the
    /// launcher's own environment, and [`ranks`](Self::ranks) is 1.
    pub world: Option<World>,
    /// How long the other ranks have after the first failure, and once more between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Ends the whole launch after this time.
    pub timeout: Option<Duration>,
    /// Binds each rank to its own share of the cores that the launcher may use.
    pub bind: bool,
    /// Lets rank 0 read the launcher's standard input.
    pub stdin: bool,
    /// Reads what the ranks write. Otherwise they write straight to the launcher's own outputs.
    pub capture: bool,
}

/// One node's part of a launch on several nodes. Each has a launcher of its own, and the same number of ranks.
#[derive(Clone, Debug)]
pub struct Node {
    /// How many nodes there are.
    pub count: usize,
    /// Which of them this is, from 0.
    pub rank: usize,
    /// MASTER_ADDR: the name or the address of node 0.
    pub master_addr: String,
    /// ANTIPHON_SECRET, which is equal on all nodes; that of the launcher's own environment when `None`.
    pub secret: Option<String>,
}

impl Launch {
    /// `ranks` ranks of `program` without arguments: output captured, no standard input, no binding, no time
    /// limit, and five seconds of grace.
    pub fn new(program: impl Into<OsString>, ranks: usize) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            ranks,
            env: Vec::new(),
            port: None,
            node: None,
            world: None,
            grace: Duration::from_secs(5),
            timeout: None,
            bind: false,
            stdin: false,
            capture: true,
        }
    }

    /// This very command line on `ranks` ranks, with `--worker` behind it; in a `world` on the one that this process is. (Not this
    /// executable: under Python that is the interpreter, and not the one of the virtual environment.)
    pub(crate) fn again(ranks: usize, world: Option<World>) -> Self {
        let mut command = std::env::args_os();
        let program = command.next().unwrap_or_default();
        let ranks = if world.is_some() { 1 } else { ranks };
        Self { args: command.chain(["--worker".into()]).collect(), world, ..Self::new(program, ranks) }
    }

    /// [Runs this command line again](Self::again) on ranks that write to this process's own outputs, bound where each can have a
    /// core, and says how they ended.
    pub(crate) fn workers(ranks: usize, world: Option<World>) -> Result<ExitStatus, LaunchError> {
        let bind = world.is_none() && ranks <= Cores::count(&Files::system()).usable();
        let outcome = Self { bind, capture: false, ..Self::again(ranks, world) }.run(|_, _, _| Ok(()))?;
        if !outcome.success() {
            eprint!("{}", outcome.report());
        }
        Ok(outcome.exit_code())
    }

    /// The first of this node's ranks, as the world numbers it.
    pub(crate) fn first_rank(&self) -> usize {
        let of_node = || self.node.as_ref().map_or(0, |node| node.rank * self.ranks);
        self.world.map_or_else(of_node, |world| world.rank)
    }

    /// Starts the ranks and returns once all have ended. Ranks have the numbers of the world.
    ///
    /// `output` gets one line per call, in the order in which each stream wrote them, with its newline (which
    /// a last line may lack, and a piece of a line longer than [`MAX_LINE`] does). It runs on a thread of its
    /// own, so that a slow reader delays no signal. An error from it closes that stream: the rank then meets
    /// a broken pipe, as it would without a launcher, and the launch has failed ([`Outcome::unwritten`]).
    ///
    /// While the launch is under way SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 go to the ranks
    /// (those that the launcher was started to ignore stay ignored); afterwards they act as by default.
    ///
    /// The calling thread starts the ranks and stays until the last has ended, which their
    /// end-with-the-parent needs: the kernel ties it to the thread, not to the process.
    pub fn run<F>(&self, mut output: F) -> Result<Outcome, LaunchError>
    where
        F: FnMut(usize, Stream, &[u8]) -> io::Result<()> + Send,
    {
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            return Err(LaunchError::Ranks { ranks: self.ranks });
        }
        if let Some(Node { count, rank, .. }) = &self.node
            && rank >= count
        {
            return Err(LaunchError::Node { rank: *rank, count: *count });
        }
        let first = self.first_rank();
        let environment = Environment::new(self)?;
        let (inbox, subscription) = signals::subscribe().map_err(LaunchError::Signals)?;
        let started = Instant::now();
        let mut children = Children::start(self, &environment)?;
        let (closing, running) = io::pipe().map_err(LaunchError::Output)?;
        let pump = Pump::new(children.take_outputs(), closing);
        let mut supervisor = Supervisor::new(self, children, started);

        thread::scope(|scope| {
            let pump = thread::Builder::new()
                .name("antiphon-output".into())
                .spawn_scoped(scope, move || {
                    pump.run(|local, stream, line| output(first + local, stream, line))
                })
                .map_err(LaunchError::Output)?;
            let supervised = supervisor.run(&inbox);
            // A supervisor that failed leaves ranks behind: end them, or the pump would wait for their output.
            let mut outcome = supervised.map(|()| supervisor.outcome());
            drop(supervisor);
            // Without the subscription a signal ends the launcher, even while the pump is blocked by a reader that has stopped reading.
            drop(subscription);
            drop(running);
            match pump.join() {
                Ok(pumped) => {
                    let unwritten = pumped.map_err(LaunchError::Output)?;
                    if let Ok(outcome) = &mut outcome {
                        outcome.unwritten = unwritten.map(|error| error.to_string());
                    }
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
            outcome
        })
    }
}

/// Why a launch could not be started or watched. Ranks that had started have been ended.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The number of ranks is out of range.
    #[error("{ranks} ranks: must be from 1 to {MAX_RANKS}")]
    Ranks {
        /// The number asked for.
        ranks: usize,
    },
    /// There is no such node.
    #[error("node rank {rank} of {count} nodes: must be from 0 to {}", count.saturating_sub(1))]
    Node {
        /// The rank asked for.
        rank: usize,
        /// The number of nodes.
        count: usize,
    },
    /// A variable of the launcher around this process is not what it must be.
    #[error(
        "{name}={value} of the launcher around this process: must be a number, from 0 to below WORLD_SIZE for RANK, and from 1 to \
             WORLD_SIZE for LOCAL_WORLD_SIZE"
    )]
    Variable {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// The launcher around this process has made a world of another size.
    #[error("{asked} ranks were asked for, and the launcher around this process has started {size}")]
    OtherWorld {
        /// The number asked for.
        asked: usize,
        /// WORLD_SIZE.
        size: usize,
    },
    /// What the launchers of several nodes must be told is missing.
    #[error("several nodes need {0}")]
    NodesNeed(&'static str),
    /// There is no such program.
    #[error("cannot start {program:?}: {reason}")]
    NotFound {
        /// The program as it was given.
        program: OsString,
        /// Where it is missing from.
        reason: &'static str,
    },
    /// The program is there but cannot be executed.
    #[error("cannot execute {program:?}: {source}")]
    NotExecutable {
        /// The program as it was given.
        program: OsString,
        /// What the operating system said.
        source: io::Error,
    },
    /// The process of a rank could not be made.
    #[error("cannot start rank {rank} of {ranks}: {source}")]
    Spawn {
        /// The rank that could not be started.
        rank: usize,
        /// The number of ranks asked for.
        ranks: usize,
        /// What the operating system said.
        source: io::Error,
    },
    /// No free port was found for MASTER_PORT.
    #[error("cannot find a free port on 127.0.0.1 for MASTER_PORT: {0}")]
    Port(#[source] io::Error),
    /// The system gave no random bytes for ANTIPHON_SECRET.
    #[error("no random bytes for ANTIPHON_SECRET: {0}")]
    Random(#[source] getrandom::Error),
    /// The cores to bind to are unknown.
    #[error("cannot tell which cores there are to bind to: {0}")]
    Cores(#[source] io::Error),
    /// Signals could not be caught.
    #[error("cannot catch signals: {0}")]
    Signals(#[source] io::Error),
    /// The ranks' output could not be read.
    #[error("cannot read what the ranks write: {0}")]
    Output(#[source] io::Error),
    /// The ranks' state could not be read.
    #[error("cannot wait for rank {rank} (pid {pid}): {source}")]
    Wait {
        /// The rank waited for.
        rank: usize,
        /// Its process.
        pid: u32,
        /// What the operating system said.
        source: io::Error,
    },
}

impl LaunchError {
    /// The exit status that a shell gives for the same failure: 127 for no such program, 126 for one that
    /// cannot be executed, 2 for a wrong argument, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotExecutable { .. } => 126,
            Self::Ranks { .. } | Self::Node { .. } | Self::NodesNeed(_) => 2,
            Self::Variable { .. } | Self::OtherWorld { .. } => 2,
            _ => 1,
        }
    }
}
