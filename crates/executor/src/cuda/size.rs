//! Which messages a plan serves.

use antiphon_plan::Extent;
use antiphon_tensor::{DType, TensorError};

use super::plan::{CudaPlan, Key};
use crate::{ExecutorError, error::Result};

/// Which of an input and an output is the message of a collective: the output of an all-gather, else the input.
pub(super) fn message<T>(collective: &str, [input, output]: [T; 2]) -> T {
    if collective == "allgather" { output } else { input }
}

/// Refuses dtypes that the kernel does not have.
pub(super) fn check_dtype(dtype: DType) -> Result<()> {
    match DType::NUMERIC.contains(&dtype) {
        true => Ok(()),
        false => Err(ExecutorError::Tensor { which: "tensor", source: TensorError::NotNumeric { dtype } }),
    }
}

impl CudaPlan {
    /// The bytes of a message with an input and an output of these bytes, as [`prepare`](Self::prepare) takes them.
    pub fn message_bytes(&self, input_bytes: usize, output_bytes: usize) -> usize {
        message(&self.plan.collective, [input_bytes, output_bytes])
    }

    /// Whether the plan can be [prepared](Self::prepare) for messages of `bytes` bytes of a dtype, if there is memory.
    ///
    /// # Errors
    /// What [`prepare`](Self::prepare) would refuse: [`ExecutorError::Plan`], [`Tensor`](ExecutorError::Tensor) and
    /// [`Buffers`](ExecutorError::Buffers).
    pub fn serves(&self, dtype: DType, bytes: usize) -> Result<()> {
        let chunk = self.extent(dtype, bytes)?.chunk() as usize;
        self.areas(&Key { dtype, chunk, in_place: false }).map(drop)
    }

    /// The bytes of the input and of the output of a message of `bytes` bytes.
    ///
    /// # Errors
    /// [`ExecutorError::Plan`] and [`Tensor`](ExecutorError::Tensor) for a message that the plan does not serve.
    pub(super) fn tensor_bytes(&self, dtype: DType, bytes: usize) -> Result<[usize; 2]> {
        let chunk = self.extent(dtype, bytes)?.chunk() as usize;
        Ok(self.chunks().map(|chunks| chunks as usize * chunk))
    }

    /// The least number of bytes from `bytes` on that is a whole number of chunks of a dtype.
    pub(super) fn whole_message(&self, dtype: DType, bytes: usize) -> usize {
        let chunks = message(&self.plan.collective, self.chunks()).max(1) as usize;
        let alignment = (self.plan.buffer_alignment as usize).next_multiple_of(dtype.size().max(1));
        bytes.next_multiple_of(chunks * alignment.max(1))
    }

    /// The extent of a message, if it can be executed in one launch.
    pub(super) fn extent(&self, dtype: DType, bytes: usize) -> Result<Extent> {
        check_dtype(dtype)?;
        let chunks = self.chunks();
        let message = message(&self.plan.collective, chunks);
        let part = |count: u64| match message {
            0 => bytes as u64,
            _ => (u128::from(count) * bytes as u128 / u128::from(message)) as u64,
        };
        let extent = Extent::new(&self.plan, part(chunks[0]), part(chunks[1]))?;
        match self.largest_chunk {
            Some(largest) if largest < extent.chunk() => Err(ExecutorError::Buffers {
                plan: self.name.clone(),
                what: format!(
                    "it is proved for chunks of up to {largest} bytes, those of the message have {}, and a message is done in one \
                     launch",
                    extent.chunk()
                ),
            }),
            _ => Ok(extent),
        }
    }
}
