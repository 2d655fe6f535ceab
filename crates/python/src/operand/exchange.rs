//! DLPack's C exchange API (version 1.3): a table of C functions on an array's type. torch provides it; it is the fastest way
//! in and out, as no Python code runs.

use std::{
    ffi::{CStr, c_char, c_void},
    mem::MaybeUninit,
    ptr::{NonNull, null_mut},
};

use antiphon::tensor::{
    Device,
    dlpack::{ElementType, Imported, sys},
};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    intern,
    prelude::*,
    types::{PyBool, PyCapsule},
};

use super::{Description, Operand, Source, Usage};
use crate::{
    error::{Error, Result},
    stream::{RawStream, library_stream},
};

#[derive(Clone, Copy)]
pub(super) struct ExchangeApi(NonNull<sys::DLPackExchangeAPI>);

impl ExchangeApi {
    /// The table of an array's type.
    pub(super) fn of(array: &Bound<'_, PyAny>) -> Result<Option<Self>> {
        let name = intern!(array.py(), "__dlpack_c_exchange_api__");
        let Some(capsule) = array.get_type().getattr_opt(name)? else { return Ok(None) };
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
        let Ok(table) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else { return Ok(None) };
        let table = table.cast::<sys::DLPackExchangeAPI>();
        // SAFETY: a capsule of this name holds such a table, which lives as long as its type; every version begins
        // with the header.
        let version = unsafe { table.as_ref() }.header.version;
        Ok((version.major == 1).then_some(Self(table)))
    }

    /// As [`of`](Self::of), unless the array was found in another way.
    pub(super) fn of_foreign(array: &Bound<'_, PyAny>, source: &Source) -> Result<Option<Self>> {
        if matches!(source, Source::Buffer(_)) { Ok(None) } else { Self::of(array) }
    }

    fn table(&self) -> &sys::DLPackExchangeAPI {
        // SAFETY: see `of`.
        unsafe { self.0.as_ref() }
    }

    pub(super) fn operand(&self, array: &Bound<'_, PyAny>, name: &str, usage: Usage) -> Result<Operand> {
        match self.table().dltensor_from_py_object_no_sync {
            Some(describe) if matches!(usage, Usage::Call(_)) => {
                let mut tensor = MaybeUninit::<sys::DLTensor>::uninit();
                // SAFETY: the array is alive and of the type that the table belongs to.
                let status = unsafe { describe(array.as_ptr().cast(), tensor.as_mut_ptr().cast()) };
                if status != 0 {
                    return Err(not_exchanged(array, name));
                }
                // SAFETY: filled, as the function says.
                let tensor = unsafe { tensor.assume_init() };
                let mut operand = borrowed(&tensor, name)?;
                operand.stream = self.stream(array, operand.tensor.device)?;
                check_lazy_bits(array, &operand, name)?;
                Ok(operand)
            }
            _ => self.managed(array, name),
        }
    }

    fn managed(&self, array: &Bound<'_, PyAny>, name: &str) -> Result<Operand> {
        let export = self.table().managed_tensor_from_py_object_no_sync.ok_or_else(incomplete)?;
        let mut tensor = null_mut();
        // SAFETY: as in `operand`.
        let status = unsafe { export(array.as_ptr().cast(), &mut tensor) };
        match NonNull::new(tensor) {
            Some(tensor) if status == 0 => {
                // SAFETY: the tensor is ours now.
                let tensor = unsafe { Imported::from_versioned(tensor) }?;
                let mut operand = super::protocol::managed(tensor, name)?;
                operand.stream = self.stream(array, operand.tensor.device)?;
                check_lazy_bits(array, &operand, name)?;
                Ok(operand)
            }
            _ => Err(not_exchanged(array, name)),
        }
    }

    /// The stream on which the array's library works on a device now.
    fn stream(&self, array: &Bound<'_, PyAny>, device: Device) -> Result<Option<RawStream>> {
        let Device::Cuda(id) = device else { return Ok(None) };
        let Some(current) = self.table().current_work_stream else {
            return Ok(library_stream(array.py(), &super::library_of(array)?.to_cow()?, id)?);
        };
        let mut stream = null_mut();
        // SAFETY: it writes one handle.
        match unsafe { current(sys::DLDevice::CUDA, id as i32, &mut stream) } {
            0 => Ok(Some(stream.addr())),
            _ => Err(PyErr::fetch(array.py()).into()),
        }
    }

