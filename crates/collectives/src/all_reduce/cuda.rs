//! All-reduce on GPUs; `kernels.cuh` has the algorithms.

use antiphon_device::cuda::{Program, StreamRef};
use antiphon_fabric::{
    Signature,
    gpu::{Family, Grid, Launch, NoArguments, Pieces, REDUCE, Reduction, Source, Tenant, Work, kernels},
};

use super::Algorithm;
use crate::{arguments::CheckedCall, error::Result};

kernels! {
    /// The kernels of `kernels.cuh` and of `reduce_scatter.cuh`. A plain one needs whole vectors at multiples of 16 bytes.
    pub(crate) enum ReduceKernel {
        OneShot = "one_shot",
        OneShotPlain = "one_shot_plain",
        OneShotPairs = "one_shot_pairs",
        TwoShot = "two_shot",
        TwoShotPlain = "two_shot_plain",
        ReduceScatter = "reduce_scatter",
        ReduceScatterPlain = "reduce_scatter_plain",
    }
}

/// The kernels that reduce elements of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reducing(pub(crate) Reduction);

impl Family for Reducing {
    type Kernel = ReduceKernel;
    type Arguments = NoArguments;
    const NAME: &'static str = "reduction.cuh";
    const SOURCES: &'static [Source] = &[
        REDUCE,
        Source::new("all_reduce/kernels.cuh", include_str!("kernels.cuh")),
        Source::new(
            "gather_scatter/blocks/reduce_scatter.cuh",
            include_str!("../gather_scatter/blocks/reduce_scatter.cuh"),
        ),
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        self.0.define(program)
    }
}

/// The number of bytes from which on a thread of one-shot has more than one vector, between two ranks, on 132 multiprocessors.
const PAIRS_FROM: usize = 528 << 10;

/// Carries out an all-reduce through the memory for staging.
///
/// # Safety
/// Both tensors stay valid, and are not used in another way, until the stream has passed this call.
pub(crate) unsafe fn run_staged(
    tenant: &Tenant,
    call: &CheckedCall<'_>,
    algorithm: Algorithm,
    stream: StreamRef<'_>,
) -> Result<()> {
    let signature = Signature { algorithm: algorithm.number(false), ..call.signature };
    let loaded = tenant.ready(Reducing(call.reduction()?), stream)?;
    let (size, bytes, world_size) = (call.dtype.size(), call.block_bytes(), call.world_size);
    let parts = if algorithm == Algorithm::OneShot { 1 } else { world_size };
    let (from, to) = call.addresses();
    let launch = |start: usize, len: usize, _| {
        let (input, output) = (from + start, to + start);
        let work = Work { input, output, count: len / size, ..Work::new(signature) };
        let plain = (input | output).is_multiple_of(16) && len.is_multiple_of(16 * parts);
        let kernel = match algorithm {
            Algorithm::OneShot if plain && world_size == 2 && len > PAIRS_FROM => ReduceKernel::OneShotPairs,
            Algorithm::OneShot if plain => ReduceKernel::OneShotPlain,
            Algorithm::OneShot => ReduceKernel::OneShot,
            Algorithm::TwoShot if plain => ReduceKernel::TwoShotPlain,
            Algorithm::TwoShot => ReduceKernel::TwoShot,
        };
        let items = len.div_ceil(16 * parts);
        let grid = if parts > 1 { Grid::ItemsByPeer(items) } else { Grid::Items(items) };
        Launch { kernel, grid, work, arguments: NoArguments }
    };
    // SAFETY: the caller's promise; a launch sends what fits a lane.
    unsafe { tenant.run(&loaded, Pieces::bytes(bytes, tenant.lane_bytes() * parts), stream, launch) }?;
    Ok(())
}
