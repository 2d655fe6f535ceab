//! Dispatch to *slots*, and combine from them: few tokens, at most `M` of each rank, go into slots of each expert. DeepEP's
//! low-latency mode has this form.
//!
//! Rows move without an exchange of counts before: every expert has `R · M` slots, enough for all tokens of all ranks. A dispatch
//! fills the slots of an expert from the first on, in the order of source rank and token. It sends a token once to each rank of its
//! experts, and that rank copies the token to the slots of these experts. Combine sends a row for each expert back, and the source
//! computes their weighted sum.

mod assignment;
mod config;
pub mod cuda;
pub(crate) mod family;
mod host;
pub mod logfmt;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

use std::sync::Arc;

use antiphon_fabric::{Communicator, Operation, Signature};
use antiphon_operation::{Count, Detail};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    Moe,
    error::{MoeError, Result, refused},
    instance::next_routes,
    layout::check_limits,
    tensors::{ID_TYPES, Ids, Name, VECTOR},
};

pub(crate) use assignment::Assignment;
pub use config::SlotLimits;

/// Elements of a row for each of its scales.
pub const SCALE_GROUP: usize = 128;

const DISPATCH: &str = "dispatch_to_slots";
const COMBINE: &str = "combine_from_slots";

/// The format of received rows. 128 elements of a row share a scale of E4M3 codes, as
/// [`GroupRule::DeepEp`](antiphon_tensor::quantize::GroupRule) says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotFormat {
    /// bf16, with the bits of the tokens.
    Bf16 = 1,
    /// E4M3 codes; f32 scales.
    Fp8 = 2,
    /// E4M3 codes; scales that are rounded up to powers of two, as f32.
    Fp8PowersOfTwo = 3,
    /// E4M3 codes; scales that are rounded up to powers of two, as UE8M0, of which an i32 holds four, the first in its lowest
    /// byte.
    Fp8Packed = 4,
}

impl SlotFormat {
    /// The dtype of received rows.
    pub fn dtype(self) -> DType {
        if self == Self::Bf16 { DType::BF16 } else { DType::U8 }
    }

    /// The dtype of their scales; none without scales.
    pub fn scale_dtype(self) -> Option<DType> {
        match self {
            Self::Bf16 => None,
            Self::Fp8 | Self::Fp8PowersOfTwo => Some(DType::F32),
            Self::Fp8Packed => Some(DType::I32),
        }
    }

    /// The number of scale elements of a row of `hidden` elements.
    pub fn num_scales(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Fp8 | Self::Fp8PowersOfTwo => hidden / SCALE_GROUP,
            Self::Fp8Packed => hidden / SCALE_GROUP / 4,
        }
    }

    fn row_bytes(self, hidden: usize) -> usize {
        hidden * self.dtype().size()
    }

    /// The number of elements of a row must be a multiple of this.
    fn unit(self) -> usize {
        match self {
            Self::Bf16 => VECTOR / DType::BF16.size(),
            Self::Fp8 | Self::Fp8PowersOfTwo => SCALE_GROUP,
            Self::Fp8Packed => SCALE_GROUP * 4,
        }
    }
}

/// The format in which a combine sends rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CombineFormat {
    /// bf16, with the bits of the rows.
    Bf16 = 0,
    /// Between GPUs 11 bits for an element where bf16 has 16; each row is what [`logfmt`] makes of it. Rows are whole blocks of 128
    /// elements.
    LogFmt = 1,
}

impl CombineFormat {
    /// The number of elements of a row must be a multiple of this.
    fn unit(self) -> usize {
        match self {
            Self::Bf16 => VECTOR / DType::BF16.size(),
            Self::LogFmt => logfmt::BLOCK,
        }
    }
}

/// The tensors of [`Moe::dispatch_to_slots`].
#[derive(Debug)]
pub struct SlotDispatch<'a> {
    /// `M`: the most tokens that any rank has; equal on all ranks.
    pub max_tokens: usize,
    /// The number of experts of all ranks; equal on all ranks.
    pub num_experts: usize,
    /// The format of received rows; equal on all ranks.
    pub format: SlotFormat,
    /// This rank's tokens: bf16 `[T, H]`, `T ≤ M`.
    pub x: TensorView<'a>,
    /// The experts of each token: i64 or i32 `[T, K]`. A number outside `0..E` names no expert. An expert that a token names twice
    /// gets the token once.
    pub ids: TensorView<'a>,
    /// The outputs.
    pub received: ReceivedSlots<'a>,
}

