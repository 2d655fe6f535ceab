//! Memory that other processes map: created, exported as a file descriptor, imported, mapped.
//!
//! An [`Allocation`] is physical memory without an address; a [`Mapping`] gives it one. The descriptor travels over a
//! Unix socket like the memfd of the host backend, and like there nothing has a name: the memory is gone with its last
//! handle, mapping and descriptor, also when processes are killed.
//!
//! ```no_run
//! use antiphon_device::cuda::{Allocation, Context, Driver};
//! use std::os::fd::AsFd;
//!
//! let context = Context::primary(Driver::load()?.device(0)?)?;
//! let mine = Allocation::create(&context, 1 << 20)?;
//! let descriptor = mine.export()?; // sent to a peer, which does the rest:
//! let theirs = Allocation::import(&context, descriptor.as_fd(), mine.len())?;
//! let mapping = theirs.map(&[context.device()])?;
//! assert_eq!(mapping.len() % Allocation::granularity(&context)?, 0);
//! # Ok::<(), antiphon_device::cuda::CudaError>(())
//! ```

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use cudarc::driver::sys::{
    self, CUmemAllocationGranularity_flags as Granularity, CUmemAllocationHandleType as HandleType,
    CUmemLocation, CUmemLocationType as LocationType,
};

use super::{Context, CudaError, Device, DevicePointer, driver::call};

pub(super) const POSIX_FD: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
pub(super) const FABRIC: HandleType = HandleType::CU_MEM_HANDLE_TYPE_FABRIC;
pub(super) const PRIVATE: HandleType = HandleType::CU_MEM_HANDLE_TYPE_NONE;

/// Physical device memory without an address; released on drop, unless mapped or exported elsewhere.
#[derive(Debug)]
pub struct Allocation {
    context: Context,
    handle: sys::CUmemGenericAllocationHandle,
    len: usize,
}

impl Allocation {
    /// The size of every allocation of this device is a multiple of this: the recommended granularity, usually 2 MiB.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn granularity(context: &Context) -> Result<usize, CudaError> {
        granularity(&properties(context.device(), POSIX_FD)?)
    }

    /// Creates at least `len` bytes on the context's device, rounded up to the [granularity](Self::granularity);
    /// [`len`](Self::len) says how many there are. Their values are unspecified.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when the device's memory cannot be handed over as a descriptor;
    /// [`CudaError::Call`].
    pub fn create(context: &Context, len: usize) -> Result<Self, CudaError> {
        let device = context.device();
        let abilities = device.properties()?;
        if !(abilities.virtual_memory && abilities.posix_fd_handles) {
            let what = "memory that is handed over as a file descriptor (VMM with POSIX handles)";
            return Err(CudaError::Unsupported { device: device.ordinal(), what });
        }
        Self::create_for(context, len, POSIX_FD)
    }

    /// As [`create`](Self::create), for memory that is shared in another way, or not at all.
    pub(super) fn create_for(context: &Context, len: usize, way: HandleType) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let properties = properties(context.device(), way)?;
        let len = len.max(1).next_multiple_of(granularity(&properties)?);
        let mut handle = 0;
        // SAFETY: writes one handle, which is released in drop.
        unsafe { call!(cuMemCreate(&mut handle, len, &properties, 0)) }?;
        Ok(Self { context: context.clone(), handle, len })
    }

    /// Takes a handle on memory of `len` bytes that another process [exported](Self::export). The descriptor can be
    /// closed afterwards. `context` is of the device that is going to use the memory, not of the one that has it.
    ///
    /// # Errors
    /// [`CudaError::Call`] when the descriptor is not of device memory. That `len` is right shows in
    /// [`map`](Self::map).
    pub fn import(context: &Context, descriptor: BorrowedFd<'_>, len: usize) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let mut handle = 0;
        // For this type the pointer is the descriptor itself; the driver takes descriptor 0 for a null pointer.
        let duplicate = (descriptor.as_raw_fd() == 0).then(|| descriptor.try_clone_to_owned());
        let descriptor = match &duplicate {
            Some(Ok(duplicate)) => duplicate.as_raw_fd(),
            _ => descriptor.as_raw_fd(),
        };
        let pointer = descriptor as usize as *mut c_void;
        // SAFETY: writes one handle, which is released in drop; the descriptor is open during the call.
        unsafe { call!(cuMemImportFromShareableHandle(&mut handle, pointer, POSIX_FD)) }?;
        Ok(Self { context: context.clone(), handle, len })
    }

    /// A handle on the memory of `len` bytes that is mapped at a pointer, by any library: PyTorch's expandable segments
    /// are mapped like this. It can be exported if it was created to be.
    ///
    /// # Errors
    /// [`CudaError::Call`] when the memory is not of this kind.
    pub fn retain(context: &Context, pointer: DevicePointer, len: usize) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let mut handle = 0;
        // SAFETY: writes one handle, which is released in drop; the driver looks the address up in its tables.
        unsafe { call!(cuMemRetainAllocationHandle(&mut handle, pointer.0 as usize as *mut c_void)) }?;
        Ok(Self { context: context.clone(), handle, len })
    }

    /// A new descriptor of the memory, to be sent to a peer; it keeps the memory alive. Not inherited by programs
    /// that this process starts.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let _current = self.context.current()?;
        let mut descriptor: RawFd = -1;
        let to: *mut RawFd = &mut descriptor;
        // SAFETY: for this type one descriptor is written.
        unsafe { call!(cuMemExportToShareableHandle(to.cast(), self.handle, POSIX_FD, 0)) }?;
        // SAFETY: the driver has just opened it for us.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // At worst a child inherits it, and keeps memory alive a little longer.
        let _ = rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC);
        Ok(descriptor)
    }

    /// Whether the driver gives a handle that other machines of the NVLink domain can import. Only asked, to tell
    /// what a machine can do.
    pub(super) fn try_export_fabric(&self) -> Result<(), CudaError> {
        let _current = self.context.current()?;
        let mut handle = sys::CUmemFabricHandle { data: [0; 64] };
        let to: *mut sys::CUmemFabricHandle = &mut handle;
        // SAFETY: for this type 64 bytes are written. They own nothing.
        unsafe { call!(cuMemExportToShareableHandle(to.cast(), self.handle, FABRIC, 0)) }
    }

    /// Size in bytes, a multiple of the granularity.
    #[allow(clippy::len_without_is_empty)] // never empty: a creation is rounded up
    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives the memory an address that these devices can load from and store to.
    ///
    /// # Errors
    /// [`CudaError::Call`], for instance when a device has no link to the memory's, or when an imported memory's
    /// length was wrong.
    pub fn map(self, devices: &[Device]) -> Result<Mapping, CudaError> {
        let context = self.context.clone();
        let reservation = {
            let _current = context.current()?;
            Reservation::new(self.len)?
        };
        let mut mapping = Mapping { allocation: None, reservation, devices: devices.to_vec(), context };
        mapping.restore(self)?;
        Ok(mapping)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _current = self.context.current();
        // SAFETY: every constructor makes one handle, which is released once.
        let _ = unsafe { call!(cuMemRelease(self.handle)) };
    }
}

