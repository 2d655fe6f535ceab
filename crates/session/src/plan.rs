//! Plans that are loaded between GPUs.

use std::{cell::Cell, fmt, sync::Arc};

use antiphon_collectives::cuda::OnFailure;
use antiphon_device::cuda::{Context, StreamRef};
use antiphon_executor::{
    ExecutorError,
    cuda::{AlgorithmCollection, CudaOptions, CudaPlan},
};
use antiphon_plan::verify::VerifiedPlan;
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    GpuStream, Result, Session, SessionError,
    parts::{Part, Parts},
};

/// The plans of a session on a GPU. A plan that a program drops without closing it stays until the session is closed: graphs may have
/// its calls, and its end waits for the GPU.
pub(crate) struct Plans {
    pub(crate) context: Context,
    /// Those that are closed are absent.
    loaded: Vec<Option<CudaPlan>>,
    /// Those that are closed are absent.
    pub(crate) collections: Vec<Option<AlgorithmCollection>>,
    /// The action after a failure, until there is a plan that takes it.
    action: Cell<Option<OnFailure>>,
}

impl Plans {
    fn first(&self) -> Option<&CudaPlan> {
        let collected = self.collections.iter().flatten().flat_map(AlgorithmCollection::plans);
        self.loaded.iter().flatten().chain(collected).next()
    }

    /// Gives the action to the plans, now that there is one.
    pub(crate) fn take_action(&self) {
        if let Some(action) = self.action.take() {
            self.on_failure(action);
        }
    }
}

impl Part for Plans {
    fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    fn on_failure(&self, action: OnFailure) {
        match self.first() {
            Some(plan) => plan.on_failure(action), // and so of all
            None => self.action.set(Some(action)),
        }
    }

    fn check(&self) -> Result {
        self.loaded.iter().flatten().try_for_each(CudaPlan::check)?;
        Ok(self.collections.iter().flatten().try_for_each(AlgorithmCollection::check)?)
    }
}

/// A plan that is loaded on a GPU of a session; see [`CudaPlan`]. Threads share it.
pub struct LoadedPlan {
    device: u32,
    plans: Arc<Parts<Plans>>,
    /// Its place among them.
    place: usize,
}

impl fmt::Debug for LoadedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedPlan").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Session {
    /// Loads a plan on a GPU together with the other ranks, or tells them that this rank has none.
    ///
    /// # Errors
    /// The plan's; as [`CudaPlan::load`]; [`SessionError::Closed`].
    pub fn load_plan(
        &self,
        device: u32,
        plan: Result<VerifiedPlan, ExecutorError>,
        options: CudaOptions,
    ) -> Result<LoadedPlan> {
        let opened = self.open_plans(device);
        let plan = plan.map_err(SessionError::from).and_then(|plan| opened.map(|()| plan));
        let place = self.shared.run(|comm| {
            let plan = comm.agree("has no plan that can run", plan)?;
            self.plans.on(device, |plans| {
                let plan = CudaPlan::load(comm, &plans.context, &plan, options)?;
                plans.loaded.push(Some(plan));
                plans.take_action();
                Ok(plans.loaded.len() - 1)
            })
        })?;
        Ok(LoadedPlan { device, plans: self.plans.clone(), place })
    }

    /// Makes the list of plans on a GPU, unless there is one.
    pub(crate) fn open_plans(&self, device: u32) -> Result {
        let make = |_: &_, context: &Context| {
            let (context, action) = (context.clone(), Cell::default());
            Ok(Plans { context, loaded: Vec::new(), collections: Vec::new(), action })
        };
        self.plans.with((device, None), "plan", make, |_| Ok(()))
    }
}

impl Parts<Plans> {
    /// With the plans of a device.
    pub(crate) fn on<T>(&self, device: u32, work: impl FnOnce(&mut Plans) -> Result<T>) -> Result<T> {
        self.with_open(device, work).unwrap_or(Err(SessionError::Closed))
    }
}

impl LoadedPlan {
    /// The number of the GPU.
    pub fn device(&self) -> u32 {
        self.device
    }

    fn with<T>(&self, work: impl FnOnce(&mut CudaPlan) -> Result<T>) -> Result<T> {
        self.plans.on(self.device, |plans| match &mut plans.loaded[self.place] {
            Some(plan) => work(plan),
            None => Err(SessionError::PlanClosed),
        })
    }

    /// Makes the plan ready for messages of a dtype and a size. The ranks do it together; the queue's turn comes before the lock.
    ///
    /// # Errors
    /// As [`CudaPlan::prepare`]; [`SessionError::PlanClosed`].
    pub fn prepare(&self, dtype: DType, num_bytes: usize) -> Result {
        self.plans.shared().run(|comm| self.with(|plan| Ok(plan.prepare(comm, dtype, num_bytes)?)))
    }

    /// Puts an execution into a stream, in place if there is no input, on [registered](Session::register) tensors or others. The first
    /// one of a dtype and size prepares it, unless the stream is being captured.
    ///
    /// # Errors
    /// As [`CudaPlan::execute`], [`ExecutorError::Unprepared`] in a capture alone; [`SessionError::PlanClosed`].
    ///
    /// # Safety
    /// As [`CudaPlan::execute`].
    pub unsafe fn execute<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        input: Option<&TensorView<'_>>,
        output: &mut TensorViewMut<'_>,
        registered: bool,
    ) -> Result {
        let stream = stream.into();
        let mut call = |plan: &mut CudaPlan| {
            let stream = stream.on(plan.context());
            // SAFETY: passed on.
            unsafe { execute(plan, input, output, registered, stream) }
        };
        let done = self.with(&mut call);
        let Some((dtype, bytes)) = unprepared(&done) else { return done };
        if self.with(|plan| Ok(stream.on(plan.context()).is_capturing()?))? {
            return done;
        }
        self.prepare(dtype, bytes)?;
        self.with(call)
    }

    /// Gives the plan's memory back, together with the other ranks.
    ///
    /// # Errors
    /// As [`CudaPlan::free`].
    pub fn close(&self) -> Result {
        self.plans.shared().run(|comm| {
            let plan = self.plans.on(self.device, |plans| Ok(plans.loaded[self.place].take()))?;
            Ok(plan.map_or(Ok(()), |plan| plan.free(comm))?) // without the lock, as it waits
        })
    }
}

/// The dtype and the bytes of an execution for which nobody prepared the plan.
pub(crate) fn unprepared<T>(done: &Result<T>) -> Option<(DType, usize)> {
    match done {
        Err(SessionError::Plan(error)) => match **error {
            ExecutorError::Unprepared { dtype, bytes, .. } => Some((dtype, bytes)),
            _ => None,
        },
        _ => None,
    }
}

/// # Safety
/// As [`CudaPlan::execute`].
pub(crate) unsafe fn execute(
    plan: &CudaPlan,
    input: Option<&TensorView<'_>>,
    output: &mut TensorViewMut<'_>,
    registered: bool,
    stream: StreamRef<'_>,
) -> Result {
    let output = output.reborrow();
    // SAFETY: passed on.
    unsafe {
        Ok(match (input.copied(), registered) {
            (Some(input), false) => plan.execute(input, output, stream),
            (Some(input), true) => plan.execute_registered(input, output, stream),
            (None, false) => plan.execute_in_place(output, stream),
            (None, true) => plan.execute_in_place_registered(output, stream),
        }?)
    }
}
