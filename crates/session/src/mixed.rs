//! The mixed collectives of a layout on a GPU.

use std::{fmt, ops::RangeInclusive, sync::Arc};

use antiphon_collectives::{
    CollectiveError, ReduceOp,
    cuda::{CudaCollectives, OnFailure},
    mixed::{CudaMixedHandler, CudaMixedNodes, MixedCall, MixedMode, MixedOp, operation_of},
};
use antiphon_device::{
    cuda::{Context, Stream},
    sync::Mutex,
};
use antiphon_fabric::{Communicator, FabricError, gpu::Runtime};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_topology::MixedLayout;

use crate::{
    GpuStream, Order, Result, Session, SessionError, Started,
    gpu::{Collectives, Gpu, REDUCED, start_in},
    parts::{Part, Parts, Shared, lock},
};

/// The mixed collectives of a layout on a GPU of a session; see [`CudaMixedHandler`], and [`CudaMixedNodes`] for several nodes. Threads
/// share it.
pub struct MixedHandler {
    device: u32,
    shared: Arc<Shared>,
    on: On,
}

/// Where the ranks are.
enum On {
    /// On one node, where they use the GPUs of the session's collectives.
    Node { collectives: Arc<Collectives>, handler: Mutex<CudaMixedHandler> },
    /// On several nodes.
    Nodes(Arc<Parts<Nodes>>),
}

/// What the mixed collectives of several nodes have on a GPU.
struct Nodes {
    context: Context,
    handler: CudaMixedNodes,
    /// The stream of started calls.
    side: Option<Stream>,
}

impl Part for Nodes {
    fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    fn on_failure(&self, action: OnFailure) {
        self.handler.on_failure(action);
    }

    fn check(&self) -> Result {
        Ok(self.handler.check()?)
    }
}

impl fmt::Debug for MixedHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MixedHandler").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Session {
    /// The mixed collectives of a layout on a GPU, with the kernels for a dtype loaded. `most_blocks` limits each launch of a fused
    /// operation. On several nodes ranks reach each other by NVSHMEM, which `runtime` makes ready; on one node that is not used. All ranks
    /// call it together.
    ///
    /// # Errors
    /// As [`CudaMixedHandler::new`] and [`call`](Self::call); on several nodes as [`CudaMixedNodes::new`].
    pub fn mixed(
        &self,
        device: u32,
        layout: MixedLayout,
        dtype: DType,
        most_blocks: Option<usize>,
        runtime: Runtime,
    ) -> Result<MixedHandler> {
        let most_blocks = most_blocks.unwrap_or(usize::MAX);
        let shared = self.shared.clone();
        if self.shared.run(|comm| Ok(comm.nodes().count()))? > 1 {
            let parts = Parts::new(&self.shared);
            let make = |comm: &Communicator, context: &Context| {
                let handler = CudaMixedNodes::new(comm, context, layout, runtime)?.most_blocks(most_blocks);
                handler.prepare(comm, dtype)?;
                Ok(Nodes { context: context.clone(), handler, side: None })
            };
            parts.with((device, None), "MixedHandler", make, |_| Ok(()))?;
            return Ok(MixedHandler { device, shared, on: On::Nodes(parts) });
        }
        self.prepare(device, &[], None)?;
        let handler = self.shared.run(|comm| {
            self.collectives.with_peers(device, |peers| {
                let handler = CudaMixedHandler::new(comm, peers, layout)?;
                handler.prepare(peers, dtype)?;
                Ok(handler.most_blocks(most_blocks))
            })
        })?;
        let on = On::Node { collectives: self.collectives.clone(), handler: Mutex::new(handler) };
        Ok(MixedHandler { device, shared, on })
    }
}

impl MixedHandler {
    /// The number of the GPU.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The mode of a call that names no mode, for blocks of `bytes` bytes.
    ///
    /// # Errors
    /// As [`CudaMixedHandler::select`].
    pub fn select(&self, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        match &self.on {
            On::Node { collectives, handler } => {
                collectives.with_peers(self.device, |peers| Ok(lock(handler).select(peers, op, bytes)?))
            }
            On::Nodes(parts) => self.with(parts, |nodes| Ok(nodes.handler.select(op, bytes)?)),
        }
    }

    /// Measures the modes, together with the other ranks.
    ///
    /// # Errors
    /// As [`CudaMixedHandler::tune`]; [`FabricError::NotImplemented`] on several nodes.
    pub fn tune(&self, sizes: RangeInclusive<usize>) -> Result {
        self.together("tune", |comm, peers, handler| Ok(lock(handler).tune(comm, peers, sizes)?))
    }

    /// Gives the memory of the GPU's collectives back until [`restore_memory`](Self::restore_memory), together with the other ranks.
    ///
    /// # Errors
    /// As [`CudaCollectives::release_memory`]; [`FabricError::NotImplemented`] on several nodes.
    pub fn release_memory(&self) -> Result {
        self.together("release_memory", |comm, peers, _| Ok(peers.release_memory(comm)?))
    }

