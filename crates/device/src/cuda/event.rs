//! Events: points in a stream.

use std::{ptr, time::Duration};

use cudarc::driver::sys;

use super::{Context, CudaError, CudaVersion, StreamRef, driver::call, stream::ready};

/// A point in a stream that others wait for, or that says when it was passed; destroyed on drop.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: sys::CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as for Send: the driver locks for itself.
unsafe impl Sync for Event {}

impl Event {
    /// An event for ordering work: the cheap kind, without a time.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that notes when it was passed.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn with_time(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Context, flags: sys::CUevent_flags) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; the event is destroyed in drop.
        unsafe { call!(cuEventCreate(&mut raw, flags as u32)) }?;
        Ok(Self { context: context.clone(), raw })
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Puts the event behind all work submitted to the stream so far, instead of wherever it was.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn record<'a>(&self, stream: impl Into<StreamRef<'a>>) -> Result<(), CudaError> {
        self.record_with(stream.into(), sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT)
    }

    /// As [`record`](Self::record), but where the stream is being captured the event stays outside the graph: every
    /// launch of the graph records it.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn record_external<'a>(&self, stream: impl Into<StreamRef<'a>>) -> Result<(), CudaError> {
        self.record_with(stream.into(), sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL)
    }

    fn record_with(&self, stream: StreamRef<'_>, flags: sys::CUevent_record_flags) -> Result<(), CudaError> {
        let _current = stream.context().current()?;
        // SAFETY: the event and the stream live.
        unsafe { call!(cuEventRecordWithFlags(self.raw, stream.raw(), flags as u32)) }
    }

    /// Whether the event was passed, or never recorded.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what went wrong in the work before it.
    pub fn is_passed(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        ready("cuEventQuery", unsafe { sys::cuEventQuery(self.raw) })
    }

    /// Waits until the event is passed, without a deadline: for work that has one itself.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what went wrong in the work before it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        unsafe { call!(cuEventSynchronize(self.raw)) }
    }

    /// How long after `start` this event was passed. Both are events [with a time](Self::with_time) that were passed;
    /// the resolution is about half a microsecond.
    ///
    /// # Errors
    /// [`CudaError::Call`] when one was not passed yet, or lacks a time; [`CudaError::DriverTooOld`] below CUDA 12.8.
    pub fn elapsed_since(&self, start: &Event) -> Result<Duration, CudaError> {
        let driver = self.context.device().driver();
        driver.require(CudaVersion::new(12, 8), "timing between events")?;
        let mut milliseconds = 0f32;
        // SAFETY: both events live; writes one float.
        unsafe { call!(cuEventElapsedTime_v2(&mut milliseconds, start.raw, self.raw)) }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `with_flags` and destroyed once. An error leaves nothing to do.
        let _ = unsafe { call!(cuEventDestroy_v2(self.raw)) };
    }
}
