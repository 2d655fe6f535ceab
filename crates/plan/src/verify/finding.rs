//! The findings of the verifier.

use std::ops::Range;

use serde::Serialize;

use super::program::Counted;
use crate::ids::{BarrierId, ChannelId, Rank, SemaphoreId, ThreadBlockId};
use crate::op::{BufferType, ChannelType};
use crate::place::Place;
use crate::plan::{Origin, Plan};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The plan does what it must, but has something that it does not need, or needs something of its caller.
    Warning,
    /// The plan must not run.
    Error,
}

/// Bytes of a rank's buffer, in chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// The rank that has it.
    pub rank: Rank,
    /// Which.
    pub buffer: BufferType,
    /// As packets.
    pub packets: bool,
    /// Where the region begins and ends, in chunks; whole numbers unless thread blocks or turns of a pipeline share a chunk.
    pub chunks: Range<f64>,
}

/// The accesses of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hazard {
    /// The first writes, the second reads.
    ReadAfterWrite,
    /// The first reads, the second writes.
    WriteAfterRead,
    /// Both write.
    WriteAfterWrite,
}

/// The object that a thread block waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// One more of something that is counted.
    Count(Counted),
    /// The other thread blocks of a barrier.
    Barrier(BarrierId),
    /// Packets that no operation has written.
    Packets,
}

/// The use of bytes of scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mistake {
    /// Packets for plain data: their flags are read.
    PacketsForData,
    /// Plain data for packets: it may equal their flag.
    DataForPackets,
    /// The same, the data being what the launch before left there.
    LaunchBefore,
}

/// The kind of a [`Finding`]. The first of the finding's places is where it is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Kind {
    /// Numbers name what does not exist ([`Plan::check`]).
    Form {
        /// What it says.
        error: String,
    },
    /// No message fits the plan.
    NoSize {
        /// The reason, with the numbers.
        why: String,
    },
    /// More than can be decided in bounded time and memory.
    TooLarge {
        /// The quantity beyond its limit.
        what: &'static str,
        /// How much of it can be decided.
        limit: u64,
    },
    /// An operation is impossible.
    Operation {
        /// Why, with the numbers.
        why: String,
    },
    /// Chunks beyond the end of a buffer.
    Bounds {
        /// The chunks.
        chunks: Range<u64>,
        /// The rank that has the buffer.
        rank: Rank,
        /// Which buffer.
        buffer: BufferType,
        /// How many it has; of scratch, if it is used for packets, how many packets' chunks it can hold.
        have: u64,
    },
    /// A signal or wait on a channel that leads nowhere.
    NoCounterpart {
        /// Memory or port.
        channel_type: ChannelType,
        /// The channel.
        channel: ChannelId,
        /// The rank to which it leads, which has fewer channels back.
        peer: Rank,
    },
    /// Not as many blocks come to a barrier as it is for, or not equally often.
    Barrier {
        /// Which barrier.
        barrier: BarrierId,
        /// For how many it is.
        expected: u32,
        /// The blocks that reach it, with their numbers of times.
        comes: Vec<(ThreadBlockId, u32)>,
    },
    /// A launch takes more from a counter than it adds, or less: the next launch finds another count.
    Unbalanced {
        /// Which counter.
        counter: Counted,
        /// How many are added.
        added: u64,
        /// How many are taken.
        taken: u64,
    },
    /// Thread blocks wait for each other, or for nothing.
    Deadlock {
        /// What each of the finding's places waits for.
        waits: Vec<Missing>,
    },
    /// Two accesses to the same bytes, of which nothing says which comes first.
    Race {
        /// Which accesses.
        hazard: Hazard,
        /// Which bytes.
        region: Region,
    },
    /// In device memory, two accesses to the same plain bytes, of which only a packet says that the first is over. It need not be
    /// seen by then.
    OnlyAnnounced {
        /// Which accesses: the first is a write.
        hazard: Hazard,
        /// Which bytes.
        region: Region,
    },
    /// A rank's buffer is still used when the rank may be done.
    Late {
        /// Which bytes.
        region: Region,
        /// Whether they are written.
        written: bool,
    },
    /// Scratch bytes that are used as packets and plain are taken for what they are not. The second place wrote them.
    MixedScratch {
        /// The bytes, as their reader reads them.
        region: Region,
        /// What they are taken for.
        mistake: Mistake,
    },
    /// A read of bytes that were never written.
    Unwritten {
        /// Which bytes.
        region: Region,
    },
    /// The result is wrong.
    Wrong {
        /// Where in the output.
        region: Region,
        /// The required content.
        expected: String,
        /// The actual content.
        found: String,
    },
    /// Nothing is known of larger chunks: those that were looked at do not stand for them.
    Range {
        /// Bytes of the largest chunk for which the plan is proved.
        largest_chunk: u64,
        /// Why the proof ends there.
        why: String,
    },
    /// Another rank's buffer is used without knowing that the rank has begun.
    Unstarted {
        /// The user.
        rank: Rank,
        /// The rank that has the buffer.
        owner: Rank,
    },
    /// The plan is right only if its ranks meet before each launch. If each launched again as soon as its own launch has ended, using its
    /// tensors in between, there would be something wrong, or too much to decide.
    NeedsMeeting {
        /// What would be wrong. Places outside the plan are the caller's accesses: it reads the output and overwrites both tensors.
        why: Box<Kind>,
    },
    /// Packets and plain data share bytes of scratch: only a reason of [`NeedsMeeting`](Kind::NeedsMeeting), since data of a launch that
    /// others have not ended may lie where a reader looks for packets.
    SharedScratch,
    /// An input is overwritten, though the plan is not in place.
    InputOverwritten {
        /// Which bytes.
        region: Region,
    },
    /// Some of a group's thread blocks leave out their share of what the others write.
    Group {
        /// Which bytes.
        region: Region,
        /// The size of the group.
        size: u32,
        /// How many of it write their share.
        present: usize,
    },
    /// Scratch that no operation uses.
    UnusedScratch {
        /// The chunks, and their ranks.
        chunks: Vec<(Range<u64>, Vec<Rank>)>,
    },
    /// A channel that no thread block lists.
    UnusedChannel {
        /// The rank that has it.
        rank: Rank,
        /// Its type.
        channel_type: ChannelType,
        /// Which.
        channel: ChannelId,
    },
    /// A semaphore that no operation acquires or releases.
    UnusedSemaphore {
        /// The rank that has it.
        rank: Rank,
        /// Which.
        semaphore: SemaphoreId,
    },
}

