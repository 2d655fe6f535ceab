//! The memory of a plan on all ranks' GPUs.

use std::{collections::BTreeSet, ops::Range, sync::Arc};

use antiphon_device::cuda::{Context, DevicePointer, memory};
use antiphon_fabric::{Communicator, CudaArena, FabricError, gpu::MAX_WORLD};
use antiphon_plan::{Block, Mode, OpKind, Plan, Rank};

use super::{bases::Base, table::Item};
use crate::layout::{self, Base as Region, Layout, Operand, Slicing};

/// Where counters and packets begin in their arenas, behind the flags of each block and the counter of blocks that clear packets.
pub(super) const HEADER: u64 = 4096;
/// The counter in the header: behind the flags of as many blocks as a grid can have.
const CLEARED_AT: u64 = HEADER - COUNTER;
/// Bytes from counter to counter, so that no two share a sector of the cache.
const COUNTER: u64 = 32;

/// The counters of channels, which peers write, and those of this rank's semaphores, barriers and requests to copy engines.
pub(super) struct Counters {
    arena: CudaArena,
    channels: usize,
    semaphores: usize,
    barriers: usize,
    /// The peer of each of this rank's channels.
    peers: Vec<usize>,
}

impl Counters {
    /// Allocates them. All ranks call it together.
    pub(super) fn new(comm: &Communicator, context: &Context, plan: &Plan) -> Result<Self, FabricError> {
        let rank = comm.rank();
        let most = |count: &dyn Fn(usize) -> usize| (0..plan.gpus.len()).map(count).max().unwrap_or(0);
        let channels = most(&|rank| layout::channels(plan, rank).count());
        let semaphores = most(&|rank| plan.gpus[rank].semaphores.len());
        let barriers = most(&|rank| barriers(plan, rank));
        let counters = channels + semaphores + barriers + 1;
        let arena = CudaArena::new(comm, context, HEADER as usize + counters * COUNTER as usize, 0)?;
        let peers = layout::channels(plan, rank).map(|(.., peer)| peer.index()).collect();
        let counters = Self { arena, channels, semaphores, barriers, peers };
        let begun = counters.begin(rank, plan).map_err(FabricError::from);
        comm.agree("cannot set its semaphores", begun)?;
        Ok(counters)
    }

    fn begin(&self, rank: usize, plan: &Plan) -> Result<(), antiphon_device::cuda::CudaError> {
        let stream = self.arena.context().stream()?;
        for (id, semaphore) in plan.gpus[rank].semaphores.iter().enumerate() {
            let value = semaphore.init_value.to_le_bytes();
            let at = self.arena.pointer(rank).offset(self.semaphore_at(id));
            // SAFETY: the counter lies in the arena, which no kernel uses yet; the stream is waited for.
            unsafe { memory::copy_to_device(stream.borrow(), at, value.as_ptr(), value.len()) }?;
            stream.borrow().synchronize()?;
        }
        Ok(())
    }

    fn semaphore_at(&self, id: usize) -> u64 {
        HEADER + (self.channels + id) as u64 * COUNTER
    }

    /// The counter of a rank's requests to its copy engines: how many were made, and how many are done.
    pub(super) fn requests(&self, rank: usize) -> DevicePointer {
        self.arena.pointer(rank).offset(self.semaphore_at(self.semaphores + self.barriers))
    }

    /// The arena, whose header serves plans without packets.
    pub(super) fn arena(&self) -> &CudaArena {
        &self.arena
    }
}

/// Calls `note` for each operation of a block, those in pipelines too.
fn each_op(block: &Block<'_>, mut note: impl FnMut(&OpKind)) {
    for op in &block.get().ops {
        note(&op.kind);
        if let OpKind::Pipeline(pipeline) = &op.kind {
            pipeline.ops.iter().for_each(|op| note(&op.kind));
        }
    }
}

/// How many barriers the blocks of a rank have.
fn barriers(plan: &Plan, rank: usize) -> usize {
    let mut seen = BTreeSet::new();
    for block in Block::all(plan).filter(|block| block.rank().index() == rank) {
        each_op(&block, |kind| {
            if let OpKind::Barrier { barrier, .. } = kind {
                seen.insert(*barrier);
            }
        });
    }
    seen.len()
}

/// Which ranks write packets into this rank's scratch.
pub(super) struct Writers(Vec<(Range<u64>, usize)>);

