//! Dispatch and combine of the hybrid form: a routing map says which experts each token chooses, and received rows are already
//! ordered by expert.
//!
//! A token goes once to each rank of its experts. That rank copies it to a row for each of its experts that the token chose: the
//! rows of an expert form a *segment*, in the order of source rank and token, behind which padding brings the segment to a
//! multiple of [`HybridOrder::Experts::pad_multiple`]. Combine sums the rows of a token on their rank first, in the order of
//! experts, and rounds this; the source sums what the ranks sent, in the order of ranks.
//!
//! | step | call |
//! | --- | --- |
//! | counts are exchanged | [`Moe::hybrid_notify`] |
//! | rows go | [`Moe::hybrid_dispatch`] |
//! | rows come back and are summed | [`Moe::hybrid_combine`] |

pub mod cuda;
pub(crate) mod family;
mod handle;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;
mod segments;

use antiphon_fabric::{Communicator, Operation, Signature};
use antiphon_operation::{Count, Detail};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    Moe, RowFormat,
    error::{MoeError, Result, refused},
    layout::check_limits,
    normal::{MOVED, SUMMED},
    tensors::Name,
};

pub use handle::HybridHandle;
pub(crate) use segments::Segments;

const DISPATCH: &str = "hybrid_dispatch";
const COMBINE: &str = "hybrid_combine";

fn of_dispatch(which: &'static str) -> Name {
    Name { call: DISPATCH, which }
}

fn of_combine(which: &'static str) -> Name {
    Name { call: COMBINE, which }
}

/// How a rank orders what it receives. Each rank may choose for itself, but for whether there is a capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HybridOrder {
    /// A row for each token, in the order of source rank and token; `N` of them.
    Tokens,
    /// A row for each token and expert, by expert, then by source rank and token; `P` of them with the padding.
    Experts {
        /// The rows of each expert are padded to a multiple of this; at least 1.
        pad_multiple: usize,
        /// How many rows there are, if not as many as come.
        capacity: Option<HybridCapacity>,
    },
}

/// Numbers that let a call wait for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridCapacity {
    /// `P`, a multiple of the padding. What belongs to rows beyond it is dropped.
    pub rows: usize,
    /// The most tokens that any rank has; equal on all ranks.
    pub max_tokens: usize,
}

/// Where this rank's tokens go, for [`Moe::hybrid_notify`].
#[derive(Debug, Clone)]
pub struct HybridRouting<'a> {
    /// Nonzero where a token chooses an expert: u8 or bool `[T, E]`.
    pub map: TensorView<'a>,
    /// How this rank orders what it receives.
    pub order: HybridOrder,
    /// What the rows of the first dispatch will be.
    pub format: RowFormat,
}

/// Rows with what travels beside them: `T` tokens that go, or `P` or `N` rows that come.
#[derive(Debug, Clone)]
pub struct HybridTokens<V> {
    /// The rows: `[T, H]`, `[P, H]` or `[N, H]`.
    pub x: V,
    /// Their scales, as [`RowFormat::scales`] says.
    pub scales: Option<V>,
    /// Weights, f32. Of tokens `[T, E]`, of which those of chosen experts are used. Of rows by expert `[P]`; of rows by token
    /// `[N, L]`, with 0 where the expert was not chosen.
    pub probs: Option<V>,
}

impl<V> HybridTokens<V> {
    /// Rows alone.
    pub fn of(x: V) -> Self {
        Self { x, scales: None, probs: None }
    }
}

/// What a rank sends and receives in [`Moe::hybrid_dispatch`]. `received` has the same parts as `tokens`. Rows by expert that receive
/// no token, such as padding and the unused rest of a capacity, are filled with 0 in all parts.
#[derive(Debug)]
pub struct HybridDispatch<'a> {
    /// This rank's tokens.
    pub tokens: HybridTokens<TensorView<'a>>,
    /// Its received rows: [`HybridHandle::rows`] of them.
    pub received: HybridTokens<TensorViewMut<'a>>,
}

