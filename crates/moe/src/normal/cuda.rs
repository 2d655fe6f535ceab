//! Dispatch and combine on GPUs: the kernels of `notify.cuh`, `dispatch.cuh` and `combine.cuh`, and what they take.

use antiphon_device::cuda::{KernelArgument, Program, StreamRef};
use antiphon_fabric::{
    Operation,
    gpu::{Family, REDUCE, ROWS, Reduction, Source, kernels},
};
use antiphon_operation::ReduceOp;
use antiphon_tensor::{DType, TensorView};

use super::{
    Combine, Dispatch, Routing, RowFormat, check_combine, check_dispatch, check_routing, signature,
    signature_of_routing,
};
use crate::{
    cuda::{Blocks, CudaHandle, CudaMoe, Extent, Plan, THREADS},
    error::{MoeError, Result},
    tensors::Name,
};

kernels! {
    /// The kernel of `notify.cuh`.
    pub(crate) enum NotifyKernel {
        Notify = "notify",
    }
}
kernels! {
    /// The kernel of `dispatch.cuh`.
    pub(crate) enum DispatchKernel {
        Dispatch = "dispatch",
    }
}
kernels! {
    /// The kernel of `combine.cuh`.
    pub(crate) enum CombineKernel {
        Combine = "combine",
    }
}

/// A struct of addresses and then 32-bit numbers, as a kernel has it.
macro_rules! kernel_call {
    ($(#[$doc:meta])* $Name:ident { $($address:ident)* ; $($number:ident)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub(crate) struct $Name {
            $(pub(crate) $address: u64,)*
            $(pub(crate) $number: u32,)*
        }

        // SAFETY: the layout of the kernel's struct: 64-bit words, then those of 32.
        unsafe impl KernelArgument for $Name {}
    };
}

kernel_call! {
    /// `notify_call` of notify.cuh.
    NotifyCall { in_rank per_expert counts starts heads order result; tokens room local }
}
kernel_call! {
    /// `rows_call` of dispatch.cuh.
    RowsCall {
        counts starts order sources x scales ids weights to_x to_scales to_ids to_weights;
        tokens row_bytes scales_of_row top_k id_bytes local
    }
}
kernel_call! {
    /// `sums_call` of combine.cuh.
    SumsCall {
        counts starts heads order sources rows weights first_bias second_bias output to_weights;
        tokens row_bytes top_k most_tokens
    }
}

/// The exchange of counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Notifying;

/// Rows to where they belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moving {
    threads: u32,
}

impl Moving {
    /// For so many ranks: with more of them a thread needs more registers.
    pub(crate) const fn new(world_size: usize) -> Self {
        Self { threads: if world_size <= 4 { THREADS } else { 384 } }
    }
}

/// Rows back, and their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summing {
    reduction: Reduction,
    threads: u32,
}

impl Summing {
    /// Of rows of a dtype, for so many ranks; none for a dtype that is not summed.
    pub(crate) fn new(dtype: DType, world_size: usize) -> Option<Self> {
        let threads = match world_size {
            ..=3 => THREADS,
            4 => 384,
            _ => 256,
        };
        Some(Self { reduction: Reduction::new(dtype, ReduceOp::Sum)?, threads })
    }
}

/// A family of one kernel.
macro_rules! family {
    ($Family:ident: $Kernel:ident($Call:ident), $name:literal behind [$($before:expr),*],
     $define:expr, $threads:expr) => {
        impl Family for $Family {
            type Kernel = $Kernel;
            type Arguments = $Call;
            const NAME: &'static str = concat!("moe_", $name);
            const SOURCES: &'static [Source] =
                &[$($before,)* Source { name: concat!("normal/", $name), text: include_str!($name) }];

            fn define(&self, program: Program, _world_size: usize) -> Program {
                let define: fn(&Self, Program) -> Program = $define;
                define(self, program)
            }

            fn threads(&self) -> u32 {
                let threads: fn(&Self) -> u32 = $threads;
                threads(self)
            }

            fn most_blocks(&self, _world_size: usize) -> u32 {
                1
            }
        }
    };
}

family!(Notifying: NotifyKernel(NotifyCall), "notify.cuh" behind [], |_, program| program, |_| THREADS);
family!(Moving: DispatchKernel(RowsCall), "dispatch.cuh" behind [ROWS], |_, program| program, |this| this.threads);
family!(
    Summing: CombineKernel(SumsCall), "combine.cuh" behind [ROWS, REDUCE],
    |this, program| this.reduction.define(program), |this| this.threads
);

/// What rows are summed on GPUs.
const SUMMED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Chunks of 31 vectors that a record of so many words beside its row takes.
fn chunks(format: &RowFormat, words_beside: usize) -> usize {
    (format.row_bytes() / 16 + words_beside.div_ceil(4)).div_ceil(31)
}

/// A rank's room when it has no capacity: what no rank can exceed.
const UNBOUNDED: u32 = i32::MAX as u32;

impl CudaMoe {
    /// What [`Moe::notify`](crate::Moe::notify) does, between GPUs. `stream` is behind what made the routing.
    pub(crate) fn exchange_counts(&self, routing: &Routing<'_>, stream: StreamRef<'_>) -> Result<Plan> {
        let name = |which| Name { call: "dispatch", which };
        let tokens = check_routing(routing, self.world_size())?;
        let local = routing.num_experts / self.world_size();
        let plan = self.plan(tokens)?;
        let call = NotifyCall {
            in_rank: name("is_token_in_rank").address(&routing.is_token_in_rank, self.device())?,
            per_expert: name("tokens_per_expert").address(&routing.tokens_per_expert, self.device())?,
            counts: plan.counts(),
            starts: plan.starts(),
            heads: plan.heads(),
            order: plan.order(),
            result: self.result_pointer(),
            tokens: tokens as u32,
            room: routing.capacity.map_or(UNBOUNDED, |rows| rows.min(UNBOUNDED as usize) as u32),
            local: local as u32,
        };
        let signature = signature_of_routing(routing);
        // SAFETY: the plan has room for what the kernel writes, and lasts; the caller answers for the routing.
        unsafe { self.launch(Notifying, &signature, Extent::whole(Blocks::One), call, stream) }?;
        Ok(plan)
    }

