//! Dispatch and combine *by token*: a rank gets one row for each token that chose some of its experts, of any number of tokens.
//! DeepEP's normal mode has this form.
//!
//! Rows are pulled in dispatch: a rank stages each of its tokens once, with the ranks that it goes to, and those copy it. In
//! combine they are pushed: each row goes to its place among those that come back to its source, which sums a token's rows
//! when the last one is there.

pub(crate) mod cuda;
pub(crate) mod family;
mod host;
#[cfg(test)]
mod model;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

use std::sync::OnceLock;

use antiphon_fabric::{Communicator, Operation, Signature};
use antiphon_operation::{Count, Detail};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    ByTokenRoutes, Layout, Moe,
    error::{MoeError, Result, refused},
    instance::next_routes,
    layout::check_limits,
    tensors::{ID_TYPES, Ids, Name, VECTOR},
    transport::{Announcement, Counts},
};

/// The dtypes of rows that can be moved.
pub(crate) const MOVED: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::F64, DType::U8, DType::I8];
/// The dtypes of rows that can be summed.
pub(crate) const SUMMED: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];
/// Elements of a row for each of its scales.
const SCALE_GROUP: usize = 128;

/// What the rows of a dispatch are, equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowFormat {
    /// Elements of a row.
    pub hidden: usize,
    /// Their type: f32, f16, bf16, f64, or bytes (u8, i8), such as codes of FP8.
    pub dtype: DType,
    /// The type of a row's scales, if it has any: f32, one for each 128 elements, or i32, with four scales in each.
    pub scales: Option<DType>,
}

impl RowFormat {
    pub(crate) fn of(tensor: &TensorView<'_>, scales: Option<&TensorView<'_>>, name: Name) -> Result<Self> {
        let (_, hidden) = name.matrix(tensor, "[T, H]")?;
        Ok(Self { hidden, dtype: tensor.dtype(), scales: scales.map(TensorView::dtype) })
    }

    /// Scales of a row.
    pub fn num_scales(&self) -> usize {
        match self.scales {
            None => 0,
            Some(DType::I32) => self.hidden.div_ceil(4 * SCALE_GROUP),
            Some(_) => self.hidden.div_ceil(SCALE_GROUP),
        }
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    pub(crate) fn check(&self, name: Name, dtypes: &[DType]) -> Result<()> {
        name.has_dtype(self.dtype, dtypes)?;
        if let Some(scales) = self.scales {
            Name { which: "scales", ..name }.has_dtype(scales, &[DType::F32, DType::I32])?;
        }
        let Self { hidden, dtype, .. } = self;
        if *hidden == 0 || u32::try_from(*hidden).is_err() || !self.row_bytes().is_multiple_of(VECTOR) {
            let problem = format!(
                "rows of {hidden} × {dtype} are {} bytes, which must be a multiple of {VECTOR}",
                self.row_bytes()
            );
            return Err(refused(name.call, problem));
        }
        Ok(())
    }

    /// What the format of rows adds to the number of an algorithm.
    pub(crate) fn code(&self) -> u8 {
        match self.scales {
            None => 0,
            Some(DType::I32) => 2,
            Some(_) => 1,
        }
    }
}

/// How the number of rows becomes known; the numbers are those of [`Operation::Dispatch`]'s algorithms.
#[derive(Debug, Clone, Copy)]
enum Form {
    Blocking = 1,
    Capacity = 4,
    Cached = 7,
}

/// The ranks that this rank's tokens go to, for [`Moe::notify`].
#[derive(Debug, Clone)]
pub struct Routing<'a> {
    /// How many experts there are; equal on all ranks.
    pub num_experts: usize,
    /// How many experts each token chooses; 0 if rows go without the choices. Equal on all ranks.
    pub top_k: usize,
    /// Nonzero where a token goes to a rank: u8 or bool `[T, R]`.
    pub is_token_in_rank: TensorView<'a>,
    /// How often the tokens chose each expert: i32 `[E]`.
    pub tokens_per_expert: TensorView<'a>,
    /// What the rows of the first dispatch will be.
    pub format: RowFormat,
    /// The number of rows that this rank has room for. Either all ranks give a capacity, which may differ, or none does. Rows beyond
    /// the capacity, in the order of arrival, are dropped.
    pub capacity: Option<usize>,
}

