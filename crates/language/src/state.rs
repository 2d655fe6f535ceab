//! The plan under construction.

use std::collections::HashMap;
use std::mem;
use std::panic::Location;

use antiphon_plan::{
    BarrierId, BufferType, ChannelId, ChannelIndex, ChannelRefs, ChannelType, Gpu, GpuChannels, Op, OpKind,
    Origin, OriginId, Pipeline, Rank, RemoteBuffer, RemoteBufferId, RemoteBufferIndex, RemoteBufferRefs,
    RemoteChunk, ThreadBlock,
};

use crate::buffer::Chunk;
use crate::collective::BufferChunks;
use crate::error::{LanguageError, Result};

/// Far beyond what a GPU holds at once, so that a slip of the pen is an error and not an exhausted memory.
const MAX_THREAD_BLOCKS: u32 = 1 << 16;

/// The plan as operations are added: thread blocks with numbered channels and buffers, before any pass.
#[derive(Default)]
pub(crate) struct State {
    pub gpus: Vec<Gpu>,
    pub origins: Vec<Origin>,
    numbers: Vec<Numbers>,
    origin_ids: HashMap<(usize, u32), OriginId>,
    files: HashMap<String, usize>,
    /// Where the operation comes from that is being added.
    origin: Option<OriginId>,
    /// Whether that was said, and callers' lines do not count.
    told: bool,
    pipeline: Option<OpenPipeline>,
}

/// The numbers that one rank has used so far.
#[derive(Default)]
struct Numbers {
    barriers: HashMap<Vec<u32>, BarrierId>,
    remote_buffers: HashMap<(Rank, BufferType), RemoteBufferId>,
}

/// Operations that wait for their pipeline to end.
struct OpenPipeline {
    unit_size: u64,
    num_chunks: u64,
    origin: Option<OriginId>,
    /// The operations of each rank and thread block, in the order of the calls.
    blocks: Vec<((u32, u32), Vec<Op>)>,
    places: HashMap<(u32, u32), usize>,
}

impl State {
    pub fn new(buffers: &[BufferChunks]) -> Self {
        let gpus = buffers.iter().enumerate().map(|(rank, chunks)| Gpu {
            id: Rank(rank as u32),
            input_chunks: chunks.input,
            output_chunks: chunks.output,
            scratch_chunks: 0,
            threadblocks: Vec::new(),
            channels: Vec::new(),
            remote_buffers: Vec::new(),
            semaphores: Vec::new(),
        });
        let numbers = buffers.iter().map(|_| Numbers::default());
        State { gpus: gpus.collect(), numbers: numbers.collect(), ..State::default() }
    }

    pub fn gpu(&mut self, rank: u32) -> &mut Gpu {
        &mut self.gpus[rank as usize]
    }

    fn block(&mut self, rank: u32, tb: u32) -> Result<&mut ThreadBlock> {
        if tb >= MAX_THREAD_BLOCKS {
            let (number, limit) = (tb.into(), MAX_THREAD_BLOCKS.into());
            return Err(LanguageError::TooMany { what: "thread block", number, limit });
        }
        let blocks = &mut self.gpus[rank as usize].threadblocks;
        for id in blocks.len() as u32..=tb {
            blocks.push(ThreadBlock {
                id,
                ops: Vec::new(),
                channels: Vec::new(),
                remote_buffer_refs: Vec::new(),
            });
        }
        Ok(&mut blocks[tb as usize])
    }

    /// A new channel of `src` to `dst`.
    pub fn add_channel(&mut self, channel_type: ChannelType, src: u32, dst: u32) -> ChannelId {
        let channels = &mut self.gpu(src).channels;
        let of_type = |entry: &GpuChannels| matches!(entry, GpuChannels::Peers { channel_type: of, .. } if *of == channel_type);
        let at = channels.iter().position(of_type).unwrap_or_else(|| {
            let peers =
                channels.iter().take_while(|entry| matches!(entry, GpuChannels::Peers { .. })).count();
            channels.insert(peers, GpuChannels::Peers { channel_type, connected_to: Vec::new() });
            peers
        });
        let GpuChannels::Peers { connected_to, .. } = &mut channels[at] else {
            unreachable!("found as such above");
        };
        connected_to.push(Rank(dst));
        ChannelId(connected_to.len() as u32 - 1)
    }

    /// A new switch channel of one rank.
    pub fn add_switch(&mut self, rank: u32, buffer: BufferType, members: &[u32]) -> ChannelId {
        let gpu = self.gpu(rank);
        let id = ChannelId(gpu.switches().count() as u32);
        let members = members.iter().copied().map(Rank).collect();
        gpu.channels.push(GpuChannels::Switch { buffer, rank_groups: vec![members] });
        id
    }

    /// How a thread block names a channel of its rank.
    pub fn channel(
        &mut self,
        rank: u32,
        tb: u32,
        channel_type: ChannelType,
        id: ChannelId,
    ) -> Result<ChannelIndex> {
        let lists = &mut self.block(rank, tb)?.channels;
        let at = lists.iter().position(|refs| refs.channel_type == channel_type).unwrap_or_else(|| {
            lists.push(ChannelRefs { channel_type, channel_ids: Vec::new() });
            lists.len() - 1
        });
        Ok(ChannelIndex(place_of(&mut lists[at].channel_ids, id)))
    }

