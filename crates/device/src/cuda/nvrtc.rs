//! The compiler: NVRTC, opened at run time.
//!
//! Its ten functions are looked up in the very file that was opened, and not through cudarc, which would look by name
//! again and may find another one.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    path::Path,
    ptr,
    sync::OnceLock,
};

use super::{
    CudaError, CudaVersion, Program,
    libraries::{self, text_of},
};
use crate::library::Library;

type Handle = *mut c_void;
type Strings = *const *const c_char;

/// NVRTC, ready to compile.
#[derive(Debug)]
pub struct Nvrtc {
    opened: Library,
    version: CudaVersion,
    functions: Functions,
}

#[derive(Debug)]
struct Functions {
    create: unsafe extern "C" fn(*mut Handle, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, Strings) -> c_int,
    cubin_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The machine code, an ELF file.
    pub cubin: Vec<u8>,
    /// The compiler's log: warnings, or nothing.
    pub log: String,
}

impl Nvrtc {
    /// Opens NVRTC the first time, looking where [the module's page](super) says; the same answer ever after.
    ///
    /// # Errors
    /// [`CudaError::Library`].
    pub fn load() -> Result<&'static Self, CudaError> {
        static NVRTC: OnceLock<Result<Nvrtc, CudaError>> = OnceLock::new();
        NVRTC
            .get_or_init(|| {
                Library::open(&libraries::NVRTC).map_err(CudaError::from).and_then(Self::with_library)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Opens NVRTC at this path: the file, or the folder it is in.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn open(path: &Path) -> Result<Self, CudaError> {
        Self::with_library(Library::open_at(&libraries::NVRTC, path)?)
    }

    fn with_library(library: Library) -> Result<Self, CudaError> {
        // SAFETY: these are the functions' types in nvrtc.h, whose enum is an int; they have not changed since CUDA 11.
        let (functions, version) = unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                library.function("nvrtcVersion")?;
            let functions = Functions {
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                error_text: library.function("nvrtcGetErrorString")?,
            };
            (functions, version)
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        functions.check("nvrtcVersion", unsafe { version(&mut major, &mut minor) })?;
        Ok(Self { opened: library, version: CudaVersion::new(major as u32, minor as u32), functions })
    }

    /// Its version. The driver's must have at least the same major number for the code to load.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// The file that was opened, or the name that the dynamic loader found it by.
    pub fn path(&self) -> &Path {
        self.opened.path()
    }

    /// Compiles a program, which takes from a tenth of a second to a few. [`KernelCache`](super::KernelCache)
    /// remembers the result.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's messages; [`CudaError::Nul`].
    pub fn compile(&self, program: &Program) -> Result<Compiled, CudaError> {
        let [name, source] = [program.name(), program.source()].map(c_string);
        let (name, source) = (name?, source?);
        let options: Vec<CString> =
            program.options().iter().map(|o| c_string(o)).collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let mut running = Running { functions: &self.functions, handle: ptr::null_mut() };
        let created = {
            let (source, name, handle) = (source.as_ptr(), name.as_ptr(), &mut running.handle);
            // SAFETY: both texts end with NUL and are copied; there are no headers.
            unsafe { (self.functions.create)(handle, source, name, 0, ptr::null(), ptr::null()) }
        };
        self.functions.check("nvrtcCreateProgram", created)?;
        // SAFETY: the program exists, and there are as many options as said.
        let result =
            unsafe { (self.functions.compile)(running.handle, options.len() as c_int, options.as_ptr()) };
        let log = running.text(self.functions.log_size, self.functions.log, "nvrtcGetProgramLog")?;
        let log = String::from_utf8_lossy(log.strip_suffix(b"\0").unwrap_or(&log)).trim_end().to_owned();
        const COMPILATION: c_int = 6;
        if result == COMPILATION {
            return Err(CudaError::Compile {
                program: program.name().to_owned(),
                architecture: program.architecture().to_string(),
                version: self.version,
                log,
            });
        }
        // Anything else, such as an option that it does not know, is in the log too.
        self.functions.check("nvrtcCompileProgram", result).map_err(|error| match log.is_empty() {
            true => error,
            false => CudaError::Compile {
                program: program.name().to_owned(),
                architecture: program.architecture().to_string(),
                version: self.version,
                log: log.clone(),
            },
        })?;
        let cubin = running.text(self.functions.cubin_size, self.functions.cubin, "nvrtcGetCUBIN")?;
        Ok(Compiled { cubin, log })
    }
}

impl Functions {
    fn check(&self, function: &'static str, result: c_int) -> Result<(), CudaError> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant of the library, which is never closed, for every number.
        let text = unsafe { text_of((self.error_text)(result)) }.unwrap_or(c"it does not say what it means");
        let name = text.to_str().unwrap_or("an error");
        Err(CudaError::Call { function, code: result as u32, name, text: "see nvrtc.h" })
    }
}

/// A program inside NVRTC; destroyed on drop.
struct Running<'a> {
    functions: &'a Functions,
    handle: Handle,
}

impl Running<'_> {
    /// The bytes that a pair of functions returns, one for the size and one for the bytes.
    fn text(
        &self,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
        name: &'static str,
    ) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // SAFETY: the program exists; writes one size.
        self.functions.check(name, unsafe { size(self.handle, &mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the program exists; writes as many bytes as it said.
        self.functions.check(name, unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created once and destroyed once.
            unsafe { (self.functions.destroy)(&mut self.handle) };
        }
    }
}

fn c_string(text: &str) -> Result<CString, CudaError> {
    // The whole source would make a poor message.
    let start = || text.chars().take(40).collect();
    CString::new(text).map_err(|_| CudaError::Nul(start()))
}
