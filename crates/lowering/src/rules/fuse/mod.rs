//! A sum, the residual that is added to it, the norm of that and its quantisation become one call.
//!
//! Applies to an out-of-place sum over a group of one tensor of f32, f16 or bf16, whose rows are a multiple of 16 bytes.
//! What follows is found by what it means, not by how it is spelled: with `x` for the sum, or for the sum and a tensor of its
//! size and type,
//!
//! ```text
//! x · 1/√(mean(x²) + eps) · (weight_bias + weight)        weight: none, or one of x's type for each element of a row
//! ```
//!
//! with factors and summands in any order, casts and reshapes that keep rows anywhere; then codes
//! `E4M3(clamp(norm / scale))`. Every value on the way that others use becomes a result of the call: the sum, the sum with the
//! residual, the norm, one over the root mean square.
//!
//! [`Costs::choose`](crate::Costs::choose) must predict that the fused call ends before a call and the operations behind it, which
//! are taken for one kernel. Under [`Numerics::Same`] each of these must have its roundings where the kernels have theirs.

mod find;
mod known;
mod matcher;
mod price;

use super::{Flight, context::Context, flight, keeps_rows, replace};
use crate::{
    graph::{Graph, Op},
    hash::{HashMap, HashSet},
    ids::{OpId, ValueId},
    lowered::Rewrite,
    numerics::Numerics,
    op::{Fused, FusedArg, FusedOutput, Kind, Quantize},
    types::{Element, Type},
    verify::{F32, is_fusible},
};
use find::{Codes, Norm, Residual, Scale, comes_before, residuals};
use known::Known;
use matcher::Term;
use price::Prices;

pub(in crate::rules) fn apply(cx: &mut Context<'_>) {
    if !cx.options.fuse {
        return;
    }
    let sums = cx.graph.ops.iter().any(|op| op.kind.coll().is_some_and(|coll| coll.is_sum()));
    if !sums {
        return;
    }
    let mut known = Known::of(cx);
    let prices = Prices::of(cx.costs, &cx.graph);
    let (mut flights, mut new, mut by) = (Vec::new(), Vec::new(), HashMap::default());
    for index in 0..cx.graph.ops.len() {
        let op = cx.graph.op(OpId::from(index));
        let Kind::Start { coll, .. } = &op.kind else { continue };
        if !coll.is_sum() || !cx.is_ours(&coll.group) {
            continue;
        }
        let (name, group) = (op.name.clone(), coll.group.clone());
        match attempt(cx, &mut known, &prices, OpId::from(index), &group) {
            Ok(Found { flight, ops, replaces, mut rewrite, mut told }) => {
                let covered = cx.covered(&name);
                rewrite.ops.splice(..0, covered.iter().cloned());
                cx.covers.insert(ops[0].name.clone(), covered);
                told.rewrite = cx.rewrites.len();
                cx.told.push(told);
                cx.rewrites.push(rewrite);
                by.extend(replaces);
                new.extend(ops.into_iter().map(|op| (flight.start, op)));
                flights.push(flight);
            }
            Err(reason) => cx.refuse("fuse", &name, reason),
        }
    }
    replace(&mut cx.graph, &flights, new);
    cx.graph.substitute(&by);
}

struct Found {
    flight: Flight,
    /// The call, then views of its results.
    ops: Vec<Op>,
    replaces: Vec<(ValueId, ValueId)>,
    rewrite: Rewrite,
    told: FusedNote,
}

/// What a rewrite says of a call, once it is known which results are used.
#[derive(Debug, Clone)]
pub(crate) struct FusedNote {
    /// The call.
    call: String,
    /// Which of the rewrites it is.
    pub(in crate::rules) rewrite: usize,
    /// Results that are rounded otherwise.
    moved: Vec<FusedOutput>,
    /// Roundings of such a result, at most.
    roundings: usize,
    /// The elements that they round to.
    dtype: Element,
}

