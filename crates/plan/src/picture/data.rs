//! The data of the page's script: columns of numbers, and each text once.

use std::collections::HashMap;
use std::fmt::Write;

use serde::Serialize;

use super::Mark;
use crate::ids::{Rank, ThreadBlockId};
use crate::op::{BufferType, Op, OpKind};
use crate::place::Place;
use crate::plan::Plan;
use crate::resolve::{Block, Mode};
use crate::simulate::{ArrowKind, Cluster, Lane, Simulation};
use crate::verify::Severity;

/// One entry of a column for each span.
#[derive(Default, Serialize)]
struct Spans {
    lane: Vec<u32>,
    name: Vec<u32>,
    start: Vec<f64>,
    end: Vec<f64>,
    bytes: Vec<u64>,
    op: Vec<u32>,
    /// The place in a pipeline; −1 outside.
    inner: Vec<i64>,
    turn: Vec<u32>,
    /// What it does in words, and the line of the program, as places in the texts.
    text: Vec<u32>,
}

/// One entry of a column for each arrow.
#[derive(Default, Serialize)]
struct Arrows {
    kind: Vec<u8>,
    from: Vec<u32>,
    /// The span that took it, or −1.
    to: Vec<i64>,
    /// The first lane of the rank that got it.
    lane: Vec<u32>,
    sent: Vec<f64>,
    arrived: Vec<f64>,
}

#[derive(Serialize)]
struct LaneRow {
    rank: u32,
    name: String,
}

#[derive(Serialize)]
struct MarkRow<'a> {
    lane: Option<u32>,
    op: u32,
    inner: i64,
    place: String,
    severity: Severity,
    text: &'a str,
}

#[derive(Serialize)]
struct Data<'a> {
    name: &'a str,
    collective: &'a str,
    cluster: &'a str,
    ranks: usize,
    message: u64,
    time: f64,
    launch: f64,
    bus: f64,
    lanes: Vec<LaneRow>,
    texts: Vec<String>,
    spans: Spans,
    arrows: Arrows,
    /// Span, from, until.
    path: Vec<(u32, f64, f64)>,
    /// Name, bytes, GB/s, share of the time.
    links: Vec<(&'a str, u64, f64, f64)>,
    marks: Vec<MarkRow<'a>>,
}

/// All data as JSON that can stand in a script element.
pub(super) fn json(plan: &Plan, cluster: &Cluster, simulation: &Simulation, marks: &[Mark]) -> String {
    let mut texts = Texts::default();
    let (lanes, rows) = lanes(plan, simulation);
    let spans = spans(plan, simulation, &lanes, &mut texts);
    let data = Data {
        name: plan.name.as_deref().unwrap_or("plan"),
        collective: &plan.collective,
        cluster: &cluster.name,
        ranks: plan.num_ranks(),
        message: simulation.message_bytes,
        time: tenths(simulation.time_ns),
        launch: tenths(simulation.launch_ns),
        bus: tenths(simulation.bus_bandwidth()),
        arrows: arrows(simulation, &rows),
        path: (simulation.critical_path().iter())
            .map(|step| (step.span.0, tenths(step.from_ns), tenths(step.until_ns)))
            .collect(),
        links: (simulation.links.iter())
            .map(|link| (&link.name[..], link.bytes, link.capacity_gb_s, (link.busy * 1e4).round() / 1e4))
            .collect(),
        marks: marks.iter().map(|mark| row(mark, &lanes)).collect(),
        lanes: rows,
        texts: texts.list,
        spans,
    };
    // In a script element only this character could end it.
    serde_json::to_string(&data).expect("plain data").replace('<', "\\u003c")
}

/// A tenth of a ns is less than any picture shows.
fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// A lane for each thread block and each engine that does something, rank by rank.
type Lanes = HashMap<(Rank, Track), u32>;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Track {
    Block(ThreadBlockId),
    CopyEngine,
    Nic,
}

impl Track {
    fn of(place: Place, lane: Lane) -> Self {
        match lane {
            Lane::Block => Track::Block(place.threadblock),
            Lane::CopyEngine(_) => Track::CopyEngine,
            Lane::Nic(_) => Track::Nic,
        }
    }
}

fn lanes(plan: &Plan, simulation: &Simulation) -> (Lanes, Vec<LaneRow>) {
    let blocks = Block::all(plan).map(|block| (block.rank(), Track::Block(block.id())));
    let spans = simulation.spans.iter().map(|span| (span.place.rank, Track::of(span.place, span.lane)));
    let mut tracks: Vec<_> =
        blocks.chain(spans.filter(|(_, track)| !matches!(track, Track::Block(_)))).collect();
    tracks.sort_unstable();
    tracks.dedup();
    let name = |track| match track {
        Track::Block(id) => format!("block {id}"),
        Track::CopyEngine => "copy engine".into(),
        Track::Nic => "network card".into(),
    };
    let rows = tracks.iter().map(|&(rank, track)| LaneRow { rank: rank.0, name: name(track) }).collect();
    (tracks.into_iter().enumerate().map(|(at, track)| (track, at as u32)).collect(), rows)
}

