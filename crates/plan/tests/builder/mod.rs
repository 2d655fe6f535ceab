//! Plans for tests, from the crate's own types.
#![allow(dead_code, reason = "each test uses some of it")]

use antiphon_plan::{
    BarrierId, BufferType, ChannelId, ChannelIndex, ChannelRefs, ChannelType, Copy, CopyKind, DataSync, Get,
    Gpu, GpuChannels, LocalChunk, Notify, NotifyKind, OpKind, Plan, Protocol, Put, PutKind, Rank, Reduce,
    ReduceOp, RemoteBuffer, RemoteBufferId, RemoteBufferIndex, RemoteBufferRefs, RemoteChunk, Semaphore,
    SemaphoreId, SemaphoreOp, SwitchChunk, SwitchReduceBroadcast, ThreadBlock,
};

pub use BufferType::{Input, Output, Scratch};
pub use ChannelType::{Memory, Port};

/// Some chunks of a buffer: which, from where, how many.
pub type Chunks = (BufferType, u64, u64);

pub fn local((buffer, index, size): Chunks) -> LocalChunk {
    LocalChunk { buffer, index, size }
}

/// A plan in the making; channels and remote buffers appear when an operation needs them.
pub struct PlanBuilder(pub Plan);

impl PlanBuilder {
    /// Chunks of input, output and scratch.
    pub fn new(collective: &str, ranks: u32, chunks: [u64; 3]) -> Self {
        let gpu = |id| Gpu {
            id: Rank(id),
            input_chunks: chunks[0],
            output_chunks: chunks[1],
            scratch_chunks: chunks[2],
            threadblocks: vec![],
            channels: vec![],
            remote_buffers: vec![],
            semaphores: vec![Semaphore { init_value: 0 }],
        };
        PlanBuilder(Plan {
            name: Some(collective.into()),
            collective: collective.into(),
            protocol: Protocol::Simple,
            inplace: false,
            reuse_resources: false,
            gpus: (0..ranks).map(gpu).collect(),
            num_threads_per_block: 512,
            use_double_scratch_buffer: false,
            buffer_alignment: 16,
            min_message_size: 0,
            max_message_size: u64::MAX,
            origins: vec![],
        })
    }

    /// A thread block of a rank.
    pub fn on(&mut self, rank: u32, block: usize) -> BlockBuilder<'_> {
        let gpu = &mut self.0.gpus[rank as usize];
        while gpu.threadblocks.len() <= block {
            let id = gpu.threadblocks.len() as u32;
            gpu.threadblocks.push(ThreadBlock {
                id,
                ops: vec![],
                channels: vec![],
                remote_buffer_refs: vec![],
            });
        }
        BlockBuilder { gpu, block }
    }
}

/// Writes the operations of a thread block.
pub struct BlockBuilder<'a> {
    gpu: &'a mut Gpu,
    block: usize,
}

