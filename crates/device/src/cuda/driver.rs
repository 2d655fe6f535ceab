//! The driver: found and initialised once.

use std::sync::OnceLock;

use cudarc::driver::sys;

use super::{
    CudaError, CudaVersion, Device,
    libraries::{self, text_of},
};
use crate::library::{Library, LibraryError};

/// The oldest driver that has every function which is called without asking.
const OLDEST: CudaVersion = CudaVersion::new(12, 0);

/// The CUDA driver of this machine, ready to use.
///
/// Whatever calls the driver is made from this or from something made from it, so no call can come before
/// [`load`](Driver::load) has found the library.
#[derive(Debug)]
pub struct Driver {
    version: CudaVersion,
    // Kept open for the process: cudarc finds by name what is open already.
    _library: Library,
}

impl Driver {
    /// Opens libcuda and initialises it, the first time; the same answer ever after.
    ///
    /// # Errors
    /// [`CudaError::Library`] where there is no driver, [`CudaError::DriverTooOld`] below CUDA 12.0, and
    /// [`CudaError::Call`] when the driver itself refuses: no device, or a driver that does not fit its kernel module.
    pub fn load() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let library = Library::open(&libraries::DRIVER)?;
        // SAFETY: only opens libraries of the driver's names, one of which is open already.
        if !unsafe { sys::is_culib_present() } {
            return Err(LibraryError::Missing {
                library: libraries::DRIVER.what,
                install: libraries::DRIVER.install,
                searched: format!("{} opens, but by no name that cudarc knows", library.path().display()),
            }
            .into());
        }
        // SAFETY: the library is present, which is all that cuInit needs.
        unsafe { call!(cuInit(0)) }?;
        let mut version = 0;
        // SAFETY: writes one integer.
        unsafe { call!(cuDriverGetVersion(&mut version)) }?;
        let version = CudaVersion::new(version as u32 / 1000, version as u32 % 1000 / 10);
        let driver = Self { version, _library: library };
        driver.require(OLDEST, "Antiphon")?;
        Ok(driver)
    }

    /// The newest CUDA that the driver supports.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// Whether the driver supports this version of CUDA.
    #[inline]
    pub fn supports(&self, version: CudaVersion) -> bool {
        self.version >= version
    }

    /// An error if the driver is older than `needed`, which `what` came with.
    pub(crate) fn require(&self, needed: CudaVersion, what: &'static str) -> Result<(), CudaError> {
        match self.supports(needed) {
            true => Ok(()),
            false => Err(CudaError::DriverTooOld { what, needed, found: self.version }),
        }
    }

    /// How many devices this process sees.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn device_count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { call!(cuDeviceGetCount(&mut count)) }?;
        Ok(count as u32)
    }

    /// The device with this ordinal, as the process numbers its visible devices.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`].
    pub fn device(&'static self, ordinal: u32) -> Result<Device, CudaError> {
        let count = self.device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoSuchDevice { ordinal, count });
        }
        Device::new(self, ordinal)
    }

    /// Every device that this process sees.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn devices(&'static self) -> Result<Vec<Device>, CudaError> {
        (0..self.device_count()?).map(|ordinal| self.device(ordinal)).collect()
    }
}

/// Calls a function of the driver and turns its code into a `Result` that names the function.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::driver::check(stringify!($function), cudarc::driver::sys::$function($($argument),*))
    };
}
pub(crate) use call;

/// Turns a code of the driver into a `Result`.
#[inline]
pub(crate) fn check(function: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
    if code as u32 == 0 { Ok(()) } else { Err(failed(function, code)) }
}

#[cold]
fn failed(function: &'static str, code: sys::CUresult) -> CudaError {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: both write one pointer, null for a code that they do not know; a code exists only once the library is
    // there.
    unsafe {
        let _ = sys::cuGetErrorName(code, &mut name);
        let _ = sys::cuGetErrorString(code, &mut text);
    }
    // SAFETY: the driver's texts are constants of its library, which is never closed.
    let text_of = |pointer| unsafe { text_of(pointer) }.and_then(|text| text.to_str().ok());
    CudaError::Call {
        function,
        code: code as u32,
        name: text_of(name).unwrap_or("a code without a name"),
        text: text_of(text).unwrap_or("the driver does not say what it means"),
    }
}
