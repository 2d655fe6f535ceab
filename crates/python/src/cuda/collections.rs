//! Collections of plans between GPUs.

use std::{ops::RangeInclusive, time::Duration};

use antiphon::{
    collectives::cuda::CudaCollectives,
    device::{ReduceOp, cuda::Context},
    fabric::{Communicator, Queue},
    operation::Operation,
    prelude::{DType, FabricError},
};
use antiphon_executor::{
    ExecutorError,
    cuda::{AlgorithmCollection, Choice, CudaOptions},
};
use antiphon_plan::verify::VerifiedPlan;

use super::{
    Gpus, Order,
    plans::{Outcome, call as call_plan, of_numbers, with_open},
};
use crate::{
    call::{Call, CallTensors},
    stream::RawStream,
};

/// A collection among the plans of a communicator on a GPU.
pub(crate) struct CollectionOnGpu {
    device: u32,
    /// Its place among the collections.
    place: usize,
}

/// What a collection says of one of its plans, or of the built-in call.
pub(crate) type Said = (String, Option<f64>, Option<String>);

impl Gpus {
    /// Makes a collection of plans on a GPU.
    pub(crate) fn plan_collection(
        &self,
        queue: &Queue,
        device: u32,
        allow_other_bits: bool,
    ) -> Outcome<CollectionOnGpu> {
        self.open_plans(queue, device)?;
        queue.run(|comm| {
            let collection = AlgorithmCollection::new(comm);
            let collection = if allow_other_bits { collection.allow_other_bits() } else { collection };
            with_open(&self.plans, device, |plans| {
                plans.collections.push(Some(collection));
                Ok(CollectionOnGpu { device, place: plans.collections.len() - 1 })
            })
        })
    }

    /// With a collection, and with the collectives of its GPU, which are opened if they are not.
    fn with_both<T>(
        &self,
        queue: &Queue,
        collection: &CollectionOnGpu,
        work: impl FnOnce(&Communicator, &mut AlgorithmCollection, &CudaCollectives) -> Outcome<T>,
    ) -> Outcome<T> {
        self.prepare(queue, collection.device, &[], None)?;
        queue.run(|comm| {
            collection.with(self, |plans| {
                // The plans' lock comes before the collectives'.
                let open = self.collectives.with_open(collection.device, |gpu| {
                    work(comm, plans, gpu.engine.nvlink("a collection of plans")?)
                });
                open.unwrap_or_else(|| Err(super::closed().into()))
            })
        })
    }
}

