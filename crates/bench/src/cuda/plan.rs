//! Execution plans between GPUs: `antiphon plan run --device cuda`.

use std::rc::Rc;

use antiphon::{
    collectives::{
        Communicator, StreamCollectives,
        cuda::{CudaBuilder, CudaCollectives},
    },
    device::{
        ReduceOp,
        cuda::{Context, Driver, Stream},
    },
    executor::{
        PacketKind,
        cuda::{CudaOptions, CudaPlan, Form, Ports},
    },
    plan::{Plan, verify::VerifiedPlan},
    tensor::{DType, Element, with_dtype},
};

use super::{
    OnStream,
    tensors::{Plain, Tensor, Tensors},
    timing::{Clock, graph},
};
use crate::{
    Result,
    host::{
        BATCHES,
        plan::{Ran, counts, reduction, wrong},
        sorted, total,
    },
    pattern,
};

/// How plans are run between GPUs; the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct OnGpus {
    /// The kind of elements.
    pub dtype: DType,
    /// The form of packets.
    pub packets: PacketKind,
    /// The form of the plan's kernel.
    pub form: Form,
    /// What does the work of ports.
    pub ports: Ports,
    /// How many ranks share a GPU: ranks `n * ranks_per_gpu` and behind are on GPU `n`.
    pub ranks_per_gpu: usize,
    /// Calls in each of the 11 batches.
    pub iterations: u32,
    /// Whether the calls of a batch are one graph.
    pub graph: bool,
    /// Whether tensors are registered, so that what peers touch is not staged.
    pub registered: bool,
    /// Whether our all-reduce is measured on the same tensors.
    pub beside_all_reduce: bool,
}

/// A plan's time at a size, and that of the all-reduce beside it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compared {
    /// The plan.
    pub plan: Ran,
    /// The all-reduce, if it was asked for.
    pub all_reduce: Option<Ran>,
}

/// Verifies and times a plan on the GPU of a rank, for each size in bytes of the larger tensor, and gives what was found to `report`. The
/// ranks do it together, each in a process or a thread of its own.
///
/// # Errors
/// [`BenchError::Chunks`](crate::BenchError::Chunks); [`Cuda`](crate::BenchError::Cuda) without a GPU or NVRTC;
/// [`Executor`](crate::BenchError::Executor) for a plan that is not proved for device memory or does not fit;
/// [`Collective`](crate::BenchError::Collective) for a dtype that our all-reduce does not sum.
pub fn run(
    comm: &Communicator,
    plan: &VerifiedPlan,
    sizes: &[u64],
    how: OnGpus,
    mut report: impl FnMut(Compared) -> std::io::Result<()>,
) -> Result<()> {
    let ordinal = comm.rank() / how.ranks_per_gpu.max(1);
    let context = &Context::primary(Driver::load()?.device(ordinal as u32)?)?;
    let stream = &context.stream()?;
    let builder = CudaCollectives::builder(comm, context);
    let builder = match how.beside_all_reduce {
        true => builder,
        false => builder.staging_bytes(CudaBuilder::LEAST_STAGING_BYTES), // it only lines the GPUs up
    };
    let ours = &builder.build()?;
    let OnGpus { packets, form, ports, .. } = how;
    let options = CudaOptions { packets, form, ports, ..CudaOptions::default() };
    let mut loaded = CudaPlan::load(comm, context, plan, options)?;
    let clock = &Clock::new(comm, ours, stream)?;
    for &bytes in sizes {
        let bench = Bench { comm, context, stream, ours, clock, plan: plan.plan(), how };
        report(with_dtype!(how.dtype, T => bench.compare::<T>(&mut loaded, bytes)?))?;
    }
    Ok(loaded.free(comm)?)
}

struct Bench<'a> {
    comm: &'a Communicator,
    context: &'a Context,
    stream: &'a Stream,
    ours: &'a CudaCollectives,
    clock: &'a Clock<'a>,
    plan: &'a Plan,
    how: OnGpus,
}

