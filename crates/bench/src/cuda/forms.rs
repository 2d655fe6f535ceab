//! Dispatch and combine to slots and by expert, which `tail` measures beside those by token.

use antiphon::{
    device::cuda::StreamRef,
    moe::{
        ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRouting, ByExpertTokens, CombineFormat,
        MoeConfig, ReceivedSlots, RowFormat, SlotCombine, SlotDispatch, SlotFormat,
        by_expert::cuda::CudaByExpertRoutes,
        cuda::{CudaMoe, RouteMemory},
        slots::{
            SlotLimits,
            cuda::{CudaSlotRoutes, CudaSlots},
        },
    },
    operation::Operation,
    tensor::DType,
};

use super::{Contenders, OnStream, Rank, tensors::Tensor};
use crate::{
    Contender, Result, Wrong,
    host::moe::{LOCAL_EXPERTS, TOP_K, choices},
};

const DTYPE: DType = DType::BF16;
/// The most tokens of a rank in a call to slots, as engines that decode have it.
const MOST_TOKENS: usize = 128;
/// The rows of each expert are padded to a multiple of this, as grouped products want it.
const PAD_MULTIPLE: usize = 32;

/// The contender of an operation, for at most `shape[0]` tokens of each rank; `None` for other operations and for too many tokens. NCCL has
/// no such call.
pub(super) fn contenders<'a>(
    rank: &'a Rank<'a>,
    operation: Operation,
    shape: [usize; 2],
) -> Result<Option<Contenders<'a>>> {
    let ours: OnStream<'a> = match operation {
        Operation::DispatchToSlots | Operation::CombineFromSlots if shape[0] <= MOST_TOKENS => {
            Box::new(SlotForm::new(rank, operation, shape)?)
        }
        Operation::DispatchByExpert | Operation::CombineByExpert => {
            Box::new(ByExpertForm::new(rank, operation, shape)?)
        }
        _ => return Ok(None),
    };
    Ok(Some(Contenders { ours: vec![ours], nccl: None }))
}

/// Dispatch of rows of bf16 in FP8, and combine of rows of bf16.
struct SlotForm {
    operation: Operation,
    moe: CudaSlots,
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
    /// The routes of every dispatch: a graph's calls need them. The first is the combines'.
    routes: Vec<CudaSlotRoutes>,
}

impl SlotForm {
    fn new(rank: &Rank<'_>, operation: Operation, [tokens, hidden]: [usize; 2]) -> Result<Self> {
        let Rank { comm, context, stream, .. } = *rank;
        let num_experts = LOCAL_EXPERTS * comm.world_size();
        let most = SlotLimits { max_tokens: MOST_TOKENS, hidden, num_experts, top_k: TOP_K };
        let slots = comm.world_size() * MOST_TOKENS;
        let ids = choices(comm.rank(), tokens, num_experts);
        let new = |dtype, shape: &[usize]| Tensor::zeros(context, stream, dtype, shape);
        let mut form = Self {
            operation,
            moe: CudaSlots::new(comm, context, most)?,
            num_experts,
            x: new(DTYPE, &[tokens, hidden])?,
            ids: Tensor::holding(context, stream, &[tokens, TOP_K], &ids)?,
            weights: new(DType::F32, &[tokens, TOP_K])?,
            codes: new(DType::U8, &[LOCAL_EXPERTS, slots, hidden])?,
            scales: new(DType::F32, &[LOCAL_EXPERTS, hidden / 128, slots])?,
            counts: new(DType::I32, &[LOCAL_EXPERTS])?,
            sources: new(DType::I32, &[LOCAL_EXPERTS, slots])?,
            layout_range: new(DType::I64, &[LOCAL_EXPERTS, comm.world_size()])?,
            rows: new(DTYPE, &[LOCAL_EXPERTS, slots, hidden])?,
            output: new(DTYPE, &[tokens, hidden])?,
            routes: Vec::new(),
        };
        form.dispatch(stream.borrow())?;
        Ok(form)
    }