impl CollectionOnGpu {
    /// The number of the GPU.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    fn with<T>(&self, gpus: &Gpus, work: impl FnOnce(&mut AlgorithmCollection) -> Outcome<T>) -> Outcome<T> {
        with_open(&gpus.plans, self.device, |plans| match &mut plans.collections[self.place] {
            Some(collection) => work(collection),
            None => Err(FabricError::invalid("the collection is closed").into()),
        })
    }

    /// Loads a plan together with the other ranks, or tells them that there is none.
    pub(crate) fn add(
        &self,
        gpus: &Gpus,
        queue: &Queue,
        plan: Outcome<VerifiedPlan>,
        dtypes: &[DType],
        options: CudaOptions,
    ) -> Outcome {
        queue.run(|comm| {
            let plan = comm.agree("has no plan that can run", plan)?;
            with_open(&gpus.plans, self.device, |plans| {
                let Some(collection) = &mut plans.collections[self.place] else {
                    return Err(FabricError::invalid("the collection is closed").into());
                };
                collection.add(comm, &plans.context, &plan, dtypes, options)?;
                plans.take_action();
                Ok(())
            })
        })
    }

    /// Adds the calls of the communicator's collectives.
    pub(crate) fn add_built_in(&self, gpus: &Gpus, queue: &Queue, op: ReduceOp) -> Outcome {
        gpus.with_both(queue, self, |_, collection, collectives| collection.add_built_in(collectives, op))
    }

    /// Measures what does a collective, together with the other ranks.
    pub(crate) fn tune(
        &self,
        gpus: &Gpus,
        queue: &Queue,
        (collective, dtype): (&str, DType),
        sizes: RangeInclusive<usize>,
    ) -> Outcome {
        gpus.with_both(queue, self, |comm, collection, collectives| {
            collection.tune(comm, collectives, collective, dtype, sizes)
        })
    }

    /// Makes what does a call ready, together with the other ranks.
    pub(crate) fn prepare(
        &self,
        gpus: &Gpus,
        queue: &Queue,
        (collective, dtype, num_bytes): (&str, DType, usize),
    ) -> Outcome {
        gpus.with_both(queue, self, |comm, collection, collectives| {
            collection.prepare(comm, collectives, collective, dtype, num_bytes)
        })
    }

    /// What each says of a call.
    pub(crate) fn explain(
        &self,
        gpus: &Gpus,
        (collective, dtype, num_bytes): (&str, DType, usize),
    ) -> Outcome<Vec<Said>> {
        self.with(gpus, |collection| {
            let explained = collection.explain(collective, dtype, num_bytes).into_iter();
            let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
            Ok(explained.map(|each| (each.name.to_owned(), each.time.map(micros), each.why_not)).collect())
        })
    }

    /// Puts what does a call into a stream, and returns the orders in which it has its place. The first call of a dtype and size prepares
    /// it, unless the stream is being captured.
    ///
    /// # Safety
    /// As [`Gpus::run`].
    pub(crate) unsafe fn execute(
        &self,
        gpus: &Gpus,
        queue: &Queue,
        (collective, call): (&str, Call),
        stream: RawStream,
    ) -> Outcome<&'static [Order]> {
        let call = Call { tensors: call.tensors.map(of_numbers), ..call };
        // SAFETY: passed on.
        match unsafe { self.attempt(gpus, queue, collective, &call, stream) } {
            Err(error @ ExecutorError::Unprepared { dtype, bytes, .. }) => {
                // SAFETY: passed on.
                let is_capturing =
                    |context: &Context| unsafe { context.borrow_stream(stream).is_capturing() };
                if with_open(&gpus.plans, self.device, |plans| Ok(is_capturing(&plans.context)?))? {
                    return Err(error);
                }
                self.prepare(gpus, queue, (collective, dtype, bytes))?;
                // SAFETY: passed on.
                unsafe { self.attempt(gpus, queue, collective, &call, stream) }
            }
            done => done,
        }
    }

    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn attempt(
        &self,
        gpus: &Gpus,
        queue: &Queue,
        collective: &str,
        call: &Call,
        stream: RawStream,
    ) -> Outcome<&'static [Order]> {
        let Some((dtype, bytes)) = call.dtype().zip(message_bytes(call)) else {
            return Err(FabricError::invalid(format!("{collective} lacks an operand")).into());
        };
        let by_plan = self.with(gpus, |collection| match collection.choose(collective, dtype, bytes)? {
            Choice::BuiltIn(what) => Ok(Some(what)),
            Choice::Plan(plan) => {
                let (input, output) = match call.tensors {
                    CallTensors::Apart(input, Some(output)) => (input, output),
                    CallTensors::Shared(buffer) => (None, buffer),
                    _ => return Err(FabricError::invalid(format!("{collective} lacks an operand")).into()),
                };
                // SAFETY: passed on.
                unsafe { call_plan(plan, input, output, false, stream) }.map(|()| None)
            }
        })?;
        let Some(what) = by_plan else { return Ok(&[Order::Plans]) };
        let orders = Order::of(what.operation);
        let call = Call { what, mixed: None, tensors: call.tensors };
        // SAFETY: passed on.
        unsafe { gpus.run(queue, self.device, stream, &call) }?;
        Ok(orders)
    }

    /// Gives the plans' memory back, together with the other ranks.
    pub(crate) fn close(&self, gpus: &Gpus, queue: &Queue) -> Outcome {
        queue.run(|comm| {
            let collection =
                with_open(&gpus.plans, self.device, |plans| Ok(plans.collections[self.place].take()))?;
            collection.map_or(Ok(()), |collection| collection.free(comm)) // without the lock, as it waits
        })
    }
}

/// The bytes of a call's message: the output of an all-gather, else the input.
fn message_bytes(call: &Call) -> Option<usize> {
    match call.tensors {
        CallTensors::Nowhere => None,
        CallTensors::Shared(buffer) => Some(buffer.bytes()),
        CallTensors::Apart(input, output) => {
            let message = if call.what.operation == Operation::AllGather { output } else { input };
            message.map(|tensor| tensor.bytes())
        }
    }
}
