//! Validating tensors once, at the door: what comes after works on plain addresses and counts.

use antiphon_device::ReduceOp;
use antiphon_fabric::Operation;
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