/// The outputs of a dispatch to slots: the slots of each expert of this rank. The call does not write slots that no token fills.
#[derive(Debug)]
pub struct ReceivedSlots<'a> {
    /// The rows, of [`SlotFormat::dtype`]: `[L, R·M, H]`.
    pub x: TensorViewMut<'a>,
    /// Their scales, of [`SlotFormat::scale_dtype`]: `[L, S, R·M]`, so that the scales of neighbouring slots are neighbours.
    pub scales: Option<TensorViewMut<'a>>,
    /// i32 `[L]`: the number of filled slots of each expert.
    pub counts: TensorViewMut<'a>,
    /// i32 `[L, R·M]`: the token, on its source rank, in each slot.
    pub source_tokens: TensorViewMut<'a>,
    /// i64 `[L, R]`: the slots that each rank's tokens fill: the first in the upper 32 bits, their number in the lower ones.
    pub layout_range: TensorViewMut<'a>,
    /// i32 `[L]`, to which `counts` is added.
    pub statistics: Option<TensorViewMut<'a>>,
    /// i64 `[R]`, to which the nanoseconds are added that this rank waited for each other rank. A rank waits for its peers one
    /// after the other, from the next rank on, so a peer's number has nothing of the waits for the peers before it. Between
    /// GPUs it is the wait for the peer's first message.
    pub waits: Option<TensorViewMut<'a>>,
}

/// The tensors of [`Moe::combine_from_slots`].
#[derive(Debug)]
pub struct SlotCombine<'a> {
    /// The format in which rows are sent; equal on all ranks.
    pub format: CombineFormat,
    /// The experts' outputs for their slots: bf16 `[L, R·M, H]`.
    pub rows: TensorView<'a>,
    /// The ids of the dispatch, i64 or i32 `[T, K]`. A sum leaves out a choice whose id here is outside `0..E`.
    pub ids: TensorView<'a>,
    /// Their weights: f32 `[T, K]`.
    pub weights: TensorView<'a>,
    /// The sums: bf16 `[T, H]`. A sum begins with +0, adds the products of weight and row, each rounded to f32, in the order
    /// of the choices, and is rounded once.
    pub output: TensorViewMut<'a>,
    /// As [`ReceivedSlots::waits`].
    pub waits: Option<TensorViewMut<'a>>,
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) world_size: usize,
    pub(crate) max_tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) num_experts: usize,
    pub(crate) top_k: usize,
    /// This rank's tokens.
    pub(crate) tokens: usize,
}

impl Sizes {
    pub(crate) fn local(&self) -> usize {
        self.num_experts / self.world_size
    }

    /// The number of slots of an expert.
    pub(crate) fn slots(&self) -> usize {
        self.world_size * self.max_tokens
    }
}

/// The routes of a dispatch to slots: which rank has which rows from which. [`Moe::dispatch_to_slots`] makes them, for its combine.
#[derive(Debug, Clone)]
pub struct SlotRoutes {
    pub(crate) owner: Arc<()>,
    number: u32,
    sizes: Sizes,
    assignment: Assignment,
}

impl SlotRoutes {
    /// How many tokens this rank dispatched.
    pub fn num_tokens(&self) -> usize {
        self.sizes.tokens
    }

    /// `[R]`: how many tokens each rank dispatched.
    pub fn tokens(&self) -> &[usize] {
        &self.assignment.tokens
    }
}

