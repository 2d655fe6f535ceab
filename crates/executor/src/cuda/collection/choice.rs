//! What does a call.

use antiphon_collectives::{StreamCollectives, cuda::CudaCollectives};
use antiphon_device::cuda::StreamRef;
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{cuda::CudaPlan, error::Result};

/// What does a call of a collection.
#[derive(Debug)]
pub enum Choice<'a> {
    /// A plan.
    Plan(&'a CudaPlan),
    /// This library's own call, which [`StreamCollectives::call`] makes.
    BuiltIn(Call<'static>),
}

impl Choice<'_> {
    /// # Safety
    /// As [`CudaPlan::execute`].
    pub(super) unsafe fn execute(
        &self,
        collectives: &CudaCollectives,
        input: TensorView<'_>,
        mut output: TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::Plan(plan) => plan.execute(input, output, stream),
                Self::BuiltIn(call) => Ok(collectives.call(call, Some(&input), Some(&mut output), stream)?),
            }
        }
    }

    pub(super) fn check(&self, collectives: &CudaCollectives) -> Result<()> {
        match self {
            Self::Plan(plan) => plan.check(),
            Self::BuiltIn(_) => Ok(collectives.check()?),
        }
    }
}
