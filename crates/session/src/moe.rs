//! Mixtures of experts on the GPUs of a session.

use std::{fmt, ops::RangeInclusive, sync::Arc};

use antiphon_collectives::cuda::OnFailure;
use antiphon_device::{
    cuda::{Context, Event, StreamRef},
    sync::Mutex,
};
use antiphon_fabric::Communicator;
use antiphon_moe::{
    ByExpertCombine, ByExpertDispatch, ByExpertRouting, Combine, Dispatch, MoeConfig, MoeError,
    Multiprocessors, Routing,
    by_expert::cuda::CudaByExpertRoutes,
    cuda::{CudaByTokenRoutes, CudaMoe, RouteMemory},
};
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    GpuStream, Result, Session, moe_tuning,
    parts::{Part, Parts, lock},
};

/// Mixtures of experts on the GPUs of a session; see [`CudaMoe`], whose calls these are. A call on a GPU that is not open opens it, so
/// the first one is made by all ranks together. Threads share it.
pub struct Moe {
    gpus: Arc<Parts<Gpu>>,
    config: MoeConfig,
    num_sms: Mutex<u32>,
}

impl fmt::Debug for Moe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Moe").field("config", &self.config).finish_non_exhaustive()
    }
}

/// A GPU that calls are made on.
struct Gpu {
    moe: CudaMoe,
    /// Orders a call on a stream beside the caller's.
    order: Event,
}

impl Part for Gpu {
    fn ordinal(&self) -> u32 {
        Part::ordinal(&self.moe)
    }

    fn on_failure(&self, action: OnFailure) {
        self.moe.on_failure(action);
    }

    fn check(&self) -> Result {
        Ok(self.moe.check()?)
    }
}

impl Part for CudaMoe {
    fn ordinal(&self) -> u32 {
        self.context().device().ordinal()
    }

    fn on_failure(&self, action: OnFailure) {
        CudaMoe::on_failure(self, action);
    }

    fn check(&self) -> Result {
        Ok(CudaMoe::check(self)?)
    }
}

/// The stream that a call of [`Moe`] is put into, or one [beside](Self::beside) it.
#[derive(Debug, Clone, Copy)]
pub struct MoeStream<'a> {
    current: GpuStream<'a>,
    /// Another one, and whether the current one waits for the call.
    side: Option<(GpuStream<'a>, bool)>,
}

impl<'a> MoeStream<'a> {
    /// The call goes into the stream `side` instead, behind the work that the current one has now; where it `joins`, the current one
    /// waits for its end.
    #[must_use]
    pub fn beside(self, side: impl Into<GpuStream<'a>>, joins: bool) -> Self {
        Self { side: Some((side.into(), joins)), ..self }
    }
}

impl<'a, S: Into<GpuStream<'a>>> From<S> for MoeStream<'a> {
    fn from(stream: S) -> Self {
        Self { current: stream.into(), side: None }
    }
}

impl Session {
    /// Mixtures of experts, with instances of this configuration on each GPU that is used. None is opened yet.
    pub fn moe(&self, config: MoeConfig) -> Moe {
        Moe { gpus: Parts::new(&self.shared), config, num_sms: Mutex::new(config.num_sms) }
    }
}

impl Moe {
    /// How many multiprocessors a call uses, at most.
    pub fn num_sms(&self) -> u32 {
        *lock(&self.num_sms)
    }

    /// Sets it for later calls, which refuse a number that the GPU has not.
    pub fn set_num_sms(&self, num_sms: u32) {
        *lock(&self.num_sms) = num_sms;
    }

    /// Measures how many multiprocessors dispatches and combines by token need, for tokens of `hidden` bf16 of which each rank has a number
    /// in `tokens`, and keeps that in the cache, from which every [`Moe`] on such GPUs takes it that is made from then on. Calls with
    /// [`MoeConfig::num_sms`] 0 take it. It takes some seconds. All ranks call it together, with nothing under way on the device.
    ///
    /// # Errors
    /// As the calls; [`CollectiveError::Tuning`](antiphon_collectives::CollectiveError::Tuning) when the cache cannot be written.
    pub fn tune(&self, device: u32, hidden: usize, tokens: RangeInclusive<usize>) -> Result<Multiprocessors> {
        self.open(device)?;
        self.gpus.run(device, |comm, gpu: &mut Gpu| {
            let chosen = moe_tuning::measure(comm, &gpu.moe, hidden, tokens)?;
            gpu.moe.choose(chosen.clone());
            Ok(chosen)
        })
    }

