//! Arrays of any library as plain memory.

mod autograd;
mod buffer;
mod exchange;
mod protocol;

use std::ops::Range;

use antiphon::{
    prelude::{DType, ReduceOp, TensorView, TensorViewMut},
    tensor::{
        Device, TensorError,
        dlpack::{ElementType, Imported},
    },
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{IntoPyDict, PyString, PyTuple},
};

use crate::{
    error::{Error, Result},
    stream::{LEGACY_DEFAULT, RawStream},
};
pub(crate) use autograd::{note_write, refuse_gradient};
use buffer::Buffer;
use exchange::ExchangeApi;
pub(crate) use protocol::capsule;

/// The memory of an array.
pub(crate) struct Operand {
    pub(crate) tensor: Tensor,
    pub(crate) element: ElementType,
    /// The current stream of its library on its device.
    pub(crate) stream: Option<RawStream>,
    read_only: bool,
    /// In elements, unless it is row-major.
    strides: Option<Vec<isize>>,
    source: Source,
}

/// The memory that an operation works on, as plain values that can go to another thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) data: *mut u8,
    /// In elements of `dtype`.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

// SAFETY: the code that uses the memory keeps it valid for as long as it does, on any thread.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

/// The owner of the memory, which keeps it alive and knows its shape.
enum Source {
    Buffer(Buffer),
    Borrowed { shape: Vec<usize> },
    Managed(Box<Imported>),
}

/// How long an operand is used, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    /// Until the call returns, which the caller's own reference outlives; on a device, in this stream, if it was given.
    Call(Option<RawStream>),
    /// Until the operand is dropped.
    Started,
}

/// An array as its library describes it.
struct Description<'a> {
    data: *mut u8,
    element: ElementType,
    device: Device,
    shape: &'a [usize],
    /// In elements; absent for row-major.
    strides: Option<&'a [isize]>,
    read_only: bool,
}

impl Operand {
    /// Finds the memory of `array`, contiguous in row-major order; `name` is the argument's, for errors.
    pub(crate) fn import(array: &Bound<'_, PyAny>, name: &str, usage: Usage) -> Result<Self> {
        let operand = Self::find(array, name, usage)?;
        match &operand.strides {
            None => Ok(operand),
            Some(strides) => Err(not_contiguous(name, operand.shape(), strides)),
        }
    }

    /// As [`import`](Self::import), of an array that the call writes.
    pub(crate) fn import_output(array: &Bound<'_, PyAny>, name: &str, usage: Usage) -> Result<Self> {
        Self::import(array, name, usage)?.written(array, name)
    }

    /// Finds the memory of `array` from its first element to its last, in whatever order.
    pub(crate) fn import_span(array: &Bound<'_, PyAny>, name: &str, usage: Usage) -> Result<Self> {
        let mut operand = Self::find(array, name, usage)?;
        if let Some(strides) = &operand.strides {
            let last = operand.shape().iter().zip(strides).try_fold(0, |last: usize, (&n, &stride)| {
                last.checked_add(usize::try_from(stride).ok()?.checked_mul(n - 1)?)
            });
            let units = operand.units();
            let count = last.and_then(|last| last.checked_add(1)?.checked_mul(units));
            operand.tensor.count = count.ok_or_else(|| not_contiguous(name, operand.shape(), strides))?;
        }
        Ok(operand)
    }

    fn find(array: &Bound<'_, PyAny>, name: &str, usage: Usage) -> Result<Self> {
        if buffer::is_supported(array) {
            return match Buffer::operand(array, name) {
                // CuPy's arrays have the protocol, to refuse it.
                Err(_) if protocol::is_on_device(array) => protocol::operand(array, name, usage),
                operand => operand,
            };
        }
        if let Some(api) = ExchangeApi::of(array)? {
            return api.operand(array, name, usage);
        }
        if array.hasattr(intern!(array.py(), "__dlpack__"))? {
            return protocol::operand(array, name, usage);
        }
        let kind = array.get_type();
        let text = format!(
            "{name} is a {}, which is no array: it has neither the buffer protocol nor DLPack",
            kind.name()?
        );
        Err(PyTypeError::new_err(text).into())
    }

