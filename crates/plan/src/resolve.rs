//! Resolving the numbers of a plan to its objects.

use std::collections::HashMap;
use std::ops::Range;

use crate::ids::{ChannelId, ChannelIndex, Rank, RemoteBufferIndex, ThreadBlockId};
use crate::op::{
    BufferType, ChannelType, CopyKind, GroupShare, LocalChunk, OpKind, PutKind, RankChunk, RemoteChunk,
    SwitchChunk,
};
use crate::place::Place;
use crate::plan::{Gpu, GpuChannels, Plan, RemoteBuffer, ThreadBlock};

impl Gpu {
    /// The peer of each memory or port channel; a place in the list is a [`ChannelId`].
    pub fn peers(&self, channel_type: ChannelType) -> &[Rank] {
        let entries = self.channels.iter().find_map(|entry| match entry {
            GpuChannels::Peers { channel_type: of, connected_to } if *of == channel_type => {
                Some(&connected_to[..])
            }
            _ => None,
        });
        entries.unwrap_or_default()
    }

    /// Buffer and members of each switch channel; a place in the sequence is a [`ChannelId`].
    pub fn switches(&self) -> impl Iterator<Item = (BufferType, &[Rank])> {
        self.channels.iter().filter_map(|entry| match entry {
            GpuChannels::Switch { buffer, rank_groups } => {
                Some((*buffer, rank_groups.first().map_or(&[][..], Vec::as_slice)))
            }
            GpuChannels::Peers { .. } => None,
        })
    }

    /// How many chunks a buffer has.
    pub fn chunks(&self, buffer: BufferType) -> u64 {
        match buffer {
            BufferType::Input => self.input_chunks,
            BufferType::Output => self.output_chunks,
            BufferType::Scratch => self.scratch_chunks,
        }
    }
}

/// Whether bytes are read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// They are read.
    Read,
    /// They are written.
    Write,
}

/// Chunks that an operation reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The rank that has the memory.
    pub rank: Rank,
    /// Which buffer.
    pub buffer: BufferType,
    /// Which chunks.
    pub chunks: Range<u64>,
    /// Read or written.
    pub mode: Mode,
    /// As packets: twice the bytes, at twice the offset, and a reader waits for them.
    pub packets: bool,
    /// The share of the chunks that is accessed.
    pub group: Option<GroupShare>,
}

/// A thread block of a plan that [`Plan::check`] has passed. On another plan its methods may panic.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    plan: &'a Plan,
    rank: Rank,
    id: ThreadBlockId,
}

impl<'a> Block<'a> {
    /// All of a plan, rank by rank.
    pub fn all(plan: &'a Plan) -> impl Iterator<Item = Block<'a>> {
        plan.gpus.iter().enumerate().flat_map(move |(rank, gpu)| {
            (0..gpu.threadblocks.len())
                .map(move |id| Block::new(plan, Rank(rank as u32), ThreadBlockId(id as u32)))
        })
    }

    /// One of them.
    pub fn new(plan: &'a Plan, rank: Rank, id: ThreadBlockId) -> Self {
        Block { plan, rank, id }
    }

    /// The rank that runs it.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Its number.
    pub fn id(&self) -> ThreadBlockId {
        self.id
    }

    /// Its rank.
    pub fn gpu(&self) -> &'a Gpu {
        &self.plan.gpus[self.rank.index()]
    }

