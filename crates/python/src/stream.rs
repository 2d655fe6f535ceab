//! Streams of CUDA as frameworks exchange them, and the current ones of torch and CuPy.

use antiphon::session::GpuStream;
use pyo3::{exceptions::PyValueError, intern, prelude::*, sync::PyOnceLock, types::PyDict};

use crate::error::Result;

/// A stream as frameworks exchange it.
pub(crate) type RawStream = usize;

/// The legacy default stream, which 0 names too.
pub(crate) const LEGACY_DEFAULT: RawStream = 1;

/// A module, if the program has imported it. (`sys.modules` is found once: each import of `sys` takes 0.4 µs.)
pub(crate) fn imported<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    MODULES.import(py, "sys", "modules")?.get_item(name)
}

/// The device that the caller names, or else the current one of torch or CuPy, whichever is imported.
pub(crate) fn device_or_current(py: Python<'_>, device: Option<u32>) -> Result<u32> {
    if let Some(device) = device {
        return Ok(device);
    }
    if let Some(torch) = imported(py, "torch")? {
        return Ok(torch.getattr("cuda")?.call_method0("current_device")?.extract()?);
    }
    if let Some(cupy) = imported(py, "cupy")? {
        return Ok(cupy.getattr("cuda")?.call_method0("Device")?.getattr("id")?.extract()?);
    }
    Err(PyValueError::new_err("no device: pass its number, as neither torch nor CuPy is imported").into())
}

/// The stream that the caller names, or else torch's or CuPy's current one on the device, or the legacy default.
pub(crate) fn stream_or_current(py: Python<'_>, device: u32, stream: Option<RawStream>) -> Result<RawStream> {
    if let Some(stream) = stream {
        return Ok(stream);
    }
    for library in ["torch", "cupy"] {
        if imported(py, library)?.is_some() {
            return Ok(library_stream(py, library, device)?.unwrap_or_default());
        }
    }
    Ok(0)
}

/// A stream of a device as the session takes it.
///
/// # Safety
/// As [`GpuStream::from_raw`].
pub(crate) unsafe fn on(device: u32, stream: RawStream) -> GpuStream<'static> {
    // SAFETY: passed on.
    unsafe { GpuStream::from_raw(device, stream) }
}

/// The current stream of torch or CuPy on a device; nothing for other libraries.
pub(crate) fn library_stream(py: Python<'_>, library: &str, device: u32) -> PyResult<Option<RawStream>> {
    let cuda = |name: &str| py.import(name)?.getattr(intern!(py, "cuda"));
    match library {
        "torch" => {
            // Triton asks so too: the number alone, where the public function makes an object around it.
            let raw =
                py.import(intern!(py, "torch._C"))?.getattr_opt(intern!(py, "_cuda_getCurrentRawStream"))?;
            if let Some(raw) = raw {
                return raw.call1((device,))?.extract().map(Some);
            }
            let current = cuda("torch")?.call_method1(intern!(py, "current_stream"), (device,))?;
            current.getattr(intern!(py, "cuda_stream"))?.extract().map(Some)
        }
        "cupy" => {
            let current = cuda("cupy")?.call_method0(intern!(py, "get_current_stream"))?;
            current.getattr(intern!(py, "ptr"))?.extract().map(Some)
        }
        _ => Ok(None),
    }
}