    /// How a thread block names a chunk of another rank.
    pub fn remote(
        &mut self,
        rank: u32,
        tb: u32,
        access_channel_type: ChannelType,
        chunk: Chunk,
    ) -> Result<RemoteChunk> {
        let id = self.remote_buffer(rank, access_channel_type, chunk);
        let lists = &mut self.block(rank, tb)?.remote_buffer_refs;
        let of_type = |refs: &RemoteBufferRefs| refs.access_channel_type == access_channel_type;
        let at = lists.iter().position(of_type).unwrap_or_else(|| {
            lists.push(RemoteBufferRefs { access_channel_type, remote_buffer_ids: Vec::new() });
            lists.len() - 1
        });
        let buffer_id = RemoteBufferIndex(place_of(&mut lists[at].remote_buffer_ids, id));
        Ok(RemoteChunk { buffer_id, index: chunk.index, size: chunk.size })
    }

    fn remote_buffer(&mut self, rank: u32, access: ChannelType, chunk: Chunk) -> RemoteBufferId {
        let buffers = &mut self.gpus[rank as usize].remote_buffers;
        let numbers = &mut self.numbers[rank as usize].remote_buffers;
        let id = *numbers.entry((chunk.rank, chunk.buffer)).or_insert_with(|| {
            let access_channel_types = Vec::new();
            buffers.push(RemoteBuffer { rank: chunk.rank, buffer: chunk.buffer, access_channel_types });
            RemoteBufferId(buffers.len() as u32 - 1)
        });
        let types = &mut buffers[id.index()].access_channel_types;
        if let Err(at) = types.binary_search(&access) {
            types.insert(at, access);
        }
        id
    }

    /// The barrier of exactly these thread blocks in this order.
    pub fn barrier(&mut self, rank: u32, blocks: &[u32]) -> BarrierId {
        let barriers = &mut self.numbers[rank as usize].barriers;
        let next = BarrierId(barriers.len() as u32);
        *barriers.entry(blocks.to_vec()).or_insert(next)
    }

    /// Adds an operation to a thread block, or to its part of the open pipeline.
    pub fn push(&mut self, rank: u32, tb: u32, kind: OpKind) -> Result<()> {
        let op = Op { kind, origin: self.origin };
        // Also if a pipeline takes it, so that an impossible thread block is found now and not at the pipeline's end.
        self.block(rank, tb)?;
        match &mut self.pipeline {
            None => self.block(rank, tb)?.ops.push(op),
            Some(open) => {
                let place = *open.places.entry((rank, tb)).or_insert_with(|| {
                    open.blocks.push(((rank, tb), Vec::new()));
                    open.blocks.len() - 1
                });
                open.blocks[place].1.push(op);
            }
        }
        Ok(())
    }

    pub fn begin_pipeline(&mut self, unit_size: u64, num_chunks: u64) -> Result<()> {
        if self.pipeline.is_some() {
            return Err(LanguageError::NestedPipeline);
        }
        let (blocks, places) = Default::default();
        self.pipeline = Some(OpenPipeline { unit_size, num_chunks, origin: self.origin, blocks, places });
        Ok(())
    }

    pub fn end_pipeline(&mut self) -> Result<()> {
        let OpenPipeline { unit_size, num_chunks, origin, blocks, .. } =
            self.pipeline.take().ok_or(LanguageError::NoPipeline)?;
        let before = mem::replace(&mut self.origin, origin);
        for ((rank, tb), ops) in blocks {
            self.push(rank, tb, OpKind::Pipeline(Pipeline { unit_size, num_chunks, ops }))?;
        }
        self.origin = before;
        Ok(())
    }

    /// The following operations come from this line of the program.
    pub fn tell_origin(&mut self, file: &str, line: u32) {
        self.told = true;
        self.set_origin(file, line);
    }

    /// Records the caller as the origin of the following operations, unless an origin was set.
    pub fn called_from(&mut self, location: &'static Location<'static>) {
        if !self.told {
            self.set_origin(location.file(), location.line());
        }
    }

    fn set_origin(&mut self, file: &str, line: u32) {
        let last = self.origin.map(|id| &self.origins[id.index()]);
        if last.is_some_and(|last| last.line == line && last.file == file) {
            return;
        }
        let number = match self.files.get(file) {
            Some(&number) => number,
            None => {
                self.files.insert(file.to_owned(), self.files.len());
                self.files.len() - 1
            }
        };
        let origins = &mut self.origins;
        self.origin = Some(*self.origin_ids.entry((number, line)).or_insert_with(|| {
            origins.push(Origin { file: file.to_owned(), line });
            OriginId(origins.len() as u32 - 1)
        }));
    }
}

/// The place of an id in a list, at whose end it is put if need be.
fn place_of<T: PartialEq>(ids: &mut Vec<T>, id: T) -> u32 {
    let at = ids.iter().position(|there| *there == id).unwrap_or_else(|| {
        ids.push(id);
        ids.len() - 1
    });
    at as u32
}
