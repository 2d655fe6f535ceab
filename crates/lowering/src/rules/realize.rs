//! Tensors lie where peers reach them, at one offset on all ranks, and share that memory.
//!
//! Applies to what calls in stream order read: storages of the graph's own, whose producer writes where it is told, that are
//! contiguous, of a size that is known or bounded, and are not returned.

use crate::{
    check::comm,
    costs::size_of,
    graph::{Analysis, Graph, Op},
    ids::{OpId, StoreId, ValueId},
    lower::{Context, Realize},
    op::{Kind, Prim, ResultMemory},
    plan::{Rewrite, Slot},
    race::{ALIGNMENT, lifetime},
    types::{Class, CommReq, Roles},
};

/// Whether a tensor can lie where peers reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CanRealize {
    /// It can.
    Yes,
    /// It can, in so many bytes: its size is not known, but bounded.
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
        || ty.offset.as_constant().is_none_or(|offset| offset * ty.dtype.size() as i64 % 16 != 0)
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
            || analysis.uses[value.index()].iter().any(|user| keeps_hold(graph, *user, *value))
    };
    if storage.values.iter().any(alias) {
        return no("an operation that is not known may keep hold of it");
    }
    let Some(bytes) = &storage.bytes else { return no("its size overflows") };
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
    let class = &mut graph.values[root.index()].class;
    match class {
        Class::Comm(req) if !req.groups.iter().any(|name| name == group) => {
            req.groups.push(group.to_owned());
            req.groups.sort();
        }
        Class::Comm(_) => {}
        class => *class = Class::Comm(CommReq { domain, groups: vec![group.to_owned()], roles: Roles::In }),
    }
    Ok(())
}

pub(super) fn apply(cx: &mut Context<'_>) {
    // On H200s registered memory costs an all-reduce 3 µs below 16 MiB and gains nothing above.
    let wanted = match cx.options.realize {
        Realize::Always => true,
        Realize::Never => false,
        Realize::Measured => cx.world.device == crate::Device::Host,
    };
    if !wanted {
        return;
    }
    let analysis = cx.graph.analyse();
    for index in 0..cx.graph.ops.len() {
        let op = &cx.graph.ops[index];
        let (Kind::Sync { .. } | Kind::Fused { .. }, Some(group)) = (&op.kind, op.kind.group()) else {
            continue;
        };
        if !cx.is_ours(group) || (cx.options.realize == Realize::Measured && !pays(&cx.graph, op)) {
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

/// Whether a call on the host is faster if its operand is in symmetric memory. Between two ranks of a Xeon an all-reduce of 64 KiB
/// to 4 MiB takes 0.8 to 0.95 of its time; other calls stage their operands in any case.
fn pays(graph: &Graph, op: &Op) -> bool {
    let is_all_reduce = matches!(&op.kind, Kind::Sync { coll } if coll.prim == Prim::AllReduce);
    is_all_reduce && (64 << 10..=4 << 20).contains(&size_of(graph, graph.ty(op.args[0])))
}

/// What has to be placed.
struct Life {
    store: StoreId,
    domain: String,
    bytes: u64,
    first: usize,
    last: usize,
}

/// What storages are placed by: the least first.
type Order = fn(&Life) -> (u128, usize);

/// A place in a heap for each storage that asks for one: storages that are never in use at once share bytes, whatever their
/// shapes, dtypes and groups. Of four orders the one that needs the fewest bytes is taken.
pub(crate) fn place(graph: &Graph) -> Vec<Slot> {
    let analysis = graph.analyse();
    let mut lives = Vec::new();
    for (index, storage) in analysis.stores.iter().enumerate() {
        let store = StoreId::from(index);
        let Some((_, req)) = comm(graph, &analysis, storage.root) else { continue };
        let most = storage.bytes.as_ref().and_then(|bytes| bytes.range(&graph.syms).max);
        let (Some(bytes), Some((first, last))) =
            (most.and_then(|most| u64::try_from(most).ok()), lifetime(graph, &analysis, store))
        else {
            continue;
        };
        lives.push(Life {
            store,
            domain: req.domain.clone(),
            bytes: bytes.next_multiple_of(ALIGNMENT),
            first,
            last,
        });
    }
    let orders: [Order; 4] = [
        |life| (u128::MAX - u128::from(life.bytes), life.first),
        |life| (u128::MAX - u128::from(life.bytes) * (life.last - life.first + 1) as u128, life.first),
        |life| (u128::MAX - (life.last - life.first) as u128, life.first),
        |life| (life.first as u128, life.last),
    ];
    let best = orders.map(|order| placed(&lives, order)).into_iter().min_by_key(|(peak, _)| *peak);
    let offsets = best.map(|(_, offsets)| offsets).unwrap_or_default();
    let slot = |(life, offset): (&Life, u64)| {
        let root = analysis.stores[life.store.index()].root;
        let name = |index: usize| graph.ops[index].name.clone();
        Slot {
            value: graph.name(root).to_owned(),
            domain: life.domain.clone(),
            offset,
            bytes: life.bytes,
            first: name(life.first),
            last: name(life.last),
        }
    };
    lives.iter().zip(offsets).map(slot).collect()
}

/// The peak and the offsets, if lives are placed in an order, each in the smallest gap that it fits.
fn placed(lives: &[Life], order: Order) -> (u64, Vec<u64>) {
    let mut queue: Vec<usize> = (0..lives.len()).collect();
    queue.sort_by_key(|index| order(&lives[*index]));
    let (mut offsets, mut done, mut peak) = (vec![0; lives.len()], Vec::<usize>::new(), 0);
    for index in queue {
        let life = &lives[index];
        let mut taken: Vec<(u64, u64)> = done
            .iter()
            .filter(|other| {
                let other = &lives[**other];
                other.domain == life.domain && other.first <= life.last && life.first <= other.last
            })
            .map(|other| (offsets[*other], offsets[*other] + lives[*other].bytes))
            .collect();
        taken.sort_unstable();
        let (mut end, mut gap) = (0, None::<(u64, u64)>);
        for (start, stop) in taken {
            let room = start.saturating_sub(end);
            if room >= life.bytes && gap.is_none_or(|(smallest, _)| room < smallest) {
                gap = Some((room, end));
            }
            end = end.max(stop);
        }
        offsets[index] = gap.map_or(end, |(_, offset)| offset);
        peak = peak.max(offsets[index] + life.bytes);
        done.push(index);
    }
    (peak, offsets)
}
