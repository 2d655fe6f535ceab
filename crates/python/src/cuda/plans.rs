//! Plans that are loaded between GPUs.

use std::{cell::Cell, sync::Arc};

use antiphon::{
    collectives::cuda::OnFailure,
    device::cuda::Context,
    fabric::Queue,
    prelude::{DType, FabricError},
};
use antiphon_executor::{
    ExecutorError,
    cuda::{AlgorithmCollection, CudaOptions, CudaPlan},
};
use antiphon_plan::verify::VerifiedPlan;
use pyo3::prelude::*;

use super::{Gpus, LastStreams, Order, Part, Parts};
use crate::{communicator::refused, error::Result, operand::Tensor, stream::RawStream};

pub(super) type Outcome<T = ()> = std::result::Result<T, ExecutorError>;

/// The plans of a communicator on a GPU. A plan that a program drops without closing it stays until the communicator is closed:
/// graphs may have its calls, and its end waits for the GPU.
pub(crate) struct Plans {
    pub(super) context: Context,
    /// Those that are closed are absent.
    loaded: Vec<Option<CudaPlan>>,
    /// Those that are closed are absent.
    pub(super) collections: Vec<Option<AlgorithmCollection>>,
    /// The action after a failure, until there is a plan that takes it.
    action: Cell<Option<OnFailure>>,
}

impl Plans {
    fn first(&self) -> Option<&CudaPlan> {
        let collected = self.collections.iter().flatten().flat_map(AlgorithmCollection::plans);
        self.loaded.iter().flatten().chain(collected).next()
    }

    /// Gives the action to the plans, now that there is one.
    pub(super) fn take_action(&self) {
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

    fn check(&self) -> Result<()> {
        self.loaded.iter().flatten().try_for_each(CudaPlan::check)?;
        Ok(self.collections.iter().flatten().try_for_each(AlgorithmCollection::check)?)
    }
}

/// A plan on a GPU.
pub(crate) struct LoadedOnGpu {
    device: u32,
    plans: Arc<Parts<Plans>>,
    /// Its place among them.
    place: usize,
    last_streams: Arc<LastStreams>,
}

impl Gpus {
    /// Loads a plan together with the other ranks, or tells them that there is none.
    pub(crate) fn load_plan(
        &self,
        queue: &Queue,
        device: u32,
        plan: Outcome<VerifiedPlan>,
        options: CudaOptions,
    ) -> Outcome<LoadedOnGpu> {
        let opened = self.open_plans(queue, device);
        let plan = plan.and_then(|plan| opened.map(|()| plan));
        let place = queue.run(|comm| {
            let plan = comm.agree("has no plan that can run", plan)?;
            with_open(&self.plans, device, |plans| {
                let plan = CudaPlan::load(comm, &plans.context, &plan, options)?;
                plans.loaded.push(Some(plan));
                plans.take_action();
                Ok(plans.loaded.len() - 1)
            })
        })?;
        let (plans, last_streams) = (self.plans.clone(), self.last_streams.clone());
        Ok(LoadedOnGpu { device, plans, place, last_streams })
    }

    /// Makes the list of plans on a GPU, unless there is one.
    pub(super) fn open_plans(&self, queue: &Queue, device: u32) -> Outcome {
        let make = |_: &_, context: &Context| {
            let (context, action) = (context.clone(), Cell::default());
            Ok::<_, ExecutorError>(Plans { context, loaded: Vec::new(), collections: Vec::new(), action })
        };
        // SAFETY: there is no stream.
        unsafe { self.plans.with((queue, device, None), "plan", make, |_| Ok(())) }
    }
}

/// With the plans of a device.
pub(super) fn with_open<T>(
    plans: &Parts<Plans>,
    device: u32,
    work: impl FnOnce(&mut Plans) -> Outcome<T>,
) -> Outcome<T> {
    plans.with_open(device, work).unwrap_or_else(|| Err(super::closed().into()))
}

impl LoadedOnGpu {
    /// The number of the GPU.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    fn with<T>(&self, work: impl FnOnce(&mut CudaPlan) -> Outcome<T>) -> Outcome<T> {
        with_open(&self.plans, self.device, |plans| match &mut plans.loaded[self.place] {
            Some(plan) => work(plan),
            None => Err(FabricError::invalid("the plan is closed").into()),
        })
    }

    /// Makes the plan ready for messages of a dtype and a size. The ranks do it together; the queue's turn comes before the lock.
    pub(crate) fn prepare(&self, queue: &Queue, dtype: DType, num_bytes: usize) -> Outcome {
        queue.run(|comm| self.with(|plan| plan.prepare(comm, dtype, num_bytes)))
    }

    /// Puts an execution into a stream, in place if there is no input, on registered tensors or others. The first one of a dtype and size
    /// prepares it, unless the stream is being captured.
    ///
    /// # Safety
    /// As [`CudaPlan::execute`]; the stream is one of the device.
    pub(crate) unsafe fn execute(
        &self,
        queue: &Queue,
        input: Option<Tensor>,
        output: Tensor,
        registered: bool,
        stream: RawStream,
    ) -> Outcome {
        let (input, output) = (input.map(of_numbers), of_numbers(output));
        // SAFETY: passed on.
        let call = |plan: &mut CudaPlan| unsafe { call(plan, input, output, registered, stream) };
        match self.with(call) {
            Err(error @ ExecutorError::Unprepared { dtype, bytes, .. }) => {
                // SAFETY: passed on.
                if self.with(|plan| Ok(unsafe { plan.context().borrow_stream(stream) }.is_capturing()?))? {
                    return Err(error);
                }
                self.prepare(queue, dtype, bytes)?;
                self.with(call)
            }
            done => done,
        }
    }

    /// Keeps the stream of a call, which the next plan of the communicator waits for.
    pub(crate) fn keep_stream(&self, py: Python<'_>, stream: RawStream) -> PyResult<()> {
        self.last_streams.keep(py, stream, &[Order::Plans])
    }

    /// Gives the plan's memory back, together with the other ranks.
    pub(crate) fn close(&self, queue: &Queue) -> Outcome {
        queue.run(|comm| {
            let plan = with_open(&self.plans, self.device, |plans| Ok(plans.loaded[self.place].take()))?;
            plan.map_or(Ok(()), |plan| plan.free(comm)) // without the lock, as it waits
        })
    }
}

/// # Safety
/// As [`LoadedOnGpu::execute`].
pub(super) unsafe fn call(
    plan: &CudaPlan,
    input: Option<Tensor>,
    output: Tensor,
    registered: bool,
    stream: RawStream,
) -> Outcome {
    // SAFETY: the caller answers for the memory, which only the device touches, and for the stream.
    unsafe {
        let stream = plan.context().borrow_stream(stream);
        let output = output.view_mut().map_err(refused)?;
        match (input.map(|input| input.view()).transpose().map_err(refused)?, registered) {
            (Some(input), false) => plan.execute(input, output, stream),
            (Some(input), true) => plan.execute_registered(input, output, stream),
            (None, false) => plan.execute_in_place(output, stream),
            (None, true) => plan.execute_in_place_registered(output, stream),
        }
    }
}

/// A tensor as one whose dtype the kernels know: as bytes, if it has no arithmetic.
pub(crate) fn of_numbers(tensor: Tensor) -> Tensor {
    match tensor.dtype.is_numeric() {
        true => tensor,
        false => Tensor { count: tensor.bytes(), dtype: DType::U8, ..tensor },
    }
}