    /// Returns the failure that kernels of these calls have reported, if any.
    ///
    /// # Errors
    /// What the kernels reported.
    pub fn check(&self) -> Result {
        self.gpus.check()
    }

    /// Leaves the peers, once the kernels under way are over.
    pub fn close(&self) {
        self.gpus.close();
    }

    /// Puts a call into a stream, or into one beside it.
    fn run<T>(
        &self,
        MoeStream { current, side }: MoeStream<'_>,
        call: impl FnOnce(&CudaMoe, StreamRef<'_>) -> Result<T, MoeError>,
    ) -> Result<T> {
        let num_sms = self.num_sms();
        let work = |Gpu { moe, order }: &mut Gpu| {
            moe.set_num_sms(num_sms)?;
            let current = current.on(moe.context());
            let Some((side, joins)) = side else { return Ok(call(moe, current)?) };
            let side = side.on(moe.context());
            order.record(current)?;
            side.wait(order)?;
            let result = call(moe, side)?;
            if joins {
                order.record(side)?;
                current.wait(order)?;
            }
            Ok(result)
        };
        self.gpus.with((current.device(), Some(current)), "MoE call", self.make(), work)
    }

    /// Makes what calls on a GPU need, together with the peers.
    fn make(&self) -> impl FnOnce(&Communicator, &Context) -> Result<Gpu> {
        |comm, context| {
            let moe = CudaMoe::new(comm, context, self.config)?;
            moe.choose(moe_tuning::load(comm, context)?);
            Ok(Gpu { moe, order: Event::new(context)? })
        }
    }

    /// Opens a GPU, which the first call on it does else, together with the other ranks.
    ///
    /// # Errors
    /// As a call.
    pub fn open(&self, device: u32) -> Result {
        self.gpus.with((device, None), "MoE call", self.make(), |_| Ok(()))
    }

    /// As [`CudaMoe::layout`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn layout<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        ids: &TensorView<'_>,
        outputs: [&mut TensorViewMut<'_>; 3],
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.layout(ids, outputs, stream) })
    }

    /// As [`CudaMoe::notify`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn notify<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        routing: &Routing<'_>,
        memory: RouteMemory<'_>,
    ) -> Result<CudaByTokenRoutes> {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.notify(routing, memory, stream) })
    }

    /// As [`CudaMoe::routes_of`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn routes_of<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        memory: (&TensorView<'_>, &TensorView<'_>),
        sizes: [usize; 3],
    ) -> Result<CudaByTokenRoutes> {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, _| unsafe { moe.routes_of(memory, sizes) })
    }

    /// As [`CudaMoe::dispatch`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn dispatch<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        routes: &CudaByTokenRoutes,
        call: Dispatch<'_>,
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.dispatch(routes, call, stream) })
    }

    /// As [`CudaMoe::combine`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn combine<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        routes: &CudaByTokenRoutes,
        call: Combine<'_>,
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.combine(routes, call, stream) })
    }

    /// As [`CudaMoe::notify_by_expert`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn notify_by_expert<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        routing: &ByExpertRouting<'_>,
        memory: RouteMemory<'_>,
    ) -> Result<CudaByExpertRoutes> {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.notify_by_expert(routing, memory, stream) })
    }

    /// As [`CudaMoe::dispatch_by_expert`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn dispatch_by_expert<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        routes: &CudaByExpertRoutes,
        call: ByExpertDispatch<'_>,
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.dispatch_by_expert(routes, call, stream) })
    }

    /// As [`CudaMoe::combine_by_expert`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn combine_by_expert<'s>(
        &self,
        stream: impl Into<MoeStream<'s>>,
        routes: &CudaByExpertRoutes,
        call: ByExpertCombine<'_>,
    ) -> Result {
        // SAFETY: passed on.
        self.run(stream.into(), |moe, stream| unsafe { moe.combine_by_expert(routes, call, stream) })
    }
}