fn attempt(
    cx: &mut Context<'_>,
    known: &mut Known,
    prices: &Prices<'_>,
    start: OpId,
    group: &str,
) -> Result<Found, String> {
    let Some((flight, _)) = flight(&cx.graph, &known.analysis, start) else {
        return Err("it has several tensors, or is used in flight".into());
    };
    let input = cx.graph.op(start).args[0];
    let ty = cx.graph.ty(input).dense();
    let dtype = ty.dtype.number().filter(|dtype| is_fusible(*dtype));
    let dtype = dtype.ok_or_else(|| format!("it is of {}, not of f32, f16 or bf16", ty.dtype))?;
    let hidden = ty.last().as_constant().unwrap_or(0);
    if ty.shape.is_empty() || hidden <= 0 || i128::from(hidden) * dtype.size() as i128 % 16 != 0 {
        let bytes = ty.last();
        return Err(format!("a row has {bytes} elements of {dtype}, not a known multiple of 16 bytes"));
    }
    if !cx.graph.ty(input).is_contiguous() {
        return Err("its tensor is not contiguous".into());
    }
    let sum = known.term(flight.ready).ok_or("nobody computes it")?;
    let mut refused = None;
    let mut choices: Vec<Option<Residual>> =
        residuals(&cx.graph, known, &flight, &mut refused).into_iter().map(Some).collect();
    choices.push(None);
    let mut found = None;
    for residual in choices {
        let x = match &residual {
            Some(residual) => known.term(residual.sum).ok_or("nobody computes it")?,
            None => sum,
        };
        if let Some(residual) = &residual
            && let Err(reason) = comes_before(&cx.graph, &known.analysis, residual.value, &flight)
        {
            refused = Some(reason);
            continue;
        }
        match find::norm(cx, known, x, &ty) {
            Ok(Some(norm)) => {
                found = Some((residual, x, Some(norm)));
                break;
            }
            Ok(None) => {}
            Err(reason) => refused = Some(reason),
        }
        // A residual alone is worth a call, where the bare sum is used for nothing else.
        let is_added = residual.as_ref().is_some_and(|residual| cx.graph.ty(residual.sum).dtype == ty.dtype);
        if is_added && found.is_none() && known.analysis.uses(flight.ready).len() == 1 {
            found = Some((residual, x, None));
        }
    }
    let (residual, x, norm) =
        found.ok_or_else(|| refused.unwrap_or_else(|| "no residual and no norm follows it".into()))?;
    build(cx, known, prices, Parts { flight, group, ty, input, residual, x, norm })
}

struct Parts<'p> {
    flight: Flight,
    group: &'p str,
    ty: Type,
    input: ValueId,
    residual: Option<Residual>,
    x: Term,
    norm: Option<Norm>,
}

