//! NCCL, opened at run time: the yardstick, and the fallback for whole collectives.
//!
//! As with NVRTC, its functions are looked up in the very file that was opened. The layer is thin: one method for one
//! call, addresses and counts instead of tensors. What is built on it validates.

mod communicator;

use std::{
    ffi::{c_char, c_int, c_void},
    fmt,
    path::Path,
    ptr,
    sync::OnceLock,
};

use cudarc::driver::sys::CUstream;

use super::{
    CudaError, LibraryVersion,
    libraries::{self, text_of},
};
use crate::library::Library;

pub use communicator::NcclCommunicator;

/// `ncclComm_t`.
type Handle = *mut c_void;
type From = *const c_void;
type To = *mut c_void;

/// NCCL, ready to make communicators.
///
/// It reads its settings from variables of its own. Nothing here sets any; where multicast (NVLS) must not be used, set
/// `NCCL_NVLS_ENABLE=0` before the first communicator of the process.
#[derive(Debug)]
pub struct Nccl {
    opened: Library,
    version: LibraryVersion,
    functions: Functions,
}

#[derive(Debug)]
struct Functions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(From, To, usize, c_int, c_int, Handle, CUstream) -> c_int,
    reduce: unsafe extern "C" fn(From, To, usize, c_int, c_int, c_int, Handle, CUstream) -> c_int,
    reduce_scatter: unsafe extern "C" fn(From, To, usize, c_int, c_int, Handle, CUstream) -> c_int,
    all_gather: unsafe extern "C" fn(From, To, usize, c_int, Handle, CUstream) -> c_int,
    broadcast: unsafe extern "C" fn(From, To, usize, c_int, c_int, Handle, CUstream) -> c_int,
    send: unsafe extern "C" fn(From, usize, c_int, c_int, Handle, CUstream) -> c_int,
    recv: unsafe extern "C" fn(To, usize, c_int, c_int, Handle, CUstream) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
}

/// The id that the ranks of one communicator of NCCL's share, or all ranks of NVSHMEM: one rank makes it, and the program sends it
/// to the others.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId([u8; UniqueId::LEN]);

impl UniqueId {
    /// How many bytes it has.
    pub const LEN: usize = 128;

    /// The bytes, for the way to the other ranks.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        self.0
    }

    /// The id from the bytes that another rank's [`to_bytes`](Self::to_bytes) returned.
    ///
    /// # Errors
    /// [`CudaError::Encoding`] when there are not [`LEN`](Self::LEN) bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CudaError> {
        let exact = bytes.try_into().map(Self);
        let what = "a unique id";
        exact.map_err(|_| CudaError::Encoding { what, found: bytes.len(), expected: Self::LEN })
    }
}

