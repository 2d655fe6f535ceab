//! The events in the order of their times, and the actions of thread blocks at them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::cluster::Cluster;
use super::cost::{Costs, Turn, Work};
use super::error::{SimulateError, Waiting};
use super::limits;
use super::network::{Completion, Network, Ordered};
use super::port::Ports;
use super::resources::Links;
use super::result::{self, Arrow, ArrowKind, Lane, Simulation, Span, SpanId};
use super::sync::{Sync, Token, Worker};
use crate::extent::Extent;
use crate::ids::Rank;
use crate::op::OpKind;
use crate::plan::Plan;
use crate::resolve::{Block, Wiring};

/// An event.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A thread block goes on.
    Resume(Worker),
    /// Flows are done.
    Flows(Completion),
    /// A signal reaches a channel.
    Signal(u32, Token),
    /// A release reaches a semaphore.
    Release(u32, Token),
    /// Packets reach a rank's scratch.
    Packets(Rank, Range<u64>, Token),
    /// A rank's engine can look whether its next transfer may begin.
    Engine(u32),
    /// Data that was put through a channel has arrived.
    Arrived(u32, Token),
}

/// Flows of a block are called by its number, those of an engine by its number from here.
pub(super) const ENGINE_FLOWS: u64 = 1 << 32;

/// A number of events up to which the engine does not look for events that no longer count.
const CROWDED: usize = 1 << 16;

/// How far a thread block is with its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It waits for something of `sync`; the number says how many are missing.
    Waits(u32),
    /// Its bytes flow when its latency is over.
    Begins,
    /// The number of flows that are left.
    Flows(u32),
    /// It asks engines for transfers.
    Asks,
    /// It is done when its time is over.
    Ends,
    /// All is done.
    Done,
}

/// A thread block.
#[derive(Debug)]
pub(super) struct State<'a> {
    pub block: Block<'a>,
    pub op: usize,
    pub inner: usize,
    pub turn: u64,
    pub phase: Phase,
    /// The span of the operation that it does, then the one before.
    pub span: SpanId,
    pub work: Work,
    /// How many of the packets that it reads are known to be there.
    pub read: usize,
}

impl<'a> State<'a> {
    /// The present operation, if any, and which piece of the bytes it is about.
    pub fn now(&self) -> Option<(&'a OpKind, Option<Turn>)> {
        let op = &self.block.get().ops.get(self.op)?.kind;
        match op {
            OpKind::Pipeline(pipeline) => Some((
                &pipeline.ops[self.inner].kind,
                Some(Turn { turn: self.turn, unit: pipeline.unit_size }),
            )),
            op => Some((op, None)),
        }
    }

    pub fn place(&self) -> crate::Place {
        let inner = match self.block.get().ops[self.op].kind {
            OpKind::Pipeline(_) => Some(self.inner),
            _ => None,
        };
        self.block.place(self.op, inner)
    }

    /// Goes to the next operation that is one, from the present one (if `past`, from the one behind it).
    fn seek(&mut self, past: bool, extent: &Extent) {
        let ops = &self.block.get().ops;
        if past {
            match &ops[self.op].kind {
                OpKind::Pipeline(pipeline) if self.inner + 1 < pipeline.ops.len() => return self.inner += 1,
                OpKind::Pipeline(pipeline) if self.turn + 1 < limits::turns(pipeline, extent) => {
                    (self.inner, self.turn) = (0, self.turn + 1);
                    return;
                }
                _ => (self.op, self.inner, self.turn) = (self.op + 1, 0, 0),
            }
        }
        let does_nothing = |op: &OpKind| matches!(op, OpKind::Pipeline(pipeline) if pipeline.ops.is_empty() || limits::turns(pipeline, extent) == 0);
        while ops.get(self.op).is_some_and(|op| does_nothing(&op.kind)) {
            self.op += 1;
        }
    }
}

/// A plan that is played.
pub(super) struct Engine<'a> {
    pub plan: &'a Plan,
    pub costs: Costs<'a>,
    pub wiring: Wiring,
    pub network: Network,
    pub sync: Sync,
    pub ports: Ports,
    pub states: Vec<State<'a>>,
    pub now: f64,
    pub spans: Vec<Span>,
    pub arrows: Vec<Arrow>,
    events: BinaryHeap<Reverse<(Ordered, u64, Slot)>>,
    scheduled: u64,
    /// With more events than that, those that no longer stand are taken out.
    crowded: usize,
}

/// An event in the heap, which is ordered by time and number alone.
#[derive(Debug)]
struct Slot(Event);

