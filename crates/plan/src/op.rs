//! Operations of a thread block.

use std::borrow::Cow;

use antiphon_operation::ReduceOp;
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::ids::{BarrierId, ChannelIndex, OriginId, Rank, RemoteBufferIndex, SemaphoreId};

/// An operation, and the line that made it.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// What is done.
    pub kind: OpKind,
    /// Where the program asked for it; not in the JSON. Of operations that were fused, the first one's.
    pub origin: Option<OriginId>,
}

impl From<OpKind> for Op {
    fn from(kind: OpKind) -> Self {
        Op { kind, origin: None }
    }
}

/// What an operation does. A thread block does its operations in order; all its threads take part in each.
#[derive(Clone, Debug, PartialEq)]
pub enum OpKind {
    /// All threads of the block meet: what was read and written before is done.
    Nop,
    /// Thread blocks of one rank meet.
    Barrier {
        /// Which barrier.
        barrier: BarrierId,
        /// How many thread blocks meet there.
        num_threadblocks: u32,
    },
    /// Something about channels, without data.
    Notify(Notify),
    /// Counting semaphores of the rank.
    Semaphore(SemaphoreOp),
    /// Data moves inside the rank.
    Copy(Copy),
    /// Data goes to other ranks.
    Put(Put),
    /// Data is read from another rank.
    Get(Get),
    /// Data is reduced, and may be sent on.
    Reduce(Box<Reduce>),
    /// The switch reduces the members' buffers into one chunk (`glre`).
    SwitchReduce(SwitchReduce),
    /// The switch stores one chunk in every member's buffer (`gstore`, `gstorepkt`).
    SwitchBroadcast(SwitchBroadcast),
    /// Both in one (`glres`).
    SwitchReduceBroadcast(SwitchReduceBroadcast),
    /// Its operations again and again, a piece of their bytes at a time.
    Pipeline(Pipeline),
}

/// How far a channel reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChannelType {
    /// The peer's memory is mapped: loads and stores.
    Memory,
    /// An engine moves the bytes.
    Port,
    /// The switch between the ranks computes.
    Switch,
}

/// The kind of memory, as a rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum BufferType {
    /// The input, which the caller gives.
    #[serde(rename = "i")]
    Input,
    /// The output, which the caller gets.
    #[serde(rename = "o")]
    Output,
    /// The plan's own.
    #[serde(rename = "s")]
    Scratch,
}

/// The operators that plans know.
pub const REDUCE_OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max];

/// Reads one of the [`REDUCE_OPS`] by its name.
pub(crate) fn reduce_op<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ReduceOp, D::Error> {
    const NAMES: [&str; REDUCE_OPS.len()] =
        [REDUCE_OPS[0].name(), REDUCE_OPS[1].name(), REDUCE_OPS[2].name()];
    let name = Cow::<str>::deserialize(deserializer)?;
    let known = REDUCE_OPS.into_iter().find(|op| op.name() == name);
    known.ok_or_else(|| de::Error::unknown_variant(&name, &NAMES))
}

/// The sides of an operation on which its thread block's threads synchronise. The pass that inserts [`OpKind::Nop`]s consumes it;
/// no operation of a finished plan has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DataSync {
    /// All threads have done the earlier operations before this one.
    pub before: bool,
    /// No thread continues before this operation is done.
    pub after: bool,
}

impl DataSync {
    /// On neither side.
    pub const NONE: Self = DataSync { before: false, after: false };
    /// Before it only.
    pub const BEFORE: Self = DataSync { before: true, after: false };
    /// After it only.
    pub const AFTER: Self = DataSync { before: false, after: true };
    /// On both sides.
    pub const BOTH: Self = DataSync { before: true, after: true };
}

/// Chunks `index .. index + size` of a buffer of the operation's rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalChunk {
    /// Which buffer.
    #[serde(rename = "type")]
    pub buffer: BufferType,
    /// The first chunk.
    pub index: u64,
    /// The number of chunks.
    pub size: u64,
}

/// Chunks of another rank's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteChunk {
    /// Which buffer, as a place in the thread block's list for the operation's type of channel.
    pub buffer_id: RemoteBufferIndex,
    /// The first chunk.
    pub index: u64,
    /// The number of chunks.
    pub size: u64,
}

/// Chunks of a buffer of a named rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankChunk {
    /// The rank that has the buffer.
    pub rank: Rank,
    /// Which buffer.
    #[serde(rename = "type")]
    pub buffer: BufferType,
    /// The first chunk.
    pub index: u64,
    /// The number of chunks.
    pub size: u64,
}

