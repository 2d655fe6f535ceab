//! The arrays of one call: found, checked, and made where the caller gave none.

use antiphon::operation::InPlace;
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

use crate::{
    call::{Call, Kind, Place},
    error::Result,
    operand::{Operand, Tensor, Usage},
};

/// An operation that could begin now.
pub(crate) struct Prepared<'py> {
    pub(crate) call: Call,
    /// What the caller gets: the output, or nothing.
    pub(crate) result: Option<Bound<'py, PyAny>>,
    /// Keeps the memory valid.
    pub(crate) operands: Operands,
}

/// The input and the output, as far as there are any.
pub(crate) type Operands = [Option<Operand>; 2];

/// An array that the caller gave, as the argument of this name.
pub(crate) type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// An operation that reads one array and writes another, on rank `rank` of `world_size`. Of an array that the caller did not
/// give, `shape` makes the shape from the input's.
pub(crate) fn prepare<'py>(
    kind: Kind,
    input: &Bound<'py, PyAny>,
    out: Given<'_, 'py>,
    (rank, world_size): (usize, usize),
    usage: Usage,
    shape: impl FnOnce(&[usize]) -> Result<Vec<usize>>,
) -> Result<Prepared<'py>> {
    let read = Operand::import(input, "the input", usage)?;
    let read = match kind.op() {
        Some(op) => read.reducible(op)?,
        None => read,
    };
    let Some(out) = out else {
        read.allocates_in_order(usage)?;
        let shape = shape(read.shape())?;
        let (new, write) = read.new_like(input, &shape, usage)?;
        same_device(&read.tensor, &write.tensor)?;
        return Ok(Prepared::apart(kind, Some(read), Some(write), Some(new)));
    };
    let in_place = kind.operation().row().in_place;
    if out.is(input) && in_place == InPlace::Same {
        return Ok(Prepared::in_place(kind, read.writable("the output")?, out.clone()));
    }
    let write = Operand::import(out, "the output", usage)?.writable("the output")?;
    same_device(&read.tensor, &write.tensor)?;
    if read.element != write.element {
        let text = format!("the input is {}, the output is {}", read.element, write.element);
        return Err(PyTypeError::new_err(text).into());
    }
    if lie_in_place(in_place, &read.tensor, &write.tensor, rank, world_size) {
        let whole = match in_place {
            InPlace::OutputBlock => read.writable("the input")?,
            _ => write,
        };
        return Ok(Prepared::in_place(kind, whole, out.clone()));
    }
    if overlap(&read.tensor, &write.tensor) {
        let text = "input and output overlap: they must be apart, or the same where that is allowed";
        return Err(PyValueError::new_err(text).into());
    }
    Ok(Prepared::apart(kind, Some(read), Some(write), Some(out.clone())))
}

/// An operation that only reads an array, on this rank.
pub(crate) fn prepare_input<'py>(
    kind: Kind,
    input: &Bound<'py, PyAny>,
    usage: Usage,
) -> Result<Prepared<'py>> {
    let read = Operand::import(input, "the input", usage)?;
    let read = match kind.op() {
        Some(op) => read.reducible(op)?,
        None => read,
    };
    Ok(Prepared::apart(kind, Some(read), None, None))
}

/// An operation that only writes an array, on this rank.
pub(crate) fn prepare_output<'py>(
    kind: Kind,
    out: &Bound<'py, PyAny>,
    usage: Usage,
) -> Result<Prepared<'py>> {
    let write = Operand::import(out, "the output", usage)?.writable("the output")?;
    Ok(Prepared::apart(kind, None, Some(write), Some(out.clone())))
}

impl<'py> Prepared<'py> {
    fn in_place(kind: Kind, buffer: Operand, result: Bound<'py, PyAny>) -> Self {
        let call = Call { kind, place: Place::Shared(buffer.tensor) };
        Self { call, result: Some(result), operands: [None, Some(buffer)] }
    }

    fn apart(
        kind: Kind,
        input: Option<Operand>,
        output: Option<Operand>,
        result: Option<Bound<'py, PyAny>>,
    ) -> Self {
        let tensor = |operand: &Option<Operand>| operand.as_ref().map(|operand| operand.tensor);
        let call = Call { kind, place: Place::Apart(tensor(&input), tensor(&output)) };
        Self { call, result, operands: [input, output] }
    }

    /// An operation without arrays.
    pub(crate) fn bare(kind: Kind) -> Self {
        Self { call: Call { kind, place: Place::Nowhere }, result: None, operands: [None, None] }
    }
}

/// Whether these two lie as a rule lets them lie in place, on this rank of so many.
fn lie_in_place(rule: InPlace, read: &Tensor, write: &Tensor, rank: usize, world_size: usize) -> bool {
    let block_of = |block: &Tensor, whole: &Tensor| {
        block.data == whole.data.wrapping_add(rank * block.bytes())
            && block.bytes().checked_mul(world_size) == Some(whole.bytes())
    };
    match rule {
        InPlace::Never => false,
        InPlace::Same => read.data == write.data && read.bytes() == write.bytes(),
        InPlace::InputBlock => block_of(read, write),
        InPlace::OutputBlock => block_of(write, read),
    }
}

/// A number that must not be negative: a rank, a count. (As a `usize` Python would raise `OverflowError`.)
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count(pub(crate) usize);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number: i64 = object.extract()?;
        let negative = |_| PyValueError::new_err(format!("{number} is negative"));
        usize::try_from(number).map(Self).map_err(negative)
    }
}

/// The tag of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag(pub(crate) u32);

impl<'py> FromPyObject<'_, 'py> for Tag {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number: i64 = object.extract()?;
        let outside =
            |_| PyValueError::new_err(format!("the tag {number} is not between 0 and {}", u32::MAX));
        u32::try_from(number).map(Self).map_err(outside)
    }
}

/// Refuses tensors in different memories.
pub(crate) fn same_device(input: &Tensor, output: &Tensor) -> PyResult<()> {
    if input.device == output.device {
        return Ok(());
    }
    let text = format!("the input is on {}, the output on {}", input.device, output.device);
    Err(PyValueError::new_err(text))
}

/// Whether two tensors share a byte.
pub(crate) fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let (first, second) = (a.data.addr(), b.data.addr());
    first < second + b.bytes() && second < first + a.bytes()
}
