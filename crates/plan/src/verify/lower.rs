//! Lowers a plan to the program that the verifier judges.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use antiphon_operation::ReduceOp;

use crate::extent::Extent;
use crate::ids::{BarrierId, ChannelId, ChannelIndex, Rank};
use crate::op::{
    BufferType, ChannelType, CopyKind, GroupShare, LocalChunk, Notify, NotifyKind, OpKind, Pipeline, Put,
    PutKind, Reduce, RemoteChunk, SwitchChunk,
};
use crate::place::Place;
use crate::plan::Plan;
use crate::resolve::{Block, Wiring};

use super::counters::Counters;
use super::finding::{Finding, Kind};
use super::program::{Agent, Home, Link, Location, Meeting, Move, Program, Step, View, What, home};
use super::{races, runs};

/// Most steps, signals and accesses of a program, which bounds memory.
const PROGRAM: u64 = 1 << 25;

/// Most of the programs of all sizes together, and of the pieces in which they take memory, which bounds time.
const ALL: u64 = 1 << 27;

/// What one in a pipeline counts for: in a few lines there may be any number of turns.
const IN_TURNS: u64 = 1 << 3;

/// How many steps, signals and accesses there may be, and how much else may be done at all sizes together.
pub(super) struct Budget {
    program: u64,
    all: u64,
    /// Words of all states of runs that are looked at.
    pub words: usize,
    /// Pairs of accesses to the same bytes.
    pub pairs: u64,
}

impl Budget {
    pub fn new() -> Self {
        Budget { program: PROGRAM, all: ALL, words: runs::ALL, pairs: races::PAIRS }
    }

    /// Pieces of memory and of accesses, at one more size.
    ///
    /// # Errors
    /// [`Kind::TooLarge`]
    pub fn pieces(&mut self, count: usize) -> Result<(), Kind> {
        let what = "pieces of memory and of accesses at all sizes";
        self.all = self.all.checked_sub(count as u64).ok_or(Kind::TooLarge { what, limit: ALL })?;
        Ok(())
    }

    fn spend(&mut self, count: u64) -> Result<(), Kind> {
        let take = |left: u64| {
            let what = "steps, signals and accesses in all turns";
            left.checked_sub(count).ok_or(Kind::TooLarge { what, limit: PROGRAM / IN_TURNS })
        };
        (self.program, self.all) = (take(self.program)?, take(self.all)?);
        Ok(())
    }
}

/// Chunks of someone's buffer, perhaps as packets.
#[derive(Clone, Copy)]
struct Chunks {
    rank: Rank,
    buffer: BufferType,
    index: u64,
    packets: bool,
}

/// The bytes of a range that an operation takes.
#[derive(Clone, Copy)]
struct Slice {
    group: Option<GroupShare>,
    /// The turn of the pipeline and the bytes of each.
    turn: Option<(u64, u64)>,
}

/// Some launches, one after the other, of a plan that [`structure::check`](super::structure::check) has passed, at one size of its chunks.
///
/// # Errors
/// [`Kind::TooLarge`], and barriers to which not all come.
pub(super) fn program<'a>(
    plan: &'a Plan,
    wiring: &Wiring,
    extent: Extent,
    launches: u32,
    budget: &mut Budget,
) -> Result<Program<'a>, Vec<Finding>> {
    budget.program = PROGRAM;
    let counters = Counters::new(plan);
    let empty = Program {
        plan,
        chunk: extent.chunk(),
        launches,
        agents: Vec::new(),
        steps: Vec::new(),
        moves: Vec::new(),
        locations: Vec::new(),
        links: Vec::new(),
        counters: counters.list(plan),
        meetings: Vec::new(),
        ports: Vec::new(),
    };
    let mut lower = Lower {
        program: empty,
        wiring,
        extent,
        counters,
        launch: 1,
        barriers: BTreeMap::new(),
        ends: vec![None; plan.gpus.len()],
        ports: HashMap::new(),
    };
    for block in Block::all(plan) {
        lower.block(&block, budget).map_err(|kind| vec![Finding::new(plan, kind, Vec::new())])?;
    }
    let wrong = lower.wrong_barriers();
    if wrong.is_empty() { Ok(lower.program) } else { Err(wrong) }
}

/// A barrier's number in the program, and for how many blocks each of its operations is.
type Barrier = (u32, Vec<(u32, Place)>);

