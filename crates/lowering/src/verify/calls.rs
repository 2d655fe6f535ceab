//! Whether operands and results fit a call of a group.

use antiphon_operation::ReduceOp;

use super::{F32, shapes::Fits};
use crate::{
    graph::{Graph, Op},
    op::{Coll, Fused, FusedArg, FusedOutput, Prim, Quantize},
    sym::{Sym, SymExpr},
    types::{Element, Type},
};

pub(super) fn fits(graph: &Graph, op: &Op, name: &str) -> Fits {
    let Some(group) = graph.group(name) else { return Err(format!("there is no group {name}")) };
    let Some(coll) = op.kind.coll() else { return Ok(()) };
    if coll.root.is_some() != (coll.prim == Prim::Broadcast)
        || coll.root.is_some_and(|root| root >= group.size)
    {
        return Err(format!("the root is {:?}, of {} ranks", coll.root, group.size));
    }
    let reduces = matches!(coll.prim, Prim::AllReduce | Prim::ReduceScatter);
    if coll.red.is_some() != reduces {
        return Err(format!("{:?} with the reduction {:?}", coll.prim, coll.red));
    }
    for list in [&coll.sends, &coll.receives].into_iter().flatten() {
        if list.len() != group.size as usize {
            return Err(format!("rows for {} ranks, of {}", list.len(), group.size));
        }
    }
    Ok(())
}

/// Whether a collective over `size` ranks gives a result of type `out` from an operand of type `arg`.
pub(super) fn collective(coll: &Coll, size: i64, arg: &Type, out: &Type, syms: &[Sym]) -> Fits {
    let wrong = || Err(format!("{:?} over {size} ranks gives {out} of {arg}", coll.prim));
    if arg.dtype != out.dtype {
        return wrong();
    }
    if let Some(red) = coll.red.filter(|red| !reduces(*red, arg.dtype)) {
        return Err(format!("the reduction {red:?} of {}", arg.dtype));
    }
    let scaled = |ty: &Type, dim: usize| -> Option<Vec<SymExpr>> {
        let mut shape = if ty.shape.is_empty() { vec![1.into()] } else { ty.shape.clone() };
        shape[dim] = shape.get(dim)?.times(&size.into())?;
        Some(shape)
    };
    let fits = match coll.prim {
        Prim::AllReduce | Prim::Broadcast => arg.shape == out.shape,
        Prim::AllGather => scaled(arg, 0).as_ref() == Some(&out.shape),
        // A size that is divided rounds down.
        Prim::ReduceScatter => {
            let rest = arg.shape.get(1..) == out.shape.get(1..);
            let rows = arg.shape.first().and_then(SymExpr::as_constant);
            let is_block = scaled(out, 0).as_ref() == Some(&arg.shape);
            is_block
                || (rest && rows.map(|rows| SymExpr::constant(rows / size)).as_ref() == out.shape.first())
        }
        Prim::AllToAll => {
            divides(&coll.sends, size, arg, syms)?;
            divides(&coll.receives, size, out, syms)?;
            let is_even = coll.sends.is_none() && coll.receives.is_none();
            arg.shape.get(1..) == out.shape.get(1..) && (!is_even || arg.shape == out.shape)
        }
        Prim::ShardDimAllToAll => {
            let Some([gather, shard]) = coll.dims else { return wrong() };
            let apart = gather != shard && gather.max(shard) < arg.shape.len().min(out.shape.len());
            // What all ranks have together is whole along both.
            apart && scaled(arg, gather).is_some_and(|whole| scaled(out, shard) == Some(whole))
        }
    };
    let in_place = !coll.in_place || arg == out;
    if fits && in_place { Ok(()) } else { wrong() }
}

