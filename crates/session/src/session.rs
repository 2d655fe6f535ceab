//! The session: a communicator and the GPUs that it has been used with.

use std::{fmt, sync::Arc};

use antiphon_collectives::{
    ReduceOp, StreamCollectives,
    cuda::CudaCollectives,
    fusion::{FusedAllReduce, Operand},
};
use antiphon_fabric::{Communicator, FabricError, Queue};
use antiphon_operation::{Call, Operation};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    FailureAction, GpuStream, Order, Result, Started, Tensors,
    gpu::Collectives,
    parts::{Parts, Shared},
    plan::Plans,
};

/// A communicator with the GPUs that it is used with; one, as a rule. [The page of the crate](crate) has an example.
///
/// Threads share it. A thread takes its turn in the queue before it takes the lock of a GPU, if it needs both, and a thread with such a
/// lock waits for no other thread of the process.
pub struct Session {
    pub(crate) shared: Arc<Shared>,
    pub(crate) collectives: Arc<Collectives>,
    pub(crate) plans: Arc<Parts<Plans>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("queue", &self.queue().ok()).finish_non_exhaustive()
    }
}

impl Session {
    /// The session of a communicator. No GPU is opened yet.
    pub fn new(comm: Communicator) -> Self {
        let shared = Shared::new(comm);
        let collectives = Arc::new(Collectives::new(&shared));
        Self { plans: Parts::new(&shared), collectives, shared }
    }

    /// The queue of the communicator's calls, for those on host memory.
    ///
    /// # Errors
    /// [`SessionError::Closed`](crate::SessionError::Closed).
    pub fn queue(&self) -> Result<Arc<Queue>> {
        self.shared.queue()
    }

    /// Whether the session takes no more calls.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Whether there are kernels for an operation.
    pub fn has_operation(operation: Operation) -> bool {
        CudaCollectives::has_operation(operation)
    }

