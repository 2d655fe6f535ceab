//! The tensors that a caller passes, validated once: later stages work on addresses and sizes.

use antiphon_fabric::{ArenaOffsets, Rounds};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::{ExecutorError, error::Result};

/// The tensors of one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arguments {
    pub(super) input: *const u8,
    pub(super) input_bytes: usize,
    pub(super) output: *mut u8,
    pub(super) output_bytes: usize,
    pub(super) dtype: DType,
    /// Whether both are in one buffer.
    pub(super) in_place: bool,
}

impl Arguments {
    pub(super) fn apart(input: &TensorView<'_>, output: &mut TensorViewMut<'_>) -> Result<Self> {
        check("input", input)?;
        check("output", &output.as_view())?;
        if input.dtype() != output.dtype() {
            return Err(ExecutorError::DTypes { input: input.dtype(), output: output.dtype() });
        }
        let call = Self {
            input: input.as_ptr(),
            input_bytes: input.num_bytes(),
            output: output.as_mut_ptr(),
            output_bytes: output.num_bytes(),
            dtype: input.dtype(),
            in_place: false,
        };
        // Views made from raw addresses may lie anywhere.
        let (from, to) = (call.input as usize, call.output as usize);
        match from < to + call.output_bytes && to < from + call.input_bytes {
            true => Err(ExecutorError::Overlap),
            false => Ok(call),
        }
    }

    /// The arena offsets of the input and the output.
    pub(super) fn offsets(&self, rounds: &Rounds) -> ArenaOffsets<2> {
        let (input, output) = ((self.input, self.input_bytes), (self.output.cast_const(), self.output_bytes));
        ArenaOffsets::of(rounds, [input, output])
    }

    /// Input and output in one buffer, of whose chunks some are the input's and some the output's, beginning where
    /// the shifts say.
    pub(super) fn together(
        buffer: &mut TensorViewMut<'_>,
        chunks: [u64; 2],
        shifts: [u64; 2],
    ) -> Result<Self> {
        check("buffer", &buffer.as_view())?;
        let (base, bytes) = (buffer.as_mut_ptr(), buffer.num_bytes());
        // The smaller one is a whole number of the buffer's parts, or a later check refuses the sizes.
        let larger = chunks[0].max(chunks[1]).max(1);
        let part = |count: u64| (bytes as u128 * u128::from(count) / u128::from(larger)) as usize;
        let [input_bytes, output_bytes] = chunks.map(part);
        Ok(Self {
            input: base.wrapping_add(part(shifts[0])),
            input_bytes,
            output: base.wrapping_add(part(shifts[1])),
            output_bytes,
            dtype: buffer.dtype(),
            in_place: true,
        })
    }
}

fn check(which: &'static str, tensor: &TensorView<'_>) -> Result<()> {
    if tensor.device() != Device::Host {
        return Err(ExecutorError::Device { which, device: tensor.device(), serves: Device::Host });
    }
    tensor.contiguous().map_err(|source| ExecutorError::Tensor { which, source })
}