    /// What [`Moe::dispatch`](crate::Moe::dispatch) does, between GPUs.
    pub(crate) fn move_rows(
        &self,
        handle: &CudaHandle,
        call: &Dispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let name = |which| Name { call: "dispatch", which };
        let (tokens, rows, top_k) = (handle.num_tokens(), handle.rows(), handle.top_k);
        let format = check_dispatch(call, tokens, rows, top_k)?;
        let address = |which, view: &TensorView<'_>| name(which).address(view, self.device());
        let optional = |which, view: Option<&TensorView<'_>>| view.map_or(Ok(0), |view| address(which, view));
        let vectors = |which, view: &TensorView<'_>| name(which).vectors(view, self.device());
        let Dispatch { tokens: from, received: to } = call;
        let (choices, to_choices) = (from.choices.as_ref(), to.choices.as_ref());
        let top_k = if choices.is_some() { top_k } else { 0 };
        let id_bytes = choices.map_or(8, |each| each.ids.dtype().size());
        if let (Some(from), Some(to)) = (choices, to_choices) {
            name("received ids").has_dtype(to.ids.dtype(), &[from.ids.dtype()])?;
        }
        let (plan, traffic) = (&handle.plan, &handle.traffic);
        let call = RowsCall {
            counts: plan.counts(),
            starts: plan.starts(),
            order: plan.order(),
            sources: handle.sources(),
            x: vectors("x", &from.x)?,
            scales: optional("scales", from.scales.as_ref())?,
            ids: optional("ids", choices.map(|each| &each.ids))?,
            weights: optional("weights", choices.map(|each| &each.weights))?,
            to_x: vectors("received x", &to.x.as_view())?,
            to_scales: optional("received scales", to.scales.as_ref().map(|view| view.as_view()).as_ref())?,
            to_ids: optional("received ids", to_choices.map(|each| each.ids.as_view()).as_ref())?,
            to_weights: optional("received weights", to_choices.map(|each| each.weights.as_view()).as_ref())?,
            tokens: tokens as u32,
            row_bytes: format.row_bytes() as u32,
            scales_of_row: format.num_scales() as u32,
            top_k: top_k as u32,
            id_bytes: id_bytes as u32,
            local: (handle.num_experts / self.world_size()) as u32,
        };
        let algorithm = super::Form::Cached as u8 + format.code();
        let signature =
            signature(Operation::Dispatch, &format, algorithm, handle.num_experts, top_k, handle.number);
        let extent = Extent {
            records: traffic.most(|from| traffic.most(|to| traffic.block(from, to).len())),
            chunks: chunks(&format, 1 + 2 * top_k + format.num_scales()),
            blocks: Blocks::ForEachPeer,
        };
        // SAFETY: the handle's memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(Moving::new(self.world_size()), &signature, extent, call, stream) }
    }

    /// What [`Moe::combine`](crate::Moe::combine) does, between GPUs.
    pub(crate) fn sum_rows(
        &self,
        handle: &CudaHandle,
        call: &Combine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let name = |which| Name { call: "combine", which };
        let (tokens, rows) = (handle.num_tokens(), handle.rows());
        let (format, top_k) = check_combine(call, tokens, rows, &SUMMED)?;
        let Some(family) = Summing::new(format.dtype, self.world_size()) else {
            return Err(MoeError::DType {
                call: "combine",
                which: "rows",
                actual: format.dtype,
                expected: "f32, f16 or bf16".into(),
            });
        };
        let address = |which, view: &TensorView<'_>| name(which).address(view, self.device());
        let optional = |which, view: Option<&TensorView<'_>>| view.map_or(Ok(0), |view| address(which, view));
        let vectors = |which, view: &TensorView<'_>| name(which).vectors(view, self.device());
        let bias = |view: Option<&TensorView<'_>>| view.map_or(Ok(0), |view| vectors("bias", view));
        let (plan, traffic) = (&handle.plan, &handle.traffic);
        let most_tokens = traffic.most(|rank| traffic.tokens[rank]);
        let sums = SumsCall {
            counts: plan.counts(),
            starts: plan.starts(),
            heads: plan.heads(),
            order: plan.order(),
            sources: handle.sources(),
            rows: vectors("rows", &call.rows)?,
            weights: optional("weights", call.weights.as_ref())?,
            first_bias: bias(call.biases[0].as_ref())?,
            second_bias: bias(call.biases[1].as_ref())?,
            output: vectors("output", &call.output.as_view())?,
            to_weights: optional(
                "output weights",
                call.output_weights.as_ref().map(|view| view.as_view()).as_ref(),
            )?,
            tokens: tokens as u32,
            row_bytes: format.row_bytes() as u32,
            top_k: top_k as u32,
            most_tokens: most_tokens as u32,
        };
        let signature = signature(Operation::Combine, &format, 0, handle.num_experts, top_k, handle.number);
        let extent =
            Extent { records: most_tokens, chunks: chunks(&format, top_k), blocks: Blocks::ForEachPeer };
        // SAFETY: the handle's memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, extent, sums, stream) }
    }
}
