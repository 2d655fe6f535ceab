//! Dispatch and combine by token between GPUs: the kernels of `notify.cuh`, `dispatch.cuh` and `combine.cuh`, and what they take.

use antiphon_device::cuda::{Program, StreamRef};
use antiphon_fabric::{
    Operation,
    gpu::{Family, REDUCE, ROWS, Reduction, Source, kernels},
};
use antiphon_operation::ReduceOp;
use antiphon_tensor::{DType, TensorView};

use super::{
    Combine, Dispatch, Routing, RowFormat, check_combine, check_dispatch, signature, signature_of_routing,
};
use crate::{
    cuda::{Blocks, CudaByTokenRoutes, CudaMoe, LINE, Plan, RouteWords, THREADS},
    error::{MoeError, Result},
    tensors::{Name, VECTOR},
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
    ($(#[$doc:meta])* $Name:ident { $($address:ident)* ; $([$region:ident: RegionCall])? $($number:ident)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub(crate) struct $Name {
            $(pub(crate) $address: u64,)*
            $(pub(crate) $region: RegionCall,)?
            $(pub(crate) $number: u32,)*
        }

        // SAFETY: the layout of the kernel's struct: 64-bit words, then those of 32.
        unsafe impl antiphon_device::cuda::KernelArgument for $Name {}
    };
}
pub(crate) use kernel_call;

/// `region_call` of region.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RegionCall {
    pub(crate) at: u64,
    pub(crate) lane_bytes: u64,
    pub(crate) record_bytes: u32,
    pub(crate) half: u32,
}

kernel_call! {
    /// `notify_call` of notify.cuh.
    NotifyCall {
        in_rank per_expert own_most counts starts prefix routed overflow chosen chosen_by most heads result;
        tokens room local number
    }
}

impl NotifyCall {
    /// A call with all outputs that routes have, and without an input.
    pub(crate) fn leaving(plan: &Plan) -> Self {
        Self {
            in_rank: 0,
            per_expert: 0,
            own_most: 0,
            counts: plan.at(RouteWords::counts),
            starts: plan.at(RouteWords::starts),
            prefix: plan.at(RouteWords::rank_prefix_matrix),
            routed: plan.at(RouteWords::routed_to_each),
            overflow: plan.at(RouteWords::overflow),
            chosen: plan.at(RouteWords::tokens_per_expert),
            chosen_by: 0,
            most: 0,
            heads: plan.at(RouteWords::send_head),
            result: 0,
            tokens: 0,
            room: UNBOUNDED,
            local: 0,
            number: 0,
        }
    }
}
kernel_call! {
    /// `rows_call` of dispatch.cuh.
    RowsCall {
        counts starts heads sources x scales ids weights to_x to_scales to_ids to_weights;
        [region: RegionCall] tokens rows row_bytes scales_of_row top_k id_bytes local
    }
}
kernel_call! {
    /// `sums_call` of combine.cuh.
    SumsCall {
        counts starts heads rows weights first_bias second_bias output to_weights;
        [region: RegionCall] tokens row_bytes top_k
    }
}

/// The kernel that exchanges the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Notifying;

/// The kernel that moves rows to where they belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moving {
    pub(crate) staging: Staging,
}

impl Moving {
    /// Most warps send and take by turns, one raises flags, one polls those of the peers.
    const WARPS: Warps = Warps { rings: 7, all: 9, stages: Stages::HALF_ROWS, streams: 0, stream: 0 };
}

/// The kernel that moves rows back and sums them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summing {
    reduction: Reduction,
    staging: Staging,
    warps: Warps,
}

