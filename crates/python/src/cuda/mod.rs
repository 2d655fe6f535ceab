//! Collectives on CUDA tensors: put into the caller's stream, in its order.
//!
//! A thread takes the lock of a communicator's GPUs detached from the interpreter, and after its turn in the queue if it needs both.
//! While it has the lock, it needs the interpreter at most to check for signals.

mod buffer;
mod collections;
mod failure;
mod last_streams;
mod parts;
mod plans;
mod register;
mod started;
mod work;

use std::sync::{Arc, PoisonError};

use antiphon::device::sync::Mutex;
use antiphon::{
    collectives::{
        StreamCollectives,
        cuda::{CudaBuilder, CudaCollectives, CudaEngine, OnFailure},
        mixed::CudaMixedHandler,
    },
    device::cuda::{Context, Stream},
    fabric::Queue,
    operation::Operation,
    prelude::{CollectiveError, DType, FabricError, MixedLayout, ReduceOp},
};
use pyo3::prelude::*;

pub(crate) use buffer::CudaBuffer;
pub(crate) use collections::{CollectionOnGpu, Said};
pub(crate) use failure::Action;
pub(crate) use parts::{List, Part, Parts, primary};
pub(crate) use plans::LoadedOnGpu;
pub(crate) use register::Registrable;
pub(crate) use started::Started;

use self::{
    last_streams::LastStreams,
    parts::{Shared, closed},
    plans::Plans,
};
use crate::{call::Call, error::Result, fused::Fused, operand::Tensor, stream::RawStream};

type Outcome<T = ()> = std::result::Result<T, CollectiveError>;

/// The dtypes that the kernels reduce.
pub(crate) const REDUCED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The orders of calls, each of which waits for the stream of its own last call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Order {
    Collectives,
    Sends,
    Receives,
    Plans,
}

impl Order {
    pub(crate) const COUNT: usize = 4;

    /// The orders in which an operation has its place.
    pub(crate) fn of(operation: Operation) -> &'static [Self] {
        match CudaCollectives::is_by_messages(operation) {
            true => &[Self::Sends, Self::Receives],
            false => &[Self::Collectives],
        }
    }
}

/// The GPUs that a communicator of this rank has been used with; one, as a rule.
pub(crate) struct Gpus {
    collectives: Arc<Parts<Gpu>>,
    plans: Arc<Parts<Plans>>,
    shared: Arc<Shared>,
    /// The memory for data under way on GPUs that are opened from now on; the usual size without one.
    staging_bytes: Mutex<Option<usize>>,
    last_streams: Arc<LastStreams>,
}

impl Default for Gpus {
    fn default() -> Self {
        let shared = Arc::<Shared>::default();
        Self {
            collectives: Parts::new(&shared),
            plans: Parts::new(&shared),
            shared,
            staging_bytes: Mutex::default(),
            last_streams: Arc::default(),
        }
    }
}

/// What the collectives have on a GPU.
struct Gpu {
    context: Context,
    engine: CudaEngine,
    /// The streams of started calls, one for each [`Order`].
    sides: [Option<Stream>; Order::COUNT],
    /// The kernels that are loaded.
    loaded: Vec<(DType, ReduceOp)>,
}

