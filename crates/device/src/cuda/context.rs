//! A device's context, and making it current.

use std::{marker::PhantomData, ptr, sync::Arc};

use cudarc::driver::sys;

use super::{CudaError, Device, Stream, StreamRef, driver::call};

/// A device's primary context: the one that PyTorch and the CUDA runtime use too, so that memory, streams and events
/// are shared with them. Cloning shares it; it is released with the last clone.
#[derive(Debug, Clone)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    device: Device,
    raw: sys::CUcontext,
}

// SAFETY: a context may be used from any thread; which is current is a matter of each thread.
unsafe impl Send for Retained {}
// SAFETY: as for Send: the driver locks for itself.
unsafe impl Sync for Retained {}

/// A device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes that are not allocated.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

impl Context {
    /// The primary context of a device, which is initialised at its first use in this process.
    ///
    /// # Errors
    /// [`CudaError::Call`], for instance when the device is in exclusive use by another process.
    pub fn primary(device: Device) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; the retained context is released in drop.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut raw, device.raw())) }?;
        Ok(Self(Arc::new(Retained { device, raw })))
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// How much of the device's memory there is, and is free, for all processes that use it.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn memory(&self) -> Result<MemoryUse, CudaError> {
        let _current = self.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(MemoryUse { free_bytes: free as u64, total_bytes: total as u64 })
    }

    /// Makes the context current in this thread until the result is dropped, which restores what was current before.
    /// Where it is current already, as in a thread of PyTorch's, this is one look and no change.
    ///
    /// Every method of this module does this itself; callers need it only for calls of their own.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[inline]
    pub fn current(&self) -> Result<Current<'_>, CudaError> {
        let mut current = ptr::null_mut();
        // SAFETY: writes one handle, null if none is current.
        unsafe { call!(cuCtxGetCurrent(&mut current)) }?;
        let pushed = current != self.0.raw;
        if pushed {
            // SAFETY: the context is retained by `self`, which outlives the guard that pops it.
            unsafe { call!(cuCtxPushCurrent_v2(self.0.raw)) }?;
        }
        Ok(Current { pushed, context: PhantomData })
    }

    /// Waits for all work of the context, of every stream and every library. For shutting down; never on a hot path.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what went wrong in any of the work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.current()?;
        // SAFETY: the context is current.
        unsafe { call!(cuCtxSynchronize()) }
    }

    /// How many multiprocessors the context's kernels may use: all that the device has, or fewer where its owner (an MPS server,
    /// say) has limited them.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn multiprocessors(&self) -> Result<u32, CudaError> {
        let all = self.device().multiprocessors()?;
        let _current = self.current()?;
        let kind = sys::CUexecAffinityType::CU_EXEC_AFFINITY_TYPE_SM_COUNT;
        // SAFETY: plain data, all of whose bits may be 0.
        let mut affinity: sys::CUexecAffinityParam = unsafe { std::mem::zeroed() };
        // SAFETY: writes one parameter. A device that knows no such limits refuses, and then there is none.
        match unsafe { call!(cuCtxGetExecAffinity(&mut affinity, kind)) } {
            // SAFETY: the driver was asked for this one.
            Ok(()) => Ok(all.min(unsafe { affinity.param.smCount.val })),
            Err(_) => Ok(all),
        }
    }

    /// Lets this context's kernels use memory that `peer` allocated with [`DeviceMemory`](super::DeviceMemory).
    /// Memory mapped by [`Allocation::map`](super::Allocation::map) does not need it. Enabling twice is harmless.
    ///
    /// # Errors
    /// [`CudaError::Call`] when the devices have no link.
    pub fn enable_peer_access(&self, peer: &Context) -> Result<(), CudaError> {
        if self.device() == peer.device() {
            return Ok(());
        }
        let _current = self.current()?;
        // SAFETY: both contexts are retained.
        let enabled = unsafe { call!(cuCtxEnablePeerAccess(peer.0.raw, 0)) };
        const ALREADY: u32 = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as u32;
        match enabled {
            Err(CudaError::Call { code: ALREADY, .. }) => Ok(()),
            other => other,
        }
    }

    /// A new stream of this context. See [`Stream::new`].
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn stream(&self) -> Result<Stream, CudaError> {
        Stream::new(self)
    }

    /// A stream of another library, given as an integer such as `torch.cuda.current_stream().cuda_stream`; 0 is
    /// the legacy default stream. Costs nothing: made anew for every call.
    ///
    /// # Safety
    /// `raw` is 0, 1, 2 (the default streams by their fixed handles) or a stream of this context that lives as long
    /// as the result is used.
    #[inline]
    pub unsafe fn borrow_stream(&self, raw: usize) -> StreamRef<'_> {
        StreamRef::borrowed(self, raw as sys::CUstream)
    }
}

impl PartialEq for Context {
    /// Whether both are the same context of the driver's.
    fn eq(&self, other: &Self) -> bool {
        self.0.raw == other.0.raw
    }
}

impl Eq for Context {}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained once in `primary`. An error (the driver is shutting down) leaves nothing to do.
        let _ = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.device.raw())) };
    }
}

/// A context that is current in this thread; see [`Context::current`].
#[derive(Debug)]
#[must_use = "the context is current only as long as this lives"]
pub struct Current<'a> {
    pushed: bool,
    // Not Send: it must be dropped in the thread whose stack it changed.
    context: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Current<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: pops what `current` pushed in this thread; guards are dropped in the reverse of their order.
            let _ = unsafe { call!(cuCtxPopCurrent_v2(&mut popped)) };
        }
    }
}
