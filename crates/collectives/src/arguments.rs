//! Validation of a call's tensors, once at its beginning: later stages work on plain addresses and counts.

use antiphon_device::ReduceOp;
use antiphon_fabric::{Operation, Signature, gpu::Reduction};
use antiphon_operation::{Call, InPlace, Layout};
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

    /// A tensor of an operation that has several, with its name.
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

    /// A tensor of an operation that has several, with its name.
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

    /// Some of its elements, which it must have.
    pub(crate) fn elements(&self, range: std::ops::Range<usize>) -> Self {
        Self { data: self.data.wrapping_add(range.start * self.dtype.size()), count: range.len(), ..*self }
    }

    /// The same tensor to read: for operations in place.
    #[inline]
    pub(crate) fn as_input(&self) -> Input {
        Input { data: self.data, count: self.count, dtype: self.dtype }
    }
}

/// A call on one rank whose arguments were checked, each alone and with the others.
pub(crate) struct CheckedCall<'c> {
    pub(crate) call: &'c Call<'c>,
    /// What the ranks must agree on.
    pub(crate) signature: Signature,
    /// Absent where this rank need not pass any.
    pub(crate) input: Option<Input>,
    /// Absent where this rank need not pass any.
    pub(crate) output: Option<Output>,
    pub(crate) dtype: DType,
    /// Elements of a block.
    pub(crate) block: usize,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

impl<'c> CheckedCall<'c> {
    /// Checks a call of rank `rank` of `world_size` whose tensors lie on `device`: first each tensor alone, then both together.
    /// A tensor that the rank need not pass is not looked at.
    #[inline]
    pub(crate) fn of_tensors(
        device: Device,
        call: &'c Call<'c>,
        (rank, world_size): (usize, usize),
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
    ) -> Result<Self> {
        let input = input.filter(|_| call.needs_input(rank));
        let output = output.filter(|_| call.needs_output(rank));
        let input = input.map(|input| Input::on(device, call.operation, input)).transpose()?;
        let output = output.map(|output| Output::on(device, call.operation, output)).transpose()?;
        Self::new(call, (rank, world_size), input, output)
    }

    /// [`of_tensors`](Self::of_tensors) for one buffer that is both input and output, as the operation's row allows.
    pub(crate) fn of_buffer(
        device: Device,
        call: &'c Call<'c>,
        ranks: (usize, usize),
        buffer: &mut TensorViewMut<'_>,
    ) -> Result<Self> {
        Self::in_place(call, ranks, Output::on(device, call.operation, buffer)?)
    }

    /// [`of_tensors`](Self::of_tensors) of a call in a stream, where a broadcast without an input takes place in the output.
    #[inline]
    pub(crate) fn in_stream(
        device: Device,
        call: &'c Call<'c>,
        ranks: (usize, usize),
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
    ) -> Result<Self> {
        match (call.operation, input, output) {
            (Operation::Broadcast, None, Some(buffer)) => Self::of_buffer(device, call, ranks, buffer),
            (_, input, output) => Self::of_tensors(device, call, ranks, input, output),
        }
    }