impl Writers {
    pub(super) fn new(plan: &Plan, rank: usize) -> Self {
        let mut writers = Vec::new();
        for block in Block::all(plan) {
            each_op(&block, |kind| {
                block.accesses(kind, |access| {
                    if access.packets && access.mode == Mode::Write && access.rank == Rank(rank as u32) {
                        writers.push((access.chunks, block.rank().index()));
                    }
                });
            });
        }
        writers.sort_by_key(|(_, writer)| *writer == rank); // a peer is to blame rather than this rank
        Self(writers)
    }

    fn of(&self, chunk: u64, rank: usize) -> usize {
        self.0.iter().find(|(chunks, _)| chunks.contains(&chunk)).map_or(rank, |(_, writer)| *writer)
    }
}

/// Bytes of the areas that hold what peers touch, for chunks of some size. An area of which there is none has 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Areas {
    staged_output_at: usize,
    /// Staged tensors, plain scratch, and packets behind their header: each in an arena.
    bytes: [usize; 3],
    /// Bytes of scratch, with packets.
    pub(super) scratch: usize,
    /// Bytes from a half of plain scratch to the other, and of packets; launches take turns between `halves`.
    half: [usize; 2],
    pub(super) halves: usize,
}

impl Areas {
    /// The areas of `input` and `output` chunks, and of `scratch` chunks for slices of them, which there are in 1 or 2 `halves`. None if they
    /// exceed the address space.
    pub(super) fn new(
        slicing: Slicing,
        chunks: [u64; 3],
        halves: usize,
        stages: bool,
        has_packets: bool,
    ) -> Option<Self> {
        const LINE: usize = 256;
        let area = |count: u64, bytes: usize| {
            usize::try_from(count).ok()?.checked_mul(bytes)?.checked_next_multiple_of(LINE)
        };
        let ([input, output, scratch], Slicing { chunk, slice }) = (chunks, slicing);
        let staged = |count| if stages { area(count, chunk) } else { Some(0) };
        let staged_output_at = staged(input)?;
        let plain = area(scratch, slice)?;
        let packets = if has_packets { area(scratch, Layout::packets(slice)?)? } else { 0 };
        let header = if has_packets { HEADER as usize } else { 0 };
        let half = [plain, packets];
        let [plain, packets] = [plain.checked_mul(halves)?, packets.checked_mul(halves)?];
        Some(Self {
            staged_output_at,
            bytes: [staged_output_at.checked_add(staged(output)?)?, plain, header.checked_add(packets)?],
            scratch: plain.checked_add(packets)?,
            half,
            halves,
        })
    }
}

/// Arenas for staged tensors, plain scratch and packets.
pub(super) type Arenas = [Option<Arc<CudaArena>>; 3];

/// The arenas of a plan, of which each was enough for all sizes until a larger one came.
///
/// * Staged tensors lie apart from scratch: a rank stages its input before ranks meet, when peers may still access its scratch in the
///   launch before, of another size perhaps. (They do not access its staged tensors any more: in a proved plan all accesses to a
///   rank's input and output are over when the rank has ended.)
/// * Packets lie where never anything else does, and each of their arenas has flags of its own.
#[derive(Default)]
pub(super) struct Workspace([Vec<Arc<CudaArena>>; 3]);

impl Workspace {
    /// The arenas for some areas, which are made if there are none. All ranks call it together.
    pub(super) fn reserve(
        &mut self,
        comm: &Communicator,
        context: &Context,
        areas: &Areas,
    ) -> Result<Arenas, FabricError> {
        let mut reserved = Arenas::default();
        for ((arenas, bytes), reserved) in self.0.iter_mut().zip(areas.bytes).zip(&mut reserved) {
            if bytes == 0 {
                continue;
            }
            let known = arenas.iter().find(|arena| arena.len() >= bytes).cloned();
            *reserved = Some(match known {
                Some(known) => known,
                None => {
                    let made = Arc::new(CudaArena::new(comm, context, bytes, 0)?);
                    arenas.push(made.clone());
                    made
                }
            });
        }
        Ok(reserved)
    }
}