fn spans(plan: &Plan, simulation: &Simulation, lanes: &Lanes, texts: &mut Texts) -> Spans {
    let mut columns = Spans::default();
    for span in &simulation.spans {
        let place = span.place;
        let op = plan.op(place).expect("a place of the plan that was simulated");
        let name = match span.lane {
            Lane::Block => op.kind.name().to_owned(),
            Lane::CopyEngine(to) | Lane::Nic(to) => format!("{} to rank {to}", op.kind.name()),
        };
        columns.lane.push(lanes[&(place.rank, Track::of(place, span.lane))]);
        columns.name.push(texts.id(name));
        columns.start.push(tenths(span.start_ns));
        columns.end.push(tenths(span.end_ns));
        columns.bytes.push(span.bytes);
        columns.op.push(place.op);
        columns.inner.push(place.inner.map_or(-1, i64::from));
        columns.turn.push(span.turn);
        columns.text.push(texts.id(describe(plan, place, op)));
    }
    columns
}

/// The description of an operation, and the line that made it.
fn describe(plan: &Plan, place: Place, op: &Op) -> String {
    let block = Block::new(plan, place.rank, place.threadblock);
    let mut text = String::new();
    match &op.kind {
        OpKind::Barrier { barrier, num_threadblocks } => {
            let _ = write!(text, "barrier {barrier} of {num_threadblocks} thread blocks");
        }
        OpKind::Notify(notify) => {
            for (at, &channel) in notify.channels.iter().enumerate() {
                let joint = if at == 0 { "rank" } else { "," };
                let _ = write!(text, "{joint} {}", block.peer(notify.channel_type, channel));
            }
        }
        OpKind::Semaphore(semaphore) => {
            for (at, id) in semaphore.semaphores.iter().enumerate() {
                let _ = write!(text, "{} {id}", if at == 0 { "semaphore" } else { "," });
            }
        }
        _ => {}
    }
    block.accesses(&op.kind, |access| {
        let buffer = match access.buffer {
            BufferType::Input => "input",
            BufferType::Output => "output",
            BufferType::Scratch => "scratch",
        };
        let verb = if access.mode == Mode::Read { "reads" } else { "writes" };
        let what = if access.packets { " packets in" } else { "" };
        let whose =
            if access.rank == place.rank { String::new() } else { format!(" of rank {}", access.rank) };
        let separator = if text.is_empty() { "" } else { "\n" };
        let (from, to) = (access.chunks.start, access.chunks.end);
        let _ = write!(text, "{separator}{verb}{what} {buffer}[{from}..{to}]{whose}");
    });
    if let Some(origin) = plan.origin(op.origin) {
        let _ = write!(text, "\n{}:{}", origin.file, origin.line);
    }
    text
}

fn arrows(simulation: &Simulation, rows: &[LaneRow]) -> Arrows {
    let mut columns = Arrows::default();
    for arrow in &simulation.arrows {
        columns.kind.push(match arrow.kind {
            ArrowKind::Signal => 0,
            ArrowKind::Semaphore => 1,
            ArrowKind::Packets => 2,
            ArrowKind::Data => 3,
        });
        columns.from.push(arrow.from.0);
        columns.to.push(arrow.to.map_or(-1, |id| i64::from(id.0)));
        columns.lane.push(rows.partition_point(|row| row.rank < arrow.rank.0) as u32);
        columns.sent.push(tenths(arrow.sent_ns));
        columns.arrived.push(tenths(arrow.arrived_ns));
    }
    columns
}

fn row<'a>(mark: &'a Mark, lanes: &Lanes) -> MarkRow<'a> {
    let place = mark.place;
    MarkRow {
        lane: place.and_then(|place| lanes.get(&(place.rank, Track::Block(place.threadblock))).copied()),
        op: place.map_or(0, |place| place.op),
        inner: place.and_then(|place| place.inner).map_or(-1, i64::from),
        place: place.map_or_else(String::new, |place| place.to_string()),
        severity: mark.severity,
        text: &mark.text,
    }
}

/// Each text once.
#[derive(Default)]
struct Texts {
    list: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Texts {
    fn id(&mut self, text: String) -> u32 {
        *self.ids.entry(text).or_insert_with_key(|text| {
            self.list.push(text.clone());
            self.list.len() as u32 - 1
        })
    }
}
