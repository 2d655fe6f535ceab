//! What the collectives of a session have on one GPU.

use std::sync::Arc;

use antiphon_collectives::{
    CollectiveError, ReduceOp, StreamCollectives,
    cuda::{CudaBuilder, CudaCollectives, CudaEngine, OnFailure},
    fusion::{FusedAllReduce, Operand},
};
use antiphon_device::{
    cuda::{Context, Event, Stream},
    sync::Mutex,
};
use antiphon_fabric::FabricError;
use antiphon_operation::{Call, Operation};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    GpuStream, Order, Result, SessionError, Started, Tensors,
    parts::{Part, Parts, Shared, lock},
};

/// The dtypes that the kernels reduce.
pub const REDUCED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The collectives on the GPUs that were used.
pub(crate) struct Collectives {
    gpus: Arc<Parts<Gpu>>,
    /// The memory for data under way on GPUs that are opened from now on; the usual size without one.
    staging_bytes: Mutex<Option<usize>>,
}

/// What the collectives have on a GPU.
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) engine: CudaEngine,
    /// The streams of started calls, one for each [`Order`].
    sides: [Option<Stream>; Order::COUNT],
    /// The kernels that are loaded.
    loaded: Vec<(DType, ReduceOp)>,
}

/// A message: what is sent and to which rank, or where it comes to and from which rank.
pub(crate) type Message<T> = Option<(T, usize)>;