/// Chunks of the buffers behind a switch channel, the same of every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchChunk {
    /// Which channel, as a place in the thread block's list of switch channels.
    pub switch_channel_id: ChannelIndex,
    /// The first chunk.
    pub index: u64,
    /// The number of chunks.
    pub size: u64,
}

/// The part of a group of thread blocks that does one operation together: block `tb_id` of `tbg_size` takes its share
/// of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupShare {
    /// The place in the group.
    pub tb_id: u32,
    /// The size of the group.
    pub tbg_size: u32,
}

/// `signal`, `rlxsignal`, `wait`, `rlxwait`, `flush`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notify {
    /// What is done.
    pub kind: NotifyKind,
    /// Without ordering what was written before (signal) or what is read after (wait).
    pub relaxed: bool,
    /// The channels, ascending.
    pub channels: Vec<ChannelIndex>,
    /// Their type.
    pub channel_type: ChannelType,
    /// Where the block's threads meet.
    pub data_sync: DataSync,
}

/// See [`Notify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NotifyKind {
    /// One is added to the peer's count.
    Signal,
    /// Waits for one more signal of the peer.
    Wait,
    /// Waits until what was put through the channel has left.
    Flush,
}

/// `sem_acquire`, `sem_release`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SemaphoreOp {
    /// Waits until the count is positive and takes one; else adds one.
    pub acquire: bool,
    /// The semaphores; one that is named twice counts twice.
    pub semaphores: Vec<SemaphoreId>,
    /// Where the block's threads meet.
    pub data_sync: DataSync,
}

/// `copy`, `cpkt`, `upkt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The form of the data.
    pub kind: CopyKind,
    /// The chunks that are read.
    pub src: LocalChunk,
    /// The chunks that are written.
    pub dst: LocalChunk,
    /// This block's share.
    pub group: Option<GroupShare>,
}

/// See [`struct@Copy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// Plain to plain (`copy`).
    Plain,
    /// Plain to packets in scratch (`cpkt`).
    Pack,
    /// Packets in scratch to plain (`upkt`), each as soon as it is there.
    Unpack,
}

/// `put`, `pws`, `pwsf`, `ppkt`, `rppkt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// The form of the data, and the signals behind it.
    pub kind: PutKind,
    /// The chunks that are read: as many as destinations; of [`PutKind::ReadPackets`] one.
    pub src: Vec<LocalChunk>,
    /// The chunks that are written.
    pub dst: Vec<RemoteChunk>,
    /// The channel of each destination. The JSON has them only for ports: of a memory channel read from there, it is empty.
    pub channels: Vec<ChannelIndex>,
    /// Memory or port.
    pub channel_type: ChannelType,
    /// This block's share.
    pub group: Option<GroupShare>,
}

/// See [`Put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PutKind {
    /// Plain to plain (`put`).
    Plain,
    /// And a signal behind it (`pws`).
    WithSignal,
    /// And a flush behind that (`pwsf`).
    WithSignalAndFlush,
    /// Plain to packets in the peer's scratch (`ppkt`).
    Packets,
    /// Packets in scratch, as soon as they are there, to packets in the peers' scratch (`rppkt`).
    ReadPackets,
}

/// `get`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Get {
    /// The chunks that are read.
    pub src: Vec<RemoteChunk>,
    /// The chunks that are written: as many.
    pub dst: Vec<LocalChunk>,
    /// The channel of each source.
    pub channels: Vec<ChannelIndex>,
    /// Memory.
    pub channel_type: ChannelType,
    /// This block's share.
    pub group: Option<GroupShare>,
}

/// `re`, `res`, `rre`, `rres`, `repkt`, `respkt`, `recpkt`, `recspkt`: see [`Reduce::name`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reduce {
    /// All sources but the first are packets in scratch, and remote destinations get packets.
    pub packets: bool,
    /// Sources in this rank; the first one is plain always.
    pub src: Vec<LocalChunk>,
    /// Sources in other ranks.
    pub remote_src: Vec<RemoteChunk>,
    /// The result.
    pub dst: LocalChunk,
    /// The result once more, as packets in this rank's scratch.
    pub packet_dst: Option<LocalChunk>,
    /// The result in other ranks.
    pub remote_dst: Vec<RemoteChunk>,
    /// Through which type of channel; none if nothing is remote (of `rre` without sources: what it was made with).
    pub channel_type: Option<ChannelType>,
    /// How.
    pub op: ReduceOp,
    /// This block's share.
    pub group: Option<GroupShare>,
}