impl<'a> Routing<'a> {
    /// The routing that a layout says, without a capacity.
    pub fn of(layout: &'a Layout, format: RowFormat) -> Self {
        let matrix =
            [layout.is_token_in_rank.len() / layout.tokens_per_rank.len(), layout.tokens_per_rank.len()];
        let is_token_in_rank =
            TensorView::new(&layout.is_token_in_rank, &matrix).expect("a layout has a row for each token");
        Self {
            num_experts: layout.num_experts,
            top_k: layout.top_k,
            is_token_in_rank,
            tokens_per_expert: (&layout.tokens_per_expert).into(),
            format,
            capacity: None,
        }
    }
}

/// Rows with their scales and choices: the `T` tokens that a rank sends ([`TensorView`]), or the `N` rows that it receives
/// ([`TensorViewMut`]).
#[derive(Debug, Clone)]
pub struct Tokens<V> {
    /// The rows: `[T, H]` or `[N, H]`.
    pub x: V,
    /// Their scales, as [`RowFormat::scales`] says: `[T, S]` or `[N, S]`.
    pub scales: Option<V>,
    /// The experts that tokens chose.
    pub choices: Option<Choices<V>>,
}

impl<V> Tokens<V> {
    /// Rows alone.
    pub fn of(x: V) -> Self {
        Self { x, scales: None, choices: None }
    }
}

/// Choices of experts.
#[derive(Debug, Clone)]
pub struct Choices<V> {
    /// The experts, i64 or i32: of all (`0..E`, anything else chooses nothing) `[T, K]`, or of the receiving rank
    /// (`0..L`, −1 where the choice is not one of these) `[N, K]`.
    pub ids: V,
    /// Their weights, f32: `[T, K]`, or `[N, K]` with 0 where the choice is not one of the receiving rank's.
    pub weights: V,
}

/// The tokens that go and the rows that come, for [`Moe::dispatch`]. `received` has the same parts as `tokens`; its `N` is
/// [`ByTokenRoutes::rows`]. With a capacity, rows that did not arrive keep what they hold, and their ids become −1.
#[derive(Debug)]
pub struct Dispatch<'a> {
    /// This rank's tokens.
    pub tokens: Tokens<TensorView<'a>>,
    /// Its received rows.
    pub received: Tokens<TensorViewMut<'a>>,
}

/// The rows that go back, and the sums, for [`Moe::combine`].
#[derive(Debug)]
pub struct Combine<'a> {
    /// What this rank made of the rows that it received: f32, f16, bf16 or f64, `[N, H]`.
    pub rows: TensorView<'a>,
    /// Weights that are summed along, unmasked: f32 `[N, K]`, for any `K` up to 32, equal on all ranks.
    pub weights: Option<TensorView<'a>>,
    /// What sums begin with, in this order, beside which the rows are added: of the dtype of the rows, `[T, H]`.
    pub biases: [Option<TensorView<'a>>; 2],
    /// The sums: of the dtype of the rows, `[T, H]`.
    pub output: TensorViewMut<'a>,
    /// The sums of the weights: f32 `[T, K]`.
    pub output_weights: Option<TensorViewMut<'a>>,
}

impl<'a> Combine<'a> {
    /// A combine of rows alone.
    pub fn of(rows: TensorView<'a>, output: TensorViewMut<'a>) -> Self {
        Self { rows, weights: None, biases: [None, None], output, output_weights: None }
    }
}

/// Refuses a routing that makes no sense, and gives the number of its tokens.
pub(crate) fn check_routing(routing: &Routing<'_>, world_size: usize) -> Result<usize> {
    let name = |which| Name { call: "dispatch", which };
    let Routing { num_experts, top_k, format, .. } = *routing;
    check_limits("dispatch", num_experts, top_k, world_size)?;
    format.check(name("x"), &MOVED)?;
    let (mask, counts) = (name("is_token_in_rank"), name("tokens_per_expert"));
    let (tokens, _) = mask.matrix(&routing.is_token_in_rank, "[T, R]")?;
    mask.has_shape(&routing.is_token_in_rank, &[tokens, world_size], "[T, R]")?;
    mask.has_dtype(routing.is_token_in_rank.dtype(), &[DType::U8, DType::Bool])?;
    counts.has_shape(&routing.tokens_per_expert, &[num_experts], "[E]")?;
    counts.has_dtype(routing.tokens_per_expert.dtype(), &[DType::I32])?;
    let most = i32::MAX as usize / world_size;
    match tokens <= most {
        true => Ok(tokens),
        false => Err(refused("dispatch", format!("{tokens} tokens; at most {most} are served"))),
    }
}

/// The signature of [`Moe::notify`].
pub(crate) fn signature_of_routing(routing: &Routing<'_>) -> Signature {
    let form = if routing.capacity.is_some() { Form::Capacity } else { Form::Blocking };
    let Routing { num_experts, top_k, format, .. } = routing;
    signature(Operation::Dispatch, format, form as u8 + format.code(), *num_experts, *top_k, 0)
}