    fn new(name: &str, described: &Description<'_>, source: Source) -> Result<Self> {
        let &Description { data, element, device, shape, strides, read_only } = described;
        let size = element.bytes().ok_or_else(|| {
            PyTypeError::new_err(format!("{name}: elements of type {element} are not whole bytes"))
        })?;
        let bytes = shape.iter().try_fold(size, |bytes, &n| bytes.checked_mul(n));
        let count = bytes.map(|bytes| bytes / size);
        let count =
            count.ok_or_else(|| PyValueError::new_err(format!("{name}: impossible shape {shape:?}")))?;
        let strides = strides.filter(|strides| !is_row_major(shape, strides)).map(<[isize]>::to_vec);
        let (count, dtype) = match element.dtype() {
            Some(dtype) => (count, dtype),
            None => (count * size, DType::U8),
        };
        let tensor = Tensor { data, count, dtype, device };
        Ok(Self { tensor, element, stream: None, read_only, strides, source })
    }

    /// Refuses a new array for work in a stream that is not the current one of its library: it may get memory that its
    /// own stream still uses.
    pub(crate) fn allocates_in_order(&self, usage: Usage) -> Result<()> {
        match (usage, self.stream) {
            (Usage::Call(Some(asked)), Some(current))
                if asked.max(LEGACY_DEFAULT) != current.max(LEGACY_DEFAULT) =>
            {
                let text = format!(
                    "stream {asked} is not the current one ({current}), where a new output is made: pass out=, or make it \
                     the current one"
                );
                Err(PyValueError::new_err(text).into())
            }
            _ => Ok(()),
        }
    }

    /// A new array of the same library, element type and device.
    pub(crate) fn new_like<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        shape: &[usize],
        usage: Usage,
    ) -> Result<(Bound<'py, PyAny>, Self)> {
        self.new_of(array, self.element, shape, usage)
    }

    /// A new array of the same library and device, of any element type.
    pub(crate) fn new_of<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        element: ElementType,
        shape: &[usize],
        usage: Usage,
    ) -> Result<(Bound<'py, PyAny>, Self)> {
        if let Some(api) = ExchangeApi::of_foreign(array, &self.source)? {
            let new = api.allocate(array.py(), self.tensor.device, element, shape)?;
            let operand = api.operand(&new, "the output", usage)?;
            return Ok((new, operand));
        }
        let same = element == self.element;
        let new = match self.tensor.device.is_host() {
            true => numpy_empty(array, shape, element, same)?,
            false => foreign_empty(array, shape, element, same)?,
        };
        let operand = Self::import(&new, "the output", usage)?;
        Ok((new, operand))
    }

    /// The element type of E4M3 codes in the array's library: its own type if the library exchanges types by number, else bytes.
    pub(crate) fn float8(&self, array: &Bound<'_, PyAny>) -> Result<ElementType> {
        let exchanges = ExchangeApi::of_foreign(array, &self.source)?.is_some();
        Ok(ElementType::named("float8_e4m3fn").filter(|_| exchanges).unwrap_or(DType::U8.into()))
    }

    /// Sizes of the dimensions, outermost first.
    pub(crate) fn shape(&self) -> &[usize] {
        match &self.source {
            Source::Buffer(buffer) => buffer.shape(),
            Source::Borrowed { shape } => shape,
            Source::Managed(tensor) => tensor.shape(),
        }
    }

    /// How many elements of the [`Tensor`] one of the array is: several, if it is only moved as bytes.
    pub(crate) fn units(&self) -> usize {
        if self.element.dtype().is_some() { 1 } else { self.element.bytes().unwrap_or(1) }
    }

    /// The operand of an array that the call writes: refuses memory that must not be written, and lets autograd know.
    pub(crate) fn written(self, array: &Bound<'_, PyAny>, name: &str) -> Result<Self> {
        if self.read_only {
            return Err(PyValueError::new_err(format!("{name} is read-only")).into());
        }
        note_write(array)?;
        Ok(self)
    }

    /// Refuses elements that have no arithmetic here.
    pub(crate) fn numeric(self) -> Result<Self> {
        match self.element.dtype().is_some_and(DType::is_numeric) {
            true => Ok(self),
            false => Err(not_reduced(&self.element)),
        }
    }

    /// Refuses elements that an operator does not combine.
    pub(crate) fn reducible(self, op: ReduceOp) -> Result<Self> {
        let operand = self.numeric()?;
        if op.is_bitwise() && operand.tensor.dtype.is_float() {
            let text = format!("{op} combines the bits of integers, and not of {}", operand.element);
            return Err(PyTypeError::new_err(text).into());
        }
        Ok(operand)
    }
}

impl Tensor {
    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Some of the elements.
    pub(crate) fn piece(&self, elements: Range<usize>) -> Self {
        let data = self.data.wrapping_add(elements.start * self.dtype.size());
        Self { data, count: elements.len(), ..*self }
    }