/// What goes back and what it is summed to, for [`Moe::hybrid_combine`].
#[derive(Debug)]
pub struct HybridCombine<'a> {
    /// What this rank's experts made of their rows: f32, f16, bf16 or f64, `[P, H]`; padding is not read. Or what the rank made
    /// of its received tokens, `[N, H]`.
    pub rows: TensorView<'a>,
    /// Weights that come back along: f32 `[P]` or `[N, L]`.
    pub probs: Option<TensorView<'a>>,
    /// The sums: of the dtype of the rows, `[T, H]`.
    pub output: TensorViewMut<'a>,
    /// The weights: f32 `[T, E]`, 0 where an expert was not chosen or its row was dropped.
    pub output_probs: Option<TensorViewMut<'a>>,
}

impl<'a> HybridCombine<'a> {
    /// A combine of rows alone.
    pub fn of(rows: TensorView<'a>, output: TensorViewMut<'a>) -> Self {
        Self { rows, probs: None, output, output_probs: None }
    }
}

/// What the numbers of a routing are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) world_size: usize,
    pub(crate) num_experts: usize,
    /// This rank's tokens.
    pub(crate) tokens: usize,
}

impl Sizes {
    pub(crate) fn local(&self) -> usize {
        self.num_experts / self.world_size
    }
}

/// What calls along a handle must fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Along {
    pub(crate) sizes: Sizes,
    pub(crate) order: HybridOrder,
    /// The rows of received tensors.
    pub(crate) rows: usize,
    /// The handle's.
    pub(crate) number: u32,
}

impl Along {
    pub(crate) fn is_by_token(&self) -> bool {
        self.order == HybridOrder::Tokens
    }

    /// The one of two texts that is about rows by expert, or by token.
    fn rule<'a>(&self, [by_expert, by_token]: [&'a str; 2]) -> &'a str {
        if self.is_by_token() { by_token } else { by_expert }
    }

    /// What received probs are.
    fn shape_of_probs(&self) -> Vec<usize> {
        if self.is_by_token() { vec![self.rows, self.sizes.local()] } else { vec![self.rows] }
    }
}

/// Refuses a routing that makes no sense.
fn check_routing(routing: &HybridRouting<'_>, world_size: usize) -> Result<Sizes> {
    let HybridRouting { map, order, format } = routing;
    let (tokens, num_experts) = of_dispatch("routing map").matrix(map, "[T, E]")?;
    check_limits(DISPATCH, num_experts, 0, world_size)?;
    of_dispatch("routing map").has_dtype(map.dtype(), &[DType::U8, DType::Bool])?;
    format.check(of_dispatch("x"), &MOVED)?;
    let most = i32::MAX as usize / world_size;
    if tokens > most {
        return Err(refused(DISPATCH, format!("{tokens} tokens; at most {most} are served")));
    }
    let problem = match *order {
        HybridOrder::Experts { pad_multiple: 0, .. } => "pad_multiple is 0; it must be at least 1".into(),
        HybridOrder::Experts { pad_multiple, .. } if pad_multiple > 1 << 20 => {
            format!("pad_multiple is {pad_multiple}; at most {} is served", 1 << 20)
        }
        HybridOrder::Experts { pad_multiple, capacity: Some(HybridCapacity { rows, max_tokens }) } => {
            match () {
                () if !rows.is_multiple_of(pad_multiple) => {
                    format!(
                        "num_permuted_tokens is {rows}, which is no multiple of pad_multiple, {pad_multiple}"
                    )
                }
                () if rows > i32::MAX as usize => {
                    format!("num_permuted_tokens is {rows}; at most {} are served", i32::MAX)
                }
                () if tokens > max_tokens => format!("{tokens} tokens; max_tokens is {max_tokens}"),
                () if max_tokens > most => format!("max_tokens is {max_tokens}; at most {most} is served"),
                () => return Ok(Sizes { world_size, num_experts, tokens }),
            }
        }
        _ => return Ok(Sizes { world_size, num_experts, tokens }),
    };
    Err(refused(DISPATCH, problem))
}