impl PartialEq for Slot {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Slot {}
impl PartialOrd for Slot {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Slot {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl<'a> Engine<'a> {
    /// The engine for a plan whose length has been checked.
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, extent: Extent) -> Self {
        let links = Links::new(cluster, plan.num_ranks());
        let state = |block| State {
            block,
            op: 0,
            inner: 0,
            turn: 0,
            phase: Phase::Done,
            span: SpanId(u32::MAX),
            work: Work::default(),
            read: 0,
        };
        Engine {
            plan,
            costs: Costs { cluster, links, extent },
            wiring: Wiring::new(plan),
            network: links.network(cluster),
            sync: Sync::new(plan),
            ports: Ports::new(plan.num_ranks()),
            states: Block::all(plan).map(state).collect(),
            now: 0.0,
            spans: Vec::new(),
            arrows: Vec::new(),
            events: BinaryHeap::new(),
            scheduled: 0,
            crowded: CROWDED,
        }
    }

    /// Plays the plan until nothing happens any more, and returns the blocks that wait then.
    pub fn run(mut self, message_bytes: u64) -> Result<(Simulation, Vec<Waiting>), SimulateError> {
        for worker in 0..self.states.len() as Worker {
            self.states[worker as usize].seek(false, &self.costs.extent);
            self.begin(worker, None);
        }
        self.settle();
        while let Some(Reverse((at, ..))) = self.events.peek() {
            self.now = at.0;
            // Rates are found once for all that happens at one time.
            while self.events.peek().is_some_and(|Reverse((next, ..))| next.0 <= self.now) {
                let Some(Reverse((.., Slot(event)))) = self.events.pop() else { break };
                self.happen(event);
            }
            self.settle();
            if self.network.shares_computed() > limits::SHARES {
                return Err(SimulateError::TooShared { limit: limits::SHARES, time_ns: self.now });
            }
        }
        let waiting = self.waiting();
        for state in self.states.iter().filter(|state| state.phase != Phase::Done) {
            self.spans[state.span.index()].end_ns = self.now;
        }
        let time_ns = self.now + self.costs.cluster.launch_ns;
        let simulation = Simulation {
            message_bytes,
            time_ns,
            launch_ns: self.costs.cluster.launch_ns,
            end_ns: self.now,
            links: self.costs.links.uses(&self.network, time_ns),
            bus_factor: result::bus_factor(self.plan),
            spans: self.spans,
            arrows: self.arrows,
        };
        Ok((simulation, waiting))
    }

    pub fn at(&mut self, time: f64, event: Event) {
        self.events.push(Reverse((Ordered(time), self.scheduled, Slot(event))));
        self.scheduled += 1;
    }

    pub fn after(&mut self, delay: f64, event: Event) {
        self.at(self.now + delay, event);
    }

    fn settle(&mut self) {
        let mut foreseen = Vec::new();
        self.network.settle(self.now, |completion| foreseen.push(completion));
        foreseen.into_iter().for_each(|completion| self.at(completion.at, Event::Flows(completion)));
        if self.events.len() > self.crowded {
            // Every change of a rate leaves a completion behind that will not be.
            let Self { events, network, .. } = self;
            events.retain(
                |Reverse((.., Slot(event)))| !matches!(event, Event::Flows(of) if !network.stands(of)),
            );
            self.crowded = CROWDED.max(2 * self.events.len());
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Resume(worker) => self.resume(worker),
            Event::Flows(completion) => {
                let mut done = Vec::new();
                self.network.complete(completion, &mut done);
                done.into_iter().for_each(|flow| match flow.checked_sub(ENGINE_FLOWS) {
                    Some(engine) => self.transferred(engine as u32),
                    None => self.flowed(flow as Worker),
                });
            }
            Event::Signal(channel, token) => self.signalled(channel, token),
            Event::Release(semaphore, token) => self.released(semaphore, token),
            Event::Packets(rank, range, token) => self.packets(rank, range, token),
            Event::Engine(engine) => self.next_transfer(engine),
            Event::Arrived(channel, token) => self.arrived(channel, token),
        }
    }