/// Checks the tensors of a dispatch.
pub(crate) fn check_dispatch(call: &SlotDispatch<'_>, world_size: usize) -> Result<Sizes> {
    let name = |which| Name { call: DISPATCH, which };
    let SlotDispatch { max_tokens, num_experts, format, ref x, ref ids, ref received } = *call;
    let (tokens, hidden) = name("x").matrix(x, "[T, H]")?;
    let (_, top_k) = name("ids").matrix(ids, "[T, K]")?;
    let local = check_limits(DISPATCH, num_experts, top_k, world_size)?;
    name("x").has_dtype(x.dtype(), &[DType::BF16])?;
    name("ids").has_dtype(ids.dtype(), &ID_TYPES)?;
    name("ids").has_shape(ids, &[tokens, top_k], "[T, K]")?;
    if tokens > max_tokens {
        return Err(refused(DISPATCH, format!("{tokens} tokens; max_tokens is {max_tokens}")));
    }
    if hidden == 0 || !hidden.is_multiple_of(format.unit()) {
        let problem = format!("rows of {hidden} elements, which must be a multiple of {}", format.unit());
        return Err(refused(DISPATCH, problem));
    }
    let slots =
        max_tokens.checked_mul(world_size.max(top_k)).and_then(|slots| slots.checked_mul(local.max(1)));
    let bytes = slots.and_then(|slots| slots.checked_mul(hidden * 2));
    if slots.is_none_or(|slots| i32::try_from(slots).is_err()) || bytes.is_none() {
        let problem = format!("max_tokens is {max_tokens}, which is too large for {local} experts of a rank");
        return Err(refused(DISPATCH, problem));
    }
    let sizes = Sizes { world_size, max_tokens, hidden, num_experts, top_k, tokens };
    let slots = sizes.slots();
    let output = |which, view: &TensorViewMut<'_>, dtype: DType, shape: &[usize], rule: &str| {
        name(which).has_dtype(view.dtype(), &[dtype])?;
        name(which).has_shape(&view.as_view(), shape, rule)
    };
    output("received x", &received.x, format.dtype(), &[local, slots, hidden], "[L, R·M, H]")?;
    match (&received.scales, format.scale_dtype()) {
        (None, None) => {}
        (Some(scales), Some(dtype)) => {
            let shape = [local, format.num_scales(hidden), slots];
            output("received scales", scales, dtype, &shape, "[L, S, R·M]")?;
        }
        (_, needed) => {
            let which = if needed.is_some() { "need" } else { "have no" };
            return Err(refused(DISPATCH, format!("rows of the format {format:?} {which} scales")));
        }
    }
    output("counts", &received.counts, DType::I32, &[local], "[L]")?;
    output("source tokens", &received.source_tokens, DType::I32, &[local, slots], "[L, R·M]")?;
    output("layout range", &received.layout_range, DType::I64, &[local, world_size], "[L, R]")?;
    if let Some(statistics) = &received.statistics {
        output("statistics", statistics, DType::I32, &[local], "[L]")?;
    }
    if let Some(waits) = &received.waits {
        output("waits", waits, DType::I64, &[world_size], "[R]")?;
    }
    Ok(sizes)
}

/// The error of a call that is larger than what the instance was made for.
pub(crate) fn too_large(call: &'static str, sizes: &Sizes, most: impl std::fmt::Display) -> MoeError {
    let Sizes { max_tokens, hidden, num_experts, top_k, .. } = sizes;
    refused(
        call,
        format!(
            "max_tokens {max_tokens}, rows of {hidden}, {num_experts} experts and top-{top_k} exceed what the instance was made \
             for: {most}"
        ),
    )
}

/// Checks the tensors of a combine.
pub(crate) fn check_combine(call: &SlotCombine<'_>, sizes: &Sizes) -> Result<()> {
    let name = |which| Name { call: COMBINE, which };
    let Sizes { hidden, tokens, top_k, .. } = *sizes;
    name("rows").has_dtype(call.rows.dtype(), &[DType::BF16])?;
    name("rows").has_shape(&call.rows, &[sizes.local(), sizes.slots(), hidden], "[L, R·M, H]")?;
    if !hidden.is_multiple_of(call.format.unit()) {
        let problem =
            format!("rows of {hidden} elements, which must be a multiple of {}", call.format.unit());
        return Err(refused(COMBINE, problem));
    }
    name("ids").has_dtype(call.ids.dtype(), &ID_TYPES)?;
    name("ids").has_shape(&call.ids, &[tokens, top_k], "[T, K]")?;
    name("weights").has_dtype(call.weights.dtype(), &[DType::F32])?;
    name("weights").has_shape(&call.weights, &[tokens, top_k], "[T, K]")?;
    name("output").has_dtype(call.output.dtype(), &[DType::BF16])?;
    name("output").has_shape(&call.output.as_view(), &[tokens, hidden], "[T, H]")?;
    let Some(waits) = &call.waits else { return Ok(()) };
    name("waits").has_dtype(waits.dtype(), &[DType::I64])?;
    name("waits").has_shape(&waits.as_view(), &[sizes.world_size], "[R]")
}

