//! Whether operands, results and groups fit an operation.

use super::{arithmetic, calls};
use crate::{
    analysis::Analysis,
    graph::{Graph, Op},
    ids::ValueId,
    op::{Binary, Kind, ResultMemory, View},
    places::Places,
    sym::{Sym, SymExpr},
    types::{Class, Type},
};

pub(super) type Fits = Result<(), String>;

/// Whether operands and results fit the operation.
pub(super) fn shapes(graph: &Graph, analysis: &Analysis, op: &Op) -> Fits {
    let types = |ids: &[ValueId]| ids.iter().map(|id| graph.ty(*id)).collect::<Vec<_>>();
    let (args, outs) = (types(&op.args), types(&op.outs));
    outs.iter().try_for_each(|out| makes_sense(graph, out))?;
    let size = op.kind.group().and_then(|group| graph.group(group)).map_or(1, |group| group.size);
    suit(&op.kind, &args, &outs, size, &graph.syms)?;
    // An input, and what an unknown operation gives, may show one element many times.
    if !matches!(op.kind, Kind::Input | Kind::Constant | Kind::Opaque { .. }) {
        let is_written = |(index, _): &(usize, &&Type)| {
            op.kind.coll().is_some() || op.kind.result_memory(*index) == ResultMemory::Fresh
        };
        outs.iter().enumerate().filter(is_written).try_for_each(|(_, out)| are_apart(out, &graph.syms))?;
    }
    if op.kind.coll().is_some_and(|coll| coll.in_place) && op.outs.len() > 1 {
        segments_are_apart(graph, analysis, op)?;
    }
    for (index, out) in op.outs.iter().enumerate() {
        let Some(root) = analysis.root(*out).filter(|root| root != out) else { continue };
        let ty = graph.ty(*out);
        match &op.kind {
            Kind::View { view: View::Strided } => {
                lies_in(graph, ty, root)?;
                let is_given = |op: &Op| matches!(op.kind, Kind::Input | Kind::Constant);
                if !analysis.op_of(graph, root).is_some_and(is_given) {
                    reads_no_gap(ty, graph.ty(root), &graph.syms)?;
                }
            }
            Kind::Opaque { aliases, .. } if aliases.get(index).is_some_and(Option::is_some) => {
                lies_in(graph, ty, root)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether the results of a call in place that lie in one storage are shown to be apart: each begins where another one ends, or
/// behind.
fn segments_are_apart(graph: &Graph, analysis: &Analysis, op: &Op) -> Fits {
    let store = |value: &ValueId| analysis.store[value.index()];
    let begin = |value: &ValueId| graph.ty(*value).offset.as_constant();
    let mut outs = op.outs.clone();
    outs.sort_by_key(|out| (store(out), begin(out)));
    for pair in outs.windows(2).filter(|pair| store(&pair[0]) == store(&pair[1])) {
        let [a, b] = [graph.ty(pair[0]), graph.ty(pair[1])];
        let room = a.reach().and_then(|end| b.offset.minus(&end));
        if a.dtype != b.dtype || !room.is_some_and(|room| room.is_at_least(0, &graph.syms)) {
            return Err(format!("{a} and {b} may share elements of one storage, and both are written"));
        }
    }
    Ok(())
}

/// Whether extents, strides and the offset can be a tensor's. An extent is not negative; the strides of row-major tensors, which
/// are products of extents, are neither, and others must be shown not to be, unless they are told by functions that are not known.
fn makes_sense(graph: &Graph, ty: &Type) -> Fits {
    let strides = ty.strides.iter().flatten().filter(|_| !ty.is_contiguous());
    let may_be_negative = |size: &&SymExpr| !size.is_at_least(0, &graph.syms) && !size.has_unknown();
    if let Some(size) = strides.chain([&ty.offset]).find(may_be_negative) {
        return Err(format!("{ty} has the stride or offset {size}, which may be negative"));
    }
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

/// Whether a value ends where the storage of a root does, or before: memory of communication must be shown to be large enough,
/// other memory must not be shown to be too small.
fn lies_in(graph: &Graph, view: &Type, root: ValueId) -> Fits {
    let fits = match &graph.value(root).class {
        Class::Comm(_) => is_within(view, graph.ty(root), &graph.syms),
        _ => room(view, graph.ty(root))
            .is_some_and(|room| room.range(&graph.syms).max.is_none_or(|max| max >= 0)),
    };
    let end = |ty: &Type| ty.reach().map_or("too many".into(), |end| end.to_string());
    match (fits, graph.ty(root)) {
        (true, _) => Ok(()),
        (false, root) => {
            let (end, elements) = (end(view), end(root));
            Err(format!("the view {view} ends at element {end}, of {elements} of {}", root.dtype))
        }
    }
}

/// How many bytes a storage has behind the last element of a value that lies in it; none if that overflows.
fn room(view: &Type, root: &Type) -> Option<SymExpr> {
    let bytes = |ty: &Type| ty.reach()?.times(&(ty.dtype.size() as i64).into());
    bytes(root)?.minus(&bytes(view)?)
}

/// Whether a value is shown to end where its storage does, or before.
pub(crate) fn is_within(view: &Type, root: &Type, syms: &[Sym]) -> bool {
    room(view, root).is_some_and(|room| room.is_at_least(0, syms))
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
    let is_inside = || view.dtype.size() == root.dtype.size() && places.within(&layout, syms).is_some();
    match layout.is_all(&elements) || !is_known || is_inside() {
        true => Ok(()),
        false => {
            Err(format!("the view {view} shows memory between the elements of {root}, which nobody wrote"))
        }
    }
}

/// Whether operands and results of these types fit an operation, for a group of `group_size` ranks.
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
            let mut pairs = args.iter().zip(outs);
            pairs.try_for_each(|(arg, out)| calls::collective(coll, group_size.into(), arg, out, syms))
        }
        Kind::Fused { fused } => calls::fused(fused, args, outs),
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
