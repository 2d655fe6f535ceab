//! The low-latency calls of mixtures of experts on a GPU of a session.

use std::{fmt, sync::Arc};

use antiphon_device::{
    cuda::{Context, StreamRef},
    sync::Mutex,
};
use antiphon_moe::{
    LowLatencyCombine, LowLatencyDispatch, MoeConfig, MoeError,
    cuda::CudaMoe,
    low_latency::{
        LowLatency,
        cuda::{CudaLowLatency, CudaLowLatencyHandle, CudaReceive},
    },
};

use crate::{
    GpuStream, Result, Session, SessionError,
    parts::{Parts, lock},
};

/// What makes low-latency calls on a GPU of a session; see [`CudaLowLatency`]. Threads share it, and a clone is the same instance.
#[derive(Clone)]
pub struct LowLatencyMoe {
    device: u32,
    /// Empty when closed.
    parts: Arc<Parts<CudaMoe>>,
}

impl fmt::Debug for LowLatencyMoe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LowLatencyMoe").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The routes of a low-latency dispatch; see [`CudaLowLatencyHandle`]. Threads share it.
pub struct LowLatencyHandle(Mutex<CudaLowLatencyHandle>);

impl LowLatencyHandle {
    /// How many tokens this rank dispatched.
    pub fn num_tokens(&self) -> usize {
        lock(&self.0).num_tokens()
    }
}

impl fmt::Debug for LowLatencyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LowLatencyHandle").field("num_tokens", &self.num_tokens()).finish_non_exhaustive()
    }
}

impl Session {
    /// Makes an instance for low-latency calls on the device of a stream, which are at most as large as `most` says. All ranks call it
    /// together.
    ///
    /// # Errors
    /// [`SessionError::Captured`] if the stream is being captured; as [`CudaMoe::new`].
    pub fn low_latency<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        most: LowLatency,
    ) -> Result<LowLatencyMoe> {
        let (stream, parts) = (stream.into(), Parts::new(&self.shared));
        let config = MoeConfig { low_latency: Some(most), region_bytes: 0, ..MoeConfig::default() };
        let make = |comm: &_, context: &Context| Ok(CudaMoe::new(comm, context, config)?);
        parts.with((stream.device(), Some(stream)), "low-latency instance", make, |_| Ok(()))?;
        Ok(LowLatencyMoe { device: stream.device(), parts })
    }
}

impl LowLatencyMoe {
    /// The number of the GPU.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Returns the failure that kernels of these calls have reported, if any.
    ///
    /// # Errors
    /// What the kernels reported.
    pub fn check(&self) -> Result {
        self.parts.check()
    }

    /// Leaves the peers, once the kernels under way are over.
    pub fn close(&self) {
        self.parts.close();
    }

    fn run<T>(
        &self,
        stream: GpuStream<'_>,
        work: impl FnOnce(&CudaLowLatency, StreamRef<'_>) -> Result<T, MoeError>,
    ) -> Result<T> {
        let outcome =
            self.parts.with_open(self.device, |moe| work(moe.low_latency()?, stream.on(moe.context())));
        Ok(outcome.ok_or(SessionError::LowLatencyClosed)??)
    }

    /// As [`CudaLowLatency::dispatch`].
    ///
    /// # Errors
    /// As there; [`SessionError::LowLatencyClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn dispatch<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &LowLatencyDispatch<'_>,
    ) -> Result<LowLatencyHandle> {
        // SAFETY: passed on.
        let handle = self.run(stream.into(), |moe, stream| unsafe { moe.dispatch(call, stream) })?;
        Ok(LowLatencyHandle(Mutex::new(handle)))
    }

    /// As [`CudaLowLatency::send_dispatch`]: the first half of a dispatch.
    ///
    /// # Errors
    /// As there; [`SessionError::LowLatencyClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send_dispatch<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &LowLatencyDispatch<'_>,
    ) -> Result<(LowLatencyHandle, CudaReceive)> {
        // SAFETY: passed on.
        let sent = self.run(stream.into(), |moe, stream| unsafe { moe.send_dispatch(call, stream) });
        sent.map(|(handle, half)| (LowLatencyHandle(Mutex::new(handle)), half))
    }

    /// As [`CudaLowLatency::combine`].
    ///
    /// # Errors
    /// As there; [`SessionError::LowLatencyClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn combine<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        handle: &LowLatencyHandle,
        call: &LowLatencyCombine<'_>,
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.combine(&lock(&handle.0), call, stream) })
    }

    /// As [`CudaLowLatency::send_combine`]: the first half of a combine.
    ///
    /// # Errors
    /// As there; [`SessionError::LowLatencyClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send_combine<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        handle: &LowLatencyHandle,
        call: &LowLatencyCombine<'_>,
    ) -> Result<CudaReceive> {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.send_combine(&lock(&handle.0), call, stream) })
    }

    /// As [`CudaLowLatency::receive`]: the second half of a call.
    ///
    /// # Errors
    /// As there; [`SessionError::LowLatencyClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn receive<'s>(&self, stream: impl Into<GpuStream<'s>>, half: &CudaReceive) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.receive(half, stream) })
    }
}