impl Kind {
    /// Errors forbid the plan to run.
    pub fn severity(&self) -> Severity {
        match self {
            Kind::Range { .. }
            | Kind::Unstarted { .. }
            | Kind::NeedsMeeting { .. }
            | Kind::InputOverwritten { .. }
            | Kind::Group { .. }
            | Kind::UnusedScratch { .. }
            | Kind::UnusedChannel { .. }
            | Kind::UnusedSemaphore { .. } => Severity::Warning,
            _ => Severity::Error,
        }
    }

    /// How far it is from a root cause: what has a smaller number can make what has a larger one happen. A signal too few
    /// makes blocks wait for ever; bytes that were read too early make results wrong.
    pub(super) fn depth(&self) -> u8 {
        match self {
            Kind::Form { .. } | Kind::NoSize { .. } | Kind::Operation { .. } | Kind::Bounds { .. } => 0,
            Kind::NoCounterpart { .. } | Kind::Barrier { .. } | Kind::Unbalanced { .. } => 1,
            Kind::Deadlock { .. } => 2,
            Kind::Unwritten { .. } | Kind::MixedScratch { .. } | Kind::InputOverwritten { .. } => 3,
            Kind::Race { .. } | Kind::OnlyAnnounced { .. } | Kind::Late { .. } | Kind::Unstarted { .. } => 4,
            Kind::Wrong { .. } => 5,
            _ => 6,
        }
    }

    /// Its name in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::Form { .. } => "form",
            Kind::NoSize { .. } => "no_size",
            Kind::TooLarge { .. } => "too_large",
            Kind::Operation { .. } => "operation",
            Kind::Bounds { .. } => "bounds",
            Kind::NoCounterpart { .. } => "no_counterpart",
            Kind::Barrier { .. } => "barrier",
            Kind::Unbalanced { .. } => "unbalanced",
            Kind::Deadlock { .. } => "deadlock",
            Kind::Race { .. } => "race",
            Kind::OnlyAnnounced { .. } => "only_announced",
            Kind::Late { .. } => "late",
            Kind::MixedScratch { .. } => "mixed_scratch",
            Kind::Unwritten { .. } => "unwritten",
            Kind::Wrong { .. } => "wrong",
            Kind::Range { .. } => "range",
            Kind::Unstarted { .. } => "unstarted",
            Kind::NeedsMeeting { .. } => "needs_meeting",
            Kind::SharedScratch => "shared_scratch",
            Kind::InputOverwritten { .. } => "input_overwritten",
            Kind::Group { .. } => "group",
            Kind::UnusedScratch { .. } => "unused_scratch",
            Kind::UnusedChannel { .. } => "unused_channel",
            Kind::UnusedSemaphore { .. } => "unused_semaphore",
        }
    }
}

/// A thread block took from a counter from which another could have taken in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Served {
    /// The counter.
    pub counter: Counted,
    /// The rank that runs the block.
    pub rank: Rank,
    /// Which block.
    pub block: ThreadBlockId,
}

/// Something that was found, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What.
    pub kind: Kind,
    /// The operations that take part, the one that cannot be first.
    pub places: Vec<Place>,
    /// For each of them, the operation's name in the plan; empty if there is no such operation.
    pub operations: Vec<&'static str>,
    /// For each of them, the line that made it, where it is known.
    pub origins: Vec<Option<Origin>>,
    /// If the finding depends on the order in which blocks take from a counter: this order, in a run that has the finding.
    pub served: Vec<Served>,
}

impl Finding {
    /// With the origins that the plan knows.
    pub(super) fn new(plan: &Plan, kind: Kind, places: Vec<Place>) -> Self {
        let ops: Vec<_> = places.iter().map(|&place| plan.op(place)).collect();
        let operations = ops.iter().map(|op| op.map_or("", |op| op.kind.name())).collect();
        let origins = ops.iter().map(|op| plan.origin((*op)?.origin).cloned()).collect();
        Finding { kind, places, operations, origins, served: Vec::new() }
    }

    /// In a run with these takes.
    pub(super) fn in_run(self, served: Vec<Served>) -> Self {
        Finding { served, ..self }
    }

    /// See [`Kind::severity`].
    pub fn severity(&self) -> Severity {
        self.kind.severity()
    }
}
