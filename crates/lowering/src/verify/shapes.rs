//! Whether operands, results and groups fit an operation.

use super::{F32, arithmetic};
use crate::{
    analysis::Analysis,
    graph::{Graph, Op},
    ids::ValueId,
    op::{Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Prim, Quantize, ResultMemory, View},
    places::Places,
    sym::{Sym, SymExpr},
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
pub(super) fn shapes(graph: &Graph, analysis: &Analysis, op: &Op) -> Fits {
    let types = |ids: &[ValueId]| ids.iter().map(|id| graph.ty(*id)).collect::<Vec<_>>();
    let (args, outs) = (types(&op.args), types(&op.outs));
    outs.iter().try_for_each(|out| makes_sense(graph, out))?;
    let size = op.kind.group().and_then(|group| graph.group(group)).map_or(1, |group| group.size);
    suit(&op.kind, &args, &outs, size, &graph.syms)?;
    // An input, and what an unknown operation gives, may show one element many times.
    if !matches!(op.kind, Kind::Input | Kind::Constant | Kind::Opaque { .. }) {
        let is_fresh = |(index, _): &(usize, &&Type)| op.kind.result_memory(*index) == ResultMemory::Fresh;
        outs.iter().enumerate().filter(is_fresh).try_for_each(|(_, out)| are_apart(out, &graph.syms))?;
    }
    let root = || analysis.root(*op.outs.first()?);
    match (&op.kind, root()) {
        (Kind::View { view: View::Strided }, Some(root)) => {
            let is_given =
                analysis.op_of(graph, root).is_some_and(|op| matches!(op.kind, Kind::Input | Kind::Constant));
            lies_in(outs[0], graph.ty(root))?;
            if is_given { Ok(()) } else { reads_no_gap(outs[0], graph.ty(root), &graph.syms) }
        }
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
    let end = |ty: &Type| ty.reach()?.as_constant();
    match (end(view), end(root)) {
        (Some(end), Some(elements)) if end > elements => {
            Err(format!("the view {view} ends at element {end}, of {elements}"))
        }
        _ => Ok(()),
    }
}

/// Whether no two elements of what is written lie in one place.
fn are_apart(ty: &Type, syms: &[Sym]) -> Fits {
    match ty.strides.is_none() || Places::of(ty).is_some_and(|places| places.are_apart(syms)) {
        true => Ok(()),
        false => Err(format!("elements of {ty} may lie in one place, and are written")),
    }
}

/// Whether a view of what an operation has computed, as far as sizes are known, shows no memory between its elements.
fn reads_no_gap(view: &Type, root: &Type, syms: &[Sym]) -> Fits {
    let (Some(places), Some(layout), Some(elements)) = (Places::of(view), Places::of(root), root.numel())
    else {
        return Err(format!("the view {view} of {root} overflows"));
    };
    let is_known = layout.reach().and_then(|reach| reach.as_constant()).is_some();
    match layout.is_all(&elements) || !is_known || places.within(&layout, syms).is_some() {
        true => Ok(()),
        false => {
            Err(format!("the view {view} shows memory between the elements of {root}, which nobody wrote"))
        }
    }
}

/// Whether operands and results of these types fit an operation, for a group of so many ranks.
pub(crate) fn suit(kind: &Kind, args: &[&Type], outs: &[&Type], group_size: u32, syms: &[Sym]) -> Fits {
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
    // What is computed, and in which elements, comes behind the numbers of operands and results.
    let computes = |wanted: usize| -> Fits {
        count(wanted, 1)?;
        arithmetic::check(kind, args, outs[0])
    };
    match kind {
        Kind::Input | Kind::Constant => count(0, 1),
        Kind::Full { .. } => computes(0),
        Kind::Unary { .. } => {
            computes(1)?;
            if outs[0].shape == args[0].shape { Ok(()) } else { differ("the result", outs[0], args[0]) }
        }
        Kind::Binary { op, scalar, .. } => {
            computes(if scalar.is_some() { 1 } else { 2 })?;
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
            computes(1)?;
            if outs[0].shape == args[0].shape { Ok(()) } else { differ("the result", outs[0], args[0]) }
        }
        Kind::Reduce { op: _, dims, keepdim } => {
            computes(1)?;
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
            if same_elements && shows(view, args[0], outs[0]) {
                Ok(())
            } else {
                differ("the view", outs[0], args[0])
            }
        }
        Kind::Copy => {
            count(1, 1)?;
            let same = args[0].dtype == outs[0].dtype && args[0].numel() == outs[0].numel();
            if same { Ok(()) } else { differ("the copy", outs[0], args[0]) }
        }
        Kind::MatMul => {
            computes(2)?;
            let wanted = match (&args[0].shape[..], &args[1].shape[..]) {
                ([m, k], [l, n]) if k == l => vec![m.clone(), n.clone()],
                _ => return Err(format!("a product of {}", list(args))),
            };
            if outs[0].shape == wanted { Ok(()) } else { Err(format!("the product is {}", outs[0])) }
        }
        Kind::Assign => {
            count(2, 1)?;
            arithmetic::converts(args[1].dtype, args[0].dtype)?;
            let fits = broadcast(&args[0].shape, &args[1].shape).as_ref() == Some(&args[0].shape);
            if fits && outs[0] == args[0] {
                are_apart(args[0], syms)
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

/// Whether a view shows its operand's elements as it says, at the places where they are.
fn shows(view: &View, from: &Type, to: &Type) -> bool {
    let Some(places) = Places::of(to) else { return false };
    let strides = || from.strides.clone().or_else(|| from.row_major());
    let wanted = match view {
        View::Reshape => (from.numel() == to.numel()).then(|| Places::of(from)).flatten(),
        View::Permute(dims) => {
            let mut sorted = dims.clone();
            sorted.sort_unstable();
            let turns = sorted.iter().copied().eq(0..from.shape.len())
                && dims.iter().map(|dim| &from.shape[*dim]).eq(&to.shape);
            let turned = |strides: Vec<SymExpr>| {
                let dims = dims.iter().map(|dim| (&from.shape[*dim], strides[*dim].clone()));
                Places::new(from.offset.clone(), dims)
            };
            strides().filter(|_| turns).and_then(turned)
        }
        View::Expand => strides()
            .filter(|_| broadcast(&from.shape, &to.shape).as_ref() == Some(&to.shape))
            .and_then(|strides| Places::repeated(&from.shape, &strides, from.offset.clone(), &to.shape)),
        View::Strided => return true,
    };
    wanted == Some(places)
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
