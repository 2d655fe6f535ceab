//! Mixtures of experts whose tokens arrive in slots, on a GPU of a session.

use std::{fmt, sync::Arc};

use antiphon_device::{
    cuda::{Context, StreamRef},
    sync::Mutex,
};
use antiphon_moe::{
    MoeConfig, MoeError, SlotCombine, SlotDispatch,
    cuda::CudaMoe,
    slots::{
        SlotLimits,
        cuda::{CudaReceive, CudaSlotRoutes, CudaSlots},
    },
};

use crate::{
    GpuStream, Result, Session, SessionError,
    parts::{Parts, lock},
};

/// What makes calls with slots on a GPU of a session; see [`CudaSlots`]. Threads share it, and a clone is the same instance.
#[derive(Clone)]
pub struct MoeSlots {
    device: u32,
    /// Empty when closed.
    parts: Arc<Parts<CudaMoe>>,
}

impl fmt::Debug for MoeSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoeSlots").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The routes of a dispatch to slots; see [`CudaSlotRoutes`]. Threads share it.
pub struct SlotRoutes(Mutex<CudaSlotRoutes>);

impl SlotRoutes {
    /// How many tokens this rank dispatched.
    pub fn num_tokens(&self) -> usize {
        lock(&self.0).num_tokens()
    }
}

impl fmt::Debug for SlotRoutes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotRoutes").field("num_tokens", &self.num_tokens()).finish_non_exhaustive()
    }
}

impl Session {
    /// Makes an instance for calls with slots on the device of a stream, which are at most as large as `most` says. All ranks call it
    /// together.
    ///
    /// # Errors
    /// [`SessionError::Captured`] if the stream is being captured; as [`CudaMoe::new`].
    pub fn moe_slots<'s>(&self, stream: impl Into<GpuStream<'s>>, most: SlotLimits) -> Result<MoeSlots> {
        let (stream, parts) = (stream.into(), Parts::new(&self.shared));
        let config = MoeConfig { slots: Some(most), region_bytes: 0, ..MoeConfig::default() };
        let make = |comm: &_, context: &Context| Ok(CudaMoe::new(comm, context, config)?);
        parts.with((stream.device(), Some(stream)), "MoE slots", make, |_| Ok(()))?;
        Ok(MoeSlots { device: stream.device(), parts })
    }
}

impl MoeSlots {
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
        work: impl FnOnce(&CudaSlots, StreamRef<'_>) -> Result<T, MoeError>,
    ) -> Result<T> {
        let outcome = self.parts.with_open(self.device, |moe| work(moe.slots()?, stream.on(moe.context())));
        Ok(outcome.ok_or(SessionError::SlotsClosed)??)
    }

    /// As [`CudaSlots::dispatch`].
    ///
    /// # Errors
    /// As there; [`SessionError::SlotsClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn dispatch<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &SlotDispatch<'_>,
    ) -> Result<SlotRoutes> {
        // SAFETY: passed on.
        let routes = self.run(stream.into(), |moe, stream| unsafe { moe.dispatch(call, stream) })?;
        Ok(SlotRoutes(Mutex::new(routes)))
    }

    /// As [`CudaSlots::send_dispatch`]: the first half of a dispatch.
    ///
    /// # Errors
    /// As there; [`SessionError::SlotsClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send_dispatch<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &SlotDispatch<'_>,
    ) -> Result<(SlotRoutes, CudaReceive)> {
        // SAFETY: passed on.
        let sent = self.run(stream.into(), |moe, stream| unsafe { moe.send_dispatch(call, stream) });
        sent.map(|(routes, half)| (SlotRoutes(Mutex::new(routes)), half))
    }

    /// As [`CudaSlots::combine`].
    ///
    /// # Errors
    /// As there; [`SessionError::SlotsClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn combine<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        routes: &SlotRoutes,
        call: &SlotCombine<'_>,
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.combine(&lock(&routes.0), call, stream) })
    }

    /// As [`CudaSlots::send_combine`]: the first half of a combine.
    ///
    /// # Errors
    /// As there; [`SessionError::SlotsClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send_combine<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        routes: &SlotRoutes,
        call: &SlotCombine<'_>,
    ) -> Result<CudaReceive> {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.send_combine(&lock(&routes.0), call, stream) })
    }

    /// As [`CudaSlots::receive`]: the second half of a call.
    ///
    /// # Errors
    /// As there; [`SessionError::SlotsClosed`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn receive<'s>(&self, stream: impl Into<GpuStream<'s>>, half: &CudaReceive) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.receive(half, stream) })
    }
}
