//! All-reduce on GPUs; `kernels.cuh` has the algorithms.

use antiphon_device::{
    ReduceOp,
    cuda::{Program, StreamRef},
};
use antiphon_fabric::{
    Operation, Signature,
    gpu::{Family, Grid, Launch, NoArguments, Pieces, REDUCE, Reduction, Source, Work, kernels},
};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use super::Algorithm;
use crate::{
    arguments::{Input, Output, block},
    cuda::{CudaCollectives, reduction, signature},
    error::Result,
};

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
        Source { name: "all_reduce/kernels.cuh", text: include_str!("kernels.cuh") },
        Source {
            name: "gather_scatter/reduce_scatter.cuh",
            text: include_str!("../gather_scatter/reduce_scatter.cuh"),
        },
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        self.0.define(program)
    }
}

/// From how many bytes on a thread of one-shot has more than one vector, between two ranks, on 132 multiprocessors.
const PAIRS_FROM: usize = 528 << 10;

impl CudaCollectives {
    /// `output[i] = op over all ranks of input[i]`, on every rank, in the order of the stream; both of `n` elements of f32,
    /// f16 or bf16. `output` may be `input`.
    ///
    /// # Errors
    /// [`CollectiveError`](crate::CollectiveError) for arguments that make no sense; what an earlier call left behind, as
    /// [`check`](Self::check).
    ///
    /// # Safety
    /// Both tensors stay valid, and are not used in another way, until the stream has passed this call.
    #[inline]
    pub unsafe fn all_reduce(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        op: ReduceOp,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let algorithm = self.algorithm_for(input.num_bytes());
        // SAFETY: passed on.
        unsafe { self.all_reduce_with(input, output, op, algorithm, stream) }
    }

    /// [`all_reduce`](Self::all_reduce) by a given algorithm, which must be the same on all ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_reduce_with(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        op: ReduceOp,
        algorithm: Algorithm,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if self.world_size() == 1 {
            let call = Call::new(Operation::AllReduce).with_op(op);
            // SAFETY: passed on.
            return unsafe { self.alone(&call, Some(input), Some(output), stream) };
        }
        let (signature, input, output) = self.reduced(input, output, op, algorithm as u8)?;
        let family = Reducing(reduction(signature.operation, input.dtype, op)?);
        let loaded = self.tenant.ready(family, stream)?;
        let (size, world_size) = (input.dtype.size(), self.world_size());
        let bytes = input.count * size;
        let parts = if algorithm == Algorithm::OneShot { 1 } else { world_size };
        let (from, to) = (input.data.addr(), output.data.addr());
        let of = |start: usize, len: usize, _| {
            let (input, output) = (from + start, to + start);
            let work = Work { input, output, count: len / size, ..Work::new(signature) };
            let plain = (input | output).is_multiple_of(16) && len.is_multiple_of(16 * parts);
            let kernel = match algorithm {
                Algorithm::OneShot if plain && world_size == 2 && len > PAIRS_FROM => {
                    ReduceKernel::OneShotPairs
                }
                Algorithm::OneShot if plain => ReduceKernel::OneShotPlain,
                Algorithm::OneShot => ReduceKernel::OneShot,
                Algorithm::TwoShot if plain => ReduceKernel::TwoShotPlain,
                Algorithm::TwoShot => ReduceKernel::TwoShot,
            };
            let items = len.div_ceil(16 * parts);
            let grid = if parts > 1 { Grid::ItemsByPeer(items) } else { Grid::Items(items) };
            Launch { kernel, grid, work, arguments: NoArguments }
        };
        let pieces = Pieces::bytes(bytes, self.tenant.lane_bytes() * parts);
        // SAFETY: passed on.
        unsafe { self.tenant.run(&loaded, pieces, stream, of) }?;
        Ok(())
    }

    /// The operands of an all-reduce, checked, and what ranks must agree on.
    pub(super) fn reduced(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        op: ReduceOp,
        algorithm: u8,
    ) -> Result<(Signature, Input, Output)> {
        let signature = Signature {
            reduce: Some(op),
            algorithm,
            ..signature(Operation::AllReduce, input.dtype(), input.numel())
        };
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        block(signature.operation, &input, &output, self.world_size())?;
        Ok((signature, input, output))
    }

    /// The algorithm that [`all_reduce`](Self::all_reduce) takes for so many bytes.
    pub fn algorithm_for(&self, bytes: usize) -> Algorithm {
        Algorithm::ALL[self.table.choose(bytes)]
    }
}
