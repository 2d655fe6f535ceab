//! The tensors that a caller passes, validated once: later stages work on addresses and sizes.

use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::{ExecutorError, error::Result};

/// The tensors of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arguments {
    pub(crate) input: *const u8,
    pub(crate) input_bytes: usize,
    pub(crate) output: *mut u8,
    pub(crate) output_bytes: usize,
    pub(crate) dtype: DType,
    /// Whether both are in one buffer.
    pub(crate) in_place: bool,
}

impl Arguments {
    /// Two tensors on `device` that are apart.
    pub(crate) fn apart(
        device: Device,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
    ) -> Result<Self> {
        check(device, "input", input)?;
        check(device, "output", &output.as_view())?;
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

    /// Input and output in one buffer, of whose chunks some are the input's and some the output's, beginning where
    /// the shifts say.
    pub(crate) fn together(
        device: Device,
        buffer: &mut TensorViewMut<'_>,
        chunks: [u64; 2],
        shifts: [u64; 2],
    ) -> Result<Self> {
        check(device, "buffer", &buffer.as_view())?;
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

fn check(device: Device, which: &'static str, tensor: &TensorView<'_>) -> Result<()> {
    if tensor.device() != device {
        return Err(ExecutorError::Device { which, device: tensor.device(), serves: device });
    }
    tensor.contiguous().map_err(|source| ExecutorError::Tensor { which, source })
}