/// What ranks agree on in [`Moe::hybrid_notify`].
fn signature_of_routing(routing: &HybridRouting<'_>, sizes: &Sizes) -> Signature {
    let (algorithm, most) = match routing.order {
        HybridOrder::Experts { capacity: Some(HybridCapacity { max_tokens, .. }), .. } => (2, max_tokens),
        _ => (1, 0),
    };
    signature(Operation::HybridDispatch, &routing.format, algorithm, sizes, most as u32)
}

/// Refuses a dispatch along a handle that makes no sense; what its rows are.
fn check_dispatch(call: &HybridDispatch<'_>, handle: &Along) -> Result<RowFormat> {
    let HybridDispatch { tokens, received } = call;
    let Along { sizes, rows, .. } = *handle;
    let format = RowFormat::of(&tokens.x, tokens.scales.as_ref(), of_dispatch("x"))?;
    format.check(of_dispatch("x"), &MOVED)?;
    let check = |which, view: &TensorView<'_>, dtype: DType, shape: &[usize], rule: &str| {
        of_dispatch(which).has_dtype(view.dtype(), &[dtype])?;
        of_dispatch(which).has_shape(view, shape, rule)
    };
    check("x", &tokens.x, format.dtype, &[sizes.tokens, format.hidden], "[T, H]")?;
    let shape = [rows, format.hidden];
    check("received x", &received.x.as_view(), format.dtype, &shape, handle.rule(["[P, H]", "[N, H]"]))?;
    if (tokens.scales.is_some(), tokens.probs.is_some())
        != (received.scales.is_some(), received.probs.is_some())
    {
        return Err(refused(DISPATCH, "what goes and what comes must have the same parts".into()));
    }
    if let (Some(from), Some(to)) = (&tokens.scales, &received.scales) {
        let width = format.num_scales();
        check("scales", from, from.dtype(), &[sizes.tokens, width], "[T, S]")?;
        let rule = handle.rule(["[P, S]", "[N, S]"]);
        check("received scales", &to.as_view(), from.dtype(), &[rows, width], rule)?;
    }
    if let (Some(from), Some(to)) = (&tokens.probs, &received.probs) {
        check("probs", from, DType::F32, &[sizes.tokens, sizes.num_experts], "[T, E]")?;
        let rule = handle.rule(["[P]", "[N, L]"]);
        check("received probs", &to.as_view(), DType::F32, &handle.shape_of_probs(), rule)?;
    }
    Ok(format)
}

/// Refuses a combine along a handle that makes no sense; what its rows are.
fn check_combine(call: &HybridCombine<'_>, handle: &Along, dtypes: &[DType]) -> Result<RowFormat> {
    let sizes = &handle.sizes;
    let format = RowFormat::of(&call.rows, None, of_combine("rows"))?;
    format.check(of_combine("rows"), dtypes)?;
    let rule = handle.rule(["[P, H]", "[N, H]"]);
    of_combine("rows").has_shape(&call.rows, &[handle.rows, format.hidden], rule)?;
    let output = call.output.as_view();
    of_combine("output").has_dtype(output.dtype(), &[format.dtype])?;
    of_combine("output").has_shape(&output, &[sizes.tokens, format.hidden], "[T, H]")?;
    match (&call.probs, &call.output_probs) {
        (None, None) => Ok(format),
        (Some(probs), Some(output)) => {
            of_combine("probs").has_dtype(probs.dtype(), &[DType::F32])?;
            of_combine("output probs").has_dtype(output.dtype(), &[DType::F32])?;
            let shape = handle.shape_of_probs();
            of_combine("probs").has_shape(probs, &shape, handle.rule(["[P]", "[N, L]"]))?;
            let shape = [sizes.tokens, sizes.num_experts];
            of_combine("output probs").has_shape(&output.as_view(), &shape, "[T, E]")?;
            Ok(format)
        }
        _ => Err(refused(COMBINE, "probs must go in and come out, or neither".into())),
    }
}

