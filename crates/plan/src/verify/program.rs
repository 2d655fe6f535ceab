//! What the proof is about: a plan at one size of its chunks, pipelines written out, channels and semaphores as counters,
//! data as moves between bytes.

use std::ops::Range;

use antiphon_operation::ReduceOp;

use crate::ids::{BarrierId, ChannelId, Rank, SemaphoreId, ThreadBlockId};
use crate::op::{BufferType, ChannelType, OpKind};
use crate::place::Place;
use crate::plan::Plan;

/// A memory: one of the [`KINDS`] kinds of a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct View(pub u32);

/// Input (with the output, in place), output, and each half of the scratch: plain, and as packets.
pub(super) const KINDS: u32 = 6;

impl View {
    pub const INPUT: u32 = 0;
    pub const OUTPUT: u32 = 1;
    pub const SCRATCH: u32 = 2;
    pub const PACKETS: u32 = 3;
    /// Of the half of the scratch that every second launch has, where it has two.
    pub const OTHER_SCRATCH: u32 = 4;
    pub const OTHER_PACKETS: u32 = 5;

    pub fn new(rank: Rank, kind: u32) -> Self {
        View(rank.0 * KINDS + kind)
    }

    pub fn rank(self) -> Rank {
        Rank(self.0 / KINDS)
    }

    pub fn kind(self) -> u32 {
        self.0 % KINDS
    }

    pub fn packets(self) -> bool {
        matches!(self.kind(), View::PACKETS | View::OTHER_PACKETS)
    }

    /// Scratch that shares its bytes, plain if it is packets, and the other way round.
    pub fn sharing(self) -> Option<View> {
        let kind = match self.kind() {
            View::SCRATCH | View::OTHER_SCRATCH => self.kind() + 1,
            View::PACKETS | View::OTHER_PACKETS => self.kind() - 1,
            _ => return None,
        };
        Some(View::new(self.rank(), kind))
    }

    /// Whether it belongs to the caller, before and after.
    pub fn callers(self) -> bool {
        matches!(self.kind(), View::INPUT | View::OUTPUT)
    }

    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a buffer begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Home {
    pub view: View,
    /// In chunks.
    pub base: u64,
}

/// Where a rank's buffer stands in memory. In place, input and output share one: the same place, but of an all-gather the
/// input is the rank's part of the output, and of a reduce-scatter the output the rank's part of the input.
pub(super) fn home(plan: &Plan, rank: Rank, buffer: BufferType) -> Home {
    let gpu = &plan.gpus[rank.index()];
    let part = |chunks: u64| u64::from(rank.0).saturating_mul(chunks);
    let (kind, base) = match (buffer, plan.inplace, plan.collective.as_str()) {
        (BufferType::Scratch, ..) => (View::SCRATCH, 0),
        (BufferType::Input, true, "allgather") => (View::INPUT, part(gpu.input_chunks)),
        (BufferType::Output, true, "reducescatter") => (View::INPUT, part(gpu.output_chunks)),
        (BufferType::Input, ..) | (BufferType::Output, true, _) => (View::INPUT, 0),
        (BufferType::Output, false, _) => (View::OUTPUT, 0),
    };
    Home { view: View::new(rank, kind), base }
}

/// The first byte of a range whose length its move has; of packets, of the bytes that they carry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub view: View,
    pub start: u64,
    /// The first of the cells that it consists of; filled in when memory has been cut into cells.
    pub cell: u32,
}

/// Byte `k` of every destination becomes byte `k` of the source, or of all sources combined.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub len: u64,
    pub sources: Range<u32>,
    pub dests: Range<u32>,
    pub combine: Option<ReduceOp>,
    /// Whether each packet among the sources is awaited; otherwise it is read as it is.
    pub awaits: bool,
    /// The launch that it belongs to, from 1. Packets are awaited from the same one.
    pub launch: u32,
    /// The timeline of the port channel that does it, if not the thread block.
    pub port: Option<u32>,
    /// How many cells it has in each location.
    pub pieces: u32,
    /// The number of its first piece among those of all moves.
    pub first_piece: u32,
}

/// One end of a counter, and the port that it goes through, if any (see [`Program::ports`]).
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub counter: u32,
    pub port: Option<u32>,
}