fn build(
    cx: &mut Context<'_>,
    known: &mut Known,
    prices: &Prices<'_>,
    parts: Parts<'_>,
) -> Result<Found, String> {
    let Parts { flight, group, ty, input, residual, x, norm } = parts;
    let ready = flight.ready;
    let like = |graph: &Graph, value: ValueId| keeps_rows(graph.ty(value), &ty);
    // Values that become results, by what they are.
    let mut results: Vec<(FusedOutput, Vec<ValueId>)> = vec![(FusedOutput::Sum, vec![ready])];
    if residual.is_some() {
        let values = known.values(&cx.graph, x, ty.dtype).filter(|value| like(&cx.graph, *value)).collect();
        results.push((FusedOutput::Residual, values));
    }
    let (mut args, mut scale, mut quantize) = (Vec::new(), None, Quantize::default());
    let mut operands = vec![input];
    if let Some(residual) = &residual {
        args.push(FusedArg::Residual);
        operands.push(residual.value);
    }
    if let Some(norm) = &norm {
        if let Some(weight) = norm.weight.value {
            comes_before(&cx.graph, &known.analysis, weight, &flight)?;
            args.push(FusedArg::Weight);
            operands.push(weight);
        }
        results.push((FusedOutput::Norm, norm.values.clone()));
        let is_column = |value: &ValueId| {
            cx.graph.ty(*value).rows() == ty.rows() && cx.graph.ty(*value).last() == 1.into()
        };
        let values = known.values(&cx.graph, norm.inverse, F32).filter(is_column).collect();
        results.push((FusedOutput::InverseRms, values));
        let codes = find::codes(&cx.graph, known, norm, &ty);
        if let Some(Codes { values, how, scale: by, scales }) = &codes {
            quantize = *how;
            results.push((FusedOutput::Codes, values.clone()));
            results.push((FusedOutput::Scales, scales.clone()));
            match by {
                None => {}
                Some(Scale::Number(number)) => scale = Some(*number),
                Some(Scale::Value(value)) => {
                    comes_before(&cx.graph, &known.analysis, *value, &flight)?;
                    args.push(FusedArg::Scale);
                    operands.push(*value);
                }
            }
        }
    }
    let mut fused = Fused {
        group: group.to_owned(),
        args,
        outputs: Vec::new(),
        eps: norm.as_ref().map(|norm| norm.eps),
        weight_bias: norm.as_ref().map_or(0.0, |norm| norm.weight.bias),
        round_before_weight: norm.as_ref().is_some_and(|norm| norm.round_before_weight),
        quantize,
        scale,
    };
    if let Some(norm) = norm.as_ref().filter(|norm| norm.weight.value.is_some()) {
        let output = FusedOutput::Norm;
        let exact = |known: &mut Known, fused: &Fused| {
            norm.values.iter().all(|value| is_exact(cx, known, fused, &operands, output, *value, &ty))
        };
        let other = Fused { round_before_weight: !fused.round_before_weight, ..fused.clone() };
        if !exact(known, &fused) && exact(known, &other) {
            fused = other;
        }
    }
    // What another collective gives stays that collective's, though it may have an equal value.
    let is_computed = |value: &ValueId| {
        let op = known.analysis.op_of(&cx.graph, *value);
        op.is_some_and(|op| !op.kind.communicates() && !matches!(op.kind, Kind::Wait { .. }))
    };
    results.iter_mut().skip(1).for_each(|(_, values)| values.retain(is_computed));
    // Results must be there for all that use them; a value that the call cannot give stays as it is computed.
    let mut moved = Vec::new();
    results.retain(|(output, values)| {
        let exact = values.iter().all(|value| is_exact(cx, known, &fused, &operands, *output, *value, &ty));
        if !exact {
            moved.push(*output);
        }
        !values.is_empty() && (exact || cx.options.numerics == Numerics::Close)
    });
    let gives = |output: FusedOutput| results.iter().any(|(other, _)| *other == output);
    if results.len() < 2 || (norm.is_some() && !gives(FusedOutput::Norm) && !gives(FusedOutput::Codes)) {
        return Err(format!("{} would be rounded otherwise", words(&moved)));
    }
    let replaced: Vec<ValueId> = results.iter().flat_map(|(_, values)| values.iter().copied()).collect();
    prices.check(&cx.graph, &known.analysis, (&flight, group), &operands, &replaced)?;
    let (mut outs, mut replaces) = (Vec::new(), Vec::new());
    let name = cx.names.fresh("fused_all_reduce");
    let mut views = Vec::new();
    for (output, values) in &results {
        let (dtype, last) = fused.row(*output, &ty).ok_or_else(|| format!("it has no {}", output.name()))?;
        let mut shape = ty.shape.clone();
        *shape.last_mut().expect("it has rows") = last;
        let ty = Type::new(dtype, shape);
        let value = cx.graph.add_value(&mut cx.names, &format!("{name}_{}", output.name()), ty.clone());
        outs.push(value);
        fused.outputs.push(*output);
        // Memory that the program returns or writes stays apart: of several values of a result, one may be the result.
        let mut is_taken = false;
        for old in values {
            let store = known.analysis.store[old.index()].map(|store| &known.analysis.stores[store.index()]);
            let is_own = store.is_none_or(|store| store.escapes || store.written);
            let must_copy = is_own && std::mem::replace(&mut is_taken, true);
            let wanted = cx.graph.ty(*old).clone();
            if wanted == ty && !must_copy {
                replaces.push((*old, value));
            } else {
                let kind = if must_copy { Kind::Copy } else { Kind::View { view: crate::View::Reshape } };
                views.push((*old, value, wanted, kind));
            }
        }
    }
    let early = norm.as_ref().is_some_and(|norm| norm.round_before_weight);
    let roundings = if early != fused.round_before_weight { 2 } else { 1 };
    let told = FusedNote { call: name.clone(), rewrite: 0, moved, roundings, dtype: ty.dtype };
    let mut ops = vec![Op { name, kind: Kind::Fused { fused }, args: operands, outs }];
    for (old, value, wanted, kind) in views {
        if !wanted.is_contiguous() || wanted.offset != 0.into() {
            return Err(format!("{} has strides", cx.graph.name(old)));
        }
        let view = cx.graph.add_value(&mut cx.names, "fused_view", wanted);
        ops.push(Op { name: cx.graph.name(view).to_owned(), kind, args: vec![value], outs: vec![view] });
        replaces.push((old, view));
    }
    let made =
        residual.iter().map(|residual| residual.sum).chain(norm.iter().flat_map(|norm| norm.values.clone()));
    let made =
        made.filter_map(|value| known.analysis.op_of(&cx.graph, value)).map(|op| op.name.clone()).collect();
    let rewrite = Rewrite { rule: "fuse".into(), ops: made, text: String::new(), bound: None };
    Ok(Found { flight, ops, replaces, rewrite, told })
}