impl fmt::Debug for UniqueId {
    /// Without the bytes: a process that knows them can join.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl Nccl {
    /// Opens NCCL the first time, looking where [the module's page](super) says; the same answer ever after.
    ///
    /// # Errors
    /// [`CudaError::Library`], which says what to install; also before version 2.13.
    pub fn load() -> Result<&'static Self, CudaError> {
        static NCCL: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
        NCCL.get_or_init(|| {
            Library::open(&libraries::NCCL).map_err(CudaError::from).and_then(Self::with_library)
        })
        .as_ref()
        .map_err(Clone::clone)
    }

    /// Opens NCCL at this path: the file, or the folder it is in.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn open(path: &Path) -> Result<Self, CudaError> {
        Self::with_library(Library::open_at(&libraries::NCCL, path)?)
    }

    fn with_library(library: Library) -> Result<Self, CudaError> {
        // SAFETY: these are the functions' types in nccl.h, whose enums are ints, and whose streams are the driver's.
        let (functions, get_version) = unsafe {
            let version: unsafe extern "C" fn(*mut c_int) -> c_int = library.function("ncclGetVersion")?;
            let functions = Functions {
                unique_id: library.function("ncclGetUniqueId")?,
                init_rank: library.function("ncclCommInitRank")?,
                destroy: library.function("ncclCommDestroy")?,
                abort: library.function("ncclCommAbort")?,
                async_error: library.function("ncclCommGetAsyncError")?,
                all_reduce: library.function("ncclAllReduce")?,
                reduce: library.function("ncclReduce")?,
                reduce_scatter: library.function("ncclReduceScatter")?,
                all_gather: library.function("ncclAllGather")?,
                broadcast: library.function("ncclBroadcast")?,
                send: library.function("ncclSend")?,
                recv: library.function("ncclRecv")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
                error_text: library.function("ncclGetErrorString")?,
                last_error: library.function("ncclGetLastError")?,
            };
            (functions, version)
        };
        let mut code = 0;
        // SAFETY: writes one integer.
        functions.check("ncclGetVersion", unsafe { get_version(&mut code) })?;
        Ok(Self { opened: library, version: version_of(code as u32), functions })
    }

    /// Its version. All ranks of a communicator must have the same.
    pub fn version(&self) -> LibraryVersion {
        self.version
    }

    /// The file that was opened, or the name that the dynamic loader found it by.
    pub fn path(&self) -> &Path {
        self.opened.path()
    }

    /// A new id, on one rank, which thereby becomes the one that the others connect to.
    ///
    /// # Errors
    /// [`CudaError::Nccl`], for instance when there is no network interface to listen on.
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = UniqueId([0; UniqueId::LEN]);
        // SAFETY: writes 128 bytes.
        self.functions.check("ncclGetUniqueId", unsafe { (self.functions.unique_id)(&mut id) })?;
        Ok(id)
    }
}

/// The version for a number of `ncclGetVersion`: 2804 is 2.8.4, and 20906 is 2.9.6.
fn version_of(code: u32) -> LibraryVersion {
    let unit = if code < 10_000 { 1_000 } else { 10_000 };
    LibraryVersion { major: code / unit, minor: code % unit / 100, patch: code % 100 }
}

impl Functions {
    fn check(&self, function: &'static str, result: c_int) -> Result<(), CudaError> {
        if result == 0 { Ok(()) } else { Err(self.failed(function, result)) }
    }

    #[cold]
    fn failed(&self, function: &'static str, result: c_int) -> CudaError {
        // SAFETY: returns a constant of the library, which is never closed, for every number.
        let text = unsafe { text_of((self.error_text)(result)) }.unwrap_or(c"it does not say what it means");
        // SAFETY: takes no communicator; returns a buffer of the library that ends with NUL, if with a torn message
        // where another thread fails at the same time.
        let detail = unsafe { text_of((self.last_error)(ptr::null_mut())) }.unwrap_or_default();
        CudaError::Nccl {
            function,
            code: result as u32,
            text: text.to_str().unwrap_or("an error"),
            detail: detail.to_string_lossy().trim().to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_both_forms() {
        assert_eq!(version_of(22809).to_string(), "2.28.9");
        assert_eq!(version_of(2804).to_string(), "2.8.4");
        assert!(version_of(2804) < version_of(20906));
    }

    #[test]
    fn ids_travel_as_bytes() {
        let bytes: [u8; UniqueId::LEN] = std::array::from_fn(|index| index as u8);
        let id = UniqueId::from_bytes(&bytes).unwrap();
        assert_eq!((id.to_bytes(), format!("{id:?}").as_str()), (bytes, "UniqueId(..)"));
        let error = UniqueId::from_bytes(&bytes[1..]).unwrap_err().to_string();
        assert_eq!(error, "127 bytes are not a unique id, which has 128");
    }

    #[test]
    fn a_missing_library_is_named_with_what_to_install() {
        let folder = tempfile::tempdir().unwrap();
        let error = Nccl::open(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("no NCCL (libnccl): `pip install nvidia-nccl-cu13`"), "{error}");
        assert!(error.contains("libnccl.so.2: cannot open shared object file"), "{error}");
    }

    #[test]
    fn another_library_is_refused_by_the_function_that_it_lacks() {
        let error = Nccl::open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no function ncclGetVersion"), "{error}");
    }
}