impl BlockBuilder<'_> {
    pub fn op(mut self, kind: OpKind) -> Self {
        self.block().ops.push(kind.into());
        self
    }

    pub fn nop(self) -> Self {
        self.op(OpKind::Nop)
    }

    pub fn barrier(self, barrier: u32, num_threadblocks: u32) -> Self {
        self.op(OpKind::Barrier { barrier: BarrierId(barrier), num_threadblocks })
    }

    pub fn semaphore(self, acquire: bool) -> Self {
        let semaphores = vec![SemaphoreId(0)];
        self.op(OpKind::Semaphore(SemaphoreOp { acquire, semaphores, data_sync: DataSync::NONE }))
    }

    pub fn signal(self, of: ChannelType, peer: u32) -> Self {
        self.notify(NotifyKind::Signal, of, peer)
    }

    pub fn wait(self, of: ChannelType, peer: u32) -> Self {
        self.notify(NotifyKind::Wait, of, peer)
    }

    pub fn flush(self, peer: u32) -> Self {
        self.notify(NotifyKind::Flush, Port, peer)
    }

    fn notify(mut self, kind: NotifyKind, channel_type: ChannelType, peer: u32) -> Self {
        let channels = vec![self.channel(channel_type, peer)];
        self.op(OpKind::Notify(Notify {
            kind,
            relaxed: false,
            channels,
            channel_type,
            data_sync: DataSync::NONE,
        }))
    }

    pub fn copy(self, kind: CopyKind, dst: Chunks, src: Chunks) -> Self {
        self.op(OpKind::Copy(Copy { kind, src: local(src), dst: local(dst), group: None }))
    }

    pub fn put(self, of: ChannelType, peer: u32, dst: Chunks, src: Chunks) -> Self {
        self.put_as(PutKind::Plain, of, peer, dst, src)
    }

    pub fn put_as(
        mut self,
        kind: PutKind,
        channel_type: ChannelType,
        peer: u32,
        dst: Chunks,
        src: Chunks,
    ) -> Self {
        let channel = self.channel(channel_type, peer);
        let dst = vec![self.remote(channel_type, peer, dst)];
        let channels = if channel_type == Port { vec![channel] } else { vec![] };
        self.op(OpKind::Put(Put { kind, src: vec![local(src)], dst, channels, channel_type, group: None }))
    }

    /// Chunks to several peers through memory, in one operation.
    pub fn put_to_all(mut self, kind: PutKind, parts: impl Iterator<Item = (u32, Chunks, Chunks)>) -> Self {
        let (src, dst) = parts.map(|(peer, dst, src)| (local(src), self.remote(Memory, peer, dst))).unzip();
        self.op(OpKind::Put(Put { kind, src, dst, channels: vec![], channel_type: Memory, group: None }))
    }

    pub fn get(mut self, peer: u32, dst: Chunks, src: Chunks) -> Self {
        let channels = vec![self.channel(Memory, peer)];
        let src = vec![self.remote(Memory, peer, src)];
        self.op(OpKind::Get(Get { src, dst: vec![local(dst)], channels, channel_type: Memory, group: None }))
    }

    /// `dst` = the sum of `src`.
    pub fn reduce(self, dst: Chunks, src: Vec<Chunks>) -> Self {
        self.reduce_as(false, dst, src, None, vec![])
    }

    /// `dst` = the sum of `src`, of which all but the first may be packets; and the sum as packets here and at peers.
    pub fn reduce_as(
        mut self,
        packets: bool,
        dst: Chunks,
        src: Vec<Chunks>,
        packet_dst: Option<Chunks>,
        peers: Vec<(u32, Chunks)>,
    ) -> Self {
        let remote_dst: Vec<_> =
            peers.iter().map(|&(peer, chunks)| self.remote(Memory, peer, chunks)).collect();
        self.op(OpKind::Reduce(Box::new(Reduce {
            packets,
            src: src.into_iter().map(local).collect(),
            remote_src: vec![],
            dst: local(dst),
            packet_dst: packet_dst.map(local),
            channel_type: (!remote_dst.is_empty()).then_some(Memory),
            remote_dst,
            op: ReduceOp::Sum,
            group: None,
        })))
    }

    /// `dst` = the sum of `src` and of what peers have.
    pub fn reduce_from(mut self, dst: Chunks, src: Chunks, peers: Vec<(u32, Chunks)>) -> Self {
        let remote_src = peers.iter().map(|&(peer, chunks)| self.remote(Memory, peer, chunks)).collect();
        self = self.reduce(dst, vec![src]);
        let Some(OpKind::Reduce(reduce)) = self.block().ops.last_mut().map(|op| &mut op.kind) else {
            unreachable!()
        };
        (reduce.remote_src, reduce.channel_type) = (remote_src, Some(Memory));
        self
    }

    /// Chunks from several peers, in one operation.
    pub fn get_from_all(mut self, parts: impl Iterator<Item = (u32, Chunks)>) -> Self {
        let (src, dst) = parts.map(|(peer, part)| (self.remote(Memory, peer, part), local(part))).unzip();
        let channels = vec![];
        self.op(OpKind::Get(Get { src, dst, channels, channel_type: Memory, group: None }))
    }

    /// A chunk of all members' inputs, summed into the same of all members' outputs.
    pub fn switch_all_reduce(mut self, index: u64, members: Vec<u32>) -> Self {
        let ranks: Vec<_> = members.into_iter().map(Rank).collect();
        for (id, buffer) in [Input, Output].into_iter().enumerate() {
            self.gpu.channels.push(GpuChannels::Switch { buffer, rank_groups: vec![ranks.clone()] });
            let refs = &mut self.block().channels;
            match refs.last_mut() {
                Some(refs) => refs.channel_ids.push(ChannelId(id as u32)),
                None => {
                    let (channel_type, channel_ids) = (ChannelType::Switch, vec![ChannelId(id as u32)]);
                    refs.push(ChannelRefs { channel_type, channel_ids });
                }
            }
        }
        let chunk = |id| SwitchChunk { switch_channel_id: ChannelIndex(id), index, size: 1 };
        let op = SwitchReduceBroadcast { src: chunk(0), dst: chunk(1), op: ReduceOp::Sum };
        self.op(OpKind::SwitchReduceBroadcast(op))
    }

    /// All peers have come here too.
    pub fn meet(self, peers: &[u32]) -> Self {
        let signalled = self.notify_all(NotifyKind::Signal, peers);
        signalled.notify_all(NotifyKind::Wait, peers)
    }

    fn notify_all(mut self, kind: NotifyKind, peers: &[u32]) -> Self {
        let channels = peers.iter().map(|&peer| self.channel(Memory, peer)).collect();
        let (channel_type, data_sync) = (Memory, DataSync::NONE);
        self.op(OpKind::Notify(Notify { kind, relaxed: false, channels, channel_type, data_sync }))
    }

    fn block(&mut self) -> &mut ThreadBlock {
        &mut self.gpu.threadblocks[self.block]
    }

    /// The block's own channel to a peer: each block of a rank has another one.
    fn channel(&mut self, of: ChannelType, peer: u32) -> ChannelIndex {
        let block = &mut self.gpu.threadblocks[self.block];
        let at = self.gpu.channels.iter().position(
            |entry| matches!(entry, GpuChannels::Peers { channel_type, .. } if *channel_type == of),
        );
        let at = at.unwrap_or_else(|| {
            self.gpu.channels.push(GpuChannels::Peers { channel_type: of, connected_to: vec![] });
            self.gpu.channels.len() - 1
        });
        let GpuChannels::Peers { connected_to, .. } = &mut self.gpu.channels[at] else { unreachable!() };
        let refs = match block.channels.iter_mut().position(|refs| refs.channel_type == of) {
            Some(at) => &mut block.channels[at],
            None => {
                block.channels.push(ChannelRefs { channel_type: of, channel_ids: vec![] });
                block.channels.last_mut().unwrap()
            }
        };
        let known = refs.channel_ids.iter().position(|id| connected_to[id.index()] == Rank(peer));
        ChannelIndex(known.unwrap_or_else(|| {
            refs.channel_ids.push(ChannelId(connected_to.len() as u32));
            connected_to.push(Rank(peer));
            refs.channel_ids.len() - 1
        }) as u32)
    }

    fn remote(&mut self, of: ChannelType, peer: u32, (buffer, index, size): Chunks) -> RemoteChunk {
        let known = self
            .gpu
            .remote_buffers
            .iter()
            .position(|remote| (remote.rank, remote.buffer) == (Rank(peer), buffer));
        let id = RemoteBufferId(known.unwrap_or_else(|| {
            self.gpu.remote_buffers.push(RemoteBuffer {
                rank: Rank(peer),
                buffer,
                access_channel_types: vec![of],
            });
            self.gpu.remote_buffers.len() - 1
        }) as u32);
        let block = self.block();
        let refs = match block.remote_buffer_refs.iter_mut().position(|refs| refs.access_channel_type == of) {
            Some(at) => &mut block.remote_buffer_refs[at],
            None => {
                block
                    .remote_buffer_refs
                    .push(RemoteBufferRefs { access_channel_type: of, remote_buffer_ids: vec![] });
                block.remote_buffer_refs.last_mut().unwrap()
            }
        };
        let at = refs.remote_buffer_ids.iter().position(|known| *known == id).unwrap_or_else(|| {
            refs.remote_buffer_ids.push(id);
            refs.remote_buffer_ids.len() - 1
        });
        RemoteChunk { buffer_id: RemoteBufferIndex(at as u32), index, size }
    }
}

