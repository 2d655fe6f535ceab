//! `antiphon run`: starts a program on every rank, as torchrun does.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Color, Style};

use crate::ExitStatus;
use crate::launch::{Launch, Node, Stream};

/// The exit status of a wrong argument.
const USAGE: ExitStatus = 2;
/// What ranks of several machines prove to know.
const SECRET: &str = "ANTIPHON_SECRET";

/// Start a program on every rank of this machine.
///
/// Each rank finds its place in the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
/// MASTER_PORT and the rest), so programs written for torchrun run as they are, and shares a fresh
/// ANTIPHON_SECRET with its peers. Lines of output carry the rank that wrote them. Signals are passed on.
/// Rank 0 reads standard input, the others find it empty.
///
/// A program that ends in .py is run by Python, as torchrun does: by the Python that ANTIPHON_PYTHON names, else python3.
///
/// When a rank fails, the others have the grace time to end by themselves, then they get SIGTERM and, after
/// the same time again, SIGKILL. The last line then says which rank failed first and how: the order is that in which the
/// processes ended, and a rank that a signal holds stopped failed before those that gave it up. Ranks that had left with
/// exit code 0 before are named beside it.
///
/// With --nnodes the same command runs on each of several machines, with its own --node-rank, and all need the same secret: that of
/// --secret-file, or of ANTIPHON_SECRET. The ranks meet at MASTER_PORT + 1 of the first machine, or at ANTIPHON_PORT.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon run -n 4 train.py --lr 0.1
  antiphon run -n 2 --timeout 60 -- ./worker --verbose
  antiphon run -n 8 --bind --no-prefix ./server
  antiphon run -n 4 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --secret-file ~/secret train.py

Exit status:
  0 when every rank exits with 0, else that of the rank that failed first: its exit code, or 128 and
  the number of the signal that killed it. 1 when what the ranks wrote could not be handed on, 124 when
  the time limit passed, 126 when the program cannot be executed, 127 when it does not exist. Of a
  script of Python, Python itself tells the last two, with exit code 2.")]
pub struct Args {
    /// The number of ranks of this machine, from 1 to 4096
    #[arg(short = 'n', long = "ranks", visible_alias = "nproc-per-node", value_name = "RANKS")]
    ranks: usize,

    /// The number of machines, on each of which this command runs
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    nnodes: u32,

    /// Which of the machines this is, from 0
    #[arg(long, value_name = "R", default_value = "0")]
    node_rank: u32,

    /// The name or the address of machine 0, for several machines
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,

    /// A file whose content is ANTIPHON_SECRET, for several machines [default: the variable]
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,

    /// End the launch after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,

    /// Seconds that the other ranks have once one has failed, and again between SIGTERM and SIGKILL
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    grace: Duration,

    /// MASTER_PORT for the ranks; several machines need it [default: a free port]
    #[arg(long, visible_alias = "master-port", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// Let the ranks write straight to this terminal or pipe, without "[rank] " before each line
    #[arg(long)]
    no_prefix: bool,

    /// Bind each rank to its own share of the cores
    #[arg(long, overrides_with = "no_bind")]
    bind: bool,

    /// Let each rank run on all cores (the default)
    #[arg(long, overrides_with = "bind")]
    no_bind: bool,

    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the command; problems and failed ranks are reported on standard error.
pub fn execute(args: Args) -> ExitStatus {
    let mut printer = Printer::new();
    let launch = match args.launch() {
        Ok(launch) => launch,
        Err(problem) => {
            let _ = writeln!(io::stderr(), "antiphon run: {problem}");
            return USAGE;
        }
    };
    match launch.run(|rank, stream, line| printer.print(rank, stream, line)) {
        Ok(outcome) => {
            // Nowhere is left to report that standard error is gone.
            let _ = io::stderr().write_all(tell(&outcome.report()).as_bytes());
            outcome.exit_code()
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "antiphon run: {error}");
            error.exit_code()
        }
    }
}

impl Args {
    fn launch(mut self) -> Result<Launch, String> {
        let node = self.node()?;
        let mut command = by_python(&self.command).into_iter().chain(self.command);
        let program = command.next().unwrap_or_default(); // clap requires one
        Ok(Launch {
            node,
            args: command.collect(),
            timeout: self.timeout,
            grace: self.grace,
            port: self.port,
            bind: self.bind,
            stdin: true,
            capture: !self.no_prefix,
            ..Launch::new(program, self.ranks)
        })
    }

    /// This machine's part of a launch on several.
    fn node(&mut self) -> Result<Option<Node>, String> {
        let (count, rank) = (self.nnodes as usize, self.node_rank as usize);
        if rank >= count {
            return Err(format!("--node-rank {rank} is not below --nnodes {count}"));
        }
        if count == 1 {
            return Ok(None);
        }
        let master_addr = self.master_addr.take().ok_or_else(|| {
            format!("--nnodes {count} needs --master-addr, the name or the address of machine 0")
        })?;
        if self.port.is_none() {
            return Err(format!("--nnodes {count} needs --master-port, equal on all machines"));
        }
        let secret = self.secret_file.as_deref().map(secret_of).transpose()?;
        if secret.is_none() && std::env::var_os(SECRET).is_none_or(|secret| secret.is_empty()) {
            return Err(format!(
                "--nnodes {count} needs a secret, the same random text on all machines: pass --secret-file, or set {SECRET}"
            ));
        }
        Ok(Some(Node { count, rank, master_addr, secret }))
    }
}

/// The secret that a file holds.
fn secret_of(file: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let secret = text.trim();
    if secret.is_empty() {
        Err(format!("{}: no secret in it", file.display()))
    } else {
        Ok(secret.to_owned())
    }
}

/// The words in front of a Python script. Its output is not buffered, so that lines of ranks come when they are written.
fn by_python(command: &[OsString]) -> Vec<OsString> {
    let is_script =
        command.first().is_some_and(|program| Path::new(program).extension() == Some("py".as_ref()));
    if is_script { vec![crate::python(), "-u".into()] } else { Vec::new() }
}

fn tell(report: &str) -> String {
    report.lines().map(|line| format!("antiphon run: {line}\n")).collect()
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 =
        text.parse().map_err(|_| "must be a number of seconds, such as 5 or 0.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Writes lines with the rank before them.
struct Printer {
    colored: [bool; 2],
    line: Vec<u8>,
}

impl Printer {
    fn new() -> Self {
        let colored = [AutoStream::choice(&io::stdout()), AutoStream::choice(&io::stderr())];
        Self { colored: colored.map(|choice| choice != ColorChoice::Never), line: Vec::new() }
    }

    /// Writes prefix and line at once: two writes could have another process's words between them.
    fn print(&mut self, rank: usize, stream: Stream, line: &[u8]) -> io::Result<()> {
        self.line.clear();
        let style = if self.colored[stream as usize] { style(rank) } else { Style::new() };
        write!(self.line, "{style}[{rank}]{style:#} ")?;
        self.line.extend_from_slice(line);
        if !line.ends_with(b"\n") {
            self.line.push(b'\n');
        }
        match stream {
            Stream::Stdout => io::stdout().write_all(&self.line),
            Stream::Stderr => io::stderr().write_all(&self.line),
        }
    }
}

/// Neighbouring ranks differ; red is left to errors.
fn style(rank: usize) -> Style {
    const COLORS: [AnsiColor; 5] =
        [AnsiColor::Cyan, AnsiColor::Green, AnsiColor::Yellow, AnsiColor::Magenta, AnsiColor::Blue];
    Style::new().fg_color(Some(Color::Ansi(COLORS[rank % COLORS.len()])))
}
