//! The mixed collectives of a layout, on each backend.

use antiphon_collectives::{
    Result,
    mixed::{CudaMixedHandler, MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp},
};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_testing::backend::{Host, Ranks};

use super::gpus::{Gpus, over};

/// What handlers of all backends have; `B` is a rank. Calls are over when they return.
pub trait Mixed<B>: Sized {
    fn new(comm: &B, layout: MixedLayout) -> Result<Self>;
    fn layout(&self) -> &MixedLayout;
    fn valid_modes(&self) -> &'static [MixedMode];
    fn select(&self, comm: &B, op: MixedOp, bytes: usize) -> Result<MixedMode>;
    /// Before calls with a dtype that the backend reduces.
    fn prepare(&self, comm: &B, dtype: DType);
    fn run(
        &self,
        comm: &B,
        call: MixedCall<'_>,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
    ) -> Result<()>;
    fn run_in_place(&self, comm: &B, call: MixedCall<'_>, buffer: TensorViewMut<'_>) -> Result<()>;
}

impl<R: Ranks> Mixed<Host<R>> for MixedHandler {
    fn new(comm: &Host<R>, layout: MixedLayout) -> Result<Self> {
        Self::new(comm, layout)
    }

    fn layout(&self) -> &MixedLayout {
        self.layout()
    }

    fn valid_modes(&self) -> &'static [MixedMode] {
        self.valid_modes()
    }

    fn select(&self, comm: &Host<R>, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        self.select(comm, op, bytes)
    }

    fn prepare(&self, _comm: &Host<R>, _dtype: DType) {}

    fn run(
        &self,
        comm: &Host<R>,
        call: MixedCall<'_>,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
    ) -> Result<()> {
        self.run(comm, call, input, output)
    }

    fn run_in_place(&self, comm: &Host<R>, call: MixedCall<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        self.run_in_place(comm, call, buffer)
    }
}

impl Mixed<Gpus> for CudaMixedHandler {
    fn new(comm: &Gpus, layout: MixedLayout) -> Result<Self> {
        Self::new(comm, &comm.own().0, layout)
    }

    fn layout(&self) -> &MixedLayout {
        self.layout()
    }

    fn valid_modes(&self) -> &'static [MixedMode] {
        self.valid_modes()
    }

    fn select(&self, comm: &Gpus, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        self.select(&comm.own().0, op, bytes)
    }

    fn prepare(&self, comm: &Gpus, dtype: DType) {
        self.prepare(&comm.own().0, dtype).unwrap();
    }

    fn run(
        &self,
        comm: &Gpus,
        call: MixedCall<'_>,
        input: TensorView<'_>,
        mut output: TensorViewMut<'_>,
    ) -> Result<()> {
        // SAFETY: the call is over before the tensors go.
        over(comm, unsafe { self.run(&comm.own().0, call, &input, &mut output, comm.stream()) })
    }

    /// Where the group's own block lies in the buffer is what the caller of a GPU's handler works out.
    fn run_in_place(&self, comm: &Gpus, call: MixedCall<'_>, mut buffer: TensorViewMut<'_>) -> Result<()> {
        let (group, groups) = (self.layout().dp_rank(), self.layout().dp_size());
        let own = match call.counts {
            Some(counts) => {
                let start = counts[..group].iter().sum::<usize>();
                start..start + counts[group]
            }
            None => {
                let block = buffer.numel() / groups;
                group * block..(group + 1) * block
            }
        };
        let (base, dtype, whole) = (buffer.as_mut_ptr(), buffer.dtype(), 0..buffer.numel());
        let part = |of: std::ops::Range<usize>| {
            let at = base.wrapping_add(of.start * dtype.size());
            // SAFETY: the elements are the buffer's; both views are used by the call alone, which allows that they overlap.
            unsafe { TensorViewMut::from_raw_parts(at, dtype, &[of.len()], None, buffer.device()) }.unwrap()
        };
        let (input, output) = match call.op {
            MixedOp::AllReduceAllGather => (part(own), part(whole)),
            _ => (part(whole), part(own)),
        };
        Mixed::run(self, comm, call, input.into_view(), output)
    }
}
