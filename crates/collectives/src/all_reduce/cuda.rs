//! All-reduce on GPUs; `kernels.cuh` has the algorithms.

use antiphon_device::{ReduceOp, cuda::StreamRef};
use antiphon_fabric::{Operation, Signature};
use antiphon_tensor::{TensorView, TensorViewMut};

use super::Algorithm;
use crate::{
    arguments::{Input, Output, block},
    cuda::{
        CudaCollectives,
        kernels::{Family, Kernel},
        launch::{Cut, Grid, Launch, More, Work},
        signature,
    },
    error::Result,
};

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
        let (signature, input, output) = self.reduced(input, output, op, algorithm as u8)?;
        let loaded = self.ready(Family::Reduction(input.dtype, op), stream)?;
        let (size, world_size) = (input.dtype.size(), self.world_size());
        let bytes = input.count * size;
        let parts = if algorithm == Algorithm::OneShot { 1 } else { world_size };
        let (from, to) = (input.data.addr(), output.data.addr());
        let of = |start: usize, len: usize, _| {
            let (input, output) = (from + start, to + start);
            let work = Work { input, output, count: len / size, stride: 0, root: 0, signature };
            let plain = (input | output).is_multiple_of(16) && len.is_multiple_of(16 * parts);
            let kernel = match algorithm {
                Algorithm::OneShot if plain && world_size == 2 && len > PAIRS_FROM => Kernel::OneShotPairs,
                Algorithm::OneShot if plain => Kernel::OneShotPlain,
                Algorithm::OneShot => Kernel::OneShot,
                Algorithm::TwoShot if plain => Kernel::TwoShotPlain,
                Algorithm::TwoShot => Kernel::TwoShot,
            };
            let items = len.div_ceil(16 * parts);
            let grid = if parts > 1 { Grid::ItemsByPeer(items) } else { Grid::Items(items) };
            Launch { kernel, grid, work, more: More::Nothing }
        };
        // SAFETY: passed on.
        unsafe { self.run(&loaded, Cut::bytes(bytes, self.lane_bytes() * parts), stream, of) }
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
