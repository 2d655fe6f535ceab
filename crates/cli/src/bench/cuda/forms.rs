//! The low-latency and the hybrid form of dispatch and combine, which `tail` measures beside the normal one.

use std::cell::RefCell;

use antiphon::{
    collectives::Communicator,
    device::cuda::{Context, DeviceMemory, Stream, StreamRef},
    moe::{
        HybridCombine, HybridDispatch, HybridOrder, HybridRouting, HybridTokens, LowLatencyCombine,
        LowLatencyDispatch, LowLatencyFormat, LowLatencyReceived, MoeConfig, RowFormat,
        cuda::{CudaMoe, HandleMemory},
        hybrid::cuda::CudaHybridHandle,
        low_latency::{
            LowLatency,
            cuda::{CudaLowLatency, CudaLowLatencyHandle},
        },
    },
    operation::Operation,
    tensor::{DType, Device, TensorView, TensorViewMut},
};

use super::Result;
use crate::bench::moe::{LOCAL_EXPERTS, TOP_K, choices};

const DTYPE: DType = DType::BF16;
/// The most tokens of a rank in a low-latency call, as engines that decode have it.
const MOST_TOKENS: usize = 128;
/// Rows of an expert are a multiple of this in the hybrid form, as grouped products want it.
const PAD_MULTIPLE: usize = 32;

/// One form at a number of tokens.
pub(super) enum Form {
    LowLatency(Box<LowLatencyForm>),
    Hybrid(Box<HybridForm>),
}

impl Form {
    /// The form of an operation, for at most `tokens` tokens of each rank; `None` for other operations and for too many tokens.
    pub(super) fn new(
        operation: Operation,
        comm: &Communicator,
        context: &Context,
        stream: &Stream,
        [tokens, hidden]: [usize; 2],
    ) -> Result<Option<Self>> {
        Ok(match operation {
            Operation::LowLatencyDispatch | Operation::LowLatencyCombine if tokens <= MOST_TOKENS => {
                Some(Self::LowLatency(Box::new(LowLatencyForm::new(comm, context, stream, tokens, hidden)?)))
            }
            Operation::HybridDispatch | Operation::HybridCombine => {
                Some(Self::Hybrid(Box::new(HybridForm::new(comm, context, stream, tokens, hidden)?)))
            }
            _ => None,
        })
    }

    /// Puts one call into the stream. The tensors live as long as the form.
    pub(super) fn call(&self, operation: Operation, stream: StreamRef<'_>) -> Result<()> {
        match (self, operation) {
            (Self::LowLatency(form), Operation::LowLatencyDispatch) => form.dispatch(stream),
            (Self::LowLatency(form), _) => form.combine(stream),
            (Self::Hybrid(form), Operation::HybridDispatch) => form.dispatch(stream),
            (Self::Hybrid(form), _) => form.combine(stream),
        }
    }

    /// The error of a call that failed on the GPU.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Self::LowLatency(form) => Ok(form.moe.check()?),
            Self::Hybrid(form) => Ok(form.moe.check()?),
        }
    }
}

/// Memory of a tensor on this rank's GPU.
struct Tensor {
    memory: DeviceMemory,
    dtype: DType,
    shape: Vec<usize>,
    device: Device,
}

impl Tensor {
    fn new(context: &Context, dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let memory = DeviceMemory::allocate(context, bytes.max(16))?;
        Ok(Self { memory, dtype, shape: shape.to_vec(), device: Device::Cuda(context.device().ordinal()) })
    }

    fn holding(
        context: &Context,
        stream: &Stream,
        dtype: DType,
        shape: &[usize],
        bytes: &[u8],
    ) -> Result<Self> {
        let tensor = Self::new(context, dtype, shape)?;
        tensor.memory.write(stream, 0, bytes)?;
        Ok(tensor)
    }

    fn view(&self) -> TensorView<'_> {
        self.view_mut().into_view()
    }

    fn view_mut(&self) -> TensorViewMut<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory was allocated for the elements of `shape` and lives as long as the view; the stream keeps calls apart.
        unsafe { TensorViewMut::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }
            .expect("plain")
    }
}

/// Dispatch of rows of bf16 in FP8, and combine of rows of bf16.
pub(super) struct LowLatencyForm {
    moe: CudaLowLatency,
    num_experts: usize,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    counts: Tensor,
    sources: Tensor,
    layout_range: Tensor,
    rows: Tensor,
    output: Tensor,
    /// The handle of every dispatch: a graph's calls need them. The first is the combines'.
    handles: RefCell<Vec<CudaLowLatencyHandle>>,
}