struct Lower<'a, 'w> {
    program: Program<'a>,
    wiring: &'w Wiring,
    extent: Extent,
    counters: Counters,
    /// The launch that is being written, from 1.
    launch: u32,
    barriers: BTreeMap<(Rank, BarrierId), Barrier>,
    /// For each rank, the meeting of its blocks when a launch ends.
    ends: Vec<Option<u32>>,
    /// The port timelines of each agent.
    ports: HashMap<(u32, ChannelId), u32>,
}

impl Lower<'_, '_> {
    fn block(&mut self, block: &Block<'_>, budget: &mut Budget) -> Result<(), Kind> {
        let first = self.program.steps.len() as u32;
        for launch in 1..=self.program.launches {
            self.launch = launch;
            if launch > 1 {
                self.between(block, budget)?;
            }
            self.operations(block, budget)?;
        }
        let steps = first..self.program.steps.len() as u32;
        self.program.agents.push(Agent { rank: block.rank(), block: block.id(), steps });
        Ok(())
    }

    /// Behind a launch, a block flushes its ports and meets the other blocks of its rank. One of them accesses the rank's tensors as the
    /// caller may: it reads the output, and writes both. Then they meet again.
    fn between(&mut self, block: &Block<'_>, budget: &mut Budget) -> Result<(), Kind> {
        let (agent, rank) = (self.agent(), block.rank());
        let ports: Vec<u32> = (0..self.program.ports.len() as u32)
            .filter(|&port| self.program.ports[port as usize] == agent)
            .collect();
        budget.spend(8 + ports.len() as u64)?;
        let place = block.place(u32::MAX as usize, None); // no operation
        let first = self.program.links.len() as u32;
        self.program.links.extend(ports.iter().map(|&port| Link { counter: u32::MAX, port: Some(port) }));
        self.step(place, What::Flush(first..self.program.links.len() as u32));
        let end = self.end(rank);
        self.step(place, end);
        if block.id().index() == 0 {
            let first = self.program.moves.len() as u32;
            self.callers(block);
            self.step(place, What::Move(first..self.program.moves.len() as u32));
        }
        let end = self.end(rank);
        self.step(place, end);
        Ok(())
    }

    /// The accesses of a rank's caller. In place, one tensor contains the other.
    fn callers(&mut self, block: &Block<'_>) {
        let (gpu, rank) = (block.gpu(), block.rank());
        let whole = |buffer| [Chunks { rank, buffer, index: 0, packets: false }];
        let [input, output] = [BufferType::Input, BufferType::Output].map(whole);
        let slice = Slice { group: None, turn: None };
        let larger = if gpu.input_chunks > gpu.output_chunks { input } else { output };
        if self.program.plan.inplace {
            let size = gpu.input_chunks.max(gpu.output_chunks);
            return self.transfer(size, slice, &larger, &larger, None, None);
        }
        self.transfer(gpu.input_chunks, slice, &[], &input, None, None);
        self.transfer(gpu.output_chunks, slice, &output, &output, None, None);
    }

    /// The meeting of the blocks of a rank when a launch ends.
    fn end(&mut self, rank: Rank) -> What {
        let (agent, meetings) = (self.agent(), &mut self.program.meetings);
        let number = *self.ends[rank.index()].get_or_insert_with(|| {
            meetings.push(Meeting::default());
            meetings.len() as u32 - 1
        });
        count(&mut meetings[number as usize].agents, agent);
        What::Barrier(number)
    }

    fn step(&mut self, place: Place, what: What) {
        self.program.steps.push(Step { place, launch: self.launch, what });
    }

    fn operations(&mut self, block: &Block<'_>, budget: &mut Budget) -> Result<(), Kind> {
        let whole = Slice { group: None, turn: None };
        for (at, op) in block.get().ops.iter().enumerate() {
            let OpKind::Pipeline(Pipeline { unit_size, num_chunks, ops }) = &op.kind else {
                budget.spend(cost(block, &op.kind))?;
                self.op(block, block.place(at, None), &op.kind, whole);
                continue;
            };
            let turns = num_chunks.saturating_mul(self.extent.chunk()).div_ceil(*unit_size);
            let of_turn: u64 = ops.iter().map(|op| cost(block, &op.kind)).sum();
            budget.spend(of_turn.saturating_mul(turns).saturating_mul(IN_TURNS))?;
            for turn in 0..if ops.is_empty() { 0 } else { turns } {
                let slice = Slice { group: None, turn: Some((turn, *unit_size)) };
                for (inner, op) in ops.iter().enumerate() {
                    self.op(block, block.place(at, Some(inner)), &op.kind, slice);
                }
            }
        }
        Ok(())
    }