impl Gpus {
    /// Puts a collective into a stream of a device. The first call on a device brings the ranks' devices together.
    ///
    /// # Safety
    /// The operands are of the device and valid, and no other code uses them, until the stream has passed the call;
    /// the stream is one of the device.
    pub(crate) unsafe fn run(&self, queue: &Queue, device: u32, stream: RawStream, call: &Call) -> Outcome {
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            unsafe { gpu.run(call, stream) }
        })
    }

    /// Puts the same operation on several tensors into a stream of a device, as [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn run_list(
        &self,
        queue: &Queue,
        device: u32,
        stream: RawStream,
        calls: &[Call],
    ) -> Outcome {
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            unsafe { gpu.run_list(calls, stream) }
        })
    }

    /// Puts a message to a rank, one from a rank, or both, into a stream of a device, as [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn exchange(
        &self,
        queue: &Queue,
        device: u32,
        stream: RawStream,
        sent: Option<(Tensor, usize)>,
        received: Option<(Tensor, usize)>,
    ) -> Outcome {
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            unsafe { gpu.exchange(sent, received, stream) }
        })
    }

    /// Puts a fused all-reduce into a stream of a device, as [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn run_fused(
        &self,
        queue: &Queue,
        device: u32,
        stream: RawStream,
        fused: &Fused,
    ) -> Outcome {
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            unsafe { gpu.run_fused(fused, stream) }
        })
    }

    /// Makes a stream wait until the streams of all ranks have reached this call.
    ///
    /// # Safety
    /// The stream is one of the device.
    pub(crate) unsafe fn barrier(&self, queue: &Queue, device: u32, stream: RawStream) -> Outcome {
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            gpu.engine.barrier(unsafe { gpu.context.borrow_stream(stream) })
        })
    }

    /// Does now what the first calls on a device would.
    pub(crate) fn prepare(
        &self,
        queue: &Queue,
        device: u32,
        kernels: &[(DType, ReduceOp)],
        staging_bytes: Option<usize>,
    ) -> Outcome {
        if staging_bytes.is_some() {
            *self.staging_bytes.lock().unwrap_or_else(PoisonError::into_inner) = staging_bytes;
        }
        self.with(queue, device, None, |gpu| kernels.iter().try_for_each(|&(dtype, op)| gpu.load(dtype, op)))
    }

    /// The mixed collectives of a layout on a device, with the kernels for a dtype loaded. All ranks call it together.
    pub(crate) fn mixed(
        &self,
        queue: &Queue,
        device: u32,
        layout: MixedLayout,
        dtype: DType,
        most_blocks: Option<usize>,
    ) -> Outcome<CudaMixedHandler> {
        queue.run(|comm| comm.check_one_node("MixedHandler with a device"))?;
        self.prepare(queue, device, &[], None)?;
        queue.run(|comm| {
            self.with_peers(device, |peers| {
                let handler = CudaMixedHandler::new(comm, peers, layout)?;
                handler.prepare(peers, dtype)?;
                Ok(handler.most_blocks(most_blocks.unwrap_or(usize::MAX)))
            })
        })
    }

    /// With the collectives of a device that has been opened before, in a world of several ranks.
    pub(crate) fn with_peers<T>(
        &self,
        device: u32,
        work: impl FnOnce(&CudaCollectives) -> Outcome<T>,
    ) -> Outcome<T> {
        self.with_open(device, |gpu| match gpu.engine.world_size() {
            2.. => work(gpu.engine.nvlink("this call")?),
            _ => Err(FabricError::invalid("there is one rank, and nothing between GPUs").into()),
        })
    }

    /// Sets the action that is taken when a kernel gives up, on every GPU and in calls of every kind.
    pub(crate) fn on_failure(&self, py: Python<'_>, action: Action) {
        self.shared.on_failure(py, action);
    }

    /// Returns the failure that kernels have reported, if any, in calls of every kind.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// An empty list of another kind of calls on the communicator's GPUs. As long as a part of any kind is open, the peers take the
    /// rank for present; [`close`](Self::close) closes them all.
    pub(crate) fn parts<P: Part + 'static>(&self, py: Python<'_>) -> Arc<Parts<P>> {
        // Detached, as another thread may hold the lock while it attaches.
        py.detach(|| Parts::new(&self.shared))
    }

    /// Leaves the peers, once the kernels under way are over.
    pub(crate) fn close(&self) {
        self.shared.close();
    }

    fn with<T>(
        &self,
        queue: &Queue,
        device: u32,
        stream: Option<RawStream>,
        work: impl FnOnce(&mut Gpu) -> Outcome<T>,
    ) -> Outcome<T> {
        let make = |comm: &_, context: &Context| {
            let staging_bytes = *self.staging_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            let staging_bytes = staging_bytes.unwrap_or(CudaBuilder::STAGING_BYTES);
            Ok(Gpu {
                context: context.clone(),
                engine: CudaEngine::new(comm, context, staging_bytes)?,
                sides: [const { None }; Order::COUNT],
                loaded: Vec::new(),
            })
        };
        // SAFETY: the stream is one of the device, as all that call this are promised.
        unsafe { self.collectives.with((queue, device, stream), "CUDA call", make, work) }
    }

    /// With a device that has been opened before.
    fn with_open<T>(&self, device: u32, work: impl FnOnce(&mut Gpu) -> Outcome<T>) -> Outcome<T> {
        self.collectives.with_open(device, work).unwrap_or_else(|| Err(closed().into()))
    }

    /// Keeps the stream of a call that was made, until the next call of the same order has been made.
    pub(crate) fn keep_stream(&self, py: Python<'_>, stream: RawStream, orders: &[Order]) -> PyResult<()> {
        self.last_streams.keep(py, stream, orders)
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        // Without an interpreter there is nothing to detach from.
        if Python::try_attach(|py| py.detach(|| self.close())).is_none() {
            self.close();
        }
    }
}

impl Part for Gpu {
    fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    fn on_failure(&self, action: OnFailure) {
        self.engine.on_failure(action);
    }

    fn check(&self) -> Result<()> {
        Ok(self.engine.check()?)
    }
}

impl Gpu {
    /// Loads the kernels that reduce a dtype, unless they are.
    fn load(&mut self, dtype: DType, op: ReduceOp) -> Outcome {
        if self.loaded.contains(&(dtype, op)) {
            return Ok(());
        }
        self.engine.prepare(dtype, op)?;
        self.loaded.push((dtype, op));
        Ok(())
    }
}
