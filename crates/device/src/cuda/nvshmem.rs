//! NVSHMEM, opened at run time: memory of GPUs on other machines, to which kernels write.
//!
//! NVSHMEM has one state for each process: a process is one of its ranks, a *PE*, and has one GPU. The layer is thin: one method for one
//! call of the host's library. Kernels call the library's device code, with which they are [linked](super::KernelCache::link): see
//! [`PUT_SIGNAL`](super::PUT_SIGNAL).
//!
//! No call of NVSHMEM's has a deadline, and some are *collective*: they end when all PEs have made them. Calls of a process come one at a
//! time.

use std::{
    ffi::{c_int, c_uint, c_void},
    path::Path,
    ptr,
    sync::OnceLock,
};

use cudarc::driver::sys::CUmodule;

use super::{Context, CudaError, DeviceLibrary, DevicePointer, LibraryVersion, Module, UniqueId, libraries};
use crate::library::Library;

/// NVSHMEM, ready to be initialised.
///
/// It reads its settings from variables of its own when it is initialised. Nothing here sets any.
#[derive(Debug)]
pub struct Nvshmem {
    opened: Library,
    version: LibraryVersion,
    functions: Functions,
    device: OnceLock<Result<DeviceLibrary, CudaError>>,
}

#[derive(Debug)]
struct Functions {
    status: unsafe extern "C" fn() -> c_int,
    unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    set_id: unsafe extern "C" fn(c_int, c_int, *const Id, *mut Attributes) -> c_int,
    initialize: unsafe extern "C" fn(c_uint, *mut Attributes) -> c_int,
    finalize: unsafe extern "C" fn(),
    pe: unsafe extern "C" fn() -> c_int,
    pe_count: unsafe extern "C" fn() -> c_int,
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    pointer: unsafe extern "C" fn(*const c_void, c_int) -> *mut c_void,
    barrier: unsafe extern "C" fn(),
    initialize_module: unsafe extern "C" fn(CUmodule) -> c_int,
    finalize_module: unsafe extern "C" fn(CUmodule) -> c_int,
}

/// `nvshmemx_uniqueid_t`, which begins with the version of its layout.
#[repr(C, align(8))]
struct Id([u8; UniqueId::LEN]);

/// `nvshmemx_init_attr_t`, of structures that each begin with the version of their layout.
#[repr(C)]
struct Attributes {
    version: c_int,
    communicator: *mut c_void,
    arguments: Arguments,
}

/// `nvshmemx_init_args_t`.
#[repr(C)]
struct Arguments {
    version: c_int,
    of_id: OfId,
    reserved: [u8; 96],
}

/// `nvshmemx_uniqueid_args_t`.
#[repr(C)]
struct OfId {
    version: c_int,
    id: *const Id,
    rank: c_int,
    rank_count: c_int,
}

/// The version of the layout of a structure: the first one, with its size.
const fn layout<T>() -> c_int {
    (1 << 16) + size_of::<T>() as c_int
}

impl Id {
    fn new() -> Self {
        let mut id = Self([0; UniqueId::LEN]);
        id.0[..4].copy_from_slice(&layout::<Self>().to_ne_bytes());
        id
    }
}

impl Attributes {
    fn new() -> Self {
        let of_id = OfId { version: layout::<OfId>(), id: ptr::null(), rank: -1, rank_count: -1 };
        let arguments = Arguments { version: layout::<Arguments>(), of_id, reserved: [0; 96] };
        Self { version: layout::<Self>(), communicator: ptr::null_mut(), arguments }
    }
}

impl Nvshmem {
    /// The version whose device code was tried with this library's kernels.
    pub const TESTED: LibraryVersion = LibraryVersion { major: 3, minor: 4, patch: 5 };

