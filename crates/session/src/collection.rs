//! Collections of plans between GPUs.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use antiphon_collectives::{ReduceOp, cuda::CudaCollectives};
use antiphon_executor::{
    ExecutorError,
    cuda::{AlgorithmCollection, Choice, CudaOptions},
};
use antiphon_fabric::{Communicator, FabricError};
use antiphon_operation::Operation;
use antiphon_plan::verify::VerifiedPlan;
use antiphon_tensor::DType;

use crate::{
    GpuStream, Order, Result, Session, SessionError, Tensors,
    gpu::Collectives,
    parts::Parts,
    plan::{Plans, execute, unprepared},
};

/// Plans on a GPU of a session, from which each call takes one, or the built-in call; see [`AlgorithmCollection`]. Threads share it.
pub struct PlanCollection {
    device: u32,
    plans: Arc<Parts<Plans>>,
    collectives: Arc<Collectives>,
    /// Its place among the collections.
    place: usize,
}

impl fmt::Debug for PlanCollection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlanCollection").field("device", &self.device).finish_non_exhaustive()
    }
}

/// What a collection says of one of its plans, or of the built-in call; see [`Explained`](antiphon_executor::cuda::Explained).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The plan's name, or `built-in`.
    pub name: String,
    /// How long it took, where it was measured at about this size.
    pub time: Option<Duration>,
    /// Why it does not do the call; none for the one that does it.
    pub why_not: Option<String>,
}

impl Session {
    /// Makes a collection of plans on a GPU. With `allow_other_bits` a measurement may choose among algorithms whose results differ in
    /// their last bits. The ranks do it together.
    ///
    /// # Errors
    /// [`SessionError::Closed`]; as the driver's.
    pub fn plan_collection(&self, device: u32, allow_other_bits: bool) -> Result<PlanCollection> {
        self.open_plans(device)?;
        let place = self.shared.run(|comm| {
            let collection = AlgorithmCollection::new(comm);
            let collection = if allow_other_bits { collection.allow_other_bits() } else { collection };
            self.plans.on(device, |plans| {
                plans.collections.push(Some(collection));
                Ok(plans.collections.len() - 1)
            })
        })?;
        let (plans, collectives) = (self.plans.clone(), self.collectives.clone());
        Ok(PlanCollection { device, plans, collectives, place })
    }
}

impl PlanCollection {
    /// The number of the GPU.
    pub fn device(&self) -> u32 {
        self.device
    }

    fn with<T>(&self, work: impl FnOnce(&mut AlgorithmCollection) -> Result<T>) -> Result<T> {
        self.plans.on(self.device, |plans| match &mut plans.collections[self.place] {
            Some(collection) => work(collection),
            None => Err(SessionError::CollectionClosed),
        })
    }

    /// With the collection and the collectives of its GPU, which are opened if they are not, in the queue's turn.
    fn with_both<T>(
        &self,
        work: impl FnOnce(&Communicator, &mut AlgorithmCollection, &CudaCollectives) -> Result<T>,
    ) -> Result<T> {
        self.collectives.with(self.device, |_| Ok(()))?;
        self.plans.shared().run(|comm| {
            self.with(|plans| {
                // The plans' lock comes before the collectives'.
                self.collectives.with_open(self.device, |gpu| {
                    work(comm, plans, gpu.engine.nvlink("a collection of plans")?)
                })
            })
        })
    }

    /// Loads a plan, for tensors of these dtypes or of all if none is named, together with the other ranks; or tells them that this
    /// rank has none.
    ///
    /// # Errors
    /// The plan's; as [`AlgorithmCollection::add`]; [`SessionError::CollectionClosed`].
    pub fn add(
        &self,
        plan: Result<VerifiedPlan, ExecutorError>,
        dtypes: &[DType],
        options: CudaOptions,
    ) -> Result {
        self.plans.shared().run(|comm| {
            let plan = comm.agree("has no plan that can run", plan)?;
            self.plans.on(self.device, |plans| {
                let Some(collection) = &mut plans.collections[self.place] else {
                    return Err(SessionError::CollectionClosed);
                };
                collection.add(comm, &plans.context, &plan, dtypes, options)?;
                plans.take_action();
                Ok(())
            })
        })
    }

    /// Adds the calls of the session's collectives.
    ///
    /// # Errors
    /// As [`AlgorithmCollection::add_built_in`]; [`SessionError::CollectionClosed`].
    pub fn add_built_in(&self, op: ReduceOp) -> Result {
        self.with_both(|_, collection, collectives| Ok(collection.add_built_in(collectives, op)?))
    }

