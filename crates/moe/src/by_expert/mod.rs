//! Dispatch and combine *by expert*: a routing map says which experts each token chooses, and received rows are ordered by expert.
//! DeepEP's branch hybrid-ep has this form as `HybridEPBuffer`.
//!
//! A token goes once to each rank of its experts. That rank copies it to a row for each of its experts that the token chose: the
//! rows of an expert form a *segment*, in the order of source rank and token, behind which padding brings the segment to a
//! multiple of [`ByExpertOrder::Experts::pad_multiple`]. Combine sums the rows of a token on their rank first, in the order of
//! experts, and rounds this; the source sums what the ranks sent, in the order of ranks. With [`ByExpertOrder::Tokens`] a rank gets
//! a row for each token in place of those for each expert, still by a routing map.
//!
//! | step | call |
//! | --- | --- |
//! | counts are exchanged | [`Moe::notify_by_expert`] |
//! | rows go | [`Moe::dispatch_by_expert`] |
//! | rows come back and are summed | [`Moe::combine_by_expert`] |

pub mod cuda;
pub(crate) mod family;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;
mod routes;
mod segments;

use antiphon_fabric::{Communicator, Operation, Signature};
use antiphon_operation::{Count, Detail};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    Moe, RowFormat,
    by_token::{MOVED, SUMMED},
    error::{MoeError, Result, refused},
    layout::check_limits,
    tensors::Name,
};

pub use routes::ByExpertRoutes;
pub(crate) use segments::Segments;

const DISPATCH: &str = "dispatch_by_expert";
const COMBINE: &str = "combine_by_expert";

fn of_dispatch(which: &'static str) -> Name {
    Name { call: DISPATCH, which }
}

fn of_combine(which: &'static str) -> Name {
    Name { call: COMBINE, which }
}

/// How a rank orders the rows that it receives. Each rank may choose for itself, but either all ranks have a capacity or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByExpertOrder {
    /// There is a row for each token, in the order of source rank and token: `N` rows.
    Tokens,
    /// There is a row for each token and expert, by expert, then by source rank and token: `P` rows with the padding.
    Experts {
        /// The rows of each expert are padded to a multiple of this; at least 1.
        pad_multiple: usize,
        /// How many rows there are, if not as many as arrive.
        capacity: Option<ByExpertCapacity>,
    },
}

/// Numbers that spare a call the wait for the counts of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByExpertCapacity {
    /// `P`, a multiple of the padding. What belongs to rows beyond it is dropped.
    pub rows: usize,
    /// The most tokens that any rank has; equal on all ranks.
    pub max_tokens: usize,
}

/// Where this rank's tokens go, for [`Moe::notify_by_expert`].
#[derive(Debug, Clone)]
pub struct ByExpertRouting<'a> {
    /// Nonzero where a token chooses an expert: u8 or bool `[T, E]`.
    pub map: TensorView<'a>,
    /// How this rank orders what it receives.
    pub order: ByExpertOrder,
    /// What the rows of the first dispatch will be.
    pub format: RowFormat,
}

/// Rows with their scales and weights: the `T` tokens that a rank sends, or the `P` or `N` rows that it receives.
#[derive(Debug, Clone)]
pub struct ByExpertTokens<V> {
    /// The rows: `[T, H]`, `[P, H]` or `[N, H]`.
    pub x: V,
    /// Their scales, as [`RowFormat::scales`] says.
    pub scales: Option<V>,
    /// Weights, f32. Of tokens `[T, E]`, of which those of chosen experts are used. Of rows by expert `[P]`; of rows by token
    /// `[N, L]`, with 0 where the expert was not chosen.
    pub probs: Option<V>,
}

impl<V> ByExpertTokens<V> {
    /// Rows alone.
    pub fn of(x: V) -> Self {
        Self { x, scales: None, probs: None }
    }
}

/// What a rank sends and receives in [`Moe::dispatch_by_expert`]. `received` has the same parts as `tokens`. Rows by expert that receive
/// no token, such as padding and the unused rest of a capacity, are filled with 0 in all parts.
#[derive(Debug)]
pub struct ByExpertDispatch<'a> {
    /// This rank's tokens.
    pub tokens: ByExpertTokens<TensorView<'a>>,
    /// Its received rows: [`ByExpertRoutes::rows`] of them.
    pub received: ByExpertTokens<TensorViewMut<'a>>,
}

/// The rows that go back, and the sums, for [`Moe::combine_by_expert`].
#[derive(Debug)]
pub struct ByExpertCombine<'a> {
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

impl<'a> ByExpertCombine<'a> {
    /// A combine of rows alone.
    pub fn of(rows: TensorView<'a>, output: TensorViewMut<'a>) -> Self {
        Self { rows, probs: None, output, output_probs: None }
    }
}

