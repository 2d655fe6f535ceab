//! The arrays of one call: found, checked, and made where the caller gave none.

use std::{ops::Range, time::Duration};

use antiphon::{operation::InPlace, tensor::dlpack::ElementType};
use pyo3::{
    exceptions::{PyOverflowError, PyTypeError, PyValueError},
    intern,
    prelude::*,
    types::PyType,
};

use crate::{
    call::{Call, CallTensors, What},
    error::Result,
    operand::{Operand, Tensor, Usage},
};

/// An operation that could begin now.
pub(crate) struct Prepared<'py> {
    pub(crate) call: Call,
    /// The value that the caller gets: the output, or nothing.
    pub(crate) result: Option<Bound<'py, PyAny>>,
    /// Keeps the memory valid.
    pub(crate) operands: Operands,
}

/// The input and the output, as far as there are any.
pub(crate) type Operands = [Option<Operand>; 2];

/// An array that the caller must give.
pub(crate) type Argument<'a, 'py> = &'a Bound<'py, PyAny>;

/// An array that the caller may give, or an operator.
pub(crate) type Given<'a, 'py> = Option<Argument<'a, 'py>>;

/// An operation that reads one array and writes another, on rank `rank` of `world_size`. An array that the caller did not give
/// gets the shape that follows from the input's. Counts are of rows.
pub(crate) fn prepare<'py>(
    what: What,
    input: &Bound<'py, PyAny>,
    out: Given<'_, 'py>,
    (rank, world_size): (usize, usize),
    usage: Usage,
) -> Result<Prepared<'py>> {
    let read = import_input(&what, input, usage)?;
    let made = match out {
        Some(_) => None,
        None => {
            read.allocates_in_order(usage)?;
            let shape = what.output_shape(read.shape(), rank, world_size);
            let shape = shape.map_err(|e| PyValueError::new_err(e.to_string()))?;
            Some(read.new_like(input, &shape, usage)?)
        }
    };
    let what = match what.counts.is_empty() {
        true => what,
        // Rows become elements, of which a type without a name has several to the byte count.
        false => what.in_rows_of(read.shape().iter().skip(1).product::<usize>() * read.units()),
    };
    if let Some((new, write)) = made {
        same_device(&read.tensor, &write.tensor)?;
        return Ok(Prepared::apart(what, Some(read), Some(write), Some(new)));
    }
    let out = out.expect("an output that was not given has been made");
    let in_place = what.operation.row().in_place;
    if out.is(input) && in_place == InPlace::Same {
        return Ok(Prepared::in_place(what, read.written(out, "the output")?, out.clone()));
    }
    let write = Operand::import_output(out, "the output", usage)?;
    same_device(&read.tensor, &write.tensor)?;
    if read.element != write.element {
        let text = format!("the input is {}, the output is {}", read.element, write.element);
        return Err(PyTypeError::new_err(text).into());
    }
    if lie_in_place(&what, &read.tensor, &write.tensor, rank, world_size) {
        let whole = match in_place {
            InPlace::OutputBlock => read.written(input, "the input")?,
            _ => write,
        };
        return Ok(Prepared::in_place(what, whole, out.clone()));
    }
    if overlap(&read.tensor, &write.tensor) {
        let text = "input and output overlap: they must be apart, or the same where that is allowed";
        return Err(PyValueError::new_err(text).into());
    }
    Ok(Prepared::apart(what, Some(read), Some(write), Some(out.clone())))
}

fn import_input(what: &What, input: &Bound<'_, PyAny>, usage: Usage) -> Result<Operand> {
    let read = Operand::import(input, "the input", usage)?;
    if what.operation.row().reduces { read.reducible(what.op) } else { Ok(read) }
}

/// An operation that only reads an array, on this rank.
pub(crate) fn prepare_input<'py>(
    what: What,
    input: &Bound<'py, PyAny>,
    usage: Usage,
) -> Result<Prepared<'py>> {
    let read = import_input(&what, input, usage)?;
    Ok(Prepared::apart(what, Some(read), None, None))
}

/// An operation that only writes an array, on this rank.
pub(crate) fn prepare_output<'py>(
    what: What,
    out: &Bound<'py, PyAny>,
    usage: Usage,
) -> Result<Prepared<'py>> {
    let write = Operand::import_output(out, "the output", usage)?;
    Ok(Prepared::apart(what, None, Some(write), Some(out.clone())))
}

impl<'py> Prepared<'py> {
    fn in_place(what: What, buffer: Operand, result: Bound<'py, PyAny>) -> Self {
        let call = Call { what, mixed: None, tensors: CallTensors::Shared(buffer.tensor) };
        Self { call, result: Some(result), operands: [None, Some(buffer)] }
    }

    fn apart(
        what: What,
        input: Option<Operand>,
        output: Option<Operand>,
        result: Option<Bound<'py, PyAny>>,
    ) -> Self {
        let tensor = |operand: &Option<Operand>| operand.as_ref().map(|operand| operand.tensor);
        let call = Call { what, mixed: None, tensors: CallTensors::Apart(tensor(&input), tensor(&output)) };
        Self { call, result, operands: [input, output] }
    }