    /// Measures what does a collective, together with the other ranks.
    ///
    /// # Errors
    /// As [`AlgorithmCollection::tune`]; [`SessionError::CollectionClosed`].
    pub fn tune(&self, collective: &str, dtype: DType, sizes: RangeInclusive<usize>) -> Result {
        self.with_both(|comm, collection, collectives| {
            Ok(collection.tune(comm, collectives, collective, dtype, sizes)?)
        })
    }

    /// Makes what does a call ready, together with the other ranks.
    ///
    /// # Errors
    /// As [`AlgorithmCollection::prepare`]; [`SessionError::CollectionClosed`].
    pub fn prepare(&self, collective: &str, dtype: DType, num_bytes: usize) -> Result {
        self.with_both(|comm, collection, collectives| {
            Ok(collection.prepare(comm, collectives, collective, dtype, num_bytes)?)
        })
    }

    /// What each says of a call.
    ///
    /// # Errors
    /// [`SessionError::CollectionClosed`].
    pub fn explain(&self, collective: &str, dtype: DType, num_bytes: usize) -> Result<Vec<Said>> {
        self.with(|collection| {
            let explained = collection.explain(collective, dtype, num_bytes).into_iter();
            let said = explained.map(|each| Said {
                name: each.name.to_owned(),
                time: each.time,
                why_not: each.why_not,
            });
            Ok(said.collect())
        })
    }

    /// Puts what does `collective`, which is `operation`, into a stream, and returns the orders in which it has its place. The first call
    /// of a dtype and size prepares it, unless the stream is being captured.
    ///
    /// # Errors
    /// As [`AlgorithmCollection::execute`], [`ExecutorError::Unprepared`] in a capture alone; [`SessionError::CollectionClosed`].
    ///
    /// # Safety
    /// As [`Session::call`].
    pub unsafe fn execute<'s, 't>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        (collective, operation): (&str, Operation),
        tensors: impl Into<Tensors<'t>>,
    ) -> Result<&'static [Order]> {
        let (stream, mut tensors) = (stream.into(), tensors.into());
        let call = (collective, operation);
        // SAFETY: passed on.
        let done = unsafe { self.attempt(stream, call, &mut tensors) };
        let Some((dtype, bytes)) = unprepared(&done) else { return done };
        if self.plans.on(self.device, |plans| Ok(stream.on(&plans.context).is_capturing()?))? {
            return done;
        }
        self.prepare(collective, dtype, bytes)?;
        // SAFETY: passed on.
        unsafe { self.attempt(stream, call, &mut tensors) }
    }

    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn attempt(
        &self,
        stream: GpuStream<'_>,
        (collective, operation): (&str, Operation),
        tensors: &mut Tensors<'_>,
    ) -> Result<&'static [Order]> {
        let lacks = || FabricError::invalid(format!("{collective} lacks an operand"));
        let (dtype, bytes) = tensors.dtype().zip(tensors.message_bytes(operation)).ok_or_else(lacks)?;
        let by_plan = self.with(|collection| match collection.choose(collective, dtype, bytes)? {
            Choice::BuiltIn(what) => Ok(Some(what)),
            Choice::Plan(plan) => {
                let (input, output) = match tensors {
                    Tensors::Apart(input, Some(output)) => (input.as_ref(), output),
                    Tensors::InPlace(buffer) => (None, buffer),
                    _ => return Err(lacks().into()),
                };
                // SAFETY: passed on.
                unsafe { execute(plan, input, output, false, stream.on(plan.context())) }.map(|()| None)
            }
        })?;
        let Some(what) = by_plan else { return Ok(&[Order::Plans]) };
        // SAFETY: passed on.
        self.collectives.on(stream, |gpu, stream| Ok(unsafe { gpu.call(&what, tensors, stream) }?))?;
        Ok(Order::of(what.operation))
    }

    /// Gives the plans' memory back, together with the other ranks.
    ///
    /// # Errors
    /// As [`AlgorithmCollection::free`].
    pub fn close(&self) -> Result {
        self.plans.shared().run(|comm| {
            let collection = self.plans.on(self.device, |plans| Ok(plans.collections[self.place].take()))?;
            Ok(collection.map_or(Ok(()), |collection| collection.free(comm))?) // without the lock, as it waits
        })
    }
}
