//! Plain memory: on the device, and pinned on the host.

use std::{ffi::c_void, fmt, ptr::NonNull};

use antiphon_tensor::{DType, Device, TensorError, TensorView, TensorViewMut};
use cudarc::driver::sys;

use super::{Context, CudaError, StreamRef, driver::call};

/// An address that a device uses. Unified addressing: device memory, mapped peers' memory and pinned host memory
/// never share one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePointer(pub u64);

impl DevicePointer {
    /// The address `bytes` bytes behind this one.
    #[inline]
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Debug for DevicePointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePointer({:#x})", self.0)
    }
}

/// Bytes of device memory for one process; freed on drop. For memory that peers map, see
/// [`Allocation`](super::Allocation).
///
/// The safe methods wait until the data is there. Kernels and the asynchronous functions of this module use it
/// through its [`pointer`](Self::pointer) and are unsafe.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    pointer: DevicePointer,
    len: usize,
}

impl DeviceMemory {
    /// Allocates `len` bytes, more than 0, whose values are unspecified.
    ///
    /// # Errors
    /// [`CudaError::Call`]; [`is_out_of_memory`](CudaError::is_out_of_memory) tells the usual one.
    pub fn allocate(context: &Context, len: usize) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let mut pointer = 0;
        // SAFETY: writes one address; the memory is freed in drop.
        unsafe { call!(cuMemAlloc_v2(&mut pointer, len)) }?;
        Ok(Self { context: context.clone(), pointer: DevicePointer(pointer), len })
    }

    /// The address of the first byte.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty: the driver refuses to allocate nothing
    pub fn len(&self) -> usize {
        self.len
    }

    /// The tensor of this dtype and shape, row-major, that begins with the memory. Its elements are what the memory holds when
    /// a kernel uses them.
    ///
    /// # Errors
    /// [`TensorError::MemoryTooSmall`]; those of [`Shape::new`](antiphon_tensor::Shape::new).
    pub fn view(&self, dtype: DType, shape: &[usize]) -> Result<TensorView<'_>, TensorError> {
        let at = self.pointer.0 as usize as *const u8;
        // SAFETY: the memory lives as long as the view, which the host does not read; its size is checked below.
        let view = unsafe { TensorView::from_raw_parts(at, dtype, shape, None, self.device()) }?;
        self.check_size(shape, view.num_bytes()).map(|()| view)
    }

    /// As [`view`](Self::view), for a kernel that writes.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_mut(&mut self, dtype: DType, shape: &[usize]) -> Result<TensorViewMut<'_>, TensorError> {
        let at = self.pointer.0 as usize as *mut u8;
        // SAFETY: as in `view`; no other view of the memory exists as long as this one.
        let view = unsafe { TensorViewMut::from_raw_parts(at, dtype, shape, None, self.device()) }?;
        self.check_size(shape, view.num_bytes()).map(|()| view)
    }

    fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal())
    }

    fn check_size(&self, shape: &[usize], needed: usize) -> Result<(), TensorError> {
        match needed <= self.len {
            true => Ok(()),
            false => Err(TensorError::MemoryTooSmall { shape: shape.to_vec(), needed, len: self.len }),
        }
    }

    /// Copies `bytes` to `offset`, in the stream's order, and waits.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`]; [`CudaError::Call`].
    pub fn write<'a>(
        &self,
        stream: impl Into<StreamRef<'a>>,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        check_range(offset, bytes.len(), self.len)?;
        let (stream, to) = (stream.into(), self.pointer.offset(offset as u64));
        // SAFETY: the range lies in this memory, and `bytes` lives until the wait is over.
        unsafe { copy_to_device(stream, to, bytes.as_ptr(), bytes.len()) }?;
        stream.synchronize()
    }

    /// Copies from `offset` into `bytes`, in the stream's order, and waits.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`]; [`CudaError::Call`].
    pub fn read<'a>(
        &self,
        stream: impl Into<StreamRef<'a>>,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), CudaError> {
        check_range(offset, bytes.len(), self.len)?;
        let (stream, from) = (stream.into(), self.pointer.offset(offset as u64));
        // SAFETY: the range lies in this memory, and `bytes` lives until the wait is over.
        unsafe { copy_to_host(stream, bytes.as_mut_ptr(), from, bytes.len()) }?;
        stream.synchronize()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _current = self.context.current();
        // SAFETY: allocated in `allocate` and freed once; the driver waits for work that uses it.
        let _ = unsafe { call!(cuMemFree_v2(self.pointer.0)) };
    }
}

/// Zeroed host memory that devices reach at any time, and that copies at full speed; freed on drop.
///
/// The reports that kernels write while they run ([`WaitReport`](super::WaitReport)) are in such memory.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Context,
    host: NonNull<u8>,
    pointer: DevicePointer,
    len: usize,
}