    /// Opens NVSHMEM the first time, looking where [the module's page](super) says; the same answer ever after.
    ///
    /// # Errors
    /// [`CudaError::Library`], which says what to install; [`CudaError::UntestedNvshmem`] for a version other than
    /// [`TESTED`](Self::TESTED).
    pub fn load() -> Result<&'static Self, CudaError> {
        static NVSHMEM: OnceLock<Result<Nvshmem, CudaError>> = OnceLock::new();
        NVSHMEM
            .get_or_init(|| {
                Library::open(&libraries::NVSHMEM).map_err(CudaError::from).and_then(Self::with_library)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Opens NVSHMEM at this path: the file, or the folder it is in.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn open(path: &Path) -> Result<Self, CudaError> {
        Self::with_library(Library::open_at(&libraries::NVSHMEM, path)?)
    }

    fn with_library(library: Library) -> Result<Self, CudaError> {
        // SAFETY: these are the functions' types in nvshmemx_api.h and nvshmem_api.h of the tested version.
        let (functions, get_version) = unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int) =
                library.function("nvshmemx_vendor_get_version_info")?;
            let functions = Functions {
                status: library.function("nvshmemx_init_status")?,
                unique_id: library.function("nvshmemx_get_uniqueid")?,
                set_id: library.function("nvshmemx_set_attr_uniqueid_args")?,
                initialize: library.function("nvshmemx_hostlib_init_attr")?,
                finalize: library.function("nvshmemx_hostlib_finalize")?,
                pe: library.function("nvshmem_my_pe")?,
                pe_count: library.function("nvshmem_n_pes")?,
                allocate: library.function("nvshmem_malloc")?,
                free: library.function("nvshmem_free")?,
                pointer: library.function("nvshmem_ptr")?,
                barrier: library.function("nvshmem_barrier_all")?,
                initialize_module: library.function("nvshmemx_cumodule_init")?,
                finalize_module: library.function("nvshmemx_cumodule_finalize")?,
            };
            (functions, version)
        };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: writes three integers.
        unsafe { get_version(&mut major, &mut minor, &mut patch) };
        let version = LibraryVersion { major: major as u32, minor: minor as u32, patch: patch as u32 };
        check_version(version, library.path())?;
        Ok(Self { opened: library, version, functions, device: OnceLock::new() })
    }

    /// Its version.
    pub fn version(&self) -> LibraryVersion {
        self.version
    }

    /// The file that was opened, or the name that the dynamic loader found it by.
    pub fn path(&self) -> &Path {
        self.opened.path()
    }

    /// The library of device code beside it, `libnvshmem_device.a`.
    ///
    /// # Errors
    /// [`CudaError::Library`] where there is none.
    pub fn device_library(&self) -> Result<&DeviceLibrary, CudaError> {
        let read = || {
            let file = self.opened.folder().unwrap_or_default().join("libnvshmem_device.a");
            DeviceLibrary::read(
                file,
                "NVSHMEM's device code (libnvshmem_device.a)",
                libraries::NVSHMEM.install,
            )
        };
        self.device.get_or_init(read).as_ref().map_err(Clone::clone)
    }