/// Every rank sends its whole input as packets and sums what came, with `blocks` thread blocks for each rank.
pub fn one_shot_all_reduce(ranks: u32, blocks: u64) -> Plan {
    let chunks = u64::from(ranks) * blocks;
    let mut builder = PlanBuilder::new("allreduce", ranks, [chunks, chunks, chunks * u64::from(ranks)]);
    let share = u64::from(ranks);
    for rank in 0..ranks {
        for block in 0..blocks {
            let own = (Input, block * share, share);
            let slot = |from: u32| (Scratch, u64::from(from) * chunks + block * share, share);
            let peers: Vec<u32> = (1..ranks).map(|k| (rank + k) % ranks).collect();
            let src = [own].into_iter().chain(peers.iter().map(|&peer| slot(peer))).collect();
            let block_builder = builder.on(rank, block as usize);
            block_builder
                .put_to_all(PutKind::Packets, peers.iter().map(|&peer| (peer, slot(rank), own)))
                .reduce_as(true, (Output, block * share, share), src, None, vec![]);
        }
    }
    builder.0
}

/// Every rank sums a part of the message and sends the sum on, both as packets.
pub fn two_shot_all_reduce(ranks: u32, blocks: u64) -> Plan {
    let n = u64::from(ranks);
    let chunks = n * blocks;
    // Scratch: the parts that came, then the sums that came.
    let mut builder = PlanBuilder::new("allreduce", ranks, [chunks, chunks, n * blocks + chunks]);
    for rank in 0..ranks {
        for block in 0..blocks {
            let part = |of: u32| block * n + u64::from(of);
            let came = |from: u32| (Scratch, part(from), 1);
            let sum = (Scratch, chunks + part(rank), 1);
            let peers: Vec<u32> = (1..ranks).map(|k| (rank + k) % ranks).collect();
            let src =
                [(Input, part(rank), 1)].into_iter().chain(peers.iter().map(|&peer| came(peer))).collect();
            let sums = peers.iter().map(|&peer| (peer, sum)).collect();
            let block_builder = builder.on(rank, block as usize);
            block_builder
                .put_to_all(
                    PutKind::Packets,
                    peers.iter().map(|&peer| (peer, came(rank), (Input, part(peer), 1))),
                )
                .reduce_as(true, (Output, part(rank), 1), src, Some(sum), sums)
                .copy(CopyKind::Unpack, (Output, part(0), n), (Scratch, chunks + part(0), n));
        }
    }
    builder.0
}