/// What ranks agree on in [`Moe::hybrid_dispatch`].
fn signature_of_rows(format: &RowFormat, has_probs: bool, handle: &Along) -> Signature {
    let algorithm = 3 + 2 * format.code() + u8::from(has_probs);
    signature(Operation::HybridDispatch, format, algorithm, &handle.sizes, handle.number)
}

/// What ranks agree on in [`Moe::hybrid_combine`].
fn signature_of_sums(format: &RowFormat, has_probs: bool, handle: &Along) -> Signature {
    signature(Operation::HybridCombine, format, u8::from(has_probs), &handle.sizes, handle.number)
}

fn signature(
    operation: Operation,
    format: &RowFormat,
    algorithm: u8,
    sizes: &Sizes,
    routed_by: u32,
) -> Signature {
    Signature {
        dtype: Some(format.dtype),
        algorithm,
        detail: Detail::experts(sizes.num_experts as u32, 0),
        count: Count::rows(format.hidden as u32, routed_by),
        ..Signature::new(operation)
    }
}

pub(crate) fn notify(
    moe: &mut Moe,
    comm: &Communicator,
    routing: &HybridRouting<'_>,
) -> Result<HybridHandle> {
    let sizes = check_routing(routing, comm.world_size())?;
    let map = of_dispatch("routing map").bytes(&routing.map)?;
    let signature = signature_of_routing(routing, &sizes);
    host::notify(moe, comm, &signature, sizes, map, routing.order)
}

pub(crate) fn dispatch(
    moe: &mut Moe,
    comm: &Communicator,
    handle: &HybridHandle,
    call: HybridDispatch<'_>,
) -> Result<()> {
    let along = handle.along();
    let format = check_dispatch(&call, &along)?;
    let HybridDispatch { tokens, received: HybridTokens { mut x, mut scales, mut probs } } = call;
    let call = host::Rows {
        signature: signature_of_rows(&format, tokens.probs.is_some(), &along),
        x: of_dispatch("x").bytes(&tokens.x)?,
        scales: optional(of_dispatch("scales"), tokens.scales.as_ref())?,
        probs: optional(of_dispatch("probs"), tokens.probs.as_ref())?,
        row_bytes: format.row_bytes(),
        scale_bytes: format.num_scales() * 4,
        has_probs: tokens.probs.is_some(),
        to_x: of_dispatch("received x").bytes_mut(&mut x)?,
        to_scales: optional_mut(of_dispatch("received scales"), scales.as_mut())?,
        to_probs: optional_mut(of_dispatch("received probs"), probs.as_mut())?,
    };
    call.run(moe, comm, handle)
}

pub(crate) fn combine(
    moe: &mut Moe,
    comm: &Communicator,
    handle: &HybridHandle,
    call: HybridCombine<'_>,
) -> Result<()> {
    let Some(received) = handle.received.get() else {
        return Err(MoeError::Handle {
            call: COMBINE,
            problem: "one along which nothing was dispatched yet",
        });
    };
    let along = handle.along();
    let format = check_combine(&call, &along, &SUMMED)?;
    let HybridCombine { rows, probs, mut output, mut output_probs } = call;
    let call = host::Sums {
        signature: signature_of_sums(&format, probs.is_some(), &along),
        dtype: format.dtype,
        hidden: format.hidden,
        rows: of_combine("rows").bytes(&rows)?,
        probs: optional(of_combine("probs"), probs.as_ref())?,
        has_probs: probs.is_some(),
        output: of_combine("output").bytes_mut(&mut output)?,
        output_probs: optional_mut(of_combine("output probs"), output_probs.as_mut())?,
    };
    call.run(moe, comm, handle, received)
}

/// What a part holds; nothing if it is not there.
fn optional<'a>(name: Name, view: Option<&TensorView<'a>>) -> Result<&'a [u8]> {
    view.map_or(Ok(&[]), |view| name.bytes(view))
}

fn optional_mut<'a>(name: Name, view: Option<&'a mut TensorViewMut<'_>>) -> Result<&'a mut [u8]> {
    view.map_or(Ok(&mut []), |view| name.bytes_mut(view))
}