    /// A new id, on one rank, which thereby becomes the one that the others connect to.
    ///
    /// # Errors
    /// [`CudaError::Nvshmem`].
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = Id::new();
        // SAFETY: writes 128 bytes.
        self.check("nvshmemx_get_uniqueid", unsafe { (self.functions.unique_id)(&mut id) })?;
        UniqueId::from_bytes(&id.0)
    }

    /// Whether this process is a PE, made so by whatever caller.
    pub fn is_initialized(&self) -> bool {
        /// `NVSHMEM_STATUS_IS_INITIALIZED`; greater ones tell of GPUs that PEs share.
        const INITIALIZED: c_int = 2;
        // SAFETY: takes nothing.
        let status = unsafe { (self.functions.status)() };
        (INITIALIZED..c_int::MAX).contains(&status)
    }

    /// Makes this process PE `pe` of `count`, on the device of the context, which stays until the process ends. Collective.
    ///
    /// # Errors
    /// [`CudaError::Nvshmem`].
    pub fn initialize(
        &self,
        context: &Context,
        id: &UniqueId,
        pe: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        /// `NVSHMEMX_INIT_WITH_UNIQUEID`.
        const WITH_UNIQUE_ID: c_uint = 1 << 3;
        let (id, mut attributes) = (Id(id.to_bytes()), Attributes::new());
        // SAFETY: the id, of which the attributes keep the address, outlives them.
        let set = unsafe { (self.functions.set_id)(pe as c_int, count as c_int, &id, &mut attributes) };
        self.check("nvshmemx_set_attr_uniqueid_args", set)?;
        let _current = context.current()?;
        // SAFETY: the attributes have the layout that they name, and live.
        let made = unsafe { (self.functions.initialize)(WITH_UNIQUE_ID, &mut attributes) };
        self.check("nvshmemx_hostlib_init_attr", made)?;
        // A thread of the library reads pinned memory of the context for as long as the process lives.
        std::mem::forget(context.clone());
        Ok(())
    }

    /// Undoes [`initialize`](Self::initialize). Collective. No memory and no module of NVSHMEM's is in use.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the context is gone.
    pub fn finalize(&self, context: &Context) -> Result<(), CudaError> {
        let _current = context.current()?;
        // SAFETY: takes nothing.
        unsafe { (self.functions.finalize)() };
        Ok(())
    }

    /// This process's number among the PEs, and how many there are.
    pub fn pe(&self) -> (usize, usize) {
        // SAFETY: both take nothing.
        unsafe { ((self.functions.pe)() as usize, (self.functions.pe_count)() as usize) }
    }

    /// Allocates `bytes` bytes on every PE, at one offset of their heaps. Collective; all PEs ask for as many.
    ///
    /// # Errors
    /// [`CudaError::Nvshmem`] for a heap that is too small: `NVSHMEM_SYMMETRIC_SIZE` sets its size.
    pub fn allocate(&self, context: &Context, bytes: usize) -> Result<DevicePointer, CudaError> {
        let _current = context.current()?;
        // SAFETY: the library is initialised, or returns null.
        let memory = unsafe { (self.functions.allocate)(bytes) };
        match memory.is_null() {
            true => self.check("nvshmem_malloc", -1).map(|()| DevicePointer(0)),
            false => Ok(DevicePointer(memory.addr() as u64)),
        }
    }

    /// Gives memory back. Collective.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the context is gone.
    ///
    /// # Safety
    /// [`allocate`](Self::allocate) returned it, on every PE, and nothing uses it, on any PE.
    pub unsafe fn free(&self, context: &Context, memory: DevicePointer) -> Result<(), CudaError> {
        let _current = context.current()?;
        // SAFETY: passed on.
        unsafe { (self.functions.free)(memory.0 as *mut c_void) };
        Ok(())
    }

    /// Where this GPU reaches a symmetric address on another PE by its own loads and stores; `None` where it does not.
    pub fn peer_pointer(&self, memory: DevicePointer, pe: usize) -> Option<DevicePointer> {
        // SAFETY: reads tables of the library.
        let pointer = unsafe { (self.functions.pointer)(memory.0 as *const c_void, pe as c_int) };
        (!pointer.is_null()).then(|| DevicePointer(pointer.addr() as u64))
    }

    /// Waits for all PEs. Collective.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the context is gone.
    pub fn barrier(&self, context: &Context) -> Result<(), CudaError> {
        let _current = context.current()?;
        // SAFETY: takes nothing.
        unsafe { (self.functions.barrier)() };
        Ok(())
    }

    /// Tells the device code in a module, which was linked with [`device_library`](Self::device_library), of this PE: before its first
    /// kernel is launched, and once. It is undone when the module is unloaded.
    ///
    /// # Errors
    /// [`CudaError::Nvshmem`], for device code of another version, say.
    pub fn initialize_module(&'static self, module: &Module) -> Result<(), CudaError> {
        let _current = module.context().current()?;
        // SAFETY: the module is loaded.
        self.check("nvshmemx_cumodule_init", unsafe { (self.functions.initialize_module)(module.raw()) })?;
        module.keeps(self);
        Ok(())
    }

    /// Undoes [`initialize_module`](Self::initialize_module).
    ///
    /// # Safety
    /// The module is loaded, in the current context, and has no kernel under way.
    pub(super) unsafe fn finalize_module(&self, module: CUmodule) {
        // SAFETY: passed on. A failure leaves nothing to do.
        let _ = unsafe { (self.functions.finalize_module)(module) };
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            _ => Err(CudaError::Nvshmem { function, version: self.version, code }),
        }
    }
}

/// Refuses the versions whose device code was not tried.
fn check_version(found: LibraryVersion, path: &Path) -> Result<(), CudaError> {
    match found == Nvshmem::TESTED {
        true => Ok(()),
        false => Err(CudaError::UntestedNvshmem { found, tested: Nvshmem::TESTED, path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structures_are_those_of_the_headers() {
        let sizes = [size_of::<Attributes>(), size_of::<Arguments>(), size_of::<OfId>(), size_of::<Id>()];
        assert_eq!(sizes, [144, 128, 24, 128]);
        assert_eq!((offset_of!(Attributes, arguments), offset_of!(Arguments, of_id)), (16, 8));
    }

    #[test]
    fn other_versions_are_refused_with_the_numbers() {
        for (minor, patch) in [(3, 9), (4, 4), (4, 6), (5, 19)] {
            let found = LibraryVersion { major: 3, minor, patch };
            let error = check_version(found, Path::new("/opt/libnvshmem_host.so.3")).unwrap_err().to_string();
            let expected = format!(
                "NVSHMEM {found} at /opt/libnvshmem_host.so.3 was not tested, which version 3.4.5 was"
            );
            assert!(error.starts_with(&expected), "{error}");
        }
        check_version(Nvshmem::TESTED, Path::new("")).unwrap();
    }

    #[test]
    fn a_missing_library_is_named_with_what_to_install() {
        let folder = tempfile::tempdir().unwrap();
        let error = Nvshmem::open(folder.path()).unwrap_err().to_string();
        assert!(
            error.starts_with("no NVSHMEM (libnvshmem_host): `pip install nvidia-nvshmem-cu13`"),
            "{error}"
        );
    }

    #[test]
    fn another_library_is_refused_by_the_function_that_it_lacks() {
        let error = Nvshmem::open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no function nvshmemx_vendor_get_version_info"), "{error}");
    }
}
