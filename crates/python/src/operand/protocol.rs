//! DLPack's Python protocol: `__dlpack__` and its capsules.

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
};

use antiphon::tensor::{
    Device,
    dlpack::{Exported, Imported, sys},
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    ffi, intern,
    prelude::*,
    types::{PyCapsule, PyDict},
};

use super::{Description, Operand, Source, Usage};
use crate::{
    error::Result,
    stream::{LEGACY_DEFAULT, RawStream, library_stream},
};

const VERSIONED: &CStr = c"dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";

/// The newest version of DLPack that this crate reads.
const VERSION: (u32, u32) = (1, 1);

/// Whether an array says that it is in the memory of a device.
#[cold]
pub(super) fn is_on_device(array: &Bound<'_, PyAny>) -> bool {
    let device = array.call_method0(intern!(array.py(), "__dlpack_device__"));
    let device = device.and_then(|device| device.extract::<(i32, i32)>());
    device.is_ok_and(|(device_type, device_id)| {
        Device::try_from(sys::DLDevice { device_type, device_id }).is_ok_and(|device| !device.is_host())
    })
}

/// Imports an array by `__dlpack__`.
pub(super) fn operand(array: &Bound<'_, PyAny>, name: &str, usage: Usage) -> Result<Operand> {
    let py = array.py();
    let (device_type, device_id) = array.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    let device = Device::try_from(sys::DLDevice { device_type, device_id })?;
    let export = array.getattr(intern!(py, "__dlpack__"))?;
    let old = PyDict::new(py); // what libraries from before DLPack 1.0 know
    let mut stream = None;
    if let Device::Cuda(ordinal) = device {
        let ready: i64;
        (stream, ready) = streams(array, ordinal, usage)?;
        old.set_item(intern!(py, "stream"), ready)?;
    }
    let options = old.copy()?;
    options.set_item(intern!(py, "max_version"), VERSION)?;
    let capsule = match export.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call((), Some(&old))?,
        result => result?,
    };
    let mut operand = managed(take(capsule.cast::<PyCapsule>().map_err(PyErr::from)?)?, name)?;
    operand.stream = stream;
    Ok(operand)
}

/// The stream to work in unless the caller names one, and the one that the library makes wait for what it has under way, as
/// DLPack numbers them.
fn streams(array: &Bound<'_, PyAny>, device: u32, usage: Usage) -> Result<(Option<RawStream>, i64)> {
    const NO_NEED: i64 = -1;
    let library = super::library_of(array)?;
    let current = library_stream(array.py(), &library.to_cow()?, device)?;
    Ok(match (usage, current) {
        (Usage::Call(Some(stream)), _) => (current, stream.max(LEGACY_DEFAULT) as i64),
        (_, Some(_)) => (current, NO_NEED),
        (_, None) => (Some(LEGACY_DEFAULT), LEGACY_DEFAULT as i64),
    })
}

/// Takes the tensor out of a capsule, and marks the capsule as used.
fn take(capsule: &Bound<'_, PyCapsule>) -> Result<Imported> {
    if let Ok(tensor) = capsule.pointer_checked(Some(VERSIONED)) {
        rename(capsule, c"used_dltensor_versioned")?;
        // SAFETY: a capsule of this name holds such a tensor, which was ours to take.
        return Ok(unsafe { Imported::from_versioned(tensor.cast()) }?);
    }
    let Ok(tensor) = capsule.pointer_checked(Some(UNVERSIONED)) else {
        let text = "the DLPack capsule is neither 'dltensor' nor 'dltensor_versioned': it may have been used already";
        return Err(PyValueError::new_err(text).into());
    };
    rename(capsule, c"used_dltensor")?;
    // SAFETY: as above.
    Ok(unsafe { Imported::from_unversioned(tensor.cast()) }?)
}

fn rename(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: the capsule is alive, and the name lives for ever.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

pub(super) fn managed(tensor: Imported, name: &str) -> Result<Operand> {
    let description = Description {
        data: tensor.data_ptr(),
        element: tensor.element_type(),
        device: tensor.device()?,
        shape: tensor.shape(),
        strides: tensor.strides(),
        read_only: tensor.is_read_only(),
    };
    let mut operand = Operand::new(name, &description, Source::Borrowed { shape: Vec::new() })?;
    operand.source = Source::Managed(Box::new(tensor));
    Ok(operand)
}

/// A capsule that lends memory: of the kind from before DLPack 1.0 unless `versioned`.
pub(crate) fn capsule<O: Send + 'static>(
    py: Python<'_>,
    exported: Exported<O>,
    versioned: bool,
) -> Result<Bound<'_, PyCapsule>> {
    let (pointer, name, destructor): (*mut c_void, _, ffi::PyCapsule_Destructor) = match versioned {
        true => (exported.into_versioned().as_ptr().cast(), VERSIONED, drop_versioned),
        false => (exported.into_unversioned()?.as_ptr().cast(), UNVERSIONED, drop_unversioned),
    };
    // SAFETY: the pointer is what the name says; the destructor frees it unless a consumer renamed the capsule.
    unsafe {
        let capsule = ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor));
        Ok(Bound::from_owned_ptr_or_err(py, capsule)?.cast_into_unchecked())
    }
}

unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that still has this name still owns its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            drop(NonNull::new(pointer.cast()).map(|tensor| Imported::from_versioned(tensor)));
        }
    }
}

unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr());
            drop(NonNull::new(pointer.cast()).map(|tensor| Imported::from_unversioned(tensor)));
        }
    }
}