impl LowLatencyForm {
    fn new(
        comm: &Communicator,
        context: &Context,
        stream: &Stream,
        tokens: usize,
        hidden: usize,
    ) -> Result<Self> {
        let num_experts = LOCAL_EXPERTS * comm.world_size();
        let most = LowLatency { max_tokens: MOST_TOKENS, hidden, num_experts, top_k: TOP_K };
        let slots = comm.world_size() * MOST_TOKENS;
        let ids: Vec<u8> =
            choices(comm.rank(), tokens, num_experts).iter().flat_map(|id| id.to_ne_bytes()).collect();
        let new = |dtype, shape: &[usize]| Tensor::new(context, dtype, shape);
        let form = Self {
            moe: CudaLowLatency::new(comm, context, most)?,
            num_experts,
            x: new(DTYPE, &[tokens, hidden])?,
            ids: Tensor::holding(context, stream, DType::I64, &[tokens, TOP_K], &ids)?,
            weights: new(DType::F32, &[tokens, TOP_K])?,
            codes: new(DType::U8, &[LOCAL_EXPERTS, slots, hidden])?,
            scales: new(DType::F32, &[LOCAL_EXPERTS, hidden / 128, slots])?,
            counts: new(DType::I32, &[LOCAL_EXPERTS])?,
            sources: new(DType::I32, &[LOCAL_EXPERTS, slots])?,
            layout_range: new(DType::I64, &[LOCAL_EXPERTS, comm.world_size()])?,
            rows: new(DTYPE, &[LOCAL_EXPERTS, slots, hidden])?,
            output: new(DTYPE, &[tokens, hidden])?,
            handles: RefCell::default(),
        };
        form.dispatch(stream.borrow())?;
        Ok(form)
    }

    fn dispatch(&self, stream: StreamRef<'_>) -> Result<()> {
        let call = LowLatencyDispatch {
            max_tokens: MOST_TOKENS,
            num_experts: self.num_experts,
            format: LowLatencyFormat::Fp8,
            x: self.x.view(),
            ids: self.ids.view(),
            received: LowLatencyReceived {
                x: self.codes.view_mut(),
                scales: Some(self.scales.view_mut()),
                counts: self.counts.view_mut(),
                source_tokens: self.sources.view_mut(),
                layout_range: self.layout_range.view_mut(),
                statistics: None,
                waits: None,
            },
        };
        // SAFETY: the tensors live as long as `self`, which outlives the stream's work.
        let handle = unsafe { self.moe.dispatch(&call, stream) }?;
        self.handles.borrow_mut().push(handle);
        Ok(())
    }

    fn combine(&self, stream: StreamRef<'_>) -> Result<()> {
        let call = LowLatencyCombine {
            rows: self.rows.view(),
            ids: self.ids.view(),
            weights: self.weights.view(),
            output: self.output.view_mut(),
            waits: None,
        };
        let handles = self.handles.borrow();
        // SAFETY: as above.
        Ok(unsafe { self.moe.combine(&handles[0], &call, stream) }?)
    }
}

/// Rows by expert, along a handle.
pub(super) struct HybridForm {
    moe: CudaMoe,
    handle: CudaHybridHandle,
    x: Tensor,
    rows: Tensor,
}

impl HybridForm {
    fn new(
        comm: &Communicator,
        context: &Context,
        stream: &Stream,
        tokens: usize,
        hidden: usize,
    ) -> Result<Self> {
        let num_experts = LOCAL_EXPERTS * comm.world_size();
        let mut map = vec![0u8; tokens * num_experts];
        for (place, id) in choices(comm.rank(), tokens, num_experts).into_iter().enumerate() {
            map[place / TOP_K * num_experts + id as usize] = 1;
        }
        let map = Tensor::holding(context, stream, DType::U8, &[tokens, num_experts], &map)?;
        let moe = CudaMoe::new(comm, context, MoeConfig::for_gpus())?;
        let routing = HybridRouting {
            map: map.view(),
            order: HybridOrder::Experts { pad_multiple: PAD_MULTIPLE, capacity: None },
            format: RowFormat { hidden, dtype: DTYPE, scales: None },
        };
        // SAFETY: the map lives until the call, which waits for the counts, has ended.
        let handle = unsafe { moe.hybrid_notify(&routing, HandleMemory::Own, stream.borrow()) }?;
        let rows = Tensor::new(context, DTYPE, &[handle.rows(), hidden])?;
        let form = Self { moe, x: Tensor::new(context, DTYPE, &[tokens, hidden])?, rows, handle };
        // A combine needs a dispatch before it.
        form.dispatch(stream.borrow())?;
        Ok(form)
    }

    fn dispatch(&self, stream: StreamRef<'_>) -> Result<()> {
        let received = HybridTokens::of(self.rows.view_mut());
        let call = HybridDispatch { tokens: HybridTokens::of(self.x.view()), received };
        // SAFETY: the tensors live as long as `self`, which outlives the stream's work.
        Ok(unsafe { self.moe.hybrid_dispatch(&self.handle, call, stream) }?)
    }

    fn combine(&self, stream: StreamRef<'_>) -> Result<()> {
        let call = HybridCombine::of(self.rows.view(), self.x.view_mut());
        // SAFETY: as above.
        Ok(unsafe { self.moe.hybrid_combine(&self.handle, call, stream) }?)
    }
}
