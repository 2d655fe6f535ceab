//! The linker: nvJitLink, opened at run time.
//!
//! As with NVRTC, its functions are looked up in the very file that was opened.

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    fs,
    path::{Path, PathBuf},
    ptr,
    sync::OnceLock,
};

use sha2::{Digest, Sha256};

use super::{CudaError, CudaVersion, Program, libraries};
use crate::library::{Library, LibraryError};

type Handle = *mut c_void;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Handle, *mut c_void) -> c_int;

/// nvJitLink, ready to link.
#[derive(Debug)]
pub struct NvJitLink {
    opened: Library,
    version: CudaVersion,
    functions: Functions,
}

#[derive(Debug)]
struct Functions {
    create: unsafe extern "C" fn(*mut Handle, u32, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    add: unsafe extern "C" fn(Handle, c_int, *const c_void, usize, *const c_char) -> c_int,
    complete: unsafe extern "C" fn(Handle) -> c_int,
    cubin_size: Size,
    cubin: Get,
    log_size: Size,
    log: Get,
}

/// A library of machine code for GPUs, with which programs are linked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceLibrary {
    path: PathBuf,
    bytes: Vec<u8>,
    digest: [u8; 32],
}

impl DeviceLibrary {
    /// Reads a file. `what` and `install` are for the error, as in [`Wanted`](crate::library::Wanted).
    ///
    /// # Errors
    /// [`CudaError::Library`] for a file that cannot be read.
    pub fn read(path: PathBuf, what: &'static str, install: &'static str) -> Result<Self, CudaError> {
        match fs::read(&path) {
            Ok(bytes) => Ok(Self { path, digest: Sha256::digest(&bytes).into(), bytes }),
            Err(error) => {
                let searched = format!("{}: {error}", path.display());
                Err(LibraryError::Missing { library: what, install, searched }.into())
            }
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The SHA-256 of the content.
    pub(super) fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

impl NvJitLink {
    /// Opens nvJitLink the first time, looking where [the module's page](super) says; the same answer ever after.
    ///
    /// # Errors
    /// [`CudaError::Library`].
    pub fn load() -> Result<&'static Self, CudaError> {
        static LINKER: OnceLock<Result<NvJitLink, CudaError>> = OnceLock::new();
        LINKER
            .get_or_init(|| {
                Library::open(&libraries::NVJITLINK).map_err(CudaError::from).and_then(Self::with_library)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Opens nvJitLink at this path: the file, or the folder it is in.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn open(path: &Path) -> Result<Self, CudaError> {
        Self::with_library(Library::open_at(&libraries::NVJITLINK, path)?)
    }

    fn with_library(library: Library) -> Result<Self, CudaError> {
        // SAFETY: these are the functions' types in nvJitLink.h, whose enums are ints.
        let (functions, get_version) = unsafe {
            let version: unsafe extern "C" fn(*mut c_uint, *mut c_uint) -> c_int =
                library.function("nvJitLinkVersion")?;
            let functions = Functions {
                create: library.function("nvJitLinkCreate")?,
                destroy: library.function("nvJitLinkDestroy")?,
                add: library.function("nvJitLinkAddData")?,
                complete: library.function("nvJitLinkComplete")?,
                cubin_size: library.function("nvJitLinkGetLinkedCubinSize")?,
                cubin: library.function("nvJitLinkGetLinkedCubin")?,
                log_size: library.function("nvJitLinkGetErrorLogSize")?,
                log: library.function("nvJitLinkGetErrorLog")?,
            };
            (functions, version)
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        check("nvJitLinkVersion", unsafe { get_version(&mut major, &mut minor) })?;
        Ok(Self { opened: library, version: CudaVersion::new(major, minor), functions })
    }

    /// Its version.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// The file that was opened, or the name that the dynamic loader found it by.
    pub fn path(&self) -> &Path {
        self.opened.path()
    }

    /// Links what NVRTC has compiled a [relocatable](Program::relocatable) program to, with a device library: machine code for the
    /// program's architecture. [`KernelCache`](super::KernelCache::link) remembers the result.
    ///
    /// # Errors
    /// [`CudaError::Link`] with the linker's messages, for a function that the library lacks, say.
    pub fn link(
        &self,
        program: &Program,
        object: &[u8],
        library: &DeviceLibrary,
    ) -> Result<Vec<u8>, CudaError> {
        /// `nvJitLinkInputType`.
        const CUBIN: c_int = 1;
        const LIBRARY: c_int = 6;
        let option = CString::new(format!("-arch={}", program.architecture())).expect("no NUL");
        let mut linking = Linking { functions: &self.functions, handle: ptr::null_mut() };
        let told = |linking: &Linking<'_>, code: c_int| match code {
            0 => Ok(()),
            code => {
                let log = linking.bytes(self.functions.log_size, self.functions.log).unwrap_or_default();
                let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
                Err(CudaError::Link {
                    program: program.name().to_owned(),
                    library: library.path.display().to_string(),
                    architecture: program.architecture().to_string(),
                    version: self.version,
                    log: if log.is_empty() { format!("error {code} of nvJitLink.h") } else { log },
                })
            }
        };
        // SAFETY: writes one handle; the option is copied.
        let created = unsafe { (self.functions.create)(&mut linking.handle, 1, &option.as_ptr()) };
        told(&linking, created)?;
        for (kind, bytes, name) in [(CUBIN, object, c"program"), (LIBRARY, &library.bytes, c"library")] {
            let (data, size): (*const c_void, _) = (bytes.as_ptr().cast(), bytes.len());
            // SAFETY: the linker lives; the bytes outlive it, and the name ends with NUL.
            let added = unsafe { (self.functions.add)(linking.handle, kind, data, size, name.as_ptr()) };
            told(&linking, added)?;
        }
        // SAFETY: the linker lives.
        let completed = unsafe { (self.functions.complete)(linking.handle) };
        told(&linking, completed)?;
        linking.bytes(self.functions.cubin_size, self.functions.cubin)
    }
}

fn check(function: &'static str, code: c_int) -> Result<(), CudaError> {
    match code {
        0 => Ok(()),
        code => Err(CudaError::Call {
            function,
            code: code as u32,
            name: "an error of nvJitLink",
            text: "see nvJitLink.h",
        }),
    }
}

/// A linker at work; destroyed on drop.
struct Linking<'a> {
    functions: &'a Functions,
    handle: Handle,
}

impl Linking<'_> {
    /// The bytes that a pair of functions returns, one for the size and one for the bytes.
    fn bytes(&self, size: Size, get: Get) -> Result<Vec<u8>, CudaError> {
        if self.handle.is_null() {
            return Ok(Vec::new());
        }
        let mut len = 0;
        // SAFETY: the linker lives; writes one size.
        check("nvJitLink", unsafe { size(self.handle, &mut len) })?;
        let mut bytes = vec![0u8; len];
        if len > 0 {
            // SAFETY: the linker lives; writes as many bytes as it said.
            check("nvJitLink", unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }
}

impl Drop for Linking<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created once and destroyed once.
            unsafe { (self.functions.destroy)(&mut self.handle) };
        }
    }
}