impl Summing {
    /// The kernel for rows of a dtype and a number of ranks; none for a dtype that is not summed.
    pub(crate) fn new(dtype: DType, staging: Staging, world_size: usize) -> Option<Self> {
        // Some warps send, one raises flags, the others sum. To several peers, more copies than these only wait for each other.
        let rings = if world_size <= 2 { 3 } else { 2 };
        let (all, streams) = (12, 12 - 1 - rings);
        let warps = Warps { rings, all, stages: Stages::HALF_ROWS, streams, stream: 16 };
        Some(Self { reduction: Reduction::new(dtype, ReduceOp::Sum)?, staging, warps })
    }
}

/// How rows pass through a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staging {
    /// Through shared memory, by bulk copies, which GPUs have from Hopper on.
    Bulk,
    /// Through registers.
    Registers,
}

/// What the warps of a block do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Warps {
    /// The first ones copy, each through a ring of stages. The next one raises their flags.
    pub(crate) rings: u32,
    pub(crate) all: u32,
    pub(crate) stages: Stages,
    /// Warps to which vectors stream that they sum, and how many a lane has room for.
    pub(crate) streams: u32,
    pub(crate) stream: u32,
}

/// The stages of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stages {
    pub(crate) count: u32,
    pub(crate) bytes: u32,
}

impl Stages {
    /// Half a row of bf16 of 7168, or a row of FP8 with its scales: a warp needs about a microsecond for a stage, whatever its size.
    pub(crate) const HALF_ROWS: Self = Self { count: 2, bytes: 7424 };
}

impl Warps {
    pub(crate) fn define(self, program: Program) -> Program {
        program
            .define("RINGS", self.rings)
            .define("STAGES", self.stages.count)
            .define("STAGE_BYTES", self.stages.bytes)
            .define("STREAM", self.stream)
            .define("LINE", LINE)
    }

    pub(crate) fn threads(self) -> u32 {
        self.all * 32
    }

    pub(crate) fn shared_bytes(self, staging: Staging) -> u32 {
        let stages = match staging {
            Staging::Bulk => self.rings * self.stages.count * self.stages.bytes,
            Staging::Registers => 0,
        };
        let streams = self.streams * self.stream * 32 * VECTOR as u32;
        // The kernel begins at a line.
        if stages + streams == 0 { 0 } else { (LINE - VECTOR) as u32 + stages + streams }
    }
}

/// A family of one kernel, made of these sources, of which the last gives it its name.
macro_rules! family {
    ($Family:ident: $Kernel:ident($Call:ident), $name:literal of [$($source:expr),*],
     $define:expr, $threads:expr, $shared:expr) => {
        impl Family for $Family {
            type Kernel = $Kernel;
            type Arguments = $Call;
            const NAME: &'static str = concat!("moe_", $name);
            const SOURCES: &'static [Source] = &[$($source),*];

            fn define(&self, program: Program, _world_size: usize) -> Program {
                let define: fn(&Self, Program) -> Program = $define;
                define(self, program)
            }

            fn threads(&self) -> u32 {
                let threads: fn(&Self) -> u32 = $threads;
                threads(self)
            }

            fn shared_bytes(&self, _world_size: usize) -> u32 {
                let shared: fn(&Self) -> u32 = $shared;
                shared(self)
            }

            fn most_blocks(&self, _world_size: usize) -> u32 {
                1
            }
        }
    };
}

pub(crate) use family;

const NOTIFY: Source = Source { name: "by_token/notify.cuh", text: include_str!("notify.cuh") };
/// The rows' way between the tensors of the ranks.
pub(crate) const PIPELINE: Source =
    Source { name: "by_token/pipeline.cuh", text: include_str!("pipeline.cuh") };
pub(crate) const REGION: Source = Source { name: "by_token/region.cuh", text: include_str!("region.cuh") };
pub(crate) const SUMS: Source = Source { name: "by_token/sums.cuh", text: include_str!("sums.cuh") };
const DISPATCH: Source = Source { name: "by_token/dispatch.cuh", text: include_str!("dispatch.cuh") };
const COMBINE: Source = Source { name: "by_token/combine.cuh", text: include_str!("combine.cuh") };