/// As torch's `one_shot_all_reduce`: every rank sums what it loads from all, between two meetings.
pub fn pulled_one_shot(ranks: u32, blocks: u64) -> Plan {
    let mut builder = PlanBuilder::new("allreduce", ranks, [blocks, blocks, 0]);
    for rank in 0..ranks {
        let peers: Vec<u32> = (1..ranks).map(|k| (rank + k) % ranks).collect();
        for block in 0..blocks {
            let part = (Input, block, 1);
            let theirs = peers.iter().map(|&peer| (peer, part)).collect();
            let block_builder = builder.on(rank, block as usize).meet(&peers);
            block_builder.reduce_from((Output, block, 1), part, theirs).meet(&peers);
        }
    }
    builder.0
}

/// As torch's `two_shot_all_reduce`: every rank sums its part of what it loads from all, and then loads all sums.
pub fn pulled_two_shot(ranks: u32, blocks: u64) -> Plan {
    let chunks = u64::from(ranks) * blocks;
    let mut builder = PlanBuilder::new("allreduce", ranks, [chunks, chunks, 0]);
    for rank in 0..ranks {
        let peers: Vec<u32> = (1..ranks).map(|k| (rank + k) % ranks).collect();
        for block in 0..blocks {
            let part = |buffer, of: u32| (buffer, block * u64::from(ranks) + u64::from(of), 1);
            let theirs = peers.iter().map(|&peer| (peer, part(Input, rank))).collect();
            let block_builder = builder.on(rank, block as usize).meet(&peers);
            let block_builder =
                block_builder.reduce_from(part(Output, rank), part(Input, rank), theirs).meet(&peers);
            block_builder.get_from_all(peers.iter().map(|&peer| (peer, part(Output, peer)))).meet(&peers);
        }
    }
    builder.0
}