    fn op(&mut self, block: &Block<'_>, place: Place, op: &OpKind, slice: Slice) {
        let what = match op {
            OpKind::Nop => What::Nop,
            OpKind::Barrier { barrier, num_threadblocks } => self.barrier(place, *barrier, *num_threadblocks),
            OpKind::Notify(notify) => self.notify(block, notify),
            OpKind::Semaphore(op) => {
                let rank = block.rank();
                let counters: Vec<_> =
                    op.semaphores.iter().map(|&id| self.counters.semaphore(rank, id)).collect();
                let links =
                    self.link(op.acquire, counters.into_iter().map(|counter| Link { counter, port: None }));
                match op.acquire {
                    true => What::Acquire { links, relaxed: false },
                    false => What::Release { links, relaxed: false },
                }
            }
            OpKind::Put(put) if put.channel_type == ChannelType::Port => self.push(block, put, slice),
            _ => What::Move(self.data(block, op, slice)),
        };
        self.step(place, what);
    }

    /// The agent that is being written.
    fn agent(&self) -> u32 {
        self.program.agents.len() as u32
    }

    fn barrier(&mut self, place: Place, barrier: BarrierId, blocks: u32) -> What {
        let agent = self.agent();
        let next = self.program.meetings.len() as u32;
        let (number, ops) = self.barriers.entry((place.rank, barrier)).or_insert_with(|| (next, Vec::new()));
        if ops.last() != Some(&(blocks, place)) {
            ops.push((blocks, place));
        }
        if *number == next {
            self.program.meetings.push(Meeting::default());
        }
        count(&mut self.program.meetings[*number as usize].agents, agent);
        What::Barrier(*number)
    }

    fn wrong_barriers(&self) -> Vec<Finding> {
        let mut wrong = Vec::new();
        for (&(_, barrier), (number, ops)) in &self.barriers {
            let agents = &self.program.meetings[*number as usize].agents;
            let expected = ops[0].0;
            let equal = agents.iter().all(|&(_, times)| times == agents[0].1);
            let odd = ops.iter().find(|&&(blocks, _)| blocks as usize != agents.len());
            if let (Some(&(expected, place)), _) | (None, Some((expected, place))) =
                (odd, (!equal).then_some((expected, ops[0].1)))
            {
                let block = |agent: u32| self.program.agents[agent as usize].block;
                let comes = agents.iter().map(|&(agent, times)| (block(agent), times)).collect();
                let kind = Kind::Barrier { barrier, expected, comes };
                wrong.push(Finding::new(self.program.plan, kind, vec![place]));
            }
        }
        wrong
    }

    /// Links to counters, and the agents that take from them or add to them.
    fn link(&mut self, acquire: bool, links: impl IntoIterator<Item = Link>) -> Range<u32> {
        let agent = self.agent();
        let first = self.program.links.len() as u32;
        for link in links {
            let counter = &mut self.program.counters[link.counter as usize];
            count(if acquire { &mut counter.acquirers } else { &mut counter.releasers }, agent);
            self.program.links.push(link);
        }
        first..self.program.links.len() as u32
    }

    /// The timeline of a block's port channel.
    fn port(&mut self, block: &Block<'_>, index: ChannelIndex) -> u32 {
        let agent = self.agent();
        let ports = &mut self.program.ports;
        let channel = block.channel(ChannelType::Port, index);
        *self.ports.entry((agent, channel)).or_insert_with(|| {
            ports.push(agent);
            ports.len() as u32 - 1
        })
    }

    fn notify(&mut self, block: &Block<'_>, notify: &Notify) -> What {
        let (of, rank, relaxed) = (notify.channel_type, block.rank(), notify.relaxed);
        let is_port = of == ChannelType::Port;
        match notify.kind {
            NotifyKind::Signal => {
                let links: Vec<_> = (notify.channels.iter())
                    .map(|&index| Link {
                        counter: self.peers_counter(block, of, index),
                        port: is_port.then(|| self.port(block, index)),
                    })
                    .collect();
                // The relaxed form of a port's signal is the same as the other.
                What::Release { links: self.link(false, links), relaxed: relaxed && !is_port }
            }
            NotifyKind::Wait => {
                let own = |index| self.counters.channel(rank, of, block.channel(of, index));
                let links: Vec<_> =
                    notify.channels.iter().map(|&index| Link { counter: own(index), port: None }).collect();
                What::Acquire { links: self.link(true, links), relaxed: relaxed && !is_port }
            }
            NotifyKind::Flush => {
                let first = self.program.links.len() as u32;
                for &index in &notify.channels {
                    let port = Some(self.port(block, index));
                    self.program.links.push(Link { counter: u32::MAX, port });
                }
                What::Flush(first..self.program.links.len() as u32)
            }
        }
    }