impl Bench<'_> {
    fn compare<T: Element>(&self, loaded: &mut CudaPlan, bytes: u64) -> Result<Compared> {
        let Self { comm, context, stream, ours, plan, .. } = *self;
        let [input, output] = counts::<T>(plan, bytes)?;
        let [input_bytes, output_bytes] = [input, output].map(|count| count * size_of::<T>());
        loaded.prepare(comm, T::DTYPE, loaded.message_bytes(input_bytes, output_bytes))?;
        let loaded = &*loaded;
        let values = pattern::input::<T>(ReduceOp::Sum, comm.rank(), input);
        let in_place = plan.inplace;
        let tensors = Rc::new(match in_place {
            false => Tensors::apart::<T>(
                Tensor::holding(context, stream, &[input], &values)?,
                Tensor::zeros(context, stream, T::DTYPE, &[output])?,
                move |output| Ok(wrong(comm, plan, output, input)),
            ),
            true => {
                // The smaller of input and output is this rank's part of the larger.
                let all = input.max(output);
                let part = move |count: usize| if count < all { comm.rank() * count } else { 0 };
                let mut before = vec![T::default(); all];
                before[part(input)..][..input].copy_from_slice(&values);
                Tensors::together::<T>(
                    Tensor::holding(context, stream, &[all], &before)?,
                    Tensor::zeros(context, stream, T::DTYPE, &[all])?,
                    move |buffer| Ok(wrong(comm, plan, &buffer[part(output)..][..output], input)),
                )
            }
        });
        let larger = input_bytes.max(output_bytes) as u64;
        let both = [&tensors.input, &tensors.output];
        let registered = if self.how.registered { &both[..] } else { &[] };
        for tensor in registered {
            CudaPlan::register(comm, tensor.registered(comm, context)?)?;
        }
        let planned = Plain::on(&tensors, "plan", |tensors, stream| {
            let (input, output) = (tensors.input.view(), tensors.output.view_mut());
            // SAFETY: `time` waits for the stream, and drops the graph, before the tensors are dropped.
            Ok(unsafe {
                match (self.how.registered, in_place) {
                    (true, false) => loaded.execute_registered(input, output, stream),
                    (false, false) => loaded.execute(input, output, stream),
                    (true, true) => loaded.execute_in_place_registered(output, stream),
                    (false, true) => loaded.execute_in_place(output, stream),
                }
            }?)
        });
        let planned = self.time(planned, loaded, larger, in_place)?;
        for tensor in registered {
            CudaPlan::unregister(comm, context, tensor.pointer())?;
        }
        let op = reduction(plan);
        let by_hand = || -> Result<Ran> {
            ours.prepare(T::DTYPE, op)?;
            let call = Plain::on(&tensors, "all-reduce", |tensors, stream| {
                let mut output = tensors.output.view_mut();
                // SAFETY: as above.
                Ok(unsafe { ours.all_reduce(tensors.input.view(), &mut output, op, stream) }?)
            });
            self.time(call, loaded, larger, false)
        };
        let all_reduce = self.how.beside_all_reduce.then(by_hand).transpose()?;
        Ok(Compared { plan: planned, all_reduce })
    }

    /// Verifies a contender, times it and verifies it again: one in place by another call, as each call has the results of the one before.
    fn time(
        &self,
        mut contender: OnStream<'_>,
        loaded: &CudaPlan,
        bytes: u64,
        in_place: bool,
    ) -> Result<Ran> {
        let (stream, calls) = (self.stream.borrow(), self.how.iterations.max(1));
        // Of a plan that waits in vain it tells which operation does.
        let explained = |outcome: Result<f64>| match (outcome, loaded.check()) {
            (Err(_), Err(error)) => Err(error.into()),
            (outcome, _) => outcome,
        };
        contender.prepare(stream)?;
        explained(self.clock.time(true, |stream| contender.call(stream)))?;
        let first = contender.check(stream)?;
        let all = match self.how.graph {
            true => Some(graph(self.stream, calls, |stream| contender.call(stream))?),
            false => None,
        };
        let mut times = Vec::new();
        for _ in 0..BATCHES {
            let took = match &all {
                // SAFETY: the contender lives until the replay has been waited for.
                Some(graph) => unsafe { self.clock.replay(graph, true) },
                None => self.clock.time(true, |stream| (0..calls).try_for_each(|_| contender.call(stream))),
            };
            times.push(explained(took)? / f64::from(calls));
        }
        if in_place {
            contender.prepare(stream)?;
            explained(self.clock.time(true, |stream| contender.call(stream)))?;
        }
        let wrong = total(self.comm, first.and(contender.check(stream)?))?;
        drop(all); // before the memory that it reads and writes
        contender.finish()?;
        let latency_us = sorted(self.comm, &times)?[BATCHES / 2];
        Ok(Ran { bytes, latency_us, wrong: self.plan.operation().map(|_| wrong.elements) })
    }
}
