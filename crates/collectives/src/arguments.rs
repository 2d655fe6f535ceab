//! Validating tensors once, at the door: what comes after works on plain addresses and counts.

use antiphon_device::ReduceOp;
use antiphon_fabric::{Operation, Signature, gpu::Reduction};
use antiphon_operation::InPlace;
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::error::{CollectiveError, Result};

/// A tensor to read: contiguous, where it is served.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub(crate) data: *const u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

/// A tensor to write: contiguous, where it is served.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) data: *mut u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

impl Input {
    #[inline]
    pub(crate) fn new(operation: Operation, tensor: &TensorView<'_>) -> Result<Self> {
        Self::on(Device::Host, operation, tensor)
    }

    /// On a device.
    #[inline]
    pub(crate) fn on(device: Device, operation: Operation, tensor: &TensorView<'_>) -> Result<Self> {
        Self::named(device, operation, "input", tensor)
    }

    /// Of an operation with several.
    #[inline]
    pub(crate) fn named(
        device: Device,
        operation: Operation,
        which: &'static str,
        tensor: &TensorView<'_>,
    ) -> Result<Self> {
        check(device, operation, which, tensor)?;
        Ok(Self { data: tensor.as_ptr(), count: tensor.numel(), dtype: tensor.dtype() })
    }
}

impl Output {
    #[inline]
    pub(crate) fn new(operation: Operation, tensor: &mut TensorViewMut<'_>) -> Result<Self> {
        Self::on(Device::Host, operation, tensor)
    }

    /// On a device.
    #[inline]
    pub(crate) fn on(device: Device, operation: Operation, tensor: &mut TensorViewMut<'_>) -> Result<Self> {
        Self::named(device, operation, "output", tensor)
    }

    /// Of an operation with several.
    #[inline]
    pub(crate) fn named(
        device: Device,
        operation: Operation,
        which: &'static str,
        tensor: &mut TensorViewMut<'_>,
    ) -> Result<Self> {
        check(device, operation, which, &tensor.as_view())?;
        Ok(Self { data: tensor.as_mut_ptr(), count: tensor.numel(), dtype: tensor.dtype() })
    }

    /// The same tensor to read: for operations in place.
    #[inline]
    pub(crate) fn as_input(&self) -> Input {
        Input { data: self.data, count: self.count, dtype: self.dtype }
    }
}

#[inline]
fn check(serves: Device, operation: Operation, which: &'static str, tensor: &TensorView<'_>) -> Result<()> {
    let operation = operation.name();
    if tensor.device() != serves {
        return Err(CollectiveError::Device { operation, which, device: tensor.device(), serves });
    }
    tensor.contiguous().map_err(|source| CollectiveError::Tensor { operation, which, source })
}

/// Checks the tensors of a call beside each other, wherever they are, as the operation's row says; the elements of a block.
#[inline]
pub(crate) fn block(
    operation: Operation,
    input: &Input,
    output: &Output,
    world_size: usize,
) -> Result<usize> {
    same_dtype(operation, input, output)?;
    Ok(operation.block(input.count, output.count, world_size)?)
}

/// Input and output must hold the same kind of elements.
#[inline]
pub(crate) fn same_dtype(operation: Operation, input: &Input, output: &Output) -> Result<()> {
    if input.dtype == output.dtype {
        return Ok(());
    }
    Err(CollectiveError::DTypes { operation: operation.name(), input: input.dtype, output: output.dtype })
}

/// The tensor must have `expected` elements; `rule` says why. For operations whose calls have a rule of their own.
#[inline]
pub(crate) fn has_count(
    operation: Operation,
    which: &'static str,
    actual: usize,
    expected: usize,
    rule: impl FnOnce() -> String,
) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(CollectiveError::Count { operation: operation.name(), which, actual, expected, rule: rule() })
}

/// The dtype must have the operator.
#[inline]
pub(crate) fn reducible(operation: Operation, dtype: DType, op: ReduceOp) -> Result<()> {
    let operation = operation.name();
    if !dtype.is_numeric() {
        return Err(CollectiveError::NotNumeric { operation, dtype });
    }
    if op.is_bitwise() && dtype.is_float() {
        return Err(CollectiveError::NotBits { operation, dtype, op });
    }
    Ok(())
}

/// The reduction of an operation on GPUs, if the kernels have such arithmetic.
#[inline]
pub(crate) fn reduction(operation: Operation, dtype: DType, op: ReduceOp) -> Result<Reduction> {
    let name = operation.name();
    let refused = match op.is_bitwise() {
        true => CollectiveError::NotBits { operation: name, dtype, op },
        false => CollectiveError::NotNumeric { operation: name, dtype },
    };
    Reduction::new(dtype, op).ok_or(refused)
}

/// An operation with what all ranks must agree on.
pub(crate) fn signature(operation: Operation, dtype: DType, count: usize) -> Signature {
    Signature { dtype: Some(dtype), count: count as u64, ..Signature::new(operation) }
}

/// Input and output of an operation whose output takes the place of its input, as the operation's row allows.
pub(crate) fn in_place(
    operation: Operation,
    buffer: Output,
    rank: usize,
    world_size: usize,
) -> Result<(Input, Output)> {
    let own_block = || -> Result<Output> {
        let count = operation.part("buffer", buffer.count, world_size)?;
        let data = buffer.data.wrapping_add(rank * count * buffer.dtype.size());
        Ok(Output { data, count, dtype: buffer.dtype })
    };
    match operation.row().in_place {
        InPlace::Same => Ok((buffer.as_input(), buffer)),
        InPlace::InputBlock => Ok((own_block()?.as_input(), buffer)),
        InPlace::OutputBlock => Ok((buffer.as_input(), own_block()?)),
        InPlace::Never => {
            let expected = "apart from the input: this operation has no form in place".to_owned();
            Err(CollectiveError::Refused { operation: operation.name(), which: "output", expected })
        }
    }
}