/// Refuses a dispatch of `num_tokens` tokens to `rows` rows that makes no sense, and gives the format of its rows.
fn check_dispatch(call: &Dispatch<'_>, num_tokens: usize, rows: usize, top_k: usize) -> Result<RowFormat> {
    let name = |which| Name { call: "dispatch", which };
    let Dispatch { tokens, received } = call;
    let format = RowFormat::of(&tokens.x, tokens.scales.as_ref(), name("x"))?;
    format.check(name("x"), &MOVED)?;
    let check = |name: Name, view: &TensorView<'_>, dtype: DType, sizes: [usize; 2], rule: &str| {
        name.has_dtype(view.dtype(), &[dtype])?;
        name.has_shape(view, &sizes, rule)
    };
    check(name("x"), &tokens.x, format.dtype, [num_tokens, format.hidden], "[T, H]")?;
    check(name("received x"), &received.x.as_view(), format.dtype, [rows, format.hidden], "[N, H]")?;
    if (tokens.scales.is_some(), tokens.choices.is_some())
        != (received.scales.is_some(), received.choices.is_some())
    {
        return Err(refused("dispatch", "what goes and what comes must have the same parts".into()));
    }
    if let (Some(from), Some(to)) = (&tokens.scales, &received.scales) {
        let width = format.num_scales();
        check(name("scales"), from, from.dtype(), [num_tokens, width], "[T, S]")?;
        check(name("received scales"), &to.as_view(), from.dtype(), [rows, width], "[N, S]")?;
    }
    if let (Some(from), Some(to)) = (&tokens.choices, &received.choices) {
        name("ids").has_dtype(from.ids.dtype(), &ID_TYPES)?;
        name("received ids").has_dtype(to.ids.dtype(), &ID_TYPES)?;
        name("ids").has_shape(&from.ids, &[num_tokens, top_k], "[T, K]")?;
        name("received ids").has_shape(&to.ids.as_view(), &[rows, top_k], "[N, K]")?;
        check(name("weights"), &from.weights, DType::F32, [num_tokens, top_k], "[T, K]")?;
        check(name("received weights"), &to.weights.as_view(), DType::F32, [rows, top_k], "[N, K]")?;
    }
    Ok(format)
}

/// Refuses a combine of `rows` rows to `num_tokens` tokens that makes no sense, and gives the format of its rows and how many weights each has.
fn check_combine(
    call: &Combine<'_>,
    num_tokens: usize,
    rows: usize,
    dtypes: &[DType],
) -> Result<(RowFormat, usize)> {
    let name = |which| Name { call: "combine", which };
    let format = RowFormat::of(&call.rows, None, name("rows"))?;
    format.check(name("rows"), dtypes)?;
    name("rows").has_shape(&call.rows, &[rows, format.hidden], "[N, H]")?;
    let as_token = |which, view: &TensorView<'_>| {
        name(which).has_dtype(view.dtype(), &[format.dtype])?;
        name(which).has_shape(view, &[num_tokens, format.hidden], "[T, H]")
    };
    as_token("output", &call.output.as_view())?;
    for bias in call.biases.iter().flatten() {
        as_token("bias", bias)?;
    }
    let top_k = match (&call.weights, &call.output_weights) {
        (None, None) => 0,
        (Some(weights), Some(output)) => {
            let (_, top_k) = name("weights").matrix(weights, "[N, K]")?;
            check_limits("combine", 1, top_k, 1)?;
            name("weights").has_dtype(weights.dtype(), &[DType::F32])?;
            name("weights").has_shape(weights, &[rows, top_k], "[N, K]")?;
            name("output weights").has_dtype(output.dtype(), &[DType::F32])?;
            name("output weights").has_shape(&output.as_view(), &[num_tokens, top_k], "[T, K]")?;
            top_k
        }
        _ => return Err(refused("combine", "weights must go in and come out, or neither".into())),
    };
    Ok((format, top_k))
}

pub(crate) fn notify(moe: &mut Moe, comm: &Communicator, routing: &Routing<'_>) -> Result<ByTokenRoutes> {
    let name = |which| Name { call: "dispatch", which };
    let announcement = Announcement {
        call: "dispatch",
        tokens: check_routing(routing, comm.world_size())?,
        signature: signature_of_routing(routing),
        in_rank: name("is_token_in_rank").bytes(&routing.is_token_in_rank)?,
        per_expert: name("tokens_per_expert").bytes(&routing.tokens_per_expert)?,
        num_experts: routing.num_experts,
        capacity: routing.capacity,
    };
    let Counts { traffic, tokens, chosen } = announcement.exchange(moe, comm)?;
    let local = routing.num_experts / comm.world_size();
    let of_expert = |expert: usize| chosen.iter().skip(expert).step_by(local).sum();
    Ok(ByTokenRoutes {
        owner: moe.token.clone(),
        number: next_routes(comm),
        num_experts: routing.num_experts,
        top_k: routing.top_k,
        traffic,
        tokens,
        tokens_per_expert: (0..local).map(of_expert).collect(),
        sources: OnceLock::new(),
    })
}

