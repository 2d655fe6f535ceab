//! `antiphon plan show`: a plan's timeline as a page.

use std::io::{Write, stdout};
use std::path::PathBuf;

use antiphon_plan::picture::{self, Mark};
use antiphon_plan::verify::{self, Severity, verify};
use antiphon_plan::{escaped, simulate};

use super::Result;
use super::simulate::{On, write};
use crate::sizes::{Bytes, Sizes};
use crate::{ExitStatus, SUCCESS};

/// Draw a plan: a page that shows what every thread block does and when, by the simulator, and what the verifier finds.
///
/// One file that needs nothing else: open it in a browser. Also a plan that cannot end is drawn, up to where all wait.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan show all_reduce.json --html all_reduce.html
  antiphon plan show all_reduce.json --html all_reduce.html --size 16M --cluster h200x8-nodes2
  antiphon plan show all_reduce.json --trace all_reduce.trace.json")]
pub struct Args {
    /// The plan
    file: PathBuf,

    /// Write the page to this file
    #[arg(long, value_name = "FILE", required_unless_present = "trace")]
    html: Option<PathBuf>,

    /// Write the events to this file, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Bytes of the message, rounded up to whole chunks
    #[arg(long, default_value = "1M")]
    size: Sizes,

    #[command(flatten)]
    on: On,
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let plan = super::read(&args.file)?;
    let cluster = args.on.cluster(&plan)?;
    let &[size] = &args.size.0[..] else { return Err("--size takes one size".into()) };
    let bytes = simulate::fitting(&plan, size).min(plan.max_message_size);
    let (simulation, waiting) = simulate::play(&plan, &cluster, bytes)?;
    let report = verify(&plan, &verify::Options::default());
    let mut marks: Vec<Mark> = report.findings.iter().map(Mark::from).collect();
    let found: Vec<_> = marks.iter().filter_map(|mark| mark.place).collect();
    let unseen = waiting.into_iter().filter(|waiting| !found.contains(&waiting.place));
    marks.extend(unseen.map(|waiting| Mark {
        place: Some(waiting.place),
        severity: Severity::Error,
        text: format!("waits for ever for {}", waiting.what),
    }));
    if let Some(file) = &args.html {
        write(file, &picture::html(&plan, &cluster, &simulation, &marks))?;
        let (time, blocks) =
            (simulation.time_ns / 1e3, plan.gpus.iter().map(|gpu| gpu.threadblocks.len()).sum::<usize>());
        writeln!(
            stdout(),
            "{}: {} on {}, {time:.2} µs, {blocks} thread blocks",
            file.display(),
            Bytes(bytes),
            escaped(&cluster.name)
        )?;
    }
    if let Some(file) = &args.trace {
        write(file, &picture::trace(&plan, &simulation))?;
        writeln!(stdout(), "{}: for ui.perfetto.dev", file.display())?;
    }
    Ok(SUCCESS)
}
