//! Dispatch and combine by token between GPUs: the launches of the kernels.

use antiphon_device::cuda::StreamRef;
use antiphon_fabric::{Operation, gpu::LINE};
use antiphon_tensor::{DType, TensorView};

use super::{
    Combine, Dispatch, Routing, RowFormat, check_combine, check_dispatch,
    family::{Moving, NotifyCall, Notifying, RegionCall, RowsCall, Summing, SumsCall, UNBOUNDED},
    signature, signature_of_routing,
};
use crate::{
    Movement,
    cuda::{Blocks, CudaByTokenRoutes, CudaMoe, Plan, RouteWords},
    error::{MoeError, Result},
    tensors::{Name, VECTOR},
};

/// The dtypes of rows that are summed on GPUs.
pub(crate) const SUMMED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

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
        let region = self.region("dispatch", &format, 1 + 2 * top_k)?;
        let blocks = self.blocks(Movement::Dispatch, tokens * format.row_bytes());
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
            region,
            tokens: tokens as u32,
            rows: rows as u32,
            row_bytes: format.row_bytes() as u32,
            scales_of_row: format.num_scales() as u32,
            top_k: top_k as u32,
            id_bytes: id_bytes as u32,
            local: (routes.num_experts / self.world_size()) as u32,
            senders: Moving::senders(self.world_size(), blocks, region.record_bytes),
        };
        let algorithm = super::Form::Cached as u8 + format.code();
        let signature =
            signature(Operation::Dispatch, &format, algorithm, routes.num_experts, top_k, routes.number);
        let family = Moving { staging: self.staging() };
        // SAFETY: the routes' memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::Of(blocks), call, stream) }
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
        let blocks = self.blocks(Movement::Combine, tokens * format.row_bytes());
        let Some(family) = Summing::new(format.dtype, self.staging(), self.world_size(), blocks) else {
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
            bias: [bias(call.biases[0].as_ref())?, bias(call.biases[1].as_ref())?],
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
        unsafe { self.launch(family, &signature, Blocks::Of(blocks), sums, stream) }
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