impl Collectives {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { gpus: Parts::new(shared), staging_bytes: Mutex::default() }
    }

    pub(crate) fn set_staging_bytes(&self, bytes: usize) {
        *lock(&self.staging_bytes) = Some(bytes);
    }

    /// With a device, which is opened if it is not.
    pub(crate) fn with<T>(&self, device: u32, work: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
        self.open_with((device, None), work)
    }

    /// With the device of a stream, as [`with`](Self::with), and the stream.
    pub(crate) fn on<T>(
        &self,
        stream: GpuStream<'_>,
        work: impl FnOnce(&mut Gpu, GpuStream<'_>) -> Result<T>,
    ) -> Result<T> {
        self.open_with((stream.device(), Some(stream)), |gpu| work(gpu, stream))
    }

    fn open_with<T>(
        &self,
        place: (u32, Option<GpuStream<'_>>),
        work: impl FnOnce(&mut Gpu) -> Result<T>,
    ) -> Result<T> {
        let make = |comm: &_, context: &Context| {
            let staging_bytes = lock(&self.staging_bytes).unwrap_or(CudaBuilder::STAGING_BYTES);
            Ok(Gpu {
                context: context.clone(),
                engine: CudaEngine::new(comm, context, staging_bytes)?,
                sides: [const { None }; Order::COUNT],
                loaded: Vec::new(),
            })
        };
        self.gpus.with(place, "CUDA call", make, work)
    }

    /// With a device that has been opened before.
    pub(crate) fn with_open<T>(&self, device: u32, work: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
        self.gpus.with_open(device, work).unwrap_or(Err(SessionError::Closed))
    }

    /// With the kernels of a device that has been opened before, in a world of several ranks.
    pub(crate) fn with_peers<T>(
        &self,
        device: u32,
        work: impl FnOnce(&CudaCollectives) -> Result<T>,
    ) -> Result<T> {
        self.with_open(device, |gpu| match gpu.engine.world_size() {
            2.. => work(gpu.engine.nvlink("this call")?),
            _ => Err(FabricError::invalid("there is one rank, and nothing between GPUs").into()),
        })
    }
}

impl Part for Gpu {
    fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    fn on_failure(&self, action: OnFailure) {
        self.engine.on_failure(action);
    }

    fn check(&self) -> Result {
        Ok(self.engine.check()?)
    }
}

impl Gpu {
    /// Loads the kernels that reduce a dtype, unless they are.
    pub(crate) fn load(&mut self, dtype: DType, op: ReduceOp) -> Result<(), CollectiveError> {
        if self.loaded.contains(&(dtype, op)) {
            return Ok(());
        }
        self.engine.prepare(dtype, op)?;
        self.loaded.push((dtype, op));
        Ok(())
    }

    /// # Safety
    /// As [`Session::call`](crate::Session::call).
    pub(crate) unsafe fn call(
        &mut self,
        call: &Call<'_>,
        tensors: &mut Tensors<'_>,
        stream: GpuStream<'_>,
    ) -> Result<(), CollectiveError> {
        if call.operation.row().reduces
            && let Some(dtype) = tensors.dtype().filter(|dtype| REDUCED.contains(dtype))
        {
            self.load(dtype, call.op)?; // of others the call says that they cannot be reduced
        }
        let (engine, stream) = (&self.engine, stream.on(&self.context));
        // SAFETY: passed on.
        unsafe {
            match tensors {
                Tensors::Nowhere => engine.call(call, None, None, stream),
                Tensors::InPlace(buffer) => engine.call_in_place(call, buffer, stream),
                Tensors::Apart(input, output) => engine.call(call, input.as_ref(), output.as_mut(), stream),
            }
        }
    }

    /// # Safety
    /// As [`Session::call_list`](crate::Session::call_list).
    pub(crate) unsafe fn call_list(
        &mut self,
        call: &Call<'_>,
        list: Vec<Tensors<'_>>,
        stream: GpuStream<'_>,
    ) -> Result<(), CollectiveError> {
        let are_apart = |tensors: &_| matches!(tensors, Tensors::Apart(Some(_), Some(_)));
        let has_lists = matches!(call.operation, Operation::AllGather | Operation::ReduceScatter);
        if !has_lists || !list.iter().all(are_apart) {
            let mut one_by_one = list.into_iter();
            // SAFETY: passed on.
            return one_by_one.try_for_each(|mut tensors| unsafe { self.call(call, &mut tensors, stream) });
        }
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for tensors in list {
            if let Tensors::Apart(Some(input), Some(output)) = tensors {
                inputs.push(input);
                outputs.push(output);
            }
        }
        // SAFETY: passed on.
        unsafe { self.engine.call_list(call, &inputs, &mut outputs, stream.on(&self.context)) }
    }

    /// # Safety
    /// As [`Session::send_recv`](crate::Session::send_recv).
    pub(crate) unsafe fn exchange(
        &self,
        sent: Message<&TensorView<'_>>,
        received: Message<&mut TensorViewMut<'_>>,
        stream: GpuStream<'_>,
    ) -> Result<(), CollectiveError> {
        let (engine, stream) = (&self.engine, stream.on(&self.context));
        // SAFETY: passed on.
        unsafe {
            match (sent, received) {
                (Some((read, to)), Some((write, from))) => engine.send_recv(read, to, write, from, stream),
                (Some((read, to)), None) => engine.send(read, to, stream),
                (None, Some((write, from))) => engine.recv(write, from, stream),
                (None, None) => Ok(()),
            }
        }
    }

    /// # Safety
    /// As [`Session::call`](crate::Session::call).
    pub(crate) unsafe fn all_reduce_fused(
        &self,
        call: FusedAllReduce<Operand<'_>>,
        stream: GpuStream<'_>,
    ) -> Result<(), CollectiveError> {
        let peers = self.engine.nvlink("all_reduce_fused")?;
        if peers.world_size() == 1 {
            let text =
                "all_reduce_fused on CUDA needs 2 ranks or more: of one rank there is nothing to reduce";
            return Err(FabricError::invalid(text).into());
        };
        // SAFETY: passed on.
        unsafe { peers.all_reduce_fused(call, stream.on(&self.context)) }
    }

    /// Begins work in the side stream of an order, behind what the caller's stream has now. What is returned keeps `kept` until the
    /// work has been waited for.
    pub(crate) fn start<K>(
        &mut self,
        order: Order,
        stream: GpuStream<'_>,
        kept: K,
        work: impl FnOnce(&mut Self, GpuStream<'_>) -> Result,
    ) -> Result<Started<K>> {
        let context = self.context.clone();
        let side = match &self.sides[order as usize] {
            Some(side) => side.clone(),
            None => self.sides[order as usize].insert(context.stream()?).clone(),
        };
        start_in(&side, (&context, stream), kept, |side| work(self, side))
    }
}

/// Begins work in a stream of the session, behind what the caller's stream has now. What is returned keeps `kept` until the work has been
/// waited for.
pub(crate) fn start_in<K>(
    side: &Stream,
    (context, stream): (&Context, GpuStream<'_>),
    kept: K,
    work: impl FnOnce(GpuStream<'_>) -> Result,
) -> Result<Started<K>> {
    let (begin, end) = (Event::new(context)?, Event::new(context)?);
    begin.record(stream.on(context))?;
    side.borrow().wait(&begin)?;
    work(side.into())?;
    end.record(side)?;
    Ok(Started::new(context.clone(), end, kept))
}