/// Inside each node a reduce-scatter, then a ring over the nodes for each GPU's part, then an all-gather in the node.
pub fn hierarchical_all_reduce(nodes: u32, gpus: u32) -> Plan {
    let (n, g) = (u64::from(nodes), u64::from(gpus));
    let mut builder = PlanBuilder::new("allreduce", nodes * gpus, [n * g, n * g, n * g + n]);
    for rank in 0..nodes * gpus {
        let (node, own) = (rank / gpus, rank % gpus);
        let at = |gpu: u32| node * gpus + gpu;
        let peers: Vec<u32> = (1..gpus).map(|k| (own + k) % gpus).collect();
        let part = |gpu: u32| u64::from(gpu) * n;
        let mine = (Output, part(own), n);
        let mut block_builder = builder.on(rank, 0);
        for &peer in &peers {
            block_builder = block_builder
                .put(Memory, at(peer), (Scratch, part(own), n), (Input, part(peer), n))
                .signal(Memory, at(peer));
        }
        let mut src = vec![(Input, part(own), n)];
        for &peer in &peers {
            block_builder = block_builder.wait(Memory, at(peer));
            src.push((Scratch, part(peer), n));
        }
        block_builder = block_builder.reduce(mine, src).nop();
        block_builder = ring(block_builder, [node, nodes], [own, gpus], part(own), n * g);
        for &peer in &peers {
            block_builder = block_builder.put(Memory, at(peer), mine, mine).signal(Memory, at(peer));
        }
        peers.iter().fold(block_builder, |block_builder, &peer| block_builder.wait(Memory, at(peer)));
    }
    builder.0
}

/// The ring of all-reduce over nodes: reduce-scatter, then all-gather, a chunk at a time.
fn ring<'a>(
    mut block_builder: BlockBuilder<'a>,
    [node, nodes]: [u32; 2],
    [gpu, gpus]: [u32; 2],
    part: u64,
    scratch: u64,
) -> BlockBuilder<'a> {
    let (next, before) = ((node + 1) % nodes * gpus + gpu, (node + nodes - 1) % nodes * gpus + gpu);
    let chunk = |back: u32| part + u64::from((node + 2 * nodes - back) % nodes);
    for step in 0..nodes - 1 {
        let slot = scratch + u64::from(step);
        block_builder = block_builder
            .put_as(PutKind::WithSignal, Port, next, (Scratch, slot, 1), (Output, chunk(step), 1))
            .wait(Port, before)
            .reduce((Output, chunk(step + 1), 1), vec![(Output, chunk(step + 1), 1), (Scratch, slot, 1)])
            .nop();
    }
    for step in 0..nodes - 1 {
        let sent = (Output, chunk((step + nodes - 1) % nodes), 1);
        block_builder = block_builder.put_as(PutKind::WithSignal, Port, next, sent, sent).wait(Port, before);
    }
    block_builder
}
