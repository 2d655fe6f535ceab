//! `antiphon plan simulate`: the predicted time of a plan on a cluster, for many sizes, and its causes.

use std::io::Write;
use std::path::PathBuf;

use antiphon_plan::simulate::{self, Cluster, Lane, Simulation};
use antiphon_plan::{Plan, escaped, picture, read_text};
use serde::{Serialize, Serializer};

use super::Result;
use crate::sizes::{Bytes, Sizes};
use crate::{ExitStatus, SUCCESS};

/// Predict how long a plan takes on a cluster.
///
/// A discrete-event model of thread blocks, links, copy engines and network cards, calibrated against 4 × H200. A table
/// over message sizes, then for the largest the critical path and the links' use. Sizes are rounded up to whole chunks;
/// those that the plan does not serve are left out.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  antiphon plan simulate all_reduce.json
  antiphon plan simulate all_reduce.json --cluster h200x8-nodes2 --sizes 64K..1G
  antiphon plan simulate all_reduce.json --cluster mine.json --sizes 1M --json --trace trace.json")]
pub struct Args {
    /// The plan
    file: PathBuf,

    #[command(flatten)]
    on: On,

    /// Message sizes in bytes: the output of allgather, the input of all others
    #[arg(long, default_value = "1K..64M")]
    sizes: Sizes,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Write the largest size's events to this file, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// Where a plan runs.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct On {
    /// h200xG (1 to 8 GPUs), h200xG-nodesN, or a JSON file that describes a cluster [default: h200x8, as many nodes as
    /// the plan needs]
    #[arg(long, value_name = "SPEC")]
    cluster: Option<String>,
}

impl On {
    pub(super) fn cluster(&self, plan: &Plan) -> Result<Cluster> {
        let ranks = plan.num_ranks().max(1);
        let spec = match &self.cluster {
            Some(spec) if spec.ends_with(".json") => {
                let text = read_text(spec).map_err(|error| super::about(spec.as_ref(), error))?;
                let text = String::from_utf8(text).map_err(|error| format!("{spec}: {error}"))?;
                return Ok(Cluster::from_spec(&text).map_err(|error| format!("{spec}: {error}"))?);
            }
            Some(spec) => spec.clone(),
            None if ranks <= 8 => format!("h200x{ranks}"),
            None => format!("h200x8-nodes{}", ranks.div_ceil(8)),
        };
        Ok(Cluster::from_spec(&spec)?)
    }
}

/// Runs the command.
pub fn execute(args: Args) -> Result<ExitStatus> {
    let plan = super::read(&args.file)?;
    let cluster = args.on.cluster(&plan)?;
    let sizes = served(&plan, &args.sizes)?;
    let mut rows = Vec::new();
    let mut last = None;
    for bytes in sizes {
        let done = simulate::simulate(&plan, &cluster, bytes)?;
        rows.push(Row::of(&done));
        last = Some(done);
    }
    let Some(last) = last else { return Ok(SUCCESS) };
    if let Some(file) = &args.trace {
        write(file, &picture::trace(&plan, &last))?;
    }
    let prediction = Prediction::new(&plan, &cluster, rows, &last);
    match args.json {
        true => super::print_json(&prediction)?,
        false => write!(std::io::stdout(), "{}", prediction.table())?,
    }
    Ok(SUCCESS)
}

/// The sizes in whole chunks that the plan serves.
fn served(plan: &Plan, sizes: &Sizes) -> Result<Vec<u64>> {
    let (min, max) = (plan.min_message_size, plan.max_message_size);
    let inside = sizes.0.iter().filter(|&&bytes| bytes >= min);
    let mut whole: Vec<u64> =
        inside.map(|&bytes| simulate::fitting(plan, bytes)).filter(|&bytes| bytes <= max).collect();
    whole.dedup();
    if whole.is_empty() {
        return Err(format!(
            "the plan serves messages of {min} to {max} bytes, and none of --sizes is in there"
        )
        .into());
    }
    Ok(whole)
}

pub(super) fn write(file: &std::path::Path, text: &str) -> Result<()> {
    Ok(std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?)
}

#[derive(Serialize)]
struct Row {
    bytes: u64,
    time_us: f64,
    algorithm_gb_s: f64,
    bus_gb_s: f64,
}

impl Row {
    fn of(done: &Simulation) -> Self {
        Row {
            bytes: done.message_bytes,
            time_us: done.time_ns / 1e3,
            algorithm_gb_s: done.algorithm_bandwidth(),
            bus_gb_s: done.bus_bandwidth(),
        }
    }
}