    /// A new array.
    pub(super) fn allocate<'py>(
        &self,
        py: Python<'py>,
        device: Device,
        element: ElementType,
        shape: &[usize],
    ) -> Result<Bound<'py, PyAny>> {
        let table = self.table();
        let allocate = table.managed_tensor_allocator.ok_or_else(incomplete)?;
        let wrap = table.managed_tensor_to_py_object_no_sync.ok_or_else(incomplete)?;
        let mut shape: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let device = match device {
            Device::Host => sys::DLDevice { device_type: sys::DLDevice::CPU, device_id: 0 },
            Device::Cuda(id) => sys::DLDevice { device_type: sys::DLDevice::CUDA, device_id: id as i32 },
        };
        let mut prototype = sys::DLTensor {
            data: null_mut(),
            device,
            ndim: shape.len() as i32,
            dtype: element.into(),
            shape: shape.as_mut_ptr(),
            strides: null_mut(),
            byte_offset: 0,
        };
        let mut problem: Option<String> = None;
        let mut tensor = null_mut();
        // SAFETY: the prototype is complete, and the context is what `remember` takes it for.
        let status =
            unsafe { allocate(&mut prototype, &mut tensor, (&raw mut problem).cast(), Some(remember)) };
        if status != 0 || tensor.is_null() {
            let text = problem.unwrap_or_else(|| format!("no tensor of shape {shape:?} could be allocated"));
            return Err(PyRuntimeError::new_err(text).into());
        }
        let mut object = null_mut();
        // SAFETY: the tensor is handed over, and the result is a new reference.
        unsafe {
            match wrap(tensor, &mut object) {
                0 => Ok(Bound::from_owned_ptr(py, object.cast())),
                _ => Err(PyErr::fetch(py).into()),
            }
        }
    }
}

/// Why a library does not describe its array; torch appends its C++ stack to the reason.
#[cold]
fn not_exchanged(array: &Bound<'_, PyAny>, name: &str) -> Error {
    let reason = PyErr::fetch(array.py()).value(array.py()).to_string();
    let reason = reason.lines().next().unwrap_or_default();
    PyValueError::new_err(format!("{name} has no memory that could be exchanged: {reason}")).into()
}

/// torch keeps conjugation and negation as bits beside the memory, and does not tell DLPack. Complex tensors may have the
/// one, floats (imaginary parts of such) the other.
fn check_lazy_bits(array: &Bound<'_, PyAny>, operand: &Operand, name: &str) -> Result<()> {
    let py = array.py();
    let (bit, resolve) = match operand.tensor.dtype {
        _ if operand.element.is_complex() => (intern!(py, "is_conj"), "resolve_conj"),
        dtype if dtype.is_float() => (intern!(py, "is_neg"), "resolve_neg"),
        _ => return Ok(()),
    };
    match array.call_method0(bit) {
        Ok(set) if set.is(PyBool::new(py, true)) => {
            let text =
                format!("{name}: its values are not what is in memory ({bit} is set): pass x.{resolve}()");
            Err(PyValueError::new_err(text).into())
        }
        _ => Ok(()), // not set, or another library
    }
}

fn borrowed(tensor: &sys::DLTensor, name: &str) -> Result<Operand> {
    let ndim = tensor.ndim as usize;
    // SAFETY: a tensor has `ndim` sizes and strides, which its library keeps until the array changes.
    let (shape, strides) =
        unsafe { (sizes::<usize>(tensor.shape, ndim), sizes::<isize>(tensor.strides, ndim)) };
    let description = Description {
        data: tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize),
        element: ElementType::from(tensor.dtype),
        device: tensor.device.try_into()?,
        shape,
        strides: (!tensor.strides.is_null()).then_some(strides),
        read_only: false,
    };
    Operand::new(name, &description, Source::Borrowed { shape: shape.to_vec() })
}

/// # Safety
/// Unless null, there are `len` numbers, of which a `T` holds every one.
unsafe fn sizes<'a, T>(numbers: *mut i64, len: usize) -> &'a [T] {
    if numbers.is_null() {
        return &[];
    }
    // SAFETY: passed on.
    unsafe { std::slice::from_raw_parts(numbers.cast(), len) }
}

/// Where an allocator leaves what went wrong.
unsafe extern "C" fn remember(context: *mut c_void, kind: *const c_char, message: *const c_char) {
    // SAFETY: the context is the one that `allocate` passed; the texts are C strings.
    unsafe {
        let [kind, message] = [kind, message].map(|text| CStr::from_ptr(text).to_string_lossy());
        *context.cast::<Option<String>>() = Some(format!("{kind}: {message}"));
    }
}

fn incomplete() -> PyErr {
    PyRuntimeError::new_err("the array's DLPack exchange API lacks a function")
}
