//! The addresses of chunks in a launch, computed from sizes, tensors and the workspace.

use antiphon_fabric::{ArenaOffsets, Rounds};

use super::memory::Workspace;
use crate::{
    arguments::Arguments,
    layout::{Base, Layout, Move, Slicing},
};

/// The address of a region's first chunk, and the distance between its chunks in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkAddresses {
    pub(super) base: *mut u8,
    pub(super) stride: usize,
}

impl ChunkAddresses {
    /// A region that no operation uses.
    pub(super) const UNUSED: Self = ChunkAddresses { base: std::ptr::null_mut(), stride: 0 };
}

/// The arena offsets of a call's input and output.
pub(super) fn offsets(call: &Arguments, rounds: &Rounds) -> ArenaOffsets<2> {
    let (input, output) = ((call.input, call.input_bytes), (call.output.cast_const(), call.output_bytes));
    ArenaOffsets::of(rounds, [input, output])
}

/// A rank's tensors, as this rank sees them.
pub(super) struct Tensors {
    /// Null if they cannot be reached, nor need to.
    input: *mut u8,
    output: *mut u8,
    /// Whether the other ranks reach them.
    is_symmetric: [bool; 2],
}

impl Tensors {
    pub(super) fn own(rounds: &Rounds, call: &Arguments) -> Self {
        let is_symmetric = [0, 1].map(|tensor| offsets(call, rounds).get(tensor).is_some());
        // The input is written to only where it is the output too.
        Tensors { input: call.input.cast_mut(), output: call.output, is_symmetric }
    }

    pub(super) fn of_peer(rounds: &Rounds, rank: usize, offsets: ArenaOffsets<2>) -> Self {
        let offsets = [offsets.get(0), offsets.get(1)];
        // SAFETY: the rank has posted these offsets of its tensors.
        let address = |offset| unsafe { rounds.arenas().at(rank, offset) };
        let [input, output] = offsets.map(|offset| offset.map_or(std::ptr::null_mut(), address));
        Tensors { input, output, is_symmetric: offsets.map(|offset| offset.is_some()) }
    }
}

/// Bytes of the workspace's areas, for chunks of some size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Areas {
    /// The size of the staged input, and that of staged input and output.
    pub(super) staged_input: usize,
    pub(super) staging: usize,
    /// The size of plain scratch, and that of scratch with its packets.
    pub(super) plain: usize,
    pub(super) scratch: usize,
    /// Whether launches take turns between two such scratches.
    pub(super) double: bool,
}

/// One launch of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slice {
    pub(super) slicing: Slicing,
    pub(super) areas: Areas,
    pub(super) number: usize,
    pub(super) flag: u32,
}

/// The addresses of one rank's chunks, by [`Base`].
pub(super) type RankAddresses = [ChunkAddresses; Base::COUNT];

impl Slice {
    /// Bytes of this slice of a chunk.
    pub(super) fn len(&self) -> usize {
        self.slicing.len(self.number)
    }

    pub(super) fn addresses(&self, rank: usize, tensors: &Tensors, workspace: &Workspace) -> RankAddresses {
        let tensor = |base: *mut u8| match base.is_null() {
            true => ChunkAddresses::UNUSED,
            false => ChunkAddresses {
                base: base.wrapping_add(self.number * self.slicing.slice),
                stride: self.slicing.chunk,
            },
        };
        let staging = workspace.staging(rank).wrapping_add(self.number % 2 * self.areas.staging);
        let staged = |offset| ChunkAddresses { base: staging.wrapping_add(offset), stride: self.len() };
        let half = usize::from(self.areas.double && self.flag.is_multiple_of(2));
        let scratch = workspace.scratch(rank).wrapping_add(half * self.areas.scratch);
        let packets = Layout::packets(self.len()).unwrap_or(0);

        let mut addresses = [ChunkAddresses::UNUSED; Base::COUNT];
        let mut set = |base: Base, start| addresses[base as usize] = start;
        let [input, output] = [tensor(tensors.input), tensor(tensors.output)];
        let [staged_input, staged_output] = [staged(0), staged(self.areas.staged_input)];
        set(Base::Input, input);
        set(Base::Output, output);
        set(Base::SharedInput, if tensors.is_symmetric[0] { input } else { staged_input });
        set(Base::SharedOutput, if tensors.is_symmetric[1] { output } else { staged_output });
        set(Base::StagedInput, staged_input);
        set(Base::StagedOutput, staged_output);
        set(Base::Scratch, ChunkAddresses { base: scratch, stride: self.len() });
        set(Base::Packets, ChunkAddresses { base: scratch.wrapping_add(self.areas.plain), stride: packets });
        addresses
    }

    /// Copies this slice of some chunks of this rank, unless they are in place.
    pub(super) fn move_all(&self, moves: &[Move], addresses: &RankAddresses) {
        for Move { from, to, chunks } in moves {
            let locate = |(base, chunk): (Base, u64)| {
                let chunks = addresses[base as usize];
                (chunks.base.wrapping_add(chunk as usize * chunks.stride), chunks.stride)
            };
            let ((from, from_stride), (to, to_stride)) = (locate(*from), locate(*to));
            if std::ptr::eq(from, to) {
                continue;
            }
            let (chunks, len) = (*chunks as usize, self.len());
            let whole = from_stride == len && to_stride == len;
            let (times, len) = if whole { (1, chunks * len) } else { (chunks, len) };
            for at in 0..times {
                // SAFETY: both ends hold `chunks` chunks: the tensors were found to be as long as the plan's buffers, and
                // the workspace has room for them. No other rank touches this rank's tensors and staging now.
                unsafe {
                    std::ptr::copy(from.wrapping_add(at * from_stride), to.wrapping_add(at * to_stride), len)
                };
            }
        }
    }
}