    /// An operation without arrays.
    pub(crate) fn bare(what: What) -> Self {
        Self {
            call: Call { what, mixed: None, tensors: CallTensors::Nowhere },
            result: None,
            operands: [None, None],
        }
    }
}

/// Whether these two lie as the operation lets them lie in place.
fn lie_in_place(what: &What, read: &Tensor, write: &Tensor, rank: usize, world_size: usize) -> bool {
    let is_piece_of = |piece: &Tensor, whole: &Tensor| {
        what.own_piece(whole.count, rank, world_size).is_ok_and(|Range { start, end }| {
            piece.data == whole.data.wrapping_add(start * whole.dtype.size()) && piece.count == end - start
        })
    };
    match what.operation.row().in_place {
        InPlace::Never => false,
        InPlace::Same => read.data == write.data && read.bytes() == write.bytes(),
        InPlace::InputBlock => is_piece_of(read, write),
        InPlace::OutputBlock => is_piece_of(write, read),
    }
}

/// A number that must not be negative: a rank, a count. (As a `usize` Python would raise `OverflowError`.)
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count(pub(crate) usize);

impl TryFrom<i64> for Count {
    type Error = PyErr;

    fn try_from(number: i64) -> PyResult<Self> {
        usize::try_from(number).map(Self).map_err(|_| PyValueError::new_err(format!("{number} is negative")))
    }
}

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<Whole>()?.0.try_into()
    }
}

/// An integer of 64 bits. Larger ones are a `ValueError`, where Python would raise `OverflowError`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whole(pub(crate) i64);

impl<'py> FromPyObject<'_, 'py> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let too_large = |error: PyErr| match error.is_instance_of::<PyOverflowError>(object.py()) {
            true => PyValueError::new_err(format!("{} has more than 64 bits", object.to_owned())),
            false => error,
        };
        object.extract().map(Self).map_err(too_large)
    }
}

/// The name of a dtype, from the name itself or a dtype of torch or NumPy.
#[derive(Debug, Clone)]
pub(crate) struct DTypeName(pub(crate) String);

impl<'py> FromPyObject<'_, 'py> for DTypeName {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(name) = object.extract::<String>() {
            return Ok(Self(name.trim_start_matches("torch.").to_owned()));
        }
        if let Ok(kind) = object.cast::<PyType>() {
            return Ok(Self(kind.name()?.to_string())); // numpy.float32
        }
        let is_native = object.getattr_opt(intern!(object.py(), "isnative"))?; // of numpy.dtype
        if !is_native.map_or(Ok(true), |native| native.is_truthy())? {
            let text = format!("the dtype {object:?} has not this machine's byte order");
            return Err(PyValueError::new_err(text));
        }
        let text = match object.getattr_opt(intern!(object.py(), "name"))? {
            Some(name) => name.extract()?, // of numpy.dtype
            None => object.str()?.to_string(),
        };
        Ok(Self(text.trim_start_matches("torch.").to_owned()))
    }
}

impl DTypeName {
    /// The type of elements that it names.
    pub(crate) fn element(&self) -> PyResult<ElementType> {
        ElementType::named(&self.0).ok_or_else(|| {
            PyValueError::new_err(format!("unknown dtype {:?}: pass a name such as \"float32\"", self.0))
        })
    }
}

/// Where something takes place: from a device of torch, its text, or the number of a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    Host,
    /// The GPU's number, or the current one of torch or CuPy.
    Cuda(Option<u32>),
}

impl<'py> FromPyObject<'_, 'py> for Place {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(number) = object.extract::<Whole>() {
            let number = u32::try_from(number.0);
            return number.map(|number| Self::Cuda(Some(number))).map_err(|_| unknown_device(&object));
        }
        // `str` of a torch.device is its text.
        let text = object.str()?;
        let text = text.to_cow()?;
        match text.split_once(':').unwrap_or((&text, "")) {
            ("cpu", "" | "0") => Ok(Self::Host),
            ("cuda", "") if !text.ends_with(':') => Ok(Self::Cuda(None)),
            ("cuda", number) => {
                number.parse().map(|number| Self::Cuda(Some(number))).map_err(|_| unknown_device(&object))
            }
            _ => Err(unknown_device(&object)),
        }
    }
}

fn unknown_device(object: &Bound<'_, PyAny>) -> PyErr {
    PyValueError::new_err(format!(
        "unknown device {object:?}: pass \"cpu\", \"cuda\", \"cuda:0\", a torch.device or the number of a GPU"
    ))
}

/// The tag of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag(pub(crate) u32);

impl TryFrom<i64> for Tag {
    type Error = PyErr;

    fn try_from(number: i64) -> PyResult<Self> {
        let text = || format!("the tag {number} is not between 0 and {}", u32::MAX);
        u32::try_from(number).map(Self).map_err(|_| PyValueError::new_err(text()))
    }
}

/// A duration from the caller's number of seconds, the argument `name`.
pub(crate) fn seconds(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let duration = |seconds| {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| PyValueError::new_err(format!("{name} is {seconds}, which is no number of seconds")))
    };
    seconds.map(duration).transpose()
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
