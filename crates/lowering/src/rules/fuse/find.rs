//! What follows a sum: the residual, the norm with its weight, the codes.

use super::{
    super::{Flight, behind_reshapes, context::Context, keeps_rows},
    known::Known,
    matcher::{Node, Term, Terms},
};
use crate::{
    analysis::Analysis,
    graph::Graph,
    hash::HashSet,
    ids::ValueId,
    op::{Binary, Kind, Quantize, Unary},
    types::{Element, Type},
    verify::F32,
};

/// What is added to a sum.
pub(super) struct Residual {
    /// `T [.., hidden]`.
    pub(super) value: ValueId,
    /// The addition's result.
    pub(super) sum: ValueId,
}

/// What a norm is multiplied with.
#[derive(Default)]
pub(super) struct Weight {
    pub(super) value: Option<ValueId>,
    pub(super) bias: f64,
}

/// The norm that was found.
pub(super) struct Norm {
    /// What it means.
    pub(super) term: Term,
    /// All values that are it; none where only its codes are rounded.
    pub(super) values: Vec<ValueId>,
    pub(super) inverse: Term,
    pub(super) eps: f64,
    pub(super) weight: Weight,
    pub(super) round_before_weight: bool,
}

/// Tensors that are added to the sum: of its type and size, through casts to f32 and reshapes that keep rows.
pub(super) fn residuals(
    graph: &Graph,
    known: &Known,
    flight: &Flight,
    refused: &mut Option<String>,
) -> Vec<Residual> {
    let ty = graph.ty(flight.ready);
    let sum = known.term(flight.ready);
    let mut residuals: Vec<Residual> = Vec::new();
    let (mut seen, mut open) = (HashSet::default(), vec![flight.ready]);
    while let Some(value) = open.pop() {
        for user in known.analysis.uses(value) {
            let op = graph.op(*user);
            let result = op.outs.first().copied();
            let Some(result) = result.filter(|_| op.outs.len() == 1) else { continue };
            if known.term(result) == sum && seen.insert(result) {
                open.push(result);
                continue;
            }
            let (Kind::Binary { op: Binary::Add, scalar: None, .. }, [x, y]) = (&op.kind, &op.args[..])
            else {
                continue;
            };
            let other = if *x == value { *y } else { *x };
            let plain = narrowed(graph, &known.analysis, other, ty.dtype);
            let fits = graph.ty(plain).dtype == ty.dtype && keeps_rows(graph.ty(plain), ty);
            if !fits || !keeps_rows(graph.ty(result), ty) {
                *refused = Some(format!("{} is added, not a tensor like {ty}", graph.ty(other)));
            } else if other != value {
                residuals.push(Residual { value: plain, sum: result });
            }
        }
    }
    residuals.sort_by_key(|residual| known.analysis.def[residual.sum.index()]);
    residuals
}

/// The value of elements `dtype` behind casts from it to f32, and reshapes.
pub(super) fn narrowed(graph: &Graph, analysis: &Analysis, value: ValueId, dtype: Element) -> ValueId {
    let mut plain = behind_reshapes(graph, analysis, value);
    while let Some(op) = analysis.op_of(graph, plain) {
        if op.kind != Kind::Cast
            || graph.ty(op.args[0]).dtype != dtype
            || ![F32, dtype].contains(&graph.ty(plain).dtype)
        {
            break;
        }
        plain = behind_reshapes(graph, analysis, op.args[0]);
    }
    plain
}

/// Whether a value can be there when the call is made: it must need neither the sum nor a call that comes later.
pub(super) fn comes_before(
    graph: &Graph,
    analysis: &Analysis,
    value: ValueId,
    flight: &Flight,
) -> Result<(), String> {
    let (mut seen, mut open) = (HashSet::default(), vec![value]);
    while let Some(value) = open.pop() {
        let Some((id, _)) = analysis.def[value.index()] else { continue };
        if id < flight.start || !seen.insert(id) {
            continue;
        }
        let op = graph.op(id);
        if op.kind.communicates() || id == flight.wait {
            return Err(format!("the residual depends on {}, which comes later", op.name));
        }
        open.extend(&op.args);
    }
    Ok(())
}

