//! Streams: queues of work on one device.

use std::{
    fmt, ptr,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    Context, CudaError, CudaVersion, Event,
    driver::{call, check},
};

/// A stream of our own. A clone is the same stream, which is destroyed with the last clone; work already in it still completes.
#[derive(Debug, Clone)]
pub struct Stream(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    context: Context,
    raw: sys::CUstream,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as for Send: the driver locks for itself.
unsafe impl Sync for Handle {}

impl Stream {
    /// A stream that does not wait for the legacy default stream, nor makes it wait.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_priority(context, 0)
    }

    /// As [`new`](Self::new), but where blocks of several streams want room on the device, those of the stream with the lowest
    /// number come first. The usual one is 0; the driver takes the nearest of those that the device has (0 to -5 on an H200).
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn with_priority(context: &Context, priority: i32) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle; the stream is destroyed in drop.
        unsafe { call!(cuStreamCreateWithPriority(&mut raw, flags, priority)) }?;
        Ok(Self(Arc::new(Handle { context: context.clone(), raw })))
    }

    /// The stream as every operation takes it.
    #[inline]
    pub fn borrow(&self) -> StreamRef<'_> {
        StreamRef { context: &self.0.context, raw: self.0.raw, owner: Some(self) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created in `Stream::new` and destroyed once. An error leaves nothing to do.
        let _ = unsafe { call!(cuStreamDestroy_v2(self.raw)) };
    }
}

/// A stream, ours or a framework's, for as long as it is used. Three words, copied freely.
#[derive(Clone, Copy)]
pub struct StreamRef<'a> {
    context: &'a Context,
    raw: sys::CUstream,
    /// None for a framework's.
    owner: Option<&'a Stream>,
}

impl<'a> StreamRef<'a> {
    #[inline]
    pub(super) fn borrowed(context: &'a Context, raw: sys::CUstream) -> Self {
        Self { context, raw, owner: None }
    }

