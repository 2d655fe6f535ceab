//! Reductions in which ranks get parts of any lengths, or one of them all; `reduce_parts.cuh` has the kernels.

pub(super) mod uneven;

use antiphon_device::cuda::{Program, StreamRef};
use antiphon_fabric::gpu::{
    Family, Grid, Launch, MAX_WORLD, Pieces, REDUCE, Reduction, Source, Work, kernel_call, kernels,
};
use antiphon_operation::Root;

use crate::{arguments::CheckedCall, cuda::CudaCollectives, error::Result};

kernels! {
    /// The kernels of `reduce_parts.cuh`. The plain one needs whole vectors at multiples of 16 bytes.
    pub(crate) enum Kernel {
        ReduceParts = "reduce_parts",
        ReducePartsPlain = "reduce_parts_plain",
    }
}

/// The kernels that reduce parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReducingParts(pub(crate) Reduction);

impl Family for ReducingParts {
    type Kernel = Kernel;
    type Arguments = PartsOfRanks;
    const NAME: &'static str = "reduction_of_parts.cuh";
    const SOURCES: &'static [Source] = &[
        REDUCE,
        PartsOfRanks::SOURCE,
        Source::new("gather_scatter/parts/reduce_parts.cuh", include_str!("reduce_parts.cuh")),
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        self.0.define(program)
    }

    /// A thread needs a few registers more than where all parts are alike.
    fn most_blocks(&self, world_size: usize) -> u32 {
        if world_size < 4 { 4 } else { 2 }
    }
}

kernel_call! {
    /// The elements of each rank's part of the input, in a launch.
    #[derive(Debug, Default)]
    pub(crate) struct PartsOfRanks = "parts" {
        input: [*const u8; MAX_WORLD],
        count: [u32; MAX_WORLD],
    }
}

impl CudaCollectives {
    /// Carries out a reduction of which each rank gets its part, or the root all.
    ///
    /// # Safety
    /// As [`call`](crate::StreamCollectives::call).
    pub(crate) unsafe fn reduce_parts(&self, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
        let (size, rank) = (call.dtype.size(), call.rank);
        let sent = call.input_layout();
        let (row, root) = (call.signature.operation.row(), call.call.root);
        let gets = |peer: usize| row.root != Some(Root::Gets) || peer == root;
        let (from, to) = call.addresses();
        // Bytes of the input that are for a rank.
        let part = |peer: usize| {
            let piece = sent.piece(if sent.is_divided() { peer } else { rank });
            let bytes = piece.start * size..piece.end * size;
            if gets(peer) { bytes } else { bytes.start..bytes.start }
        };
        let family = ReducingParts(call.reduction()?);
        let loaded = self.tenant.ready(family, stream)?;
        let launch = |start: usize, len: usize, _| {
            let (mut parts, mut bits) = (PartsOfRanks::default(), to + start);
            for peer in 0..call.world_size {
                let part = part(peer);
                let bytes = part.len().min(start + len).saturating_sub(start);
                parts.input[peer] = (from + part.start + start) as u64;
                parts.count[peer] = (bytes / size) as u32;
                bits |= if bytes > 0 { (from + part.start + start) | bytes } else { 0 };
            }
            let kernel = if bits.is_multiple_of(16) { Kernel::ReducePartsPlain } else { Kernel::ReduceParts };
            let work = Work { output: to + start, root, ..Work::new(call.signature) };
            Launch { kernel, grid: Grid::ItemsByPeer(len.div_ceil(16)), work, arguments: parts }
        };
        // The longest part of any rank, so that all ranks launch as often.
        let pieces = Pieces::bytes(sent.longest() * size, self.tenant.lane_bytes());
        // SAFETY: the launches keep to the parts; the rest is passed on.
        Ok(unsafe { self.tenant.run(&loaded, pieces, stream, launch) }?)
    }
}