// SAFETY: the memory is plain and lives as long as the value, and is not tied to a thread. Access goes through raw
// pointers, whose users answer for synchronisation.
unsafe impl Send for PinnedMemory {}
// SAFETY: as for Send: `&PinnedMemory` only hands out addresses.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `len` zeroed bytes, more than 0, that every device of the process can use.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn allocate(context: &Context, len: usize) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let mut host: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address; the memory is freed in drop.
        unsafe { call!(cuMemHostAlloc(&mut host, len, flags)) }?;
        let host = NonNull::new(host.cast::<u8>()).expect("cuMemHostAlloc does not return null on success");
        let mut memory = Self { context: context.clone(), host, pointer: DevicePointer(0), len };
        // SAFETY: the memory is `len` bytes long, and no other code has its address yet.
        unsafe { host.write_bytes(0, len) };
        // SAFETY: writes one address; the memory was allocated to be mapped.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&mut memory.pointer.0, host.as_ptr().cast(), 0)) }?;
        Ok(memory)
    }

    /// The first byte for the CPU. Valid for [`len`](Self::len) bytes as long as the value lives.
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// The address of the first byte for devices.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty: the driver refuses to allocate nothing
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _current = self.context.current();
        // SAFETY: allocated in `allocate` and freed once; users of its addresses borrow from owners of this value.
        let _ = unsafe { call!(cuMemFreeHost(self.host.as_ptr().cast())) };
    }
}

/// Copies from the host to a device in the stream's order.
///
/// # Errors
/// [`CudaError::Call`].
///
/// # Safety
/// Both ranges are valid for `len` bytes until the copy is done; from memory that is not pinned the driver may have
/// read them before this returns, or not.
pub unsafe fn copy_to_device(
    stream: StreamRef<'_>,
    to: DevicePointer,
    from: *const u8,
    len: usize,
) -> Result<(), CudaError> {
    let _current = stream.context().current()?;
    // SAFETY: passed on to the caller.
    unsafe { call!(cuMemcpyHtoDAsync_v2(to.0, from.cast(), len, stream.raw())) }
}

/// Copies from a device to the host in the stream's order.
///
/// # Errors
/// [`CudaError::Call`].
///
/// # Safety
/// Both ranges are valid for `len` bytes until the copy is done, and no other code uses the destination until then.
pub unsafe fn copy_to_host(
    stream: StreamRef<'_>,
    to: *mut u8,
    from: DevicePointer,
    len: usize,
) -> Result<(), CudaError> {
    let _current = stream.context().current()?;
    // SAFETY: passed on to the caller.
    unsafe { call!(cuMemcpyDtoHAsync_v2(to.cast(), from.0, len, stream.raw())) }
}

/// Copies between devices, or within one, in the stream's order: by a copy engine over NVLink where there is one.
///
/// # Errors
/// [`CudaError::Call`].
///
/// # Safety
/// Both ranges are valid for `len` bytes until the copy is done, and do not overlap.
pub unsafe fn copy(
    stream: StreamRef<'_>,
    to: DevicePointer,
    from: DevicePointer,
    len: usize,
) -> Result<(), CudaError> {
    let _current = stream.context().current()?;
    // SAFETY: passed on to the caller.
    unsafe { call!(cuMemcpyDtoDAsync_v2(to.0, from.0, len, stream.raw())) }
}

/// Writes a word of 64 bits in the stream's order: all that the stream did before is visible, in the whole system, to whoever sees the word.
///
/// # Errors
/// [`CudaError::Call`], also where streams cannot write memory ([`DeviceProperties::stream_writes`](super::DeviceProperties::stream_writes)).
///
/// # Safety
/// The word is valid until it is written, and lies at a multiple of 8 bytes. Other code reads it by strong loads alone.
pub unsafe fn write_word(stream: StreamRef<'_>, to: DevicePointer, value: u64) -> Result<(), CudaError> {
    const WITH_A_FENCE: u32 = 0; // CU_STREAM_WRITE_VALUE_DEFAULT
    let _current = stream.context().current()?;
    // SAFETY: passed on to the caller.
    unsafe { call!(cuStreamWriteValue64_v2(stream.raw(), to.0, value, WITH_A_FENCE)) }
}

/// Sets `len` bytes to `value` in the stream's order.
///
/// # Errors
/// [`CudaError::Call`].
///
/// # Safety
/// The range is valid until the fill is done.
pub unsafe fn fill(stream: StreamRef<'_>, to: DevicePointer, value: u8, len: usize) -> Result<(), CudaError> {
    let _current = stream.context().current()?;
    // SAFETY: passed on to the caller.
    unsafe { call!(cuMemsetD8Async(to.0, value, len, stream.raw())) }
}

/// Sets `count` words of 32 bits to `value` in the stream's order; `to` is a multiple of 4.
///
/// # Errors
/// [`CudaError::Call`].
///
/// # Safety
/// The range is valid until the fill is done.
pub unsafe fn fill_words(
    stream: StreamRef<'_>,
    to: DevicePointer,
    value: u32,
    count: usize,
) -> Result<(), CudaError> {
    let _current = stream.context().current()?;
    // SAFETY: passed on to the caller.
    unsafe { call!(cuMemsetD32Async(to.0, value, count, stream.raw())) }
}

fn check_range(offset: usize, len: usize, size: usize) -> Result<(), CudaError> {
    match offset.checked_add(len).is_some_and(|end| end <= size) {
        true => Ok(()),
        false => Err(CudaError::OutOfBounds { offset, len, size }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_beyond_the_memory_is_refused_with_its_numbers() {
        assert!(check_range(0, 8, 8).is_ok() && check_range(8, 0, 8).is_ok());
        let error = check_range(4, 5, 8).unwrap_err().to_string();
        assert_eq!(error, "5 bytes at offset 4 do not lie in memory of 8 bytes");
        assert!(check_range(usize::MAX, 2, 8).is_err());
    }
}