    fn dispatch(&mut self, stream: StreamRef<'_>) -> Result<()> {
        let call = SlotDispatch {
            max_tokens: MOST_TOKENS,
            num_experts: self.num_experts,
            format: SlotFormat::Fp8,
            x: self.x.view(),
            ids: self.ids.view(),
            received: ReceivedSlots {
                x: self.codes.view_mut(),
                scales: Some(self.scales.view_mut()),
                counts: self.counts.view_mut(),
                source_tokens: self.sources.view_mut(),
                layout_range: self.layout_range.view_mut(),
                statistics: None,
                waits: None,
            },
        };
        // SAFETY: the tensors live as long as `self`, and the driver waits for the stream before it drops that.
        let routes = unsafe { self.moe.dispatch(&call, stream) }?;
        self.routes.push(routes);
        Ok(())
    }

    fn combine(&self, stream: StreamRef<'_>) -> Result<()> {
        let call = SlotCombine {
            format: CombineFormat::Bf16,
            rows: self.rows.view(),
            ids: self.ids.view(),
            weights: self.weights.view(),
            output: self.output.view_mut(),
            waits: None,
        };
        // SAFETY: as above.
        Ok(unsafe { self.moe.combine(&self.routes[0], &call, stream) }?)
    }
}

/// Rows by expert, along routes.
struct ByExpertForm {
    operation: Operation,
    moe: CudaMoe,
    routes: CudaByExpertRoutes,
    x: Tensor,
    rows: Tensor,
}

impl ByExpertForm {
    fn new(rank: &Rank<'_>, operation: Operation, [tokens, hidden]: [usize; 2]) -> Result<Self> {
        let Rank { comm, context, stream, .. } = *rank;
        let num_experts = LOCAL_EXPERTS * comm.world_size();
        let mut map = vec![0u8; tokens * num_experts];
        for (place, id) in choices(comm.rank(), tokens, num_experts).into_iter().enumerate() {
            map[place / TOP_K * num_experts + id as usize] = 1;
        }
        let map = Tensor::holding(context, stream, &[tokens, num_experts], &map)?;
        let moe = CudaMoe::new(comm, context, MoeConfig::for_gpus())?;
        let routing = ByExpertRouting {
            map: map.view(),
            order: ByExpertOrder::Experts { pad_multiple: PAD_MULTIPLE, capacity: None },
            format: RowFormat { hidden, dtype: DTYPE, scales: None },
        };
        // SAFETY: the map lives until the call, which waits for the counts, has ended.
        let routes = unsafe { moe.notify_by_expert(&routing, RouteMemory::Own, stream.borrow()) }?;
        let rows = Tensor::zeros(context, stream, DTYPE, &[routes.rows(), hidden])?;
        let x = Tensor::zeros(context, stream, DTYPE, &[tokens, hidden])?;
        let form = Self { operation, moe, x, rows, routes };
        // A combine needs a dispatch before it.
        form.dispatch(stream.borrow())?;
        Ok(form)
    }

    fn dispatch(&self, stream: StreamRef<'_>) -> Result<()> {
        let received = ByExpertTokens::of(self.rows.view_mut());
        let call = ByExpertDispatch { tokens: ByExpertTokens::of(self.x.view()), received };
        // SAFETY: the tensors live as long as `self`, and the driver waits for the stream before it drops that.
        Ok(unsafe { self.moe.dispatch_by_expert(&self.routes, call, stream) }?)
    }

    fn combine(&self, stream: StreamRef<'_>) -> Result<()> {
        let call = ByExpertCombine::of(self.rows.view(), self.x.view_mut());
        // SAFETY: as above.
        Ok(unsafe { self.moe.combine_by_expert(&self.routes, call, stream) }?)
    }
}

macro_rules! contender {
    ($Form:ty, $dispatch:ident) => {
        impl Contender<StreamRef<'_>> for $Form {
            fn name(&self) -> Result<String> {
                Ok(self.operation.name().into())
            }

            fn call(&mut self, stream: StreamRef<'_>) -> Result<()> {
                if self.operation == Operation::$dispatch {
                    self.dispatch(stream)
                } else {
                    self.combine(stream)
                }
            }

            /// The error of a call that failed on the GPU; the rows are not compared.
            fn check(&mut self, _: StreamRef<'_>) -> Result<Wrong> {
                self.moe.check()?;
                Ok(Wrong::default())
            }
        }
    };
}

contender!(SlotForm, DispatchToSlots);
contender!(ByExpertForm, DispatchByExpert);