    /// The counter at the other end of a channel.
    fn peers_counter(&self, block: &Block<'_>, of: ChannelType, index: ChannelIndex) -> u32 {
        let channel = self.wiring.counterpart(block.rank(), of, block.channel(of, index));
        self.counters.channel(block.peer(of, index), of, channel.expect("the structure is checked"))
    }

    fn push(&mut self, block: &Block<'_>, put: &Put, slice: Slice) -> What {
        let moves = self.data(block, &OpKind::Put(put.clone()), slice);
        let signals = matches!(put.kind, PutKind::WithSignal | PutKind::WithSignalAndFlush);
        let links: Vec<_> = (put.channels.iter())
            .filter(|_| signals)
            .map(|&index| Link {
                counter: self.peers_counter(block, ChannelType::Port, index),
                port: Some(self.port(block, index)),
            })
            .collect();
        let links = self.link(false, links);
        What::Push { moves, links, flush: put.kind == PutKind::WithSignalAndFlush }
    }

    /// The moves of an operation. All have its kind's length; those of no bytes are left out.
    fn data(&mut self, block: &Block<'_>, op: &OpKind, slice: Slice) -> Range<u32> {
        let first = self.program.moves.len() as u32;
        let own = |chunk: &LocalChunk, packets| Chunks {
            rank: block.rank(),
            buffer: chunk.buffer,
            index: chunk.index,
            packets,
        };
        let remote = |of, chunk: &RemoteChunk, packets| {
            let there = block.remote(of, chunk.buffer_id);
            Chunks { rank: there.rank, buffer: there.buffer, index: chunk.index, packets }
        };
        let members = |chunk: &SwitchChunk, packets| -> Vec<Chunks> {
            let (buffer, members) = block.switch(chunk.switch_channel_id);
            members.iter().map(|&rank| Chunks { rank, buffer, index: chunk.index, packets }).collect()
        };
        let grouped = |group| Slice { group, ..slice };
        match op {
            OpKind::Copy(copy) => {
                let src = own(&copy.src, copy.kind == CopyKind::Unpack);
                let dst = own(&copy.dst, copy.kind == CopyKind::Pack);
                self.transfer(copy.src.size, grouped(copy.group), &[src], &[dst], None, None);
            }
            OpKind::Put(put) => {
                let packets = matches!(put.kind, PutKind::Packets | PutKind::ReadPackets);
                let is_port = put.channel_type == ChannelType::Port;
                // A packet is read once and written to all.
                for (at, dst) in put.dst.iter().enumerate() {
                    let src = &put.src[if put.src.len() == 1 { 0 } else { at }];
                    // A port moves packets as they are: what it puts was packed before.
                    let from = own(src, put.kind == PutKind::ReadPackets || (packets && is_port));
                    let to = remote(put.channel_type, dst, packets);
                    let port = is_port.then(|| self.port(block, put.channels[at]));
                    let before = self.program.moves.len();
                    self.transfer(dst.size, grouped(put.group), &[from], &[to], None, port);
                    if put.kind == PutKind::Packets {
                        self.program.moves[before..].iter_mut().for_each(|put| put.awaits = false);
                    }
                }
            }
            OpKind::Get(get) => {
                for (src, dst) in get.src.iter().zip(&get.dst) {
                    let (from, to) = (remote(get.channel_type, src, false), own(dst, false));
                    self.transfer(dst.size, grouped(get.group), &[from], &[to], None, None);
                }
            }
            OpKind::Reduce(reduce) => self.reduce(reduce, own, remote, grouped(reduce.group)),
            OpKind::SwitchReduce(op) => {
                let (_, ranks) = block.switch(op.channels[0]);
                let from =
                    |&rank: &Rank| Chunks { rank, buffer: op.buffer, index: op.offset, packets: false };
                let from: Vec<_> = ranks.iter().map(from).collect();
                let to =
                    Chunks { rank: op.dst.rank, buffer: op.dst.buffer, index: op.dst.index, packets: false };
                self.transfer(op.size, slice, &from, &[to], Some(op.op), None);
            }
            OpKind::SwitchBroadcast(op) => {
                let (rank, buffer, index) = (op.src.rank, op.src.buffer, op.src.index);
                let from = Chunks { rank, buffer, index, packets: op.packets };
                self.transfer(op.src.size, slice, &[from], &members(&op.dst, op.packets), None, None);
            }
            OpKind::SwitchReduceBroadcast(op) => {
                let (from, to) = (members(&op.src, false), members(&op.dst, false));
                self.transfer(op.src.size, slice, &from, &to, Some(op.op), None);
            }
            OpKind::Nop
            | OpKind::Barrier { .. }
            | OpKind::Notify(_)
            | OpKind::Semaphore(_)
            | OpKind::Pipeline(_) => {}
        }
        first..self.program.moves.len() as u32
    }