/// Whether a reduction over ranks has a meaning for such elements: numbers, of which integers have bits.
fn reduces(red: ReduceOp, element: Element) -> bool {
    let needs_bits = matches!(red, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
    matches!(element, Element::Number(_)) && !(needs_bits && element.is_float())
}

/// Whether the rows of a tensor can be divided so among the ranks: as a list says, or evenly.
fn divides(list: &Option<Vec<SymExpr>>, size: i64, ty: &Type, syms: &[Sym]) -> Fits {
    let rows = ty.shape.first().ok_or_else(|| format!("rows of {ty}, which has none"))?;
    let Some(list) = list else {
        return match rows.as_constant() {
            Some(count) if count % size != 0 => Err(format!("{count} rows for {size} ranks")),
            _ => Ok(()),
        };
    };
    let may_be = |size: &SymExpr, least: i64, most: i64| {
        let range = size.range(syms);
        range.max.is_none_or(|max| max >= least) && range.min.is_none_or(|min| min <= most)
    };
    if let Some(rows) = list.iter().find(|rows| !may_be(rows, 0, i64::MAX)) {
        return Err(format!("{rows} rows for a rank"));
    }
    let sum = list.iter().try_fold(SymExpr::constant(0), |sum, rows| sum.plus(rows));
    let sum = sum.ok_or_else(|| format!("more rows than can be counted, of {ty}"))?;
    match sum.minus(rows) {
        Some(more) if may_be(&more, 0, 0) => Ok(()),
        _ => Err(format!("{sum} rows for all ranks, of {rows}")),
    }
}

/// Whether a fused all-reduce has such operands and results.
pub(super) fn fused(fused: &Fused, args: &[&Type], outs: &[&Type]) -> Fits {
    let Some((input, rest)) = args.split_first() else { return Err("a fused all-reduce of nothing".into()) };
    if rest.len() != fused.args.len() || outs.len() != fused.outputs.len() || outs.is_empty() {
        return Err(format!("{} operands and {} results", args.len(), outs.len()));
    }
    if !input.dtype.number().is_some_and(is_fusible) {
        return Err(format!("a fused all-reduce of {}: of f32, f16 and bf16 only", input.dtype));
    }
    let hidden = input.last();
    for (index, (role, ty)) in fused.args.iter().zip(rest).enumerate() {
        let fits = match role {
            _ if fused.args[..index].contains(role) => false,
            FusedArg::Residual => ty.dtype == input.dtype && ty.last() == hidden && ty.rows() == input.rows(),
            FusedArg::Weight => ty.dtype == input.dtype && ty.numel().as_ref() == Some(&hidden),
            FusedArg::Scale => ty.dtype == F32 && ty.numel() == Some(1.into()),
        };
        if !fits {
            return Err(format!("operand {role:?} is {ty}, of {input}"));
        }
    }
    for (index, (role, ty)) in fused.outputs.iter().zip(outs).enumerate() {
        let Some((dtype, last)) = fused.row(*role, input) else {
            return Err(format!("result {role:?} of {:?} over rows of {hidden}", fused.quantize));
        };
        let is_new = !fused.outputs[..index].contains(role);
        if !is_new
            || ty.dtype != dtype
            || ty.last() != last
            || ty.rows() != input.rows()
            || !ty.is_contiguous()
        {
            return Err(format!("result {role:?} is {ty}, of {input}"));
        }
        if role.needs_norm() && !fused.eps.is_some_and(f64::is_finite) {
            return Err(format!("result {role:?} with an eps of {:?}", fused.eps));
        }
    }
    let has_scale = fused.args.contains(&FusedArg::Scale) || fused.scale.is_some_and(f64::is_finite);
    let needs_scale = fused.quantize == Quantize::Fp8 && fused.outputs.contains(&FusedOutput::Codes);
    if needs_scale != has_scale {
        return Err(format!("codes {:?} with the scale {:?}", fused.quantize, fused.scale));
    }
    let groups = hidden.as_constant().and_then(|hidden| fused.quantize.scales_of(hidden));
    if matches!(fused.quantize, Quantize::Fp8Groups(_)) && groups.is_none() {
        return Err(format!("codes {:?} of rows of {hidden}", fused.quantize));
    }
    Ok(())
}

/// Whether fused all-reduces have such elements.
pub(crate) fn is_fusible(dtype: antiphon_tensor::DType) -> bool {
    use antiphon_tensor::DType;
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}