#[derive(Serialize)]
struct Step {
    from_us: f64,
    until_us: f64,
    operation: String,
    lane: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Link {
    link: String,
    bytes: u64,
    capacity_gb_s: f64,
    busy: f64,
}

/// All that the command prints.
#[derive(Serialize)]
struct Prediction<'a> {
    plan: String,
    collective: String,
    ranks: usize,
    cluster: String,
    rows: Vec<Row>,
    /// The critical path of the last row; times are from the kernel's start.
    #[serde(serialize_with = "Path::serialize")]
    critical_path: Path<'a>,
    /// The utilisation of the links in the last row.
    links: Vec<Link>,
}

/// The critical path, which may have a million steps: each is described when it is written.
struct Path<'a> {
    plan: &'a Plan,
    simulation: &'a Simulation,
    steps: Vec<simulate::Step>,
}

impl Path<'_> {
    fn describe(&self, step: &simulate::Step) -> Step {
        let span = &self.simulation.spans[step.span.index()];
        let lane = match span.lane {
            Lane::Block => String::new(),
            Lane::CopyEngine(to) => format!(" (copy engine to rank {to})"),
            Lane::Nic(to) => format!(" (network card to rank {to})"),
        };
        Step {
            from_us: step.from_ns / 1e3,
            until_us: step.until_ns / 1e3,
            operation: self.plan.op(span.place).map_or("", |op| op.kind.name()).to_owned(),
            lane: format!("{}{lane}", span.place),
            bytes: span.bytes,
        }
    }

    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(self.steps.iter().map(|step| self.describe(step)))
    }
}

impl<'a> Prediction<'a> {
    fn new(plan: &'a Plan, cluster: &Cluster, rows: Vec<Row>, last: &'a Simulation) -> Self {
        let link = |link: &simulate::LinkUse| Link {
            link: link.name.clone(),
            bytes: link.bytes,
            capacity_gb_s: link.capacity_gb_s,
            busy: link.busy,
        };
        Prediction {
            plan: plan.name.clone().unwrap_or_else(|| "plan".into()),
            collective: plan.collective.clone(),
            ranks: plan.num_ranks(),
            cluster: cluster.name.clone(),
            rows,
            critical_path: Path { plan, simulation: last, steps: last.critical_path() },
            links: last.links.iter().map(link).collect(),
        }
    }

    fn table(&self) -> String {
        const SHOWN: usize = 24;
        let [plan, collective, cluster] =
            [&self.plan, &self.collective, &self.cluster].map(|name| escaped(name));
        let mut text = format!("{plan} ({collective}, {} ranks) on {cluster}\n\n", self.ranks);
        text += &format!("{:>12} {:>12} {:>12} {:>12}\n", "bytes", "time µs", "alg GB/s", "bus GB/s");
        for Row { bytes, time_us, algorithm_gb_s, bus_gb_s } in &self.rows {
            text += &format!("{bytes:>12} {time_us:>12.2} {algorithm_gb_s:>12.2} {bus_gb_s:>12.2}\n");
        }
        let bytes = Bytes(self.rows.last().map_or(0, |row| row.bytes));
        text += &format!("\nCritical path at {bytes}, from the kernel's start\n");
        text += &format!("{:>12} {:>12}  what\n", "from µs", "until µs");
        for step in self.critical_path.steps.iter().take(SHOWN) {
            let Step { from_us, until_us, operation, lane, bytes } = self.critical_path.describe(step);
            let moved = if bytes > 0 { format!(", {}", Bytes(bytes)) } else { String::new() };
            text += &format!("{from_us:>12.2} {until_us:>12.2}  {operation}: {lane}{moved}\n");
        }
        text += &more(self.critical_path.steps.len(), SHOWN);
        text += &format!("\nLinks at {bytes}, busiest first\n{:>12} {:>12}  link\n", "busy", "GB/s at most");
        let mut busiest: Vec<_> = self.links.iter().filter(|link| link.bytes > 0).collect();
        busiest.sort_by(|a, b| b.busy.total_cmp(&a.busy));
        for Link { link, capacity_gb_s, busy, bytes } in busiest.iter().take(SHOWN) {
            text += &format!("{:>11.1}% {capacity_gb_s:>12.0}  {link}, {}\n", busy * 100.0, Bytes(*bytes));
        }
        text + &more(busiest.len(), SHOWN)
    }
}

fn more(count: usize, shown: usize) -> String {
    if count > shown {
        format!("{:>27} {} more; --json has all\n", "and", count - shown)
    } else {
        String::new()
    }
}