    /// The tensor to read.
    ///
    /// # Safety
    /// The memory is valid and not written by others for `'a`.
    pub(crate) unsafe fn view<'a>(&self) -> Result<TensorView<'a>, TensorError> {
        // SAFETY: passed on.
        unsafe { self.view_as(&[self.count]) }
    }

    /// The tensor to read, in a shape of as many elements.
    ///
    /// # Safety
    /// As [`view`](Self::view).
    pub(crate) unsafe fn view_as<'a>(&self, shape: &[usize]) -> Result<TensorView<'a>, TensorError> {
        debug_assert_eq!(shape.iter().product::<usize>(), self.count);
        // SAFETY: passed on; the memory is contiguous.
        unsafe { TensorView::from_raw_parts(self.data, self.dtype, shape, None, self.device) }
    }

    /// The tensor to write.
    ///
    /// # Safety
    /// The memory is valid and not used by others for `'a`.
    pub(crate) unsafe fn view_mut<'a>(&self) -> Result<TensorViewMut<'a>, TensorError> {
        // SAFETY: passed on; the memory is contiguous.
        unsafe { TensorViewMut::from_raw_parts(self.data, self.dtype, &[self.count], None, self.device) }
    }
}

// The C interfaces count in `i64` and `Py_ssize_t`.
const _: () = assert!(size_of::<usize>() == 8, "made for machines of 64 bits");

/// An array without elements is, whatever its strides.
fn is_row_major(shape: &[usize], strides: &[isize]) -> bool {
    let mut step = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == step;
            step *= n as isize;
            fits
        })
}

#[cold]
pub(crate) fn not_reduced(element: &ElementType) -> Error {
    let names = DType::NUMERIC.iter().map(|&dtype| ElementType::from(dtype).to_string());
    let known = names.collect::<Vec<_>>().join(", ");
    PyTypeError::new_err(format!("elements of type {element} cannot be reduced, only {known}")).into()
}

#[cold]
fn not_contiguous(name: &str, shape: &[usize], strides: &[isize]) -> Error {
    PyValueError::new_err(format!(
        "{name} of shape {shape:?} with strides {strides:?} (in elements) is not contiguous: \
         pass numpy.ascontiguousarray(x), or x.contiguous() in torch"
    ))
    .into()
}

/// `empty` of an array's own library, such as CuPy, which puts it on its current device: of the array's dtype if that is
/// the `same`.
fn foreign_empty<'py>(
    array: &Bound<'py, PyAny>,
    shape: &[usize],
    element: ElementType,
    same: bool,
) -> Result<Bound<'py, PyAny>> {
    let py = array.py();
    let make = || {
        let library = py.import(library_of(array)?)?;
        let dtype = match same {
            true => array.getattr(intern!(py, "dtype"))?,
            false => library.getattr(element.to_string())?,
        };
        let options = [("dtype", dtype)].into_py_dict(py)?;
        library.getattr(intern!(py, "empty"))?.call((PyTuple::new(py, shape)?,), Some(&options))
    };
    make().map_err(|error| {
        let text = format!("no output can be made like this array ({error}): pass out=");
        PyTypeError::new_err(text).into()
    })
}

/// The package that an array's type is of.
fn library_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
    let module = array.get_type().module()?;
    let package = module.to_cow()?.split('.').next().unwrap_or_default().to_owned();
    Ok(PyString::new(array.py(), &package))
}

/// `numpy.empty`, for arrays whose library cannot allocate for others.
fn numpy_empty<'py>(
    array: &Bound<'py, PyAny>,
    shape: &[usize],
    element: ElementType,
    same: bool,
) -> Result<Bound<'py, PyAny>> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = array.py();
    let unavailable = |e: PyErr| {
        let text = format!("no output can be made without NumPy ({e}): pass out=");
        Error::from(PyTypeError::new_err(text))
    };
    let empty = EMPTY
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("numpy")?.getattr("empty")?.unbind()))
        .map_err(unavailable)?;
    let shape = PyTuple::new(py, shape)?;
    // NumPy's own dtype where there is one: it may be of an extension, such as ml_dtypes' bfloat16.
    let dtype = match array.getattr(intern!(py, "dtype")) {
        Ok(dtype) if same && buffer::is_supported(array) => dtype,
        _ => element.to_string().into_pyobject(py).map(|name| name.into_any()).expect("a string"),
    };
    empty.bind(py).call1((shape, dtype)).map_err(|e| {
        let text = format!("NumPy has no array for elements of type {element} ({e}): pass out=");
        PyTypeError::new_err(text).into()
    })
}