    /// The stream itself, of which a clone keeps it from being destroyed; none for a framework's.
    pub fn owner(&self) -> Option<&'a Stream> {
        self.owner
    }

    /// The context it belongs to.
    #[inline]
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// The driver's handle, as frameworks exchange it.
    pub fn as_raw(&self) -> usize {
        self.raw as usize
    }

    #[inline]
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Whether what is submitted now goes into a graph instead of running.
    ///
    /// # Errors
    /// [`CudaError::Call`]; for the legacy default stream also while another, blocking stream captures.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        let _current = self.context.current()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; writes one status.
        unsafe { call!(cuStreamIsCapturing(self.raw, &mut status)) }?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Which capture the stream is in, by a number that no other capture of the process has; none where what is submitted
    /// runs.
    ///
    /// # Errors
    /// As [`is_capturing`](Self::is_capturing).
    pub fn capture(&self) -> Result<Option<u64>, CudaError> {
        if !self.is_capturing()? {
            return Ok(None);
        }
        let _current = self.context.current()?;
        let (mut status, mut number) = (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        let (graph, nodes, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let info = capture_info(self.context)?;
        // SAFETY: the stream lives; writes the status and the number, and nothing where it is given null.
        let code = unsafe { info(self.raw, &mut status, &mut number, graph, nodes, count) };
        check("cuStreamGetCaptureInfo", code)?;
        Ok(Some(number))
    }

    /// A number that no other stream of the process has had or will have; unlike the handle, which a new stream may get from one
    /// that was destroyed. The default stream of each thread has its own.
    ///
    /// A stream that is being captured has another number meanwhile, which no other stream of its capture has: the driver tells the first
    /// one of no such stream, and ends the capture if it is asked.
    ///
    /// # Errors
    /// As [`is_capturing`](Self::is_capturing).
    #[inline]
    pub fn id(&self) -> Result<u64, CudaError> {
        // Numbers count streams, and handles are addresses of the lower half.
        const IN_CAPTURE: u64 = 1 << 63;
        if self.is_capturing()? {
            return Ok(IN_CAPTURE | self.raw as u64);
        }
        let _current = self.context.current()?;
        let mut id = 0;
        // SAFETY: the stream lives; writes one number.
        unsafe { call!(cuStreamGetId(self.raw, &mut id)) }?;
        Ok(id)
    }

    /// How many multiprocessors the stream's kernels may use: those of its green context, or all that the context has.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn multiprocessors(&self) -> Result<u32, CudaError> {
        let of_context = self.context.multiprocessors()?;
        if !self.context.device().driver().supports(CudaVersion::new(12, 5)) {
            return Ok(of_context);
        }
        let _current = self.context.current()?;
        let mut green = ptr::null_mut();
        // SAFETY: the stream lives; writes one handle, or null.
        unsafe { call!(cuStreamGetGreenCtx(self.raw, &mut green)) }?;
        if green.is_null() {
            return Ok(of_context);
        }
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: plain data, all of whose bits may be 0.
        let mut resource: sys::CUdevResource = unsafe { std::mem::zeroed() };
        // SAFETY: the green context lives as long as its stream; writes one resource.
        unsafe { call!(cuGreenCtxGetDevResource(green, &mut resource, kind)) }?;
        // SAFETY: the driver was asked for multiprocessors.
        Ok(of_context.min(unsafe { resource.__bindgen_anon_1.sm.smCount }))
    }

    /// Whether all work submitted so far is done.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what went wrong in the work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _current = self.context.current()?;
        // SAFETY: the stream lives.
        ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) })
    }

    /// Waits for all work submitted so far, without a deadline: for work that has one itself.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what went wrong in the work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.context.current()?;
        // SAFETY: the stream lives.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }

    /// Waits for all work submitted so far, for `limit` at most.
    ///
    /// # Errors
    /// [`CudaError::Deadline`], with the work still running; [`CudaError::Call`] with the work's own error.
    pub fn synchronize_within(&self, limit: Duration) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.is_done()? {
            let waited = start.elapsed();
            if waited > limit {
                return Err(CudaError::Deadline { what: "the work in a stream", waited });
            }
            // A wait of more than a few microseconds should leave the core to other threads.
            if waited > Duration::from_micros(50) {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        Ok(())
    }

    /// Makes what is submitted from now on wait for an event, which may be another stream's or another device's.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.wait_with(event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
    }

    /// As [`wait`](Self::wait), but where the stream is being captured the event stays outside the graph: every
    /// launch of the graph waits for its latest record.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait_external(&self, event: &Event) -> Result<(), CudaError> {
        self.wait_with(event, sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL)
    }

    fn wait_with(&self, event: &Event, flags: sys::CUevent_wait_flags) -> Result<(), CudaError> {
        let _current = self.context.current()?;
        // SAFETY: the stream and the event live.
        unsafe { call!(cuStreamWaitEvent(self.raw, event.raw(), flags as u32)) }
    }
}

impl<'a> From<&'a Stream> for StreamRef<'a> {
    #[inline]
    fn from(stream: &'a Stream) -> Self {
        stream.borrow()
    }
}

impl fmt::Debug for StreamRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamRef({:#x} on {})", self.as_raw(), self.context.device())
    }
}

/// Tells "not yet" from the failures of a query.
pub(super) fn ready(function: &'static str, code: sys::CUresult) -> Result<bool, CudaError> {
    match code {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(function, code).map(|()| true),
    }
}

/// cuStreamGetCaptureInfo as it is since CUDA 11.3: the newer one came with 12.3, and the bindings have that alone.
type CaptureInfo = unsafe extern "C" fn(
    sys::CUstream,
    *mut sys::CUstreamCaptureStatus,
    *mut u64,
    *mut sys::CUgraph,
    *mut *const sys::CUgraphNode,
    *mut usize,
) -> sys::CUresult;

fn capture_info(context: &Context) -> Result<CaptureInfo, CudaError> {
    static FOUND: OnceLock<CaptureInfo> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(*found);
    }
    let mut function = ptr::null_mut();
    let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
    let name = c"cuStreamGetCaptureInfo".as_ptr();
    // SAFETY: writes one pointer and one status.
    unsafe { call!(cuGetProcAddress_v2(name, &mut function, 11_030, 0, &mut status)) }?;
    if function.is_null() {
        return Err(CudaError::DriverTooOld {
            what: "the number of a capture",
            needed: CudaVersion::new(11, 3),
            found: context.device().driver().version(),
        });
    }
    // SAFETY: the function with this name and version has this type; the driver is never closed.
    let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, CaptureInfo>(function) };
    Ok(*FOUND.get_or_init(|| function))
}