    fn reduce(
        &mut self,
        reduce: &Reduce,
        own: impl Fn(&LocalChunk, bool) -> Chunks,
        remote: impl Fn(ChannelType, &RemoteChunk, bool) -> Chunks,
        slice: Slice,
    ) {
        let of = reduce.channel_type.unwrap_or(ChannelType::Memory);
        let local = reduce.src.iter().enumerate().map(|(at, chunk)| own(chunk, reduce.packets && at > 0));
        let from: Vec<_> =
            local.chain(reduce.remote_src.iter().map(|chunk| remote(of, chunk, false))).collect();
        let mut to = vec![own(&reduce.dst, false)];
        to.extend(reduce.packet_dst.iter().map(|chunk| own(chunk, true)));
        to.extend(reduce.remote_dst.iter().map(|chunk| remote(of, chunk, reduce.packets)));
        self.transfer(reduce.dst.size, slice, &from, &to, Some(reduce.op), None);
    }

    fn transfer(
        &mut self,
        size: u64,
        slice: Slice,
        from: &[Chunks],
        to: &[Chunks],
        combine: Option<ReduceOp>,
        port: Option<u32>,
    ) {
        // The turns of a pipeline cut plain data only; packets carry no turn.
        let packets = from.iter().chain(to).any(|chunks| chunks.packets);
        let part = self.part(size, Slice { turn: slice.turn.filter(|_| !packets), ..slice });
        if part.is_empty() {
            return;
        }
        let awaits = from.iter().any(|chunks| chunks.packets);
        let sources = self.locations(from, part.start);
        let dests = self.locations(to, part.start);
        let len = part.end - part.start;
        self.program.moves.push(Move {
            len,
            sources,
            dests,
            combine,
            awaits,
            launch: self.launch,
            port,
            pieces: 0,
            first_piece: 0,
        });
    }

    /// The bytes of `size` chunks.
    fn part(&self, size: u64, slice: Slice) -> Range<u64> {
        let all = 0..size * self.extent.chunk();
        let shared = slice.group.map_or(all.clone(), |group| self.extent.share(&all, group));
        match slice.turn {
            None => shared,
            Some((turn, unit)) => {
                let start = shared.start.saturating_add(turn.saturating_mul(unit)).min(shared.end);
                start..start.saturating_add(unit).min(shared.end)
            }
        }
    }

    fn locations(&mut self, chunks: &[Chunks], offset: u64) -> Range<u32> {
        let first = self.program.locations.len() as u32;
        for part in chunks {
            let Home { view, base } = home(self.program.plan, part.rank, part.buffer);
            let is_other = self.program.plan.use_double_scratch_buffer && self.launch.is_multiple_of(2);
            let view = match (part.packets, is_other && !view.callers()) {
                (false, false) => view,
                (false, true) => View::new(view.rank(), View::OTHER_SCRATCH),
                (true, false) => View::new(view.rank(), View::PACKETS),
                (true, true) => View::new(view.rank(), View::OTHER_PACKETS),
            };
            let start = (base + part.index) * self.extent.chunk() + offset;
            self.program.locations.push(Location { view, start, cell: 0 });
        }
        first..self.program.locations.len() as u32
    }
}

/// The step, the signals and the accesses of an operation.
fn cost(block: &Block<'_>, op: &OpKind) -> u64 {
    let signals = match op {
        OpKind::Notify(notify) => notify.channels.len(),
        OpKind::Semaphore(op) => op.semaphores.len(),
        OpKind::Put(put) => put.channels.len(),
        _ => 0,
    };
    let mut cost = 1 + signals as u64;
    block.accesses(op, |_| cost += 1);
    cost
}

/// Agents come in ascending order: only the last one's count can grow.
fn count(times: &mut Vec<(u32, u32)>, agent: u32) {
    match times.last_mut() {
        Some((last, times)) if *last == agent => *times += 1,
        _ => times.push((agent, 1)),
    }
}