    /// The block itself.
    pub fn get(&self) -> &'a ThreadBlock {
        &self.gpu().threadblocks[self.id.index()]
    }

    /// Its operation number `op`.
    pub fn place(&self, op: usize, inner: Option<usize>) -> Place {
        Place { rank: self.rank, threadblock: self.id, op: op as u32, inner: inner.map(|at| at as u32) }
    }

    /// The rank's number of a channel.
    pub fn channel(&self, channel_type: ChannelType, index: ChannelIndex) -> ChannelId {
        let refs = self.get().channels.iter().find(|refs| refs.channel_type == channel_type);
        refs.expect("the plan is checked").channel_ids[index.index()]
    }

    /// The rank at the other end of a memory or port channel.
    pub fn peer(&self, channel_type: ChannelType, index: ChannelIndex) -> Rank {
        self.gpu().peers(channel_type)[self.channel(channel_type, index).index()]
    }

    /// Buffer and members of a switch channel.
    pub fn switch(&self, index: ChannelIndex) -> (BufferType, &'a [Rank]) {
        let id = self.channel(ChannelType::Switch, index);
        self.gpu().switches().nth(id.index()).expect("the plan is checked")
    }

    /// A buffer of another rank.
    pub fn remote(&self, channel_type: ChannelType, index: RemoteBufferIndex) -> &'a RemoteBuffer {
        let refs = self.get().remote_buffer_refs.iter().find(|refs| refs.access_channel_type == channel_type);
        &self.gpu().remote_buffers
            [refs.expect("the plan is checked").remote_buffer_ids[index.index()].index()]
    }

    /// What an operation reads and writes, in the order in which it does: sources, then destinations. Of a pipeline,
    /// nothing: its operations are asked one by one.
    pub fn accesses(&self, op: &OpKind, mut each: impl FnMut(Access)) {
        let mut emit = |rank, buffer, index: u64, size: u64, mode, packets, group| {
            let chunks = index..index + size;
            each(Access { rank, buffer, chunks, mode, packets, group });
        };
        let (rank, read, write) = (self.rank, Mode::Read, Mode::Write);
        match op {
            OpKind::Nop
            | OpKind::Barrier { .. }
            | OpKind::Notify(_)
            | OpKind::Semaphore(_)
            | OpKind::Pipeline(_) => {}
            OpKind::Copy(copy) => {
                let mut local = |chunk: LocalChunk, mode, packets| {
                    emit(rank, chunk.buffer, chunk.index, chunk.size, mode, packets, copy.group);
                };
                local(copy.src, read, copy.kind == CopyKind::Unpack);
                local(copy.dst, write, copy.kind == CopyKind::Pack);
            }
            OpKind::Put(put) => {
                let packets = matches!(put.kind, PutKind::Packets | PutKind::ReadPackets);
                // A port moves packets as they are: what it puts was packed before.
                let packed = put.kind == PutKind::ReadPackets || put.channel_type == ChannelType::Port;
                for chunk in &put.src {
                    let packets = packets && packed;
                    emit(rank, chunk.buffer, chunk.index, chunk.size, read, packets, put.group);
                }
                for chunk in &put.dst {
                    let to = self.remote(put.channel_type, chunk.buffer_id);
                    emit(to.rank, to.buffer, chunk.index, chunk.size, write, packets, put.group);
                }
            }
            OpKind::Get(get) => {
                for chunk in &get.src {
                    let from = self.remote(get.channel_type, chunk.buffer_id);
                    emit(from.rank, from.buffer, chunk.index, chunk.size, read, false, get.group);
                }
                for chunk in &get.dst {
                    emit(rank, chunk.buffer, chunk.index, chunk.size, write, false, get.group);
                }
            }
            OpKind::Reduce(reduce) => {
                let channel_type = reduce.channel_type.unwrap_or(ChannelType::Memory);
                for (at, chunk) in reduce.src.iter().enumerate() {
                    let packets = reduce.packets && at > 0;
                    emit(rank, chunk.buffer, chunk.index, chunk.size, read, packets, reduce.group);
                }
                let mut remote = |chunk: &RemoteChunk, mode, packets| {
                    let of = self.remote(channel_type, chunk.buffer_id);
                    emit(of.rank, of.buffer, chunk.index, chunk.size, mode, packets, reduce.group);
                };
                reduce.remote_src.iter().for_each(|chunk| remote(chunk, read, false));
                reduce.remote_dst.iter().for_each(|chunk| remote(chunk, write, reduce.packets));
                for (chunk, packets) in [(Some(reduce.dst), false), (reduce.packet_dst, true)] {
                    if let Some(chunk) = chunk {
                        emit(rank, chunk.buffer, chunk.index, chunk.size, write, packets, reduce.group);
                    }
                }
            }
            OpKind::SwitchReduce(op) => {
                for &member in self.switch(op.channels[0]).1 {
                    emit(member, op.buffer, op.offset, op.size, read, false, None);
                }
                let RankChunk { rank, buffer, index, size } = op.dst;
                emit(rank, buffer, index, size, write, false, None);
            }
            OpKind::SwitchBroadcast(op) => {
                let RankChunk { rank, buffer, index, size } = op.src;
                emit(rank, buffer, index, size, read, op.packets, None);
                self.members(op.dst, |member, buffer, index, size| {
                    emit(member, buffer, index, size, write, op.packets, None);
                });
            }
            OpKind::SwitchReduceBroadcast(op) => {
                self.members(op.src, |member, buffer, index, size| {
                    emit(member, buffer, index, size, read, false, None)
                });
                self.members(op.dst, |member, buffer, index, size| {
                    emit(member, buffer, index, size, write, false, None)
                });
            }
        }
    }

    fn members(&self, chunk: SwitchChunk, mut each: impl FnMut(Rank, BufferType, u64, u64)) {
        let (buffer, members) = self.switch(chunk.switch_channel_id);
        members.iter().for_each(|&member| each(member, buffer, chunk.index, chunk.size));
    }
}

/// Which channel is whose counterpart: the `k`-th channel of a type that one rank has to another belongs to the `k`-th
/// channel of that type which the other has to it.
#[derive(Clone, Debug)]
pub struct Wiring {
    /// For each rank: memory channels, then port channels.
    ends: Vec<[Vec<Option<ChannelId>>; 2]>,
}

impl Wiring {
    /// The counterparts of all channels of a checked plan.
    pub fn new(plan: &Plan) -> Self {
        let types = [ChannelType::Memory, ChannelType::Port];
        let mut channels: HashMap<(ChannelType, Rank, Rank), Vec<ChannelId>> = HashMap::new();
        for gpu in &plan.gpus {
            for channel_type in types {
                for (id, &peer) in gpu.peers(channel_type).iter().enumerate() {
                    channels.entry((channel_type, gpu.id, peer)).or_default().push(ChannelId(id as u32));
                }
            }
        }
        let mut ends: Vec<_> = (plan.gpus.iter())
            .map(|gpu| types.map(|channel_type| vec![None; gpu.peers(channel_type).len()]))
            .collect();
        for (&(channel_type, rank, peer), ids) in &channels {
            let there = channels.get(&(channel_type, peer, rank)).map_or(&[][..], Vec::as_slice);
            for (id, end) in ids.iter().zip(there) {
                ends[rank.index()][Self::place(channel_type)][id.index()] = Some(*end);
            }
        }
        Wiring { ends }
    }

    /// The peer's channel at the other end, if the peer has as many channels back.
    pub fn counterpart(
        &self,
        rank: Rank,
        channel_type: ChannelType,
        channel: ChannelId,
    ) -> Option<ChannelId> {
        self.ends[rank.index()][Self::place(channel_type)][channel.index()]
    }

    fn place(channel_type: ChannelType) -> usize {
        usize::from(channel_type == ChannelType::Port)
    }
}