pub(crate) fn dispatch(
    moe: &mut Moe,
    comm: &Communicator,
    routes: &ByTokenRoutes,
    call: Dispatch<'_>,
) -> Result<()> {
    let name = |which| Name { call: "dispatch", which };
    let format = check_dispatch(&call, routes.num_tokens(), routes.rows(), routes.top_k)?;
    let Dispatch { tokens, received: Tokens { mut x, mut scales, mut choices } } = call;
    let form = match routes.sources.get() {
        Some(_) => Form::Cached,
        None if routes.traffic.capacity[routes.traffic.rank].is_some() => Form::Capacity,
        None => Form::Blocking,
    };
    let top_k = if tokens.choices.is_some() { routes.top_k } else { 0 };
    let algorithm = form as u8 + format.code();
    let call = host::Rows {
        signature: signature(
            Operation::Dispatch,
            &format,
            algorithm,
            routes.num_experts,
            top_k,
            routes.number,
        ),
        top_k,
        from: host::Part {
            row: name("x").bytes(&tokens.x)?,
            scales: tokens.scales.as_ref().map_or(Ok(&[][..]), |scales| name("scales").bytes(scales))?,
            weights: tokens
                .choices
                .as_ref()
                .map_or(Ok(&[][..]), |each| name("weights").bytes(&each.weights))?,
        },
        ids: tokens
            .choices
            .as_ref()
            .map(|each| Ids::new(name("ids"), &each.ids, routes.num_experts))
            .transpose()?,
        row_bytes: format.row_bytes(),
        scale_bytes: format.num_scales() * 4,
    };
    let id_bytes = choices.as_ref().map_or(0, |each| each.ids.dtype().size());
    let to = host::Received {
        row: name("received x").bytes_mut(&mut x)?,
        scales: match &mut scales {
            Some(scales) => name("received scales").bytes_mut(scales)?,
            None => &mut [],
        },
        choices: match &mut choices {
            Some(each) => Some((
                name("received ids").bytes_mut(&mut each.ids)?,
                name("received weights").bytes_mut(&mut each.weights)?,
            )),
            None => None,
        },
        id_bytes,
    };
    call.run(moe, comm, routes, to)
}

pub(crate) fn combine(
    moe: &mut Moe,
    comm: &Communicator,
    routes: &ByTokenRoutes,
    call: Combine<'_>,
) -> Result<()> {
    let name = |which| Name { call: "combine", which };
    let Some(sources) = routes.sources.get() else {
        return Err(MoeError::Routes {
            call: "combine",
            problem: "ones along which nothing was dispatched yet",
        });
    };
    let (format, top_k) = check_combine(&call, routes.num_tokens(), routes.rows(), &SUMMED)?;
    let Combine { rows, weights, biases: [first, second], mut output, mut output_weights } = call;
    let call = host::Sums {
        signature: signature(Operation::Combine, &format, 0, routes.num_experts, top_k, routes.number),
        dtype: format.dtype,
        hidden: format.hidden,
        top_k,
        rows: name("rows").bytes(&rows)?,
        weights: weights.as_ref().map_or(Ok(&[][..]), |weights| name("weights").bytes(weights))?,
        biases: [
            first.as_ref().map(|bias| name("bias").bytes(bias)).transpose()?,
            second.as_ref().map(|bias| name("bias").bytes(bias)).transpose()?,
        ],
    };
    let output_weights = match &mut output_weights {
        Some(weights) => name("output weights").bytes_mut(weights)?,
        None => &mut [],
    };
    call.run(moe, comm, routes, sources, name("output").bytes_mut(&mut output)?, output_weights)
}

fn signature(
    operation: Operation,
    format: &RowFormat,
    algorithm: u8,
    num_experts: usize,
    top_k: usize,
    routes: u32,
) -> Signature {
    Signature {
        dtype: Some(format.dtype),
        algorithm,
        detail: Detail::experts(num_experts as u32, top_k as u8),
        count: Count::rows(format.hidden as u32, routes),
        ..Signature::new(operation)
    }
}