/// Memory at an address; unmapped on drop, for which all work that uses it must be done.
///
/// The memory can be [released](Self::release) and other memory [put in its place](Self::restore), under the same address: what
/// was captured in a graph continues to work.
#[derive(Debug)]
pub struct Mapping {
    /// None while the memory is released.
    allocation: Option<Allocation>,
    reservation: Reservation,
    /// The devices that have access.
    devices: Vec<Device>,
    context: Context,
}

impl Mapping {
    /// The address of the first byte, the same for every device that has access.
    pub fn pointer(&self) -> DevicePointer {
        self.reservation.pointer
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty, as the allocation
    pub fn len(&self) -> usize {
        self.reservation.len
    }

    /// The memory, to export it; none while it is [released](Self::release).
    pub fn allocation(&self) -> Option<&Allocation> {
        self.allocation.as_ref()
    }

    /// Gives the memory back, and keeps the address, at which nothing may be used until [`restore`](Self::restore). All work that
    /// uses the memory must be done. A mapping whose memory is released stays as it is.
    ///
    /// # Errors
    /// [`CudaError::Call`]: the memory is still there.
    pub fn release(&mut self) -> Result<(), CudaError> {
        if self.allocation.is_none() {
            return Ok(());
        }
        let _current = self.context.current()?;
        // SAFETY: mapped in `restore` over the whole range.
        unsafe { call!(cuMemUnmap(self.reservation.pointer.0, self.reservation.len)) }?;
        self.allocation = None;
        Ok(())
    }

    /// Puts memory at the address, in place of what was [released](Self::release).
    ///
    /// # Errors
    /// [`CudaError::Call`], for which the address stays without memory.
    ///
    /// # Panics
    /// If the mapping has memory, or the allocation is of another length.
    pub fn restore(&mut self, allocation: Allocation) -> Result<(), CudaError> {
        let (pointer, len) = (self.reservation.pointer.0, self.reservation.len);
        assert!(self.allocation.is_none(), "a mapping of {len} bytes has its memory");
        assert_eq!(allocation.len, len, "bytes of the allocation and of the mapping");
        let context = self.context.clone();
        let _current = context.current()?;
        // SAFETY: the reserved range is as long as the memory, and nothing is mapped there.
        unsafe { call!(cuMemMap(pointer, len, 0, allocation.handle, 0)) }?;
        self.allocation = Some(allocation);
        let access: Vec<sys::CUmemAccessDesc> = self.devices.iter().map(|&device| access(device)).collect();
        // SAFETY: the whole range is mapped; reads `access.len()` descriptions.
        let accessible = unsafe { call!(cuMemSetAccess(pointer, len, access.as_ptr(), access.len())) };
        accessible.inspect_err(|_| _ = self.release())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// A range of addresses.
#[derive(Debug)]
struct Reservation {
    pointer: DevicePointer,
    len: usize,
}

impl Reservation {
    fn new(len: usize) -> Result<Self, CudaError> {
        let mut pointer = 0;
        // SAFETY: writes one address, of a range that is freed in drop.
        unsafe { call!(cuMemAddressReserve(&mut pointer, len, 0, 0, 0)) }?;
        Ok(Self { pointer: DevicePointer(pointer), len })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved in `new`, freed once, and nothing is mapped there any more.
        let _ = unsafe { call!(cuMemAddressFree(self.pointer.0, self.len)) };
    }
}

fn access(device: Device) -> sys::CUmemAccessDesc {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    sys::CUmemAccessDesc { location: location(device), flags }
}

fn location(device: Device) -> CUmemLocation {
    CUmemLocation { type_: LocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.raw() }
}

fn properties(device: Device, way: HandleType) -> Result<sys::CUmemAllocationProp, CudaError> {
    Ok(sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: way,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            // So that an engine can register the memory with a network card.
            gpuDirectRDMACapable: device.has_rdma_virtual_memory()?.into(),
            usage: 0,
            reserved: [0; 4],
        },
    })
}

fn granularity(properties: &sys::CUmemAllocationProp) -> Result<usize, CudaError> {
    let mut bytes = 0;
    let which = Granularity::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: writes one size.
    unsafe { call!(cuMemGetAllocationGranularity(&mut bytes, properties, which)) }?;
    Ok(bytes)
}
