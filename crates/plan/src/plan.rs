//! The plan: what every thread block of every rank does.

use antiphon_operation::{Operation, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::ids::{ChannelId, OriginId, Rank, RemoteBufferId};
use crate::op::{BufferType, ChannelType, Op, OpKind};
use crate::place::Place;

/// The operations of every thread block of every rank, in terms of chunks. The size of a chunk follows from the message.
///
/// The format is that of MSCCL++ 0.9.0's `ExecutionPlan`.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The program's name.
    pub name: Option<String>,
    /// The collective: `allgather`, `allreduce`, `reducescatter`, `alltoall`, `sendrecv`, or any other.
    pub collective: String,
    /// How data travels.
    pub protocol: Protocol,
    /// Whether input and output share memory.
    pub inplace: bool,
    /// Whether scratch is shared with other plans.
    pub reuse_resources: bool,
    /// One for each rank.
    pub gpus: Vec<Gpu>,
    /// Threads of each thread block.
    pub num_threads_per_block: u64,
    /// Whether calls take turns between two halves of the scratch.
    pub use_double_scratch_buffer: bool,
    /// Bytes; messages are multiples of it.
    pub buffer_alignment: u64,
    /// Bytes of the smallest message.
    pub min_message_size: u64,
    /// Bytes of the largest message.
    pub max_message_size: u64,
    /// Lines of the program that made the plan; not in the JSON.
    pub origins: Vec<Origin>,
}

/// A line of the program that made the plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
}

impl Plan {
    /// How many ranks it is for.
    pub fn num_ranks(&self) -> usize {
        self.gpus.len()
    }

    /// The operation that [`collective`](Self::collective) names in MSCCL++'s words, if it is one of theirs.
    pub fn operation(&self) -> Option<Operation> {
        Self::operation_of(&self.collective)
    }

    /// The operation that a collective's name means in MSCCL++'s words, if it is one of theirs.
    pub fn operation_of(collective: &str) -> Option<Operation> {
        match collective {
            "allgather" => Some(Operation::AllGather),
            "allreduce" => Some(Operation::AllReduce),
            "reducescatter" => Some(Operation::ReduceScatter),
            "alltoall" => Some(Operation::AllToAll),
            "sendrecv" => Some(Operation::Message),
            _ => None,
        }
    }

    /// Whether it computes with elements, and does not only move them.
    pub fn reduces(&self) -> bool {
        !self.reductions().is_empty()
    }

    /// How it computes with elements: each reduction once, in the order in which ranks, thread blocks and operations name them first.
    pub fn reductions(&self) -> Vec<ReduceOp> {
        let reduction = |op: &Op| match &op.kind {
            OpKind::Reduce(reduce) => Some(reduce.op),
            OpKind::SwitchReduce(reduce) => Some(reduce.op),
            OpKind::SwitchReduceBroadcast(reduce) => Some(reduce.op),
            _ => None,
        };
        let mut found = Vec::new();
        for op in self.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops) {
            let each = match &op.kind {
                OpKind::Pipeline(pipeline) => &pipeline.ops[..],
                _ => std::slice::from_ref(op),
            };
            for reduction in each.iter().filter_map(reduction) {
                if !found.contains(&reduction) {
                    found.push(reduction);
                }
            }
        }
        found
    }

    /// The operation at a place, if there is one.
    pub fn op(&self, place: Place) -> Option<&Op> {
        let block = self.gpus.get(place.rank.index())?.threadblocks.get(place.threadblock.index())?;
        let op = block.ops.get(place.op as usize)?;
        match (place.inner, &op.kind) {
            (None, _) => Some(op),
            (Some(inner), OpKind::Pipeline(pipeline)) => pipeline.ops.get(inner as usize),
            (Some(_), _) => None,
        }
    }

    /// The line that made an operation, where it is known.
    pub fn origin(&self, id: Option<OriginId>) -> Option<&Origin> {
        self.origins.get(id?.index())
    }
}

/// How data travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// Plain data, ordered by signals.
    Simple,
    /// Packets: data with a flag that says that it is there.
    LL,
}

/// One rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Its number: its place in [`Plan::gpus`].
    pub id: Rank,
    /// Chunks of the input.
    pub input_chunks: u64,
    /// Chunks of the output.
    pub output_chunks: u64,
    /// Chunks of the scratch.
    pub scratch_chunks: u64,
    /// Its thread blocks.
    pub threadblocks: Vec<ThreadBlock>,
    /// Its channels: at most one entry of memory and of port channels, then an entry for each switch channel.
    pub channels: Vec<GpuChannels>,
    /// Other ranks' buffers that it accesses.
    pub remote_buffers: Vec<RemoteBuffer>,
    /// Its semaphores.
    pub semaphores: Vec<Semaphore>,
}

/// Channels of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuChannels {
    /// To one rank each. A place in the list is a [`ChannelId`].
    Peers {
        /// Memory or port.
        channel_type: ChannelType,
        /// The peer of each channel.
        connected_to: Vec<Rank>,
    },
    /// One switch channel. Its place among the switch channels is its [`ChannelId`].
    Switch {
        /// The buffer that it binds.
        buffer: BufferType,
        /// Its ranks, in one group.
        rank_groups: Vec<Vec<Rank>>,
    },
}

/// A buffer of another rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteBuffer {
    /// The rank that has the buffer.
    pub rank: Rank,
    /// Which.
    #[serde(rename = "type")]
    pub buffer: BufferType,
    /// Through what it is accessed, ascending.
    pub access_channel_types: Vec<ChannelType>,
}

/// A counting semaphore of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Semaphore {
    /// Its count before the first call.
    pub init_value: i64,
}

/// One thread block.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadBlock {
    /// Its number: its place in [`Gpu::threadblocks`].
    pub id: u32,
    /// Its operations.
    pub ops: Vec<Op>,
    /// The channels that it uses: an entry for each type. A place in `channel_ids` is a
    /// [`ChannelIndex`](crate::ChannelIndex).
    pub channels: Vec<ChannelRefs>,
    /// The remote buffers that it uses: an entry for each type of channel. A place in `remote_buffer_ids` is a
    /// [`RemoteBufferIndex`](crate::RemoteBufferIndex).
    pub remote_buffer_refs: Vec<RemoteBufferRefs>,
}

/// See [`ThreadBlock::channels`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelRefs {
    /// The type.
    pub channel_type: ChannelType,
    /// The rank's channels of that type.
    pub channel_ids: Vec<ChannelId>,
}

/// See [`ThreadBlock::remote_buffer_refs`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteBufferRefs {
    /// The type.
    pub access_channel_type: ChannelType,
    /// The rank's remote buffers.
    pub remote_buffer_ids: Vec<RemoteBufferId>,
}