/// The norm of `x`, if there is one that a call has.
pub(super) fn norm(cx: &Context<'_>, known: &mut Known, x: Term, ty: &Type) -> Result<Option<Norm>, String> {
    let found = norm_of(cx, known, x, ty, ty.dtype)?;
    if found.is_some() || ty.dtype == F32 {
        return Ok(found);
    }
    // Compilers leave out that a norm is rounded before its codes are.
    let wide = norm_of(cx, known, x, ty, F32)?.map(|norm| Norm { values: Vec::new(), ..norm });
    Ok(wide.filter(|norm| codes(&cx.graph, known, norm, ty).is_some()))
}

/// The same among values of these elements.
fn norm_of(
    cx: &Context<'_>,
    known: &Known,
    x: Term,
    ty: &Type,
    dtype: Element,
) -> Result<Option<Norm>, String> {
    let graph = &cx.graph;
    let (mut refused, mut bare) = (None, None);
    let Some(candidates) = known.norms.get(&x) else { return Ok(None) };
    for (value, inverse) in candidates {
        let out = graph.ty(*value);
        if out.dtype != dtype || !keeps_rows(out, ty) || known.follows(graph, *value) {
            continue;
        }
        let term = known.term(*value).ok_or("nobody computes it")?;
        let mut rest = known.close.factors(term);
        for factor in [x, *inverse] {
            rest.swap_remove(rest.iter().position(|other| *other == factor).ok_or("it is no product")?);
        }
        let weight = match rest[..] {
            [] => Weight::default(),
            [factor] => match weight(graph, known, factor, ty) {
                Ok(weight) => weight,
                Err(reason) => {
                    refused = Some(reason);
                    continue;
                }
            },
            _ => {
                refused = Some(format!("the norm is multiplied with {} more factors", rest.len()));
                continue;
            }
        };
        let multiplies = known.analysis.op_of(graph, behind_reshapes(graph, &known.analysis, *value));
        let is_product = multiplies.is_some_and(|op| matches!(op.kind, Kind::Binary { op: Binary::Mul, .. }));
        let round_before_weight = is_product && weight.value.is_some() && ty.dtype != F32;
        let values =
            known.values(graph, term, ty.dtype).filter(|value| keeps_rows(graph.ty(*value), ty)).collect();
        let eps = known.inverses[inverse].eps;
        let norm = Norm { term, values, inverse: *inverse, eps, weight, round_before_weight };
        // A product with the weight may be made of one without.
        match norm.weight.value {
            Some(_) => return Ok(Some(norm)),
            None => bare = bare.or(Some(norm)),
        }
    }
    match (bare, refused) {
        (None, Some(reason)) => Err(reason),
        (bare, _) => Ok(bare),
    }
}

/// A weight of the norm's dtype, or a number and one.
pub(super) fn weight(graph: &Graph, known: &Known, factor: Term, ty: &Type) -> Result<Weight, String> {
    let mut bias = 0.0;
    let mut plain = factor;
    if let [a, b] = known.close.summands(factor)[..]
        && let Some((number, other)) =
            [(a, b), (b, a)].into_iter().find_map(|(x, y)| Some((known.close.as_number(x)?, y)))
    {
        (bias, plain) = (number, other);
    }
    let is_row =
        |value: &ValueId| graph.ty(*value).numel() == Some(ty.last()) && graph.ty(*value).is_contiguous();
    match known.values(graph, plain, ty.dtype).find(is_row) {
        Some(value) => Ok(Weight { value: Some(value), bias }),
        None => {
            let found = known.all_values(plain).first();
            let found = found.map_or("something".to_owned(), |value| graph.ty(*value).to_string());
            Err(format!("the norm is multiplied with {found}, not with a row of {}", ty.dtype))
        }
    }
}