    /// Puts a collective into a stream. The first call on a GPU opens it: it brings the ranks' GPUs together.
    ///
    /// # Errors
    /// [`SessionError::Captured`](crate::SessionError::Captured) for the first call on a GPU, if the stream is being captured;
    /// [`SessionError::Closed`](crate::SessionError::Closed); as [`CudaCollectives::call`].
    ///
    /// # Safety
    /// The tensors are of the stream's device and valid, and no other code uses them, until the stream has passed the call.
    pub unsafe fn call<'s, 't>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &Call<'_>,
        tensors: impl Into<Tensors<'t>>,
    ) -> Result {
        let mut tensors = tensors.into();
        // SAFETY: passed on.
        self.collectives.on(stream.into(), |gpu, stream| Ok(unsafe { gpu.call(call, &mut tensors, stream) }?))
    }

    /// Puts the same operation on each entry of a list into a stream: all-gathers and reduce-scatters of tensors that are apart in one
    /// launch, where they fit one.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn call_list<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &Call<'_>,
        list: Vec<Tensors<'_>>,
    ) -> Result {
        // SAFETY: passed on.
        self.collectives.on(stream.into(), |gpu, stream| Ok(unsafe { gpu.call_list(call, list, stream) }?))
    }

    /// Puts a fused all-reduce into a stream.
    ///
    /// # Errors
    /// As [`call`](Self::call); [`FabricError::InvalidArgument`] in a world of one rank.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn all_reduce_fused<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: FusedAllReduce<Operand<'_>>,
    ) -> Result {
        // SAFETY: passed on.
        self.collectives.on(stream.into(), |gpu, stream| Ok(unsafe { gpu.all_reduce_fused(call, stream) }?))
    }

    /// Makes a stream wait until the streams of all ranks have reached this call.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn barrier<'s>(&self, stream: impl Into<GpuStream<'s>>) -> Result {
        self.collectives.on(stream.into(), |gpu, stream| Ok(gpu.engine.barrier(stream.on(&gpu.context))?))
    }

    /// Puts a message to a rank into a stream.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn send<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        input: &TensorView<'_>,
        to: usize,
    ) -> Result {
        self.collectives.on(stream.into(), |gpu, stream| {
            // SAFETY: passed on.
            Ok(unsafe { gpu.exchange(Some((input, to)), None, stream) }?)
        })
    }

    /// Puts a message from a rank into a stream.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn recv<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        output: &mut TensorViewMut<'_>,
        from: usize,
    ) -> Result {
        self.collectives.on(stream.into(), |gpu, stream| {
            // SAFETY: passed on.
            Ok(unsafe { gpu.exchange(None, Some((output, from)), stream) }?)
        })
    }

    /// Puts a message to a rank and one from a rank into a stream, at once.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call).
    pub unsafe fn send_recv<'s>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        (input, to): (&TensorView<'_>, usize),
        (output, from): (&mut TensorViewMut<'_>, usize),
    ) -> Result {
        self.collectives.on(stream.into(), |gpu, stream| {
            // SAFETY: passed on.
            Ok(unsafe { gpu.exchange(Some((input, to)), Some((output, from)), stream) }?)
        })
    }

    /// Puts a collective into a stream of the session, which first waits for the caller's.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`call`](Self::call), until what this returns has been waited for or dropped. It keeps `kept`, the owner of the memory.
    pub unsafe fn start<'s, 't, K>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        call: &Call<'_>,
        tensors: impl Into<Tensors<'t>>,
        kept: K,
    ) -> Result<Started<K>> {
        let mut tensors = tensors.into();
        self.collectives.on(stream.into(), |gpu, stream| {
            gpu.start(Order::Collectives, stream, kept, |gpu, side| {
                // SAFETY: passed on.
                Ok(unsafe { gpu.call(call, &mut tensors, side) }?)
            })
        })
    }

    /// Puts a message to a rank into a stream of the session, as [`start`](Self::start).
    ///
    /// Started sends have a stream of their own, and so have started receives: a receive that waits for its message delays no
    /// send, and so no peer that waits for one.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub unsafe fn start_send<'s, K>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        input: &TensorView<'_>,
        to: usize,
        kept: K,
    ) -> Result<Started<K>> {
        self.collectives.on(stream.into(), |gpu, stream| {
            gpu.start(Order::Sends, stream, kept, |gpu, side| {
                // SAFETY: passed on.
                Ok(unsafe { gpu.exchange(Some((input, to)), None, side) }?)
            })
        })
    }

    /// Puts a message from a rank into a stream of the session, as [`start_send`](Self::start_send).
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub unsafe fn start_recv<'s, K>(
        &self,
        stream: impl Into<GpuStream<'s>>,
        output: &mut TensorViewMut<'_>,
        from: usize,
        kept: K,
    ) -> Result<Started<K>> {
        self.collectives.on(stream.into(), |gpu, stream| {
            gpu.start(Order::Receives, stream, kept, |gpu, side| {
                // SAFETY: passed on.
                Ok(unsafe { gpu.exchange(None, Some((output, from)), side) }?)
            })
        })
    }

    /// Does now what the first calls on a GPU would: opens it, and loads the kernels that reduce these dtypes by these operators. A
    /// capture may then have the first call. `staging_bytes` is the memory for data under way on GPUs that are opened from now on.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn prepare(
        &self,
        device: u32,
        kernels: &[(DType, ReduceOp)],
        staging_bytes: Option<usize>,
    ) -> Result {
        if let Some(bytes) = staging_bytes {
            self.collectives.set_staging_bytes(bytes);
        }
        self.collectives
            .with(device, |gpu| Ok(kernels.iter().try_for_each(|&(dtype, op)| gpu.load(dtype, op))?))
    }

    /// Sets the action that is taken when a kernel gives up, on every GPU and in calls of every kind, also those that are opened later.
    pub fn on_failure(&self, action: FailureAction) {
        self.shared.on_failure(action);
    }

    /// Returns the failure that kernels have reported, if any, in calls of every kind. It does not wait: synchronise with the streams
    /// first.
    ///
    /// # Errors
    /// What the kernels reported.
    pub fn check(&self) -> Result {
        self.shared.check()
    }

    /// Ends the queue: no later call takes part, and those that were started on the host complete. The GPUs stay until
    /// [`close`](Self::close).
    ///
    /// # Errors
    /// [`FabricError::Interrupted`], and other failures of the communicator.
    pub fn finish(&self) -> Result<(), FabricError> {
        let Some(queue) = self.shared.take_queue() else { return Ok(()) };
        queue.run(|_| Ok::<_, FabricError>(()))?;
        queue.messenger().flush()
    }

    /// Leaves the peers, on every GPU and in calls of every kind, once the kernels under way are over. Nothing is opened any more.
    pub fn close(&self) {
        drop(self.shared.take_queue());
        self.shared.close();
    }
}

/// Closes the session; what it has handed out refuses later calls.
impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}