/// The numbers of a routing.
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

/// The sizes of routes, which calls along them must fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RouteSizes {
    pub(crate) sizes: Sizes,
    pub(crate) order: ByExpertOrder,
    /// The rows of received tensors.
    pub(crate) rows: usize,
    /// The number of the routes.
    pub(crate) number: u32,
}

impl RouteSizes {
    pub(crate) fn is_by_token(&self) -> bool {
        self.order == ByExpertOrder::Tokens
    }

    /// The one of two texts that is about rows by expert, or by token.
    fn rule<'a>(&self, [by_expert, by_token]: [&'a str; 2]) -> &'a str {
        if self.is_by_token() { by_token } else { by_expert }
    }

    /// The shape of received probs.
    fn shape_of_probs(&self) -> Vec<usize> {
        if self.is_by_token() { vec![self.rows, self.sizes.local()] } else { vec![self.rows] }
    }
}

/// Refuses a routing that makes no sense, and gives its numbers.
fn check_routing(routing: &ByExpertRouting<'_>, world_size: usize) -> Result<Sizes> {
    let ByExpertRouting { map, order, format } = routing;
    let (tokens, num_experts) = of_dispatch("routing map").matrix(map, "[T, E]")?;
    check_limits(DISPATCH, num_experts, 0, world_size)?;
    of_dispatch("routing map").has_dtype(map.dtype(), &[DType::U8, DType::Bool])?;
    format.check(of_dispatch("x"), &MOVED)?;
    let most = i32::MAX as usize / world_size;
    if tokens > most {
        return Err(refused(DISPATCH, format!("{tokens} tokens; at most {most} are served")));
    }
    let problem = match *order {
        ByExpertOrder::Experts { pad_multiple: 0, .. } => "pad_multiple is 0; it must be at least 1".into(),
        ByExpertOrder::Experts { pad_multiple, .. } if pad_multiple > 1 << 20 => {
            format!("pad_multiple is {pad_multiple}; at most {} is served", 1 << 20)
        }
        ByExpertOrder::Experts { pad_multiple, capacity: Some(ByExpertCapacity { rows, max_tokens }) } => {
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

/// What ranks agree on in [`Moe::notify_by_expert`].
fn signature_of_routing(routing: &ByExpertRouting<'_>, sizes: &Sizes) -> Signature {
    let (algorithm, most) = match routing.order {
        ByExpertOrder::Experts { capacity: Some(ByExpertCapacity { max_tokens, .. }), .. } => (2, max_tokens),
        _ => (1, 0),
    };
    signature(Operation::DispatchByExpert, &routing.format, algorithm, sizes, most as u32)
}

/// Refuses a dispatch along routes that makes no sense, and gives the format of its rows.
fn check_dispatch(call: &ByExpertDispatch<'_>, routes: &RouteSizes) -> Result<RowFormat> {
    let ByExpertDispatch { tokens, received } = call;
    let RouteSizes { sizes, rows, .. } = *routes;
    let format = RowFormat::of(&tokens.x, tokens.scales.as_ref(), of_dispatch("x"))?;
    format.check(of_dispatch("x"), &MOVED)?;
    let check = |which, view: &TensorView<'_>, dtype: DType, shape: &[usize], rule: &str| {
        of_dispatch(which).has_dtype(view.dtype(), &[dtype])?;
        of_dispatch(which).has_shape(view, shape, rule)
    };
    check("x", &tokens.x, format.dtype, &[sizes.tokens, format.hidden], "[T, H]")?;
    let shape = [rows, format.hidden];
    check("received x", &received.x.as_view(), format.dtype, &shape, routes.rule(["[P, H]", "[N, H]"]))?;
    if (tokens.scales.is_some(), tokens.probs.is_some())
        != (received.scales.is_some(), received.probs.is_some())
    {
        return Err(refused(DISPATCH, "what goes and what comes must have the same parts".into()));
    }
    if let (Some(from), Some(to)) = (&tokens.scales, &received.scales) {
        let width = format.num_scales();
        check("scales", from, from.dtype(), &[sizes.tokens, width], "[T, S]")?;
        let rule = routes.rule(["[P, S]", "[N, S]"]);
        check("received scales", &to.as_view(), from.dtype(), &[rows, width], rule)?;
    }
    if let (Some(from), Some(to)) = (&tokens.probs, &received.probs) {
        check("probs", from, DType::F32, &[sizes.tokens, sizes.num_experts], "[T, E]")?;
        let rule = routes.rule(["[P]", "[N, L]"]);
        check("received probs", &to.as_view(), DType::F32, &routes.shape_of_probs(), rule)?;
    }
    Ok(format)
}

/// Refuses a combine along routes that makes no sense, and gives the format of its rows.
fn check_combine(call: &ByExpertCombine<'_>, routes: &RouteSizes, dtypes: &[DType]) -> Result<RowFormat> {
    let sizes = &routes.sizes;
    let format = RowFormat::of(&call.rows, None, of_combine("rows"))?;
    format.check(of_combine("rows"), dtypes)?;
    let rule = routes.rule(["[P, H]", "[N, H]"]);
    of_combine("rows").has_shape(&call.rows, &[routes.rows, format.hidden], rule)?;
    let output = call.output.as_view();
    of_combine("output").has_dtype(output.dtype(), &[format.dtype])?;
    of_combine("output").has_shape(&output, &[sizes.tokens, format.hidden], "[T, H]")?;
    match (&call.probs, &call.output_probs) {
        (None, None) => Ok(format),
        (Some(probs), Some(output)) => {
            of_combine("probs").has_dtype(probs.dtype(), &[DType::F32])?;
            of_combine("output probs").has_dtype(output.dtype(), &[DType::F32])?;
            let shape = routes.shape_of_probs();
            of_combine("probs").has_shape(probs, &shape, routes.rule(["[P]", "[N, L]"]))?;
            let shape = [sizes.tokens, sizes.num_experts];
            of_combine("output probs").has_shape(&output.as_view(), &shape, "[T, E]")?;
            Ok(format)
        }
        _ => Err(refused(COMBINE, "probs must go in and come out, or neither".into())),
    }
}

/// What ranks agree on in [`Moe::dispatch_by_expert`].
fn signature_of_rows(format: &RowFormat, has_probs: bool, routes: &RouteSizes) -> Signature {
    let algorithm = 3 + 2 * format.code() + u8::from(has_probs);
    signature(Operation::DispatchByExpert, format, algorithm, &routes.sizes, routes.number)
}

/// What ranks agree on in [`Moe::combine_by_expert`].
fn signature_of_sums(format: &RowFormat, has_probs: bool, routes: &RouteSizes) -> Signature {
    signature(Operation::CombineByExpert, format, u8::from(has_probs), &routes.sizes, routes.number)
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
    routing: &ByExpertRouting<'_>,
) -> Result<ByExpertRoutes> {
    let sizes = check_routing(routing, comm.world_size())?;
    let map = of_dispatch("routing map").bytes(&routing.map)?;
    let signature = signature_of_routing(routing, &sizes);
    host::notify(moe, comm, &signature, sizes, map, routing.order)
}

pub(crate) fn dispatch(
    moe: &mut Moe,
    comm: &Communicator,
    routes: &ByExpertRoutes,
    call: ByExpertDispatch<'_>,
) -> Result<()> {
    let route_sizes = routes.route_sizes();
    let format = check_dispatch(&call, &route_sizes)?;
    let ByExpertDispatch { tokens, received: ByExpertTokens { mut x, mut scales, mut probs } } = call;
    let call = host::Rows {
        signature: signature_of_rows(&format, tokens.probs.is_some(), &route_sizes),
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
    call.run(moe, comm, routes)
}

pub(crate) fn combine(
    moe: &mut Moe,
    comm: &Communicator,
    routes: &ByExpertRoutes,
    call: ByExpertCombine<'_>,
) -> Result<()> {
    let Some(received) = routes.received.get() else {
        return Err(MoeError::Routes {
            call: COMBINE,
            problem: "ones along which nothing was dispatched yet",
        });
    };
    let route_sizes = routes.route_sizes();
    let format = check_combine(&call, &route_sizes, &SUMMED)?;
    let ByExpertCombine { rows, probs, mut output, mut output_probs } = call;
    let call = host::Sums {
        signature: signature_of_sums(&format, probs.is_some(), &route_sizes),
        dtype: format.dtype,
        hidden: format.hidden,
        rows: of_combine("rows").bytes(&rows)?,
        probs: optional(of_combine("probs"), probs.as_ref())?,
        has_probs: probs.is_some(),
        output: of_combine("output").bytes_mut(&mut output)?,
        output_probs: optional_mut(of_combine("output probs"), output_probs.as_mut())?,
    };
    call.run(moe, comm, routes, received)
}

/// The bytes of a part; empty if the call has no such part.
fn optional<'a>(name: Name, view: Option<&TensorView<'a>>) -> Result<&'a [u8]> {
    view.map_or(Ok(&[]), |view| name.bytes(view))
}

fn optional_mut<'a>(name: Name, view: Option<&'a mut TensorViewMut<'_>>) -> Result<&'a mut [u8]> {
    view.map_or(Ok(&mut []), |view| name.bytes_mut(view))
}
