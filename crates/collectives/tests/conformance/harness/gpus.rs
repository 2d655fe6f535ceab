//! The collectives of ranks that have a GPU each.

use std::time::Duration;

use antiphon_collectives::{
    Call, Communicator, ReduceOp, Result, StreamCollectives,
    all_reduce::{Algorithm, AllReduceOptions},
    cuda::CudaCollectives,
    mixed::CudaMixedHandler,
};
use antiphon_device::{
    DeviceError,
    cuda::{Context, CudaError},
};
use antiphon_fabric::FabricError;
use antiphon_operation::Operation;
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_testing::{
    Alignment,
    backend::{self, OnGpu},
    ranks_per_gpu,
};

use super::{CollectiveBackend, Like, Loose};
use crate::values::Values;

/// A rank with tensors in the memory of its GPU.
pub type Gpus = backend::Gpus<OnOne>;

/// The collectives on one GPU.
pub struct OnOne(pub CudaCollectives);

impl OnGpu for OnOne {
    fn new(comm: &Communicator, context: &Context) -> Self {
        Self(CudaCollectives::new(comm, context).unwrap())
    }
}

/// Waits until the GPU has done what was queued.
pub fn over(rank: &Gpus, queued: Result<()>) -> Result<()> {
    queued?;
    let failed = |error: CudaError| FabricError::from(DeviceError::from(error));
    rank.stream().synchronize().map_err(failed)?;
    rank.own().0.check()
}

/// Loads the kernels of reductions to parts, which a call of no elements does.
fn load_parts(rank: &Gpus, dtype: DType, op: ReduceOp) {
    let counts = vec![0; rank.world_size()];
    let call = Call::reduce_scatter_v(counts, op);
    let [mut input, mut output] = [(); 2].map(|()| Loose::new(rank, Like::of(dtype, 0)));
    rank.call(&call, Some(input.view()), Some(output.view_mut())).unwrap();
}

impl CollectiveBackend for Gpus {
    type Mixed = CudaMixedHandler;
    // A row of what moves; a block's; where kernels and algorithms change. Lanes, which are larger, have a test of GPUs alone.
    const SEAMS: &'static [usize] = &[496, 14_336, 512 << 10, 3 << 20];

    /// A rank that is alone copies, and so keeps the payload of a NaN.
    fn reduced(op: ReduceOp, contributions: &[Values], nodes: &[u32]) -> Values {
        match contributions {
            [alone] => alone.clone(),
            several => Values::reduced(op, several, nodes),
        }
    }

    fn operators(dtype: DType) -> &'static [ReduceOp] {
        match dtype {
            DType::F32 => &ReduceOp::ARITHMETIC,
            DType::F16 => &[ReduceOp::Sum, ReduceOp::Max],
            _ => &[ReduceOp::Sum],
        }
    }

    fn refusal(dtype: DType, op: ReduceOp, alignment: Alignment) -> Option<&'static str> {
        match dtype {
            _ if op.is_bitwise() && dtype.is_float() => Some("combines the bits of integers"),
            DType::F32 | DType::F16 | DType::BF16 => (alignment == Alignment::Odd).then_some("a multiple of"),
            _ => Some("cannot be reduced"),
        }
    }

    fn before(&self, dtype: DType, reduces: Option<ReduceOp>) {
        if let Some(op) = reduces.filter(|&op| Self::refusal(dtype, op, Alignment::Aligned).is_none()) {
            self.own().0.prepare(dtype, op).unwrap();
            if ranks_per_gpu() > 1 {
                load_parts(self, dtype, op);
            }
        }
        self.meet_on_gpu();
    }

    fn behind(&self) {
        self.meet_on_gpu();
    }

    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        mut output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        // SAFETY: the call is over before the tensors go.
        over(self, unsafe { self.own().0.call(call, input.as_ref(), output.as_mut(), self.stream()) })
    }

    fn call_in_place(&self, call: &Call<'_>, mut buffer: TensorViewMut<'_>) -> Result<()> {
        // SAFETY: as above.
        over(self, unsafe { self.own().0.call_in_place(call, &mut buffer, self.stream()) })
    }

    fn by_name(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        // SAFETY: as above.
        over(self, unsafe { by_name!(&self.own().0, call, input, output, self.stream()) })
    }

    fn by_name_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        // SAFETY: as above.
        over(self, unsafe { by_name_in_place!(&self.own().0, call, buffer, self.stream()) })
    }

    fn all_reduce_with(
        &self,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
        op: ReduceOp,
        options: AllReduceOptions,
    ) -> Result<()> {
        // SAFETY: as above.
        over(self, unsafe { self.own().0.all_reduce_with(input, output, op, options, self.stream()) })
    }

    fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.own().0.algorithm_for(bytes)
    }

    fn send_recv(
        &self,
        input: TensorView<'_>,
        to: usize,
        mut output: TensorViewMut<'_>,
        from: usize,
    ) -> Result<()> {
        // SAFETY: as above.
        over(self, unsafe { self.own().0.send_recv(&input, to, &mut output, from, self.stream()) })
    }

    fn told(&self) -> Result<()> {
        // A kernel that needed nothing from the peer that disagrees has ended well.
        for _ in 0..200 {
            self.own().0.check()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
