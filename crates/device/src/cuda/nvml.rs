//! NVML, the driver's management library, opened at run time for properties that the driver does not report. It changes nothing.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    ptr,
    sync::OnceLock,
};

use super::{
    CudaError,
    libraries::{self, text_of},
};
use crate::library::Library;

type Handle = *mut c_void;

const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;

/// More links than any device has; asking for one too many is an error that ends the count.
const MOST_LINKS: c_uint = 64;

/// NVML, initialised.
#[derive(Debug)]
pub struct Nvml {
    functions: Functions,
    // Kept open for the process, like every library here.
    _library: Library,
}

#[derive(Debug)]
struct Functions {
    driver_version: unsafe extern "C" fn(*mut c_char, c_uint) -> c_int,
    by_pci_bus_id: unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int,
    link_state: unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int,
    mig_mode: unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Nvml {
    /// Opens and initialises NVML, the first time; the same answer ever after.
    ///
    /// # Errors
    /// [`CudaError::Library`], [`CudaError::Call`].
    pub fn load() -> Result<&'static Self, CudaError> {
        static NVML: OnceLock<Result<Nvml, CudaError>> = OnceLock::new();
        NVML.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let library = Library::open(&libraries::NVML)?;
        // SAFETY: these are the functions' types in nvml.h, whose enums are ints.
        let (functions, initialise) = unsafe {
            let initialise: unsafe extern "C" fn() -> c_int = library.function("nvmlInit_v2")?;
            let functions = Functions {
                driver_version: library.function("nvmlSystemGetDriverVersion")?,
                by_pci_bus_id: library.function("nvmlDeviceGetHandleByPciBusId_v2")?,
                link_state: library.function("nvmlDeviceGetNvLinkState")?,
                mig_mode: library.function("nvmlDeviceGetMigMode")?,
                error_text: library.function("nvmlErrorString")?,
            };
            (functions, initialise)
        };
        // SAFETY: takes nothing. Never shut down: the library stays until the process ends.
        functions.check("nvmlInit_v2", unsafe { initialise() })?;
        Ok(Self { functions, _library: library })
    }

    /// The driver's own version, such as `580.95.05`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn driver_version(&self) -> Result<String, CudaError> {
        let mut text = [0u8; 80];
        let len = text.len() as c_uint;
        // SAFETY: writes at most `len` bytes, the last of them NUL.
        let result = unsafe { (self.functions.driver_version)(text.as_mut_ptr().cast(), len) };
        self.functions.check("nvmlSystemGetDriverVersion", result)?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// How many NVLinks of the device at this place on the PCI bus are active; 0 for a device without any.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn active_links(&self, pci_bus_id: &str) -> Result<u32, CudaError> {
        let device = self.device(pci_bus_id)?;
        let mut active = 0;
        for link in 0..MOST_LINKS {
            let mut state = 0;
            // SAFETY: the handle is NVML's; writes one integer.
            match unsafe { (self.functions.link_state)(device, link, &mut state) } {
                0 => active += u32::from(state != 0),
                // The first number beyond the last link, or a device without links.
                INVALID_ARGUMENT | NOT_SUPPORTED => break,
                other => self.functions.check("nvmlDeviceGetNvLinkState", other)?,
            }
        }
        Ok(active)
    }

    /// Whether the device at this place on the PCI bus is divided into instances (MIG), which have no links.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn is_divided(&self, pci_bus_id: &str) -> Result<bool, CudaError> {
        let device = self.device(pci_bus_id)?;
        let (mut now, mut after_reset) = (0, 0);
        // SAFETY: the handle is NVML's; writes two integers.
        match unsafe { (self.functions.mig_mode)(device, &mut now, &mut after_reset) } {
            NOT_SUPPORTED => Ok(false),
            result => self.functions.check("nvmlDeviceGetMigMode", result).map(|()| now != 0),
        }
    }

    fn device(&self, pci_bus_id: &str) -> Result<Handle, CudaError> {
        let name = CString::new(pci_bus_id).map_err(|_| CudaError::Nul(pci_bus_id.to_owned()))?;
        let mut device = ptr::null_mut();
        // SAFETY: the name ends with NUL; writes one handle, which is valid for as long as NVML is initialised.
        let result = unsafe { (self.functions.by_pci_bus_id)(name.as_ptr(), &mut device) };
        self.functions.check("nvmlDeviceGetHandleByPciBusId_v2", result).map(|()| device)
    }
}

impl Functions {
    fn check(&self, function: &'static str, result: c_int) -> Result<(), CudaError> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant of the library, which is never closed, for every number.
        let text = unsafe { text_of((self.error_text)(result)) }.unwrap_or(c"it does not say what it means");
        let text = text.to_str().unwrap_or("an error");
        Err(CudaError::Call { function, code: result as u32, name: "see nvml.h", text })
    }
}
