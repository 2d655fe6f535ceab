//! The buffer protocol: NumPy arrays, bytearrays, memoryviews, `array.array`.
//!
//! Python made it part of its stable ABI in 3.11, with the very symbols and layout of 3.10
//! (<https://docs.python.org/3/c-api/buffer.html>), so they are declared here and one wheel serves both.

use std::ffi::{CStr, c_char, c_int, c_void};

use antiphon::tensor::{Device, dlpack::ElementType};
use pyo3::{exceptions::PyTypeError, ffi, intern, prelude::*};

use super::{Description, Operand, Source};
use crate::error::Result;

#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

/// Any strides, the format of the elements, writable or not.
const PYBUF_RECORDS_RO: c_int = 0x0008 | 0x0010 | 0x0004;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
    fn PyBuffer_IsContiguous(view: *const PyBuffer, order: c_char) -> c_int;
}

/// Whether an object has a buffer.
#[inline]
pub(super) fn is_supported(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the object is alive, and the interpreter attached.
    unsafe { PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// An exported buffer. Its memory neither moves nor goes away while this lives. (It is boxed as `shape` may point into
/// it.)
pub(super) struct Buffer(Box<PyBuffer>);

// SAFETY: the description is plain data; releasing attaches to the interpreter.
unsafe impl Send for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Without an interpreter the buffer cannot be released.
        // SAFETY: it was filled by `PyObject_GetBuffer` and is released once.
        Python::try_attach(|_| unsafe { PyBuffer_Release(&mut *self.0) });
    }
}

impl Buffer {
    fn get(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::<PyBuffer>::new_uninit();
        // SAFETY: the object is alive; the view is there to be filled.
        match unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), PYBUF_RECORDS_RO) } {
            // SAFETY: success means that all fields are filled.
            0 => Ok(Self(unsafe { view.assume_init() })),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    pub(super) fn operand(object: &Bound<'_, PyAny>, name: &str) -> Result<Operand> {
        match Self::get(object) {
            Ok(buffer) => {
                let element = buffer.element(name)?;
                buffer.described(name, element)
            }
            Err(error) => Self::extension(object, name, error),
        }
    }

    /// NumPy exports no buffer of the types that the package ml_dtypes adds, but of their bytes.
    #[cold]
    fn extension(object: &Bound<'_, PyAny>, name: &str, error: PyErr) -> Result<Operand> {
        let py = object.py();
        let dtype = object.getattr(intern!(py, "dtype")).and_then(|d| d.getattr("name")?.extract::<String>());
        let (code, bits) = match dtype.as_deref() {
            Ok("bfloat16") => (4, 16),
            Ok("float8_e4m3fn") => (10, 8),
            Ok("float8_e5m2") => (12, 8),
            _ => {
                let text = format!("{name}: its elements cannot be exchanged: {error}");
                return Err(PyTypeError::new_err(text).into());
            }
        };
        let bytes = object.call_method1(intern!(py, "view"), (format!("uint{bits}"),))?;
        let element = ElementType::new(code, bits, 1);
        Self::get(&bytes)?.described(name, element)
    }

    fn described(self, name: &str, element: ElementType) -> Result<Operand> {
        let view = &*self.0;
        // SAFETY: the view is filled; b'C' asks for row-major.
        let row_major = unsafe { PyBuffer_IsContiguous(view, b'C' as c_char) == 1 };
        let strides = if row_major { Vec::new() } else { self.strides() };
        let description = Description {
            data: view.buf.cast(),
            element,
            device: Device::Host,
            shape: self.shape(),
            strides: (!row_major).then_some(&strides),
            read_only: view.readonly != 0,
        };
        let mut operand = Operand::new(name, &description, Source::Borrowed { shape: Vec::new() })?;
        operand.source = Source::Buffer(self);
        Ok(operand)
    }

    pub(super) fn shape(&self) -> &[usize] {
        match self.0.ndim {
            0 => &[],
            // SAFETY: there are `ndim` sizes, none negative, as long as the buffer is not released.
            ndim => unsafe { std::slice::from_raw_parts(self.0.shape.cast(), ndim as usize) },
        }
    }

    /// In elements.
    #[cold]
    fn strides(&self) -> Vec<isize> {
        let view = &*self.0;
        // SAFETY: what is not row-major has strides, `ndim` of them.
        let bytes = unsafe { std::slice::from_raw_parts(view.strides, view.ndim as usize) };
        bytes.iter().map(|stride| stride.div_euclid(view.itemsize.max(1))).collect()
    }

    /// The element type of a format as the module `struct` spells it.
    fn element(&self, name: &str) -> Result<ElementType> {
        let format = match self.0.format.is_null() {
            true => c"B",
            // SAFETY: a format is a C string as long as the buffer is not released.
            false => unsafe { CStr::from_ptr(self.0.format) },
        };
        let native = if cfg!(target_endian = "little") { b'<' } else { b'>' };
        let code = match format.to_bytes() {
            [b'@' | b'=', code @ ..] => code,
            [order, code @ ..] if *order == native => code,
            code => code,
        };
        let kind = match code {
            b"?" => 6,
            b"b" | b"h" | b"i" | b"l" | b"q" | b"n" => 0,
            b"B" | b"H" | b"I" | b"L" | b"Q" | b"N" | b"c" => 1,
            b"e" | b"f" | b"d" => 2,
            b"Zf" | b"Zd" => 5,
            _ => {
                let text = format!("{name}: elements of the format {format:?} are not supported");
                return Err(PyTypeError::new_err(text).into());
            }
        };
        let bits = (self.0.itemsize * 8) as u8;
        Ok(ElementType::new(kind, bits, 1))
    }
}