pub(super) enum Scale {
    Number(f64),
    Value(ValueId),
}

/// Codes of the norm.
pub(super) struct Codes {
    pub(super) values: Vec<ValueId>,
    pub(super) how: Quantize,
    /// The one that is given.
    pub(super) scale: Option<Scale>,
    /// Those that follow from the norm.
    pub(super) scales: Vec<ValueId>,
}

/// FP8 codes of the norm: with one scale, or one for each row, or group of neighbours in a row.
pub(super) fn codes(graph: &Graph, known: &mut Known, norm: &Norm, ty: &Type) -> Option<Codes> {
    let term = norm.term;
    let candidates: Vec<ValueId> =
        known.codes.iter().copied().filter(|value| keeps_rows(graph.ty(*value), ty)).collect();
    if candidates.is_empty() {
        return None;
    }
    let values_of = |known: &Known, of: Term| -> Vec<ValueId> {
        known.values(graph, of, Element::E4m3).filter(|value| keeps_rows(graph.ty(*value), ty)).collect()
    };
    let given = candidates.into_iter().find_map(|value| {
        let of = known.term(value)?;
        Some(Codes {
            values: values_of(known, of),
            how: Quantize::Fp8,
            scale: Some(given_scale(graph, known, term, of)?),
            scales: Vec::new(),
        })
    });
    if given.is_some() {
        return given;
    }
    let hidden = ty.last().as_constant().and_then(|hidden| u32::try_from(hidden).ok())?;
    let groups = (3..31).map(|power| 1 << power).filter(|group| hidden.is_multiple_of(*group));
    let forms = std::iter::once(Quantize::Fp8Tokens).chain(groups.map(Quantize::Fp8Groups));
    for how in forms {
        let [codes, scales] = known.close.quantized(how, term, term, ty);
        let values = values_of(known, codes);
        if values.is_empty() {
            continue;
        }
        let count = how.scales_of(i64::from(hidden))?;
        let is_there =
            |value: &ValueId| graph.ty(*value).rows() == ty.rows() && graph.ty(*value).last() == count.into();
        let scales = known.values(graph, scales, F32).filter(is_there).collect();
        return Some(Codes { values, how, scale: None, scales });
    }
    None
}

/// What a norm is divided by to give these codes, if they are its codes.
fn given_scale(graph: &Graph, known: &Known, norm: Term, codes: Term) -> Option<Scale> {
    let mut rest = known.close.factors(clamped(&known.close, codes)?);
    for factor in known.close.factors(norm) {
        rest.swap_remove(rest.iter().position(|other| *other == factor)?);
    }
    let [factor] = rest[..] else { return rest.is_empty().then_some(Scale::Number(1.0)) };
    if let Some(number) = known.close.as_number(factor) {
        let scale = f64::from(1.0 / number as f32);
        return (f64::from(1.0 / scale as f32) == number).then_some(Scale::Number(scale));
    }
    let Node::Unary(Unary::Reciprocal, scale) = known.close.node(factor) else { return None };
    let one = |value: &ValueId| graph.ty(*value).numel() == Some(1.into());
    known.values(graph, scale, F32).find(one).map(Scale::Value)
}

/// What is clamped to ±448 and rounded to E4M3.
pub(super) fn clamped(terms: &Terms, term: Term) -> Option<Term> {
    let Node::Round(Element::E4m3, clamped) = terms.node(term) else { return None };
    let bounded = |term: Term, op: Binary, bound: f64| match terms.node(term) {
        Node::Binary(found, x, y) if found == op => {
            [(x, y), (y, x)].into_iter().find_map(|(x, y)| (terms.as_number(x) == Some(bound)).then_some(y))
        }
        _ => None,
    };
    bounded(bounded(clamped, Binary::Minimum, 448.0)?, Binary::Maximum, -448.0)
}