    /// Starts the block's present operation.
    fn begin(&mut self, worker: Worker, previous: Option<SpanId>) {
        let state = &mut self.states[worker as usize];
        let Some((op, turn)) = state.now() else {
            state.phase = Phase::Done;
            return;
        };
        let span = SpanId(self.spans.len() as u32);
        self.spans.push(Span {
            place: state.place(),
            lane: Lane::Block,
            turn: state.turn as u32,
            start_ns: self.now,
            end_ns: self.now,
            bytes: 0,
            previous,
            cause: None,
        });
        state.span = span;
        let block = &self.costs.cluster.block;
        let ends_after = match op {
            OpKind::Nop => block.sync_ns,
            OpKind::Barrier { barrier, num_threadblocks } => {
                return self.meet(worker, *barrier, *num_threadblocks);
            }
            OpKind::Notify(notify) => return self.notify(worker, notify),
            OpKind::Semaphore(semaphore) if semaphore.acquire => return self.acquire(worker, semaphore),
            OpKind::Semaphore(_) => block.op_ns,
            OpKind::Pipeline(_) => unreachable!("stands for its operations"),
            op => {
                state.work = self.costs.work(state.block, op, turn);
                (state.read, self.spans[span.index()].bytes) = (0, state.work.bytes);
                return self.read_packets(worker);
            }
        };
        self.ends_after(worker, ends_after);
    }

    pub fn ends_after(&mut self, worker: Worker, delay: f64) {
        self.states[worker as usize].phase = Phase::Ends;
        self.after(delay, Event::Resume(worker));
    }

    /// Waits for the next of the packets that are not there yet; when all are, goes on.
    pub fn read_packets(&mut self, worker: Worker) {
        let state = &mut self.states[worker as usize];
        while let Some((rank, range)) = state.work.reads.get(state.read) {
            let packets = &mut self.sync.packets[rank.index()];
            if !packets.has(range) {
                packets.wait(range.clone(), worker);
                state.phase = Phase::Waits(1);
                return;
            }
            state.read += 1;
        }
        let costs = &self.costs.cluster.block;
        let own = state.block.rank();
        let asks = super::port::is_put(state.now()).map(|put| {
            let to = put.dst.first().map(|chunk| state.block.remote(put.channel_type, chunk.buffer_id).rank);
            (own, to.unwrap_or(own))
        });
        if let (Some(local), false) = (&mut state.work.local, state.work.reads.is_empty()) {
            // While it waited it read what was there.
            let waited = self.now - self.spans[state.span.index()].start_ns;
            local.bytes = (local.bytes - waited * local.cap).max(1.0);
        }
        let mut delay = costs.op_ns + state.work.latency_ns;
        state.phase = Phase::Begins;
        if let Some((from, to)) = asks {
            state.phase = Phase::Asks;
            delay += self.port_engine(from, to).issue_ns;
        }
        self.after(delay, Event::Resume(worker));
    }

    fn resume(&mut self, worker: Worker) {
        match self.states[worker as usize].phase {
            Phase::Begins => self.flow(worker),
            Phase::Asks => self.ask(worker),
            Phase::Ends => self.end(worker),
            Phase::Waits(_) | Phase::Flows(_) | Phase::Done => {}
        }
    }

    fn flow(&mut self, worker: Worker) {
        let state = &mut self.states[worker as usize];
        let flows = state.work.local.iter().chain(&state.work.remote);
        let mut count = 0;
        for flow in flows {
            self.network.begin(self.now, &flow.resources, flow.cap, flow.bytes, u64::from(worker));
            count += 1;
        }
        state.phase = Phase::Flows(count);
        if count == 0 {
            self.end(worker);
        }
    }

    fn flowed(&mut self, worker: Worker) {
        let state = &mut self.states[worker as usize];
        if let Phase::Flows(left) = &mut state.phase {
            *left -= 1;
            if *left == 0 {
                self.end(worker);
            }
        }
    }

    /// Ends the block's operation: others hear of it, and the next one begins.
    pub fn end(&mut self, worker: Worker) {
        let (now, costs) = (self.now, self.costs.cluster);
        let state = &mut self.states[worker as usize];
        let (span, own) = (state.span, state.block.rank());
        self.spans[span.index()].end_ns = now;
        let work = std::mem::take(&mut state.work);
        let op = state.now().map(|(op, _)| op);
        state.seek(true, &self.costs.extent);
        let token = Token { from: span, sent: now };
        for (rank, range) in work.writes {
            let latency = if rank == own { 0.0 } else { costs.link.latency_ns };
            self.after(latency, Event::Packets(rank, range, token));
        }
        let (sent_ns, arrived_ns) = (self.spans[span.index()].start_ns, now + costs.link.latency_ns);
        for (rank, _) in work.sends {
            self.arrows.push(Arrow {
                kind: ArrowKind::Data,
                from: span,
                rank,
                to: None,
                sent_ns,
                arrived_ns,
            });
        }
        match op {
            Some(OpKind::Notify(notify)) => self.signal(own, worker, notify, token),
            Some(OpKind::Semaphore(semaphore)) if !semaphore.acquire => self.release(own, semaphore, token),
            _ => {}
        }
        self.begin(worker, Some(span));
    }
}
