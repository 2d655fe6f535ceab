//! The mixed collectives of a layout on a GPU.

use std::{fmt, ops::RangeInclusive, sync::Arc};

use antiphon_collectives::{
    CollectiveError, ReduceOp,
    cuda::CudaCollectives,
    mixed::{CudaMixedHandler, MixedCall, MixedMode, MixedOp, operation_of},
};
use antiphon_device::sync::Mutex;
use antiphon_fabric::{Communicator, FabricError};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_topology::MixedLayout;

use crate::{
    GpuStream, Order, Result, Session, Started,
    gpu::{Collectives, Gpu, REDUCED},
    parts::lock,
};

/// The mixed collectives of a layout on a GPU of a session; see [`CudaMixedHandler`]. Threads share it.
pub struct MixedHandler {
    device: u32,
    collectives: Arc<Collectives>,
    handler: Mutex<CudaMixedHandler>,
}

impl fmt::Debug for MixedHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MixedHandler").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Session {
    /// The mixed collectives of a layout on a GPU, with the kernels for a dtype loaded. `most_blocks` limits each launch of a fused
    /// operation. All ranks call it together.
    ///
    /// # Errors
    /// [`FabricError::NotImplemented`] on several nodes; as [`CudaMixedHandler::new`] and [`call`](Self::call).
    pub fn mixed(
        &self,
        device: u32,
        layout: MixedLayout,
        dtype: DType,
        most_blocks: Option<usize>,
    ) -> Result<MixedHandler> {
        self.shared.run(|comm| Ok(comm.check_one_node("MixedHandler with a device")?))?;
        self.prepare(device, &[], None)?;
        let handler = self.shared.run(|comm| {
            self.collectives.with_peers(device, |peers| {
                let handler = CudaMixedHandler::new(comm, peers, layout)?;
                handler.prepare(peers, dtype)?;
                Ok(handler.most_blocks(most_blocks.unwrap_or(usize::MAX)))
            })
        })?;
        Ok(MixedHandler { device, collectives: self.collectives.clone(), handler: Mutex::new(handler) })
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
        self.collectives.with_peers(self.device, |peers| Ok(lock(&self.handler).select(peers, op, bytes)?))
    }

    /// Measures the modes, together with the other ranks.
    ///
    /// # Errors
    /// As [`CudaMixedHandler::tune`].
    pub fn tune(&self, sizes: RangeInclusive<usize>) -> Result {
        self.together(|comm, peers| Ok(lock(&self.handler).tune(comm, peers, sizes)?))
    }

    /// Gives the memory of the GPU's collectives back until [`restore_memory`](Self::restore_memory), together with the other ranks.
    ///
    /// # Errors
    /// As [`CudaCollectives::release_memory`].
    pub fn release_memory(&self) -> Result {
        self.together(|comm, peers| Ok(peers.release_memory(comm)?))
    }

    /// Undoes [`release_memory`](Self::release_memory), together with the other ranks, unless one of them has a `problem`.
    ///
    /// # Errors
    /// The problem; as [`CudaCollectives::restore_memory`].
    pub fn restore_memory(&self, problem: Result<(), FabricError>) -> Result {
        self.together(|comm, peers| {
            comm.agree("cannot restore its memory", problem)?;
            Ok(peers.restore_memory(comm)?)
        })
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
        self.collectives.on(stream.into(), |gpu, stream| {
            // SAFETY: passed on.
            Ok(unsafe { self.run_on(gpu, call, input, output, stream) }?)
        })
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
        self.collectives.on(stream.into(), |gpu, stream| {
            gpu.start(Order::Collectives, stream, kept, |gpu, side| {
                // SAFETY: passed on.
                Ok(unsafe { self.run_on(gpu, call, input, output, side) }?)
            })
        })
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_on(
        &self,
        gpu: &mut Gpu,
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
        unsafe { lock(&self.handler).run(peers, call, input, output, stream.on(&gpu.context)) }
    }

    /// Something that all ranks do together.
    fn together(&self, work: impl FnOnce(&Communicator, &CudaCollectives) -> Result) -> Result {
        let on_gpu =
            |comm: &Communicator| self.collectives.with_peers(self.device, |peers| work(comm, peers));
        self.collectives.shared().run(on_gpu)
    }
}