/// Where the memory of all ranks lies, for this rank's GPU.
pub(super) struct Places<'a> {
    pub(super) rank: usize,
    pub(super) counters: &'a Counters,
    pub(super) writers: &'a Writers,
    pub(super) arenas: &'a Arenas,
    pub(super) areas: Areas,
    /// Which half of the scratch.
    pub(super) half: usize,
    pub(super) slicing: Slicing,
    /// Bytes of each chunk that a launch does: of scratch, all that there are.
    pub(super) slice: usize,
}

impl Places<'_> {
    /// The counter of a rank's channel.
    pub(super) fn channel(&self, rank: usize, channel: usize) -> u64 {
        self.counters.arena.pointer(rank).0 + HEADER + channel as u64 * COUNTER
    }

    /// The peer of this rank's channel.
    pub(super) fn peer(&self, channel: usize) -> usize {
        self.counters.peers[channel]
    }

    pub(super) fn semaphore(&self, id: usize) -> u64 {
        self.counters.arena.pointer(self.rank).0 + self.counters.semaphore_at(id)
    }

    pub(super) fn barrier(&self, barrier: usize) -> u64 {
        self.semaphore(self.counters.semaphores + barrier)
    }

    /// The flags of this rank's blocks.
    pub(super) fn flags(&self) -> u64 {
        self.arenas[2].as_deref().unwrap_or(self.counters.arena()).pointer(self.rank).0
    }

    /// The counter of this rank's blocks that have cleared packets.
    pub(super) fn cleared(&self) -> u64 {
        self.flags() + CLEARED_AT
    }

    /// The packets that come to this rank: where they begin, and how many bytes they have.
    pub(super) fn packets(&self) -> [u64; 2] {
        let packets =
            |arena: &Arc<CudaArena>| [arena.pointer(self.rank).0 + HEADER, arena.len() as u64 - HEADER];
        self.arenas[2].as_ref().map_or([0; 2], packets)
    }

    /// Where all ranks stage inputs and outputs, and where staging begins.
    pub(super) fn staging(&self) -> [[u64; MAX_WORLD]; 3] {
        let mut all = [[0; MAX_WORLD]; 3];
        if let Some(arena) = &self.arenas[0] {
            for rank in 0..arena.world_size() {
                let start = arena.pointer(rank).0;
                let starts = [start, start + self.areas.staged_output_at as u64, start];
                all.iter_mut().zip(starts).for_each(|(all, start)| all[rank] = start);
            }
        }
        all
    }

    /// A region of a rank as this rank's GPU sees it, and the bytes from chunk to chunk there.
    pub(super) fn region(&self, rank: usize, region: Region) -> (Base, u64, usize) {
        let (chunk, slice) = (self.slicing.chunk, self.slice);
        let [plain, packets] = self.areas.half.map(|bytes| (bytes * self.half) as u64);
        let within = |kind: usize, at: u64, stride| {
            let start = self.arenas[kind].as_ref().map_or(0, |arena| arena.pointer(rank).0);
            (Base::Absolute, start + at, stride)
        };
        match region {
            Region::Input => (Base::OfInput, 0, chunk),
            Region::Output => (Base::OfOutput, 0, chunk),
            Region::SharedInput => (Base::OfSharedInput, 0, chunk),
            Region::SharedOutput => (Base::OfSharedOutput, 0, chunk),
            Region::StagedInput => (Base::OfStaging, 0, chunk),
            Region::StagedOutput => (Base::OfStaging, self.areas.staged_output_at as u64, chunk),
            Region::Scratch => within(1, plain, slice),
            Region::Packets => within(2, HEADER + packets, Layout::packets(slice).unwrap_or(0)),
        }
    }

    /// An operand of a step that begins at byte `start` of its operation: where byte 0 of that would lie, if the step's chunk and all
    /// before it lay side by side.
    pub(super) fn operand(&self, operand: Operand, start: usize) -> Item {
        let (base, at, stride) = self.region(operand.rank(), operand.base());
        let before = start.checked_div(self.slice).unwrap_or(0);
        let chunk = operand.chunk.wrapping_add(before); // the operation's first chunk may lie before the region's first
        let (rank, scale) = match operand.base() {
            Region::Packets => (self.writers.of(chunk as u64, self.rank), 2),
            _ => (operand.rank(), 1),
        };
        let skipped = (before * self.slice * scale) as u64;
        let at = at.wrapping_add(chunk.wrapping_mul(stride) as u64).wrapping_sub(skipped);
        Item { at, base, rank }
    }
}