    /// [`of_tensors`](Self::of_tensors) for every pair of a list.
    pub(crate) fn of_lists(
        device: Device,
        call: &'c Call<'c>,
        ranks: (usize, usize),
        inputs: &[TensorView<'_>],
        outputs: &mut [TensorViewMut<'_>],
    ) -> Result<Vec<Self>> {
        if inputs.len() != outputs.len() {
            let expected = format!("one output for each of {} inputs, not {}", inputs.len(), outputs.len());
            return Err(CollectiveError::Refused {
                operation: call.operation.name(),
                which: "list",
                expected,
            });
        }
        let pairs = inputs.iter().zip(outputs);
        pairs
            .map(|(input, output)| Self::of_tensors(device, call, ranks, Some(input), Some(output)))
            .collect()
    }

    /// A call of rank `rank` of `world_size` with tensors that were checked alone; those that the rank need not pass are dropped.
    #[inline]
    pub(crate) fn new(
        call: &'c Call<'c>,
        (rank, world_size): (usize, usize),
        input: Option<Input>,
        output: Option<Output>,
    ) -> Result<Self> {
        let (operation, reduces) = (call.operation, call.operation.row().reduces);
        let (input, output) =
            (input.filter(|_| call.needs_input(rank)), output.filter(|_| call.needs_output(rank)));
        if let (Some(input), Some(output)) = (&input, &output) {
            same_dtype(operation, input, output)?;
        }
        let block =
            call.check(rank, world_size, input.map(|input| input.count), output.map(|output| output.count))?;
        let tensor = input.or(output.as_ref().map(Output::as_input));
        let Some(Input { dtype, .. }) = tensor else {
            let expected = format!("one that moves tensors, not {operation}");
            return Err(CollectiveError::Refused { operation: "call", which: "operation", expected });
        };
        if reduces {
            reducible(operation, dtype, call.op)?;
        }
        let signature = Signature {
            dtype: Some(dtype),
            reduce: reduces.then_some(call.op),
            detail: call.detail(),
            count: block as u64,
            ..Signature::new(operation)
        };
        Ok(Self { call, signature, input, output, dtype, block, rank, world_size })
    }

    /// A call whose output takes the place of its input, as the operation's row allows.
    fn in_place(call: &'c Call<'c>, (rank, world_size): (usize, usize), buffer: Output) -> Result<Self> {
        let operation = call.operation;
        let own =
            || -> Result<Output> { Ok(buffer.elements(call.own_piece(buffer.count, rank, world_size)?)) };
        match operation.row().in_place {
            InPlace::Same => Self::new(call, (rank, world_size), Some(buffer.as_input()), Some(buffer)),
            InPlace::InputBlock => Self::new(call, (rank, world_size), Some(own()?.as_input()), Some(buffer)),
            InPlace::OutputBlock => {
                Self::new(call, (rank, world_size), Some(buffer.as_input()), Some(own()?))
            }
            InPlace::Never => Err(CollectiveError::not_in_place(operation)),
        }
    }

    /// The addresses of the input and of the output; 0 for one that is absent.
    #[inline]
    pub(crate) fn addresses(&self) -> (usize, usize) {
        (self.input.map_or(0, |input| input.data.addr()), self.output.map_or(0, |output| output.data.addr()))
    }

    /// The size of a block in bytes.
    #[inline]
    pub(crate) fn block_bytes(&self) -> usize {
        self.block * self.dtype.size()
    }

    /// The kernels' reduction for this call.
    #[inline]
    pub(crate) fn reduction(&self) -> Result<Reduction> {
        reduction(self.signature.operation, self.dtype, self.call.op)
    }

    /// See [`check_reduction`].
    pub(crate) fn check_reduction(&self) -> Result<()> {
        let of = (self.signature.operation, self.call.op);
        check_reduction(of, self.input.as_ref(), self.output.as_ref())
    }

    /// The elements of the input that go to each rank.
    #[inline]
    pub(crate) fn input_layout(&self) -> Layout<'_> {
        self.call.input_layout(self.block, self.rank, self.world_size)
    }

    /// The elements of the output that come from each rank.
    #[inline]
    pub(crate) fn output_layout(&self) -> Layout<'_> {
        self.call.output_layout(self.block, self.rank, self.world_size)
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
    reducible(operation, dtype, op)?;
    let refused = CollectiveError::NotNumeric { operation: operation.name(), dtype };
    Reduction::new(dtype, op).ok_or(refused)
}

/// GPUs reduce tensors of f32, f16 and bf16 that lie at multiples of their elements' size: kernels load no part of an element,
/// and an address between two elements would end the work of the whole context.
#[inline]
pub(crate) fn check_reduction(
    (operation, op): (Operation, ReduceOp),
    input: Option<&Input>,
    output: Option<&Output>,
) -> Result<()> {
    let input = input.map(|input| ("input", input.data.addr(), input.dtype));
    let output = output.map(|output| ("output", output.data.addr(), output.dtype));
    for (which, address, dtype) in input.into_iter().chain(output) {
        reduction(operation, dtype, op)?;
        let size = dtype.size();
        if !address.is_multiple_of(size) {
            let expected = format!("at a multiple of {size} bytes, the size of {dtype}, not at {address:#x}");
            return Err(CollectiveError::Refused { operation: operation.name(), which, expected });
        }
    }
    Ok(())
}
