//! The result of a simulation.

use crate::ids::Rank;
use crate::place::Place;
use crate::plan::Plan;

/// A place in [`Simulation::spans`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpanId(pub u32);

impl SpanId {
    /// The place as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A thread block or an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The thread block of the operation.
    Block,
    /// The rank's copy engine, for an operation on a port channel, to this rank.
    CopyEngine(Rank),
    /// The rank's network card, likewise.
    Nic(Rank),
}

/// An operation, or a transfer of an engine, from its begin to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The operation; for a transfer, the operation that requested it.
    pub place: Place,
    /// The block or engine that does it.
    pub lane: Lane,
    /// The iteration of its pipeline, from 0.
    pub turn: u32,
    /// When it begins, in ns from the kernel's start.
    pub start_ns: f64,
    /// When it ends.
    pub end_ns: f64,
    /// Bytes that it moves: over links, or within the rank if there are no others; packets with their flags.
    pub bytes: u64,
    /// The span before it in its lane.
    pub previous: Option<SpanId>,
    /// The span for which it waited last, if it waited; for a transfer, the operation that requested it.
    pub cause: Option<SpanId>,
}

/// A signal or data from an operation to another rank or thread block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrow {
    /// The kind of the arrow.
    pub kind: ArrowKind,
    /// The span that the arrow comes from.
    pub from: SpanId,
    /// The receiver.
    pub rank: Rank,
    /// The operation that took it; none of plain data.
    pub to: Option<SpanId>,
    /// When it left, in ns.
    pub sent_ns: f64,
    /// When it was there.
    pub arrived_ns: f64,
}

/// The meaning of an [`Arrow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArrowKind {
    /// A channel's signal.
    Signal,
    /// A semaphore's release.
    Semaphore,
    /// Packets that a reader waited for.
    Packets,
    /// Bytes.
    Data,
}

/// How much a link carried.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkUse {
    /// The link.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Its capacity, in GB/s.
    pub capacity_gb_s: f64,
    /// Its use over the whole time, from 0 to 1.
    pub busy: f64,
}

/// A part of the critical path: until when which span was what all waited for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The span.
    pub span: SpanId,
    /// When the step begins to count, in ns; until then the step before it counts. Latency on the way from that step is part of this one.
    pub from_ns: f64,
    /// When the step no longer counts, in ns.
    pub until_ns: f64,
}

/// How a plan went.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// Bytes of the message.
    pub message_bytes: u64,
    /// The whole time, launch included, in ns.
    pub time_ns: f64,
    /// The part of it before the launch is over; spans count from the end of the launch.
    pub launch_ns: f64,
    /// All operations and transfers, in the order in which they began.
    pub spans: Vec<Span>,
    /// The arrows between spans.
    pub arrows: Vec<Arrow>,
    /// The links, in order: for each rank out, in, memory; then the network cards.
    pub links: Vec<LinkUse>,
    pub(super) end_ns: f64,
    pub(super) bus_factor: f64,
}

impl Simulation {
    /// The time of the last event, in ns from the kernel's start.
    pub fn end_ns(&self) -> f64 {
        self.end_ns
    }

    /// Message bytes by time, in GB/s.
    pub fn algorithm_bandwidth(&self) -> f64 {
        if self.time_ns > 0.0 { self.message_bytes as f64 / self.time_ns } else { 0.0 }
    }

    /// The algorithm bandwidth times the [`BusFactor`](antiphon_operation::BusFactor) of the plan's
    /// [operation](crate::Plan::operation), or 1 if that has none. In GB/s.
    pub fn bus_bandwidth(&self) -> f64 {
        self.algorithm_bandwidth() * self.bus_factor
    }

    /// The chain of operations that determines the time, in the order of time: from the first operation to the last one that ended.
    /// Each operation is the next of its lane, or the one before released it. A step begins where the one before ended.
    pub fn critical_path(&self) -> Vec<Step> {
        let by_end =
            |a: &usize, b: &usize| self.spans[*a].end_ns.total_cmp(&self.spans[*b].end_ns).then(a.cmp(b));
        let last = (0..self.spans.len()).max_by(by_end);
        let mut path = Vec::new();
        let mut at = last.map(|at| (SpanId(at as u32), self.spans[at].end_ns));
        while let Some((id, until_ns)) = at {
            let span = &self.spans[id.index()];
            at = self.before(span, until_ns);
            let from_ns = at.map_or(span.start_ns.min(until_ns), |(_, until)| until);
            path.push(Step { span: id, from_ns, until_ns });
            // A put that flushes is there twice: from its begin to its transfer's, and at its end.
            if path.len() > 2 * self.spans.len() {
                break;
            }
        }
        path.reverse();
        path
    }

    /// What a span, as far as it had got at a time, waited for; and until when.
    fn before(&self, span: &Span, until_ns: f64) -> Option<(SpanId, f64)> {
        let end_of = |id: SpanId| (id, self.spans[id.index()].end_ns.min(until_ns));
        let previous = span.previous.map(end_of);
        match span.lane {
            Lane::Block if until_ns < span.end_ns => previous,
            Lane::Block => span.cause.map(end_of).or(previous),
            // It queued behind another one, or began when it was asked for.
            Lane::CopyEngine(_) | Lane::Nic(_) => match previous {
                Some((_, end)) if end >= span.start_ns => previous,
                _ => span.cause.map(|id| (id, self.spans[id.index()].end_ns.min(span.start_ns))),
            },
        }
    }
}

pub(super) fn bus_factor(plan: &Plan) -> f64 {
    let factor = plan.operation().and_then(|operation| operation.row().bus_factor.among(plan.num_ranks()));
    factor.unwrap_or(1.0)
}