/// The signature of a dispatch: what must be equal on all ranks.
pub(crate) fn dispatch_signature(sizes: &Sizes, format: SlotFormat) -> Signature {
    Signature {
        dtype: Some(DType::BF16),
        algorithm: format as u8,
        detail: Detail::experts(sizes.num_experts as u32, sizes.top_k as u8),
        count: Count::bounded_rows(sizes.hidden as u32, sizes.max_tokens as u32),
        ..Signature::new(Operation::DispatchToSlots)
    }
}

/// The signature of a combine along the routes with this number.
pub(crate) fn combine_signature(sizes: &Sizes, number: u32, format: CombineFormat) -> Signature {
    Signature {
        dtype: Some(DType::BF16),
        algorithm: format as u8,
        detail: Detail::experts(sizes.num_experts as u32, sizes.top_k as u8),
        count: Count::rows(sizes.hidden as u32, number),
        ..Signature::new(Operation::CombineFromSlots)
    }
}

pub(crate) fn dispatch(moe: &mut Moe, comm: &Communicator, call: SlotDispatch<'_>) -> Result<SlotRoutes> {
    let sizes = check_dispatch(&call, comm.world_size())?;
    if let Some(most) = moe.slots.filter(|most| !most.serves(&sizes)) {
        return Err(too_large(DISPATCH, &sizes, format_args!("{most:?}")));
    }
    let name = |which| Name { call: DISPATCH, which };
    let SlotDispatch { num_experts, format, x, ids, mut received, .. } = call;
    let statistics = match &mut received.statistics {
        Some(statistics) => name("statistics").bytes_mut(statistics)?,
        None => &mut [],
    };
    let waits = received.waits.as_mut().map(|waits| name("waits").bytes_mut(waits)).transpose()?;
    let to = host::Received {
        x: name("received x").bytes_mut(&mut received.x)?,
        scales: match &mut received.scales {
            Some(scales) => name("received scales").bytes_mut(scales)?,
            None => &mut [],
        },
        counts: name("counts").bytes_mut(&mut received.counts)?,
        source_tokens: name("source tokens").bytes_mut(&mut received.source_tokens)?,
        layout_range: name("layout range").bytes_mut(&mut received.layout_range)?,
        statistics,
        waits,
    };
    let call = host::Dispatch {
        signature: dispatch_signature(&sizes, format),
        sizes,
        format,
        x: name("x").bytes(&x)?,
        ids: Ids::new(name("ids"), &ids, num_experts)?,
    };
    let assignment = call.run(moe, comm, to)?;
    Ok(SlotRoutes { owner: moe.token.clone(), number: next_routes(comm), sizes, assignment })
}

pub(crate) fn combine(
    moe: &mut Moe,
    comm: &Communicator,
    routes: &SlotRoutes,
    call: SlotCombine<'_>,
) -> Result<()> {
    let SlotRoutes { number, sizes, assignment, .. } = routes;
    check_combine(&call, sizes)?;
    let name = |which| Name { call: COMBINE, which };
    let SlotCombine { format, rows, ids, weights, mut output, mut waits } = call;
    let waits = waits.as_mut().map(|waits| name("waits").bytes_mut(waits)).transpose()?;
    let call = host::Combine {
        signature: combine_signature(sizes, *number, format),
        format,
        sizes: *sizes,
        assignment,
        rows: name("rows").bytes(&rows)?,
        ids: Ids::new(name("ids"), &ids, sizes.num_experts)?,
        weights: name("weights").bytes(&weights)?,
    };
    call.run(moe, comm, name("output").bytes_mut(&mut output)?, waits)
}
