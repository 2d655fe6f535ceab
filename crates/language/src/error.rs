//! The errors of programs.

use antiphon_plan::{BufferType, PlanError};
use thiserror::Error;

/// An error in a program. The call that returns it has had no effect, unless its page says otherwise.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum LanguageError {
    /// A rank is none of the program's.
    #[error("{what}: there is no rank {rank} among {num_ranks}")]
    NoSuchRank {
        /// The object that was to have that rank.
        what: &'static str,
        /// The rank.
        rank: u32,
        /// How many there are.
        num_ranks: u32,
    },
    /// A channel leads from a rank to itself.
    #[error("{what}: from rank {rank} to itself, where no channel leads")]
    ToItself {
        /// The kind of channel.
        what: &'static str,
        /// The rank.
        rank: u32,
    },
    /// A range of chunks ends before it starts.
    #[error("chunks {start}..{end} of a buffer end before they start")]
    BackwardRange {
        /// The first chunk.
        start: u64,
        /// The chunk behind the last.
        end: u64,
    },
    /// A range of chunks goes beyond its buffer.
    #[error("chunks {start}..{end} are not in the {size} chunks of this {buffer:?} buffer of rank {rank}")]
    BeyondBuffer {
        /// The rank that has the buffer.
        rank: u32,
        /// Which buffer.
        buffer: BufferType,
        /// The first chunk, from the buffer's start.
        start: u64,
        /// The chunk behind the last.
        end: u64,
        /// How many there are.
        size: u64,
    },
    /// A chunk is another rank's than the operation takes.
    #[error("{op}: {what} is a chunk of rank {rank}, and must be one of rank {expected}")]
    WrongRank {
        /// The operation.
        op: &'static str,
        /// Which of its chunks.
        what: &'static str,
        /// The rank that has the chunk.
        rank: u32,
        /// The rank that must have it.
        expected: u32,
    },
    /// Chunks of one operation differ in size.
    #[error("{op}: {what} has {size} chunks, and must have {expected}")]
    SizesDiffer {
        /// The operation.
        op: &'static str,
        /// Which of its chunks.
        what: &'static str,
        /// The number that it has.
        size: u64,
        /// The number that it must have.
        expected: u64,
    },
    /// Packets are outside scratch.
    #[error("{op}: {what} is in the {buffer:?} buffer, and packets are only in scratch")]
    NotScratch {
        /// The operation.
        op: &'static str,
        /// Which of its chunks.
        what: &'static str,
        /// Where it is.
        buffer: BufferType,
    },
    /// A reduction has one operand.
    #[error("reduce: nothing to reduce with")]
    NothingToReduce,
    /// A barrier has no thread blocks.
    #[error("barrier of rank {rank}: no thread blocks")]
    EmptyBarrier {
        /// The rank that has the barrier.
        rank: u32,
    },
    /// A group has a thread block twice.
    #[error("thread block {tb} is twice in the group {group:?}")]
    DuplicateThreadBlock {
        /// Which.
        tb: u32,
        /// The group.
        group: Vec<u32>,
    },
    /// A thread block is to take its share of a group that it is not in.
    #[error("thread block {tb} is not in the group {group:?}")]
    NotInGroup {
        /// Which.
        tb: u32,
        /// The group.
        group: Vec<u32>,
    },
    /// A rank or its chunk is not behind a switch channel.
    #[error("{op}: rank {rank} is not among the ranks {members:?} of the switch channel")]
    NotAMember {
        /// The operation.
        op: &'static str,
        /// The rank.
        rank: u32,
        /// The members of the channel.
        members: Vec<u32>,
    },
    /// A rank that has no end of a switch channel uses it.
    #[error("{op}: the switch channel of ranks {members:?} has no end at rank {rank}")]
    NoSwitchEnd {
        /// The operation.
        op: &'static str,
        /// The rank.
        rank: u32,
        /// The ranks that have one.
        members: Vec<u32>,
    },
    /// A switch channel's buffer is too small at one of its ranks.
    #[error(
        "{op}: chunks {start}..{end} are not in the {size} chunks of the {buffer:?} buffer of rank {rank}"
    )]
    BeyondSwitchBuffer {
        /// The operation.
        op: &'static str,
        /// At which rank.
        rank: u32,
        /// Which buffer.
        buffer: BufferType,
        /// The first chunk.
        start: u64,
        /// The chunk behind the last.
        end: u64,
        /// How many there are; of scratch, so far.
        size: u64,
    },
    /// A channel is another program's.
    #[error("there is no such channel at rank {rank} of this program")]
    ForeignChannel {
        /// Where it was to be.
        rank: u32,
    },
    /// A pipeline begins inside another.
    #[error("a pipeline in a pipeline")]
    NestedPipeline,
    /// A pipeline ends that did not begin.
    #[error("no pipeline is open")]
    NoPipeline,
    /// An algorithm of the library is not for this.
    #[error("{algorithm} {why}")]
    Unsuited {
        /// The algorithm.
        algorithm: &'static str,
        /// The requirement or the limit, with the numbers.
        why: String,
    },
    /// Something has too large a number.
    #[error("{what} {number}: there can be {limit} at most")]
    TooMany {
        /// What.
        what: &'static str,
        /// The number.
        number: u64,
        /// The limit.
        limit: u64,
    },
    /// The plan cannot be made: signals without waits, or no room for as many instances.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The result of most calls.
pub type Result<T> = std::result::Result<T, LanguageError>;
