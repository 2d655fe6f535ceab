//! Tensors lie where peers reach them, at one offset on all ranks, and share that memory.
//!
//! Applies to what calls in stream order read: storages of the graph's own, whose producer writes where it is told, that are
//! contiguous, of a size that is known or bounded, and are not returned.

use super::context::Context;
use crate::{
    analysis::Analysis,
    costs::{Call, size_of},
    decisions::Choice,
    graph::{Graph, Op},
    ids::{OpId, ValueId},
    lowered::Rewrite,
    op::{Kind, Prim, ResultMemory},
    options::Realize,
    types::{Class, CommReq, Roles},
    verify::is_within,
};
pub(crate) use place::place;

mod place;

/// Whether a tensor can lie where peers reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CanRealize {
    /// It can.
    Yes,
    /// It can, in a buffer of this number of bytes: its size is not known, but has this bound.
    AtMost(u64),
    /// It cannot, for this reason.
    No(String),
}

/// Whether a value's storage can lie where the ranks of a heap reach it.
pub fn can_realize(graph: &Graph, analysis: &Analysis, value: ValueId, domain: &str) -> CanRealize {
    let no = |reason: &str| CanRealize::No(format!("{}: {reason}", graph.name(value)));
    let Some(store) = analysis.store[value.index()] else { return no("nobody defines it") };
    let storage = &analysis.stores[store.index()];
    let producer = analysis.op_of(graph, storage.root);
    match &graph.value(storage.root).class {
        Class::Owned => {}
        Class::Comm(req) if req.domain == domain => {}
        Class::Comm(req) => return no(&format!("it lies in the heap of {} already", req.domain)),
        Class::External => return no("it is the caller's"),
        Class::Const => return no("it is a constant"),
    }
    if storage.escapes {
        return no("it is returned");
    }
    let ty = graph.ty(value);
    if !ty.is_contiguous()
        || ty.offset.as_constant().is_none_or(|offset| i128::from(offset) * ty.dtype.size() as i128 % 16 != 0)
    {
        return no("it is not contiguous, or begins at no multiple of 16 bytes");
    }
    let writes_anywhere = |kind: &Kind| {
        matches!(
            kind,
            Kind::Unary { .. }
                | Kind::Binary { .. }
                | Kind::Cast
                | Kind::Copy
                | Kind::Reduce { .. }
                | Kind::MatMul
        )
    };
    if !producer.is_some_and(|op| writes_anywhere(&op.kind)) {
        return no("what computes it allocates its memory");
    }
    let alias = |value: &ValueId| {
        analysis.op_of(graph, *value).is_some_and(|op| matches!(op.kind, Kind::Opaque { .. }))
            || analysis.uses(*value).iter().any(|user| keeps_hold(graph, *user, *value))
    };
    if analysis.values(store).iter().any(alias) {
        return no("an operation that is not known may keep hold of it");
    }
    let Some(bytes) = analysis.bytes(graph, store) else { return no("its size overflows") };
    let root = graph.ty(storage.root);
    if !analysis.values(store).iter().all(|view| is_within(graph.ty(*view), root, &graph.syms)) {
        return no("a view of it is not known to end where it does");
    }
    match (bytes.as_constant(), bytes.range(&graph.syms).max) {
        (Some(_), _) => CanRealize::Yes,
        (None, Some(most)) => {
            u64::try_from(most).map_or_else(|_| no("its size is negative"), CanRealize::AtMost)
        }
        (None, None) => no(&format!("its size, {bytes}, has no bound")),
    }
}

fn keeps_hold(graph: &Graph, user: OpId, value: ValueId) -> bool {
    let op = graph.op(user);
    let lies = |index: usize| match op.kind.result_memory(index) {
        ResultMemory::Alias(arg) | ResultMemory::Write(arg) => op.args.get(arg) == Some(&value),
        ResultMemory::Fresh => false,
    };
    matches!(op.kind, Kind::Opaque { .. }) && (0..op.outs.len()).any(lies)
}

/// Puts a value's storage where the ranks of a group's heap reach it.
///
/// # Errors
/// What [`can_realize`] says.
pub fn realize(graph: &mut Graph, value: ValueId, group: &str) -> Result<(), String> {
    let analysis = graph.analyse();
    realize_in(graph, &analysis, value, group)
}

fn realize_in(graph: &mut Graph, analysis: &Analysis, value: ValueId, group: &str) -> Result<(), String> {
    let domain = graph.group(group).map(|group| group.domain().to_owned());
    let domain = domain.ok_or_else(|| format!("there is no group {group}"))?;
    if let CanRealize::No(reason) = can_realize(graph, analysis, value, &domain) {
        return Err(reason);
    }
    let root = analysis.root(value).ok_or("nobody defines it")?;
    let is_written = |value: &ValueId| {
        let op = analysis.op_of(graph, *value);
        op.is_some_and(|op| op.kind.coll().is_some_and(|coll| coll.in_place))
    };
    let store = analysis.store[root.index()].ok_or("nobody defines it")?;
    let is_written = analysis.values(store).iter().any(is_written);
    let roles = if is_written { Roles::InOut } else { Roles::In };
    let class = &mut graph.values[root.index()].class;
    match class {
        Class::Comm(req) => {
            req.roles = if req.roles == roles { roles } else { Roles::InOut };
            if !req.groups.iter().any(|name| name == group) {
                req.groups.push(group.to_owned());
                req.groups.sort();
            }
        }
        class => *class = Class::Comm(CommReq { domain, groups: vec![group.to_owned()], roles }),
    }
    Ok(())
}

pub(super) fn apply(cx: &mut Context<'_>) {
    if cx.options.realize == Realize::Never {
        return;
    }
    let analysis = cx.analysis();
    for index in 0..cx.graph.ops.len() {
        let op = &cx.graph.ops[index];
        let (Kind::Sync { .. } | Kind::Fused { .. }, Some(group)) = (&op.kind, op.kind.group()) else {
            continue;
        };
        if !cx.is_ours(group) || (cx.options.realize == Realize::Measured && !pays(cx, op, group)) {
            continue;
        }
        let (name, group, value) = (op.name.clone(), group.to_owned(), op.args[0]);
        let domain = cx.graph.group(&group).map_or("", |group| group.domain()).to_owned();
        if let CanRealize::AtMost(bytes) = can_realize(&cx.graph, &analysis, value, &domain)
            && bytes > cx.options.max_slot_bytes
        {
            let limit = cx.options.max_slot_bytes;
            cx.refuse("realize", &name, format!("it may have {bytes} bytes: at most {limit} are reserved"));
            continue;
        }
        match realize_in(&mut cx.graph, &analysis, value, &group) {
            Ok(()) => {
                let text = format!("{} lies where {group} reaches it", cx.graph.name(value));
                cx.rewrites.push(Rewrite { rule: "realize".into(), ops: vec![name], text, bound: None });
            }
            Err(reason) => cx.refuse("realize", &name, reason),
        }
    }
}

/// Whether a call is predicted to be faster if its operand is in symmetric memory. Only all-reduces read their operands there:
/// other calls stage them in any case.
fn pays(cx: &Context<'_>, op: &Op, group: &str) -> bool {
    let bytes = size_of(&cx.graph, cx.graph.ty(op.args[0]));
    let ranks = cx.graph.group(group).map_or(1, |group| group.size);
    let call = Call { bytes, ranks, registrable: true, ..Call::default() };
    let is_all_reduce = matches!(&op.kind, Kind::Sync { coll } if coll.prim == Prim::AllReduce);
    is_all_reduce && cx.costs.choose(&call) == Choice::Registered
}