/// Whether a result of the call has every rounding where the value has it.
fn is_exact(
    cx: &Context<'_>,
    known: &mut Known,
    fused: &Fused,
    operands: &[ValueId],
    output: FusedOutput,
    value: ValueId,
    ty: &Type,
) -> bool {
    let args: Option<Vec<Term>> = operands.iter().map(|arg| known.same_of[arg.index()]).collect();
    let Some(args) = args else { return false };
    Some(known.same.fused(&cx.graph, fused, &args, ty, output)) == known.same_of[value.index()]
}

impl FusedNote {
    /// What was done, and how far results may be off, in words.
    fn words(&self, outputs: &[FusedOutput]) -> (String, Option<String>) {
        let moved: Vec<FusedOutput> =
            outputs.iter().copied().filter(|output| self.moved.contains(output)).collect();
        let bound = (!moved.is_empty()).then(|| {
            let codes = if moved.contains(&FusedOutput::Codes) {
                "; a code may differ by one where the norm lies between two codes"
            } else {
                ""
            };
            let Self { roundings, dtype, .. } = self;
            let moved = words(&moved);
            format!(
                "the relative error of {moved} is at most {roundings}u + 20ε, with u the rounding of {dtype} and ε that of f32{codes}"
            )
        });
        (format!("one call gives {}", words(outputs)), bound)
    }
}

fn words(outputs: &[FusedOutput]) -> String {
    outputs.iter().map(|output| output.name()).collect::<Vec<_>>().join(", ")
}

/// Takes results that nobody uses from fused calls, but for the last one, and says which are left.
pub(in crate::rules) fn drop_unused_outputs(cx: &mut Context<'_>) {
    let Context { graph, told, rewrites, .. } = cx;
    told.retain(|told| told.rewrite < rewrites.len());
    if told.is_empty() {
        return;
    }
    let used: HashSet<ValueId> =
        graph.ops.iter().flat_map(|op| &op.args).chain(&graph.outputs).copied().collect();
    let told: HashMap<&str, &FusedNote> = told.iter().map(|told| (told.call.as_str(), told)).collect();
    for op in &mut graph.ops {
        let Kind::Fused { fused } = &mut op.kind else { continue };
        let any = op.outs.iter().any(|out| used.contains(out));
        for index in (0..op.outs.len()).rev() {
            if !used.contains(&op.outs[index]) && (any || index > 0) {
                op.outs.remove(index);
                fused.outputs.remove(index);
            }
        }
        if !fused.outputs.iter().any(|output| output.needs_norm()) {
            fused.eps = None;
        }
        if let Some(told) = told.get(op.name.as_str()) {
            let rewrite = &mut rewrites[told.rewrite];
            (rewrite.text, rewrite.bound) = told.words(&fused.outputs);
        }
    }
}
