//! Whether operands, results and groups fit an operation.

use super::F32;
use crate::{
    graph::{Graph, Op},
    ids::ValueId,
    op::{Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Prim, Quantize, View},
    sym::SymExpr,
    types::Type,
};

pub(super) type Fits = Result<(), String>;

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

/// Whether operands and results fit the operation.
pub(super) fn shapes(graph: &Graph, op: &Op) -> Fits {
    let types = |ids: &[ValueId]| ids.iter().map(|id| graph.ty(*id)).collect::<Vec<_>>();
    let (args, outs) = (types(&op.args), types(&op.outs));
    outs.iter().try_for_each(|out| makes_sense(graph, out))?;
    let size = op.kind.group().and_then(|group| graph.group(group)).map_or(1, |group| group.size);
    suit(&op.kind, &args, &outs, size)?;
    match (&op.kind, graph.root(op.outs.first().copied().unwrap_or(ValueId(0)))) {
        (Kind::View { view: View::Strided }, Some(root)) => lies_in(outs[0], graph.ty(root)),
        _ => Ok(()),
    }
}

/// Whether extents, strides and the offset can be a tensor's.
fn makes_sense(graph: &Graph, ty: &Type) -> Fits {
    for size in ty.shape.iter().chain(ty.strides.iter().flatten()).chain([&ty.offset]) {
        if size.as_constant().is_some_and(|size| size < 0) {
            return Err(format!("{ty} has the negative number {size}"));
        }
        if let Some(name) =
            size.symbols().into_iter().find(|name| graph.syms.iter().all(|sym| sym.name != *name))
        {
            return Err(format!("{ty} has the symbol {name}, which is not declared"));
        }
    }
    Ok(())
}

/// Whether a view ends where its storage does, or before, as far as their sizes are known.
fn lies_in(view: &Type, root: &Type) -> Fits {
    let end = |ty: &Type| -> Option<i64> {
        let strides = match &ty.strides {
            Some(strides) => strides.clone(),
            None => ty.row_major()?,
        };
        let mut last = ty.offset.as_constant()?;
        for (size, stride) in ty.shape.iter().zip(&strides) {
            match size.as_constant()? {
                0 => return Some(0),
                size => last = last.checked_add((size - 1).checked_mul(stride.as_constant()?)?)?,
            }
        }
        last.checked_add(1)
    };
    match (end(view), end(root)) {
        (Some(end), Some(elements)) if end > elements => {
            Err(format!("the view {view} ends at element {end}, of {elements}"))
        }
        _ => Ok(()),
    }
}