family!(Notifying: NotifyKernel(NotifyCall), "notify.cuh" of [NOTIFY], |_, program| program, |_| THREADS, |_| 0);
family!(
    Moving: DispatchKernel(RowsCall), "dispatch.cuh" of [ROWS, PIPELINE, REGION, DISPATCH],
    |_, program| Moving::WARPS.define(program), |_| Moving::WARPS.threads(), |this| Moving::WARPS.shared_bytes(this.staging)
);
family!(
    Summing: CombineKernel(SumsCall), "combine.cuh" of [ROWS, REDUCE, PIPELINE, REGION, SUMS, COMBINE],
    |this, program| this.warps.define(this.reduction.define(program)), |this| this.warps.threads(),
    |this| this.warps.shared_bytes(this.staging)
);

/// The dtypes of rows that are summed on GPUs.
pub(crate) const SUMMED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The room of a rank without a capacity: a number of rows that no rank exceeds.
pub(crate) const UNBOUNDED: u32 = i32::MAX as u32;

impl CudaMoe {
    /// What [`Moe::notify`](crate::Moe::notify) does, between GPUs. `stream` is behind what made the routing.
    pub(crate) fn exchange_counts(
        &self,
        routing: &Routing<'_>,
        plan: &Plan,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let name = |which| Name { call: "dispatch", which };
        let in_rank = &routing.is_token_in_rank;
        let call = NotifyCall {
            in_rank: name("is_token_in_rank").address(in_rank, self.device())?,
            per_expert: name("tokens_per_expert").address(&routing.tokens_per_expert, self.device())?,
            result: if routing.capacity.is_none() { self.result_pointer() } else { 0 },
            number: self.result_number(),
            tokens: in_rank.shape()[0] as u32,
            room: routing.capacity.map_or(UNBOUNDED, |rows| rows.min(UNBOUNDED as usize) as u32),
            local: (routing.num_experts / self.world_size()) as u32,
            ..NotifyCall::leaving(plan)
        };
        let signature = signature_of_routing(routing);
        // SAFETY: the plan has room for what the kernel writes, and lasts; the caller answers for the routing.
        unsafe { self.launch(Notifying, &signature, Blocks::One, call, stream) }
    }