/// The action of a step.
#[derive(Clone, Debug)]
pub(super) enum What {
    /// The block's threads meet.
    Nop,
    /// The threads of several blocks synchronise.
    Barrier(u32),
    /// Takes one from each counter.
    Acquire { links: Range<u32>, relaxed: bool },
    /// Adds one to each counter.
    Release { links: Range<u32>, relaxed: bool },
    /// Waits until the ports have done what was pushed.
    Flush(Range<u32>),
    /// The block moves data.
    Move(Range<u32>),
    /// Ports move data; then each adds one to its counter, if there are links; then they are flushed, if asked.
    Push { moves: Range<u32>, links: Range<u32>, flush: bool },
}

/// An operation, in one turn of its pipeline if it stands in one.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub place: Place,
    /// The launch that it belongs to, from 1.
    pub launch: u32,
    pub what: What,
}

/// A thread block.
#[derive(Clone, Debug)]
pub(super) struct Agent {
    pub rank: Rank,
    pub block: ThreadBlockId,
    pub steps: Range<u32>,
}

/// The object that a counter stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counted {
    /// Signals that arrive through a channel.
    Channel {
        /// The receiving rank.
        rank: Rank,
        /// Memory or port.
        channel_type: ChannelType,
        /// The channel, as the receiver names it.
        channel: ChannelId,
    },
    /// A semaphore.
    Semaphore {
        /// The rank that has it.
        rank: Rank,
        /// Which.
        semaphore: SemaphoreId,
    },
}

/// A count that steps add to and take from; a step that would take it below zero waits.
#[derive(Clone, Debug)]
pub(super) struct Counter {
    pub counted: Counted,
    pub initial: i64,
    /// How often each agent adds to it, and takes from it, ascending.
    pub releasers: Vec<(u32, u32)>,
    pub acquirers: Vec<(u32, u32)>,
}

impl Counter {
    /// The index of an agent among the counter's acquirers.
    pub fn acquirer(&self, agent: u32) -> usize {
        self.acquirers.binary_search_by_key(&agent, |&(who, _)| who).expect("listed when lowered")
    }

    /// How many all acquirers but one can take while that one is in a launch, one of `launches`: all are blocks of one rank, so none is
    /// in a later launch.
    pub fn others(&self, own: usize, launch: u32, launches: u32) -> i64 {
        let others = self.acquirers.iter().enumerate().filter(|&(at, _)| at != own);
        others.map(|(_, &(_, times))| i64::from(times / launches * launch)).sum()
    }
}

/// A barrier of one rank: its agents, ascending, and how often each comes.
#[derive(Clone, Debug, Default)]
pub(super) struct Meeting {
    pub agents: Vec<(u32, u32)>,
}

/// See the module's page.
#[derive(Clone, Debug)]
pub(super) struct Program<'a> {
    pub plan: &'a Plan,
    /// Bytes.
    pub chunk: u64,
    /// How many launches it consists of.
    pub launches: u32,
    pub agents: Vec<Agent>,
    pub steps: Vec<Step>,
    pub moves: Vec<Move>,
    pub locations: Vec<Location>,
    pub links: Vec<Link>,
    pub counters: Vec<Counter>,
    pub meetings: Vec<Meeting>,
    /// For each thread block's port channels, the block: a timeline of its own, on which its pushes stand in order.
    pub ports: Vec<u32>,
}

impl Program<'_> {
    pub fn sources(&self, what: &Move) -> &[Location] {
        &self.locations[what.sources.start as usize..what.sources.end as usize]
    }

    pub fn dests(&self, what: &Move) -> &[Location] {
        &self.locations[what.dests.start as usize..what.dests.end as usize]
    }

    pub fn links(&self, links: &Range<u32>) -> &[Link] {
        &self.links[links.start as usize..links.end as usize]
    }

    /// The barrier from which a step was made; none for the end of a launch.
    pub fn barrier(&self, step: u32) -> Option<BarrierId> {
        match self.plan.op(self.steps[step as usize].place).map(|op| &op.kind) {
            Some(&OpKind::Barrier { barrier, .. }) => Some(barrier),
            _ => None,
        }
    }

    /// Whether several agents take from some counter.
    pub fn contended(&self) -> bool {
        self.counters.iter().any(|counter| counter.acquirers.len() > 1)
    }

    pub fn moves(&self, moves: &Range<u32>) -> &[Move] {
        &self.moves[moves.start as usize..moves.end as usize]
    }
}