/// Whether operands and results of these types fit an operation, for a group of so many ranks.
pub(crate) fn suit(kind: &Kind, args: &[&Type], outs: &[&Type], group_size: u32) -> Fits {
    let count = |wanted_args: usize, wanted_outs: usize| -> Fits {
        match (args.len(), outs.len()) == (wanted_args, wanted_outs) {
            true => Ok(()),
            false => Err(format!(
                "{} operands and {} results, wanted {wanted_args} and {wanted_outs}",
                args.len(),
                outs.len()
            )),
        }
    };
    let differ = |what: &str, found: &Type, wanted: &Type| Err(format!("{what} is {found}, wanted {wanted}"));
    match kind {
        Kind::Input | Kind::Constant | Kind::Full { .. } => count(0, 1),
        Kind::Unary { .. } => {
            count(1, 1)?;
            if outs[0].shape == args[0].shape { Ok(()) } else { differ("the result", outs[0], args[0]) }
        }
        Kind::Binary { op, scalar, .. } => {
            count(if scalar.is_some() { 1 } else { 2 }, 1)?;
            if *op == Binary::Pow && scalar.is_none() {
                return Err("a power needs a number for its exponent".into());
            }
            let shape = args.iter().try_fold(Vec::new(), |shape, arg| broadcast(&shape, &arg.shape));
            match shape {
                Some(shape) if shape == outs[0].shape => Ok(()),
                _ => Err(format!("the result is {}, of {}", outs[0], list(args))),
            }
        }
        Kind::Cast => {
            count(1, 1)?;
            if outs[0].shape == args[0].shape { Ok(()) } else { differ("the result", outs[0], args[0]) }
        }
        Kind::Reduce { dims, keepdim, .. } => {
            count(1, 1)?;
            let ascending = dims.windows(2).all(|pair| pair[0] < pair[1]);
            if dims.is_empty() || !ascending || dims.last().is_some_and(|dim| *dim >= args[0].shape.len()) {
                return Err(format!("dimensions {dims:?} of {}", args[0]));
            }
            let kept = args[0].shape.iter().enumerate().filter_map(|(dim, size)| match dims.contains(&dim) {
                true => keepdim.then(|| 1.into()),
                false => Some(size.clone()),
            });
            if kept.eq(outs[0].shape.iter().cloned()) {
                Ok(())
            } else {
                Err(format!("the result is {}", outs[0]))
            }
        }
        Kind::View { view } => {
            count(1, 1)?;
            let same_elements = args[0].dtype == outs[0].dtype;
            let same_shape = match view {
                View::Reshape => args[0].numel() == outs[0].numel(),
                View::Permute(dims) => {
                    let mut sorted = dims.clone();
                    sorted.sort_unstable();
                    sorted.iter().copied().eq(0..args[0].shape.len())
                        && dims.iter().map(|dim| &args[0].shape[*dim]).eq(&outs[0].shape)
                }
                View::Expand => broadcast(&args[0].shape, &outs[0].shape).as_ref() == Some(&outs[0].shape),
                View::Strided => true,
            };
            if same_elements && same_shape { Ok(()) } else { differ("the view", outs[0], args[0]) }
        }
        Kind::Copy => {
            count(1, 1)?;
            let same = args[0].dtype == outs[0].dtype && args[0].numel() == outs[0].numel();
            if same { Ok(()) } else { differ("the copy", outs[0], args[0]) }
        }
        Kind::MatMul => {
            count(2, 1)?;
            let wanted = match (&args[0].shape[..], &args[1].shape[..]) {
                ([m, k], [l, n]) if k == l => vec![m.clone(), n.clone()],
                _ => return Err(format!("a product of {}", list(args))),
            };
            if outs[0].shape == wanted { Ok(()) } else { Err(format!("the product is {}", outs[0])) }
        }
        Kind::Assign => {
            count(2, 1)?;
            let fits = broadcast(&args[0].shape, &args[1].shape).as_ref() == Some(&args[0].shape);
            if fits && outs[0] == args[0] {
                Ok(())
            } else {
                Err(format!("{} goes into {}", args[1], args[0]))
            }
        }
        Kind::Opaque { aliases, .. } => {
            match aliases.iter().flatten().find(|alias| alias.arg >= args.len()) {
                Some(alias) => Err(format!("operand {} of {}", alias.arg, args.len())),
                None => Ok(()),
            }
        }
        Kind::Wait { .. } => {
            count(args.len(), args.len())?;
            match args.iter().zip(outs).find(|(arg, out)| arg != out) {
                Some((arg, out)) => differ("what was waited for", out, arg),
                None => Ok(()),
            }
        }
        Kind::Start { coll, .. } | Kind::Sync { coll } => {
            count(args.len(), args.len())?;
            if args.is_empty() {
                return Err("a collective of nothing".into());
            }
            args.iter().zip(outs).try_for_each(|(arg, out)| collective(coll, group_size.into(), arg, out))
        }
        Kind::Fused { fused } => self::fused(fused, args, outs),
    }
}

fn list(types: &[&Type]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

/// The shape that two shapes have together.
fn broadcast(a: &[SymExpr], b: &[SymExpr]) -> Option<Vec<SymExpr>> {
    let one = SymExpr::constant(1);
    let (long, short) = if a.len() >= b.len() { (a, b) } else { (b, a) };
    let (lead, rest) = long.split_at(long.len() - short.len());
    let together = rest.iter().zip(short).map(|(x, y)| match x == y || *y == one {
        true => Some(x.clone()),
        false => (*x == one).then(|| y.clone()),
    });
    lead.iter().cloned().map(Some).chain(together).collect()
}

fn collective(coll: &Coll, size: i64, arg: &Type, out: &Type) -> Fits {
    let wrong = || Err(format!("{:?} over {size} ranks gives {out} of {arg}", coll.prim));
    if arg.dtype != out.dtype {
        return wrong();
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
            let rows = |list: &Option<Vec<SymExpr>>, ty: &Type| match list {
                Some(list) => {
                    let sum = list.iter().try_fold(SymExpr::constant(0), |sum, rows| sum.plus(rows));
                    let known = sum.as_ref().and_then(SymExpr::as_constant);
                    let size = ty.shape.first().and_then(SymExpr::as_constant);
                    known.is_none() || size.is_none() || known == size
                }
                None => true,
            };
            let splits = rows(&coll.sends, arg) && rows(&coll.receives, out);
            splits && arg.shape.get(1..) == out.shape.get(1..)
        }
        Prim::ShardDimAllToAll => {
            let Some([gather, shard]) = coll.dims else { return wrong() };
            let apart = gather != shard && gather.max(shard) < arg.shape.len();
            apart && arg.shape.len() == out.shape.len()
        }
    };
    let in_place = !coll.in_place || arg == out;
    if fits && in_place { Ok(()) } else { wrong() }
}

fn fused(fused: &Fused, args: &[&Type], outs: &[&Type]) -> Fits {
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