    /// What [`Moe::dispatch`](crate::Moe::dispatch) does, between GPUs.
    pub(crate) fn move_rows(
        &self,
        routes: &CudaByTokenRoutes,
        call: &Dispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let name = |which| Name { call: "dispatch", which };
        let (tokens, rows, top_k) = (routes.num_tokens(), routes.rows(), routes.top_k);
        let format = check_dispatch(call, tokens, rows, top_k)?;
        let address = |which, view: &TensorView<'_>| name(which).address(view, self.device());
        let optional = |which, view: Option<&TensorView<'_>>| view.map_or(Ok(0), |view| address(which, view));
        let vectors = |which, view: &TensorView<'_>| name(which).vectors(view, self.device());
        let scales = |which, view: Option<&TensorView<'_>>| match view {
            Some(view) if format.num_scales().is_multiple_of(4) => vectors(which, view),
            _ => optional(which, view),
        };
        let Dispatch { tokens: from, received: to } = call;
        let (choices, to_choices) = (from.choices.as_ref(), to.choices.as_ref());
        let top_k = if choices.is_some() { top_k } else { 0 };
        let id_bytes = choices.map_or(8, |each| each.ids.dtype().size());
        if let (Some(from), Some(to)) = (choices, to_choices) {
            name("received ids").has_dtype(to.ids.dtype(), &[from.ids.dtype()])?;
        }
        let plan = &routes.plan;
        let call = RowsCall {
            counts: plan.at(RouteWords::counts),
            starts: plan.at(RouteWords::starts),
            heads: plan.at(RouteWords::send_head),
            sources: routes.sources(),
            x: vectors("x", &from.x)?,
            scales: scales("scales", from.scales.as_ref())?,
            ids: optional("ids", choices.map(|each| &each.ids))?,
            weights: optional("weights", choices.map(|each| &each.weights))?,
            to_x: vectors("received x", &to.x.as_view())?,
            to_scales: scales("received scales", to.scales.as_ref().map(|view| view.as_view()).as_ref())?,
            to_ids: optional("received ids", to_choices.map(|each| each.ids.as_view()).as_ref())?,
            to_weights: optional("received weights", to_choices.map(|each| each.weights.as_view()).as_ref())?,
            region: self.region("dispatch", &format, 1 + 2 * top_k)?,
            tokens: tokens as u32,
            rows: rows as u32,
            row_bytes: format.row_bytes() as u32,
            scales_of_row: format.num_scales() as u32,
            top_k: top_k as u32,
            id_bytes: id_bytes as u32,
            local: (routes.num_experts / self.world_size()) as u32,
        };
        let algorithm = super::Form::Cached as u8 + format.code();
        let signature =
            signature(Operation::Dispatch, &format, algorithm, routes.num_experts, top_k, routes.number);
        let family = Moving { staging: self.staging() };
        // SAFETY: the routes' memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::All, call, stream) }
    }

    /// What [`Moe::combine`](crate::Moe::combine) does, between GPUs.
    pub(crate) fn sum_rows(
        &self,
        routes: &CudaByTokenRoutes,
        call: &Combine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let name = |which| Name { call: "combine", which };
        let (tokens, rows) = (routes.num_tokens(), routes.rows());
        let (format, top_k) = check_combine(call, tokens, rows, &SUMMED)?;
        let Some(family) = Summing::new(format.dtype, self.staging(), self.world_size()) else {
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
        let plan = &routes.plan;
        let sums = SumsCall {
            counts: plan.at(RouteWords::counts),
            starts: plan.at(RouteWords::starts),
            heads: plan.at(RouteWords::send_head),
            rows: vectors("rows", &call.rows)?,
            weights: optional("weights", call.weights.as_ref())?,
            first_bias: bias(call.biases[0].as_ref())?,
            second_bias: bias(call.biases[1].as_ref())?,
            output: vectors("output", &call.output.as_view())?,
            to_weights: optional(
                "output weights",
                call.output_weights.as_ref().map(|view| view.as_view()).as_ref(),
            )?,
            region: self.region("combine", &format, top_k)?,
            tokens: tokens as u32,
            row_bytes: format.row_bytes() as u32,
            top_k: top_k as u32,
        };
        let signature = signature(Operation::Combine, &format, 0, routes.num_experts, top_k, routes.number);
        // SAFETY: the routes' memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::All, sums, stream) }
    }

    /// How the region serves records of a row with `words` words beside it.
    fn region(&self, call: &'static str, format: &RowFormat, words: usize) -> Result<RegionCall> {
        // Scales that are whole vectors are a row of their own.
        let scales = format.num_scales();
        let (second, words) =
            if scales.is_multiple_of(4) { (scales * 4, words) } else { (0, words + scales) };
        self.region_of_records(call, format.row_bytes() + second + words.div_ceil(4) * VECTOR)
    }

    /// How the region serves records of `record_bytes` bytes.
    pub(crate) fn region_of_records(&self, call: &'static str, record_bytes: usize) -> Result<RegionCall> {
        let lane_bytes = self.region_lane_bytes();
        let record_bytes = record_bytes.next_multiple_of(LINE);
        let half = (lane_bytes / record_bytes).min(self.flags()) / 2;
        if half == 0 {
            return Err(MoeError::Region {
                call,
                needed: record_bytes,
                half: lane_bytes / 2,
                region_bytes: self.region_bytes(),
            });
        }
        Ok(RegionCall {
            at: self.region_at(),
            lane_bytes: lane_bytes as u64,
            record_bytes: record_bytes as u32,
            half: half as u32,
        })
    }
}