    /// Undoes [`release_memory`](Self::release_memory), together with the other ranks, unless one of them has a `problem`.
    ///
    /// # Errors
    /// The problem; as [`CudaCollectives::restore_memory`]; [`FabricError::NotImplemented`] on several nodes.
    pub fn restore_memory(&self, problem: Result<(), FabricError>) -> Result {
        self.together("restore_memory", |comm, peers, _| {
            comm.agree("cannot restore its memory", problem)?;
            Ok(peers.restore_memory(comm)?)
        })
    }

    /// Gives back what the handler has for itself, together with the other ranks; it makes no call after that. On one node that is nothing.
    ///
    /// # Errors
    /// As [`CudaMixedNodes::close`].
    pub fn close(&self) -> Result {
        match &self.on {
            On::Node { .. } => Ok(()),
            On::Nodes(parts) => self.shared.run(|comm| match parts.take(self.device) {
                Some(nodes) => Ok(nodes.handler.close(comm)?),
                None => Ok(()),
            }),
        }
    }

    fn with<T>(&self, parts: &Parts<Nodes>, work: impl FnOnce(&mut Nodes) -> Result<T>) -> Result<T> {
        parts.with_open(self.device, work).unwrap_or(Err(SessionError::Closed))
    }

    /// As [`with`](Self::with), for a call on a stream.
    fn with_stream<T>(
        &self,
        parts: &Parts<Nodes>,
        stream: GpuStream<'_>,
        work: impl FnOnce(&mut Nodes) -> Result<T>,
    ) -> Result<T> {
        if stream.device() != self.device {
            let text = format!(
                "the mixed handler is of cuda:{}, and the call is on cuda:{}",
                self.device,
                stream.device()
            );
            return Err(FabricError::InvalidArgument(text).into());
        }
        self.with(parts, work)
    }

    /// Puts a mixed collective into a stream.
    ///
    /// # Errors
    /// As [`CudaMixedHandler::run`].
    ///
    /// # Safety
    /// As [`CudaMixedHandler::run`].
    pub unsafe fn run<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: MixedCall<'_>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
    ) -> Result {
        let stream = stream.into();
        match &self.on {
            On::Node { collectives, handler } => collectives.on(stream, |gpu, stream| {
                // SAFETY: passed on.
                Ok(unsafe { run_on(gpu, handler, call, input, output, stream) }?)
            }),
            On::Nodes(parts) => self.with_stream(parts, stream, |Nodes { context, handler, .. }| {
                // SAFETY: passed on.
                Ok(unsafe { handler.run(call, input, output, stream.on(context)) }?)
            }),
        }
    }

    /// Puts a mixed collective into a stream of the session, as [`Session::start`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Safety
    /// As [`Session::start`].
    pub unsafe fn start<'s, K>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: MixedCall<'_>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        kept: K,
    ) -> Result<Started<K>> {
        let stream = stream.into();
        match &self.on {
            On::Node { collectives, handler } => collectives.on(stream, |gpu, stream| {
                gpu.start(Order::Collectives, stream, kept, |gpu, side| {
                    // SAFETY: passed on.
                    Ok(unsafe { run_on(gpu, handler, call, input, output, side) }?)
                })
            }),
            On::Nodes(parts) => self.with_stream(parts, stream, |Nodes { context, handler, side }| {
                let side = match side {
                    Some(side) => side,
                    None => side.insert(context.stream()?),
                };
                start_in(side, (context, stream), kept, |side| {
                    // SAFETY: passed on.
                    Ok(unsafe { handler.run(call, input, output, side.on(context)) }?)
                })
            }),
        }
    }

    /// Something that all ranks of one node do together.
    fn together(
        &self,
        what: &'static str,
        work: impl FnOnce(&Communicator, &CudaCollectives, &Mutex<CudaMixedHandler>) -> Result,
    ) -> Result {
        match &self.on {
            On::Node { collectives, handler } => self
                .shared
                .run(|comm| collectives.with_peers(self.device, |peers| work(comm, peers, handler))),
            On::Nodes(_) => {
                let text = format!("{what} of a mixed handler of GPUs on several nodes");
                Err(FabricError::NotImplemented(text).into())
            }
        }
    }
}

/// # Safety
/// As [`MixedHandler::run`].
unsafe fn run_on(
    gpu: &mut Gpu,
    handler: &Mutex<CudaMixedHandler>,
    call: MixedCall<'_>,
    input: &TensorView<'_>,
    output: &mut TensorViewMut<'_>,
    stream: GpuStream<'_>,
) -> Result<(), CollectiveError> {
    use MixedOp::{AllReduce, ReduceScatter, ReduceScatterAllReduce};
    // Where no tensors are parallel these are the plain collectives.
    if matches!(call.op, AllReduce | ReduceScatter | ReduceScatterAllReduce)
        && REDUCED.contains(&input.dtype())
    {
        gpu.load(input.dtype(), ReduceOp::Sum)?;
    }
    let peers = gpu.engine.nvlink(operation_of(call.op).name())?;
    // SAFETY: passed on.
    unsafe { lock(handler).run(peers, call, input, output, stream.on(&gpu.context)) }
}