impl Reduce {
    /// The operation's name in the JSON, which says what it has.
    pub fn name(&self) -> &'static str {
        match (
            self.packets,
            self.packet_dst.is_some(),
            !self.remote_src.is_empty(),
            !self.remote_dst.is_empty(),
        ) {
            (false, _, false, false) => "re",
            (false, _, false, true) => "res",
            (false, _, true, false) => "rre",
            (false, _, true, true) => "rres",
            (true, false, _, false) => "repkt",
            (true, false, _, true) => "respkt",
            (true, true, _, false) => "recpkt",
            (true, true, _, true) => "recspkt",
        }
    }
}

/// `glre`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchReduce {
    /// The members' buffer.
    pub buffer: BufferType,
    /// Its first chunk.
    pub offset: u64,
    /// The number of chunks.
    pub size: u64,
    /// The result.
    pub dst: RankChunk,
    /// The channel: one.
    pub channels: Vec<ChannelIndex>,
    /// How.
    pub op: ReduceOp,
}

/// `gstore`, `gstorepkt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchBroadcast {
    /// The source is packets in scratch, and packets are stored.
    pub packets: bool,
    /// The chunks that are read.
    pub src: RankChunk,
    /// The chunks that are written, at every member.
    pub dst: SwitchChunk,
}

/// `glres`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchReduceBroadcast {
    /// The chunks that are read, at every member.
    pub src: SwitchChunk,
    /// The chunks that are written, at every member.
    pub dst: SwitchChunk,
    /// How.
    pub op: ReduceOp,
}

/// `pipeline`: `ceil(num_chunks × bytes of a chunk / unit_size)` times its operations, the `k`-th time on bytes
/// `k × unit_size ..` of each chunk range.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    /// Bytes of each turn.
    pub unit_size: u64,
    /// How many chunks all turns together cover.
    pub num_chunks: u64,
    /// The operations of each iteration; no pipelines.
    pub ops: Vec<Op>,
}

impl OpKind {
    /// Its name in the JSON.
    pub fn name(&self) -> &'static str {
        match self {
            OpKind::Nop => "nop",
            OpKind::Barrier { .. } => "barrier",
            OpKind::Notify(Notify { kind: NotifyKind::Signal, relaxed: false, .. }) => "signal",
            OpKind::Notify(Notify { kind: NotifyKind::Signal, relaxed: true, .. }) => "rlxsignal",
            OpKind::Notify(Notify { kind: NotifyKind::Wait, relaxed: false, .. }) => "wait",
            OpKind::Notify(Notify { kind: NotifyKind::Wait, relaxed: true, .. }) => "rlxwait",
            OpKind::Notify(Notify { kind: NotifyKind::Flush, .. }) => "flush",
            OpKind::Semaphore(SemaphoreOp { acquire: true, .. }) => "sem_acquire",
            OpKind::Semaphore(SemaphoreOp { acquire: false, .. }) => "sem_release",
            OpKind::Copy(Copy { kind: CopyKind::Plain, .. }) => "copy",
            OpKind::Copy(Copy { kind: CopyKind::Pack, .. }) => "cpkt",
            OpKind::Copy(Copy { kind: CopyKind::Unpack, .. }) => "upkt",
            OpKind::Put(Put { kind: PutKind::Plain, .. }) => "put",
            OpKind::Put(Put { kind: PutKind::WithSignal, .. }) => "pws",
            OpKind::Put(Put { kind: PutKind::WithSignalAndFlush, .. }) => "pwsf",
            OpKind::Put(Put { kind: PutKind::Packets, .. }) => "ppkt",
            OpKind::Put(Put { kind: PutKind::ReadPackets, .. }) => "rppkt",
            OpKind::Get(_) => "get",
            OpKind::Reduce(reduce) => reduce.name(),
            OpKind::SwitchReduce(_) => "glre",
            OpKind::SwitchBroadcast(SwitchBroadcast { packets: false, .. }) => "gstore",
            OpKind::SwitchBroadcast(SwitchBroadcast { packets: true, .. }) => "gstorepkt",
            OpKind::SwitchReduceBroadcast(_) => "glres",
            OpKind::Pipeline(_) => "pipeline",
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{ReduceOp, verify::Expected};

    #[test]
    fn plans_read_three_operators_and_refuse_the_others_by_name() {
        let read = |op: &str| {
            let row = format!(r#"{{"rank": 0, "index": 0, "size": 1, "from": [], "op": "{op}"}}"#);
            serde_json::from_str::<Expected>(&row).map(|row| row.op).map_err(|error| error.to_string())
        };
        assert_eq!(["sum", "min", "max"].map(read), [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max].map(Ok));
        for other in ["prod", "avg", "Sum", ""] {
            let expected = format!("unknown variant `{other}`, expected one of `sum`, `min`, `max`");
            assert!(read(other).unwrap_err().starts_with(&expected));
        }
    }
}
