//! Σa + Σb = Σ(a + b).
//!
//! Applies to an addition of two sums over one group that nobody else uses, of equal types, perhaps behind equal reshapes.
//! The sum of the second call's place is made of `a + b`. Floating-point numbers are rounded otherwise then, so that
//! [`Numerics::Same`] refuses those.

use super::{Flight, context::Context, flight, replace};
use crate::{
    analysis::Analysis,
    graph::Op,
    hash::{HashMap, HashSet},
    ids::{OpId, ValueId},
    lowered::Rewrite,
    numerics::Numerics,
    op::{Binary, Coll, Kind, View},
};

/// The most sums that are made one after the other of one.
const MAX_ROUNDS: usize = 64;

pub(super) fn apply(cx: &mut Context<'_>) {
    if !cx.options.merge {
        return;
    }
    // Each round merges pairs; a chain of k sums takes k − 1 of them.
    for _ in 0..MAX_ROUNDS {
        if !round(cx) {
            return;
        }
        if cx.graph.sort().is_err() {
            return; // the caller finds the same, and takes everything back
        }
        cx.graph.remove_dead();
        cx.changed();
    }
}

/// One of the two sums that are added.
struct Addend {
    flight: Flight,
    coll: Coll,
    /// The reshapes between the sum and the addition.
    views: usize,
}

/// The sum that a value is, behind reshapes, if nothing else uses it.
fn addend(cx: &Context<'_>, analysis: &Analysis, user: OpId, mut value: ValueId) -> Option<Addend> {
    let (mut user, mut views) = (user, 0);
    loop {
        if !analysis.is_used_by_only(value, user) {
            return None;
        }
        let (id, _) = analysis.def[value.index()]?;
        let op = cx.graph.op(id);
        match &op.kind {
            Kind::View { view: View::Reshape } => (user, value, views) = (id, op.args[0], views + 1),
            Kind::Wait { .. } => {
                let at = op.outs.iter().position(|out| *out == value)?;
                let (start, _) = analysis.def[op.args[at].index()]?;
                let (flight, coll) = flight(&cx.graph, analysis, start)?;
                return coll.is_sum().then_some(Addend { flight, coll, views });
            }
            _ => return None,
        }
    }
}

fn round(cx: &mut Context<'_>) -> bool {
    let analysis = cx.analysis();
    let (mut taken, mut refused) = (HashSet::default(), HashSet::default());
    let (mut flights, mut by, mut new) = (Vec::new(), HashMap::default(), Vec::new());
    let mut tokens = cx.graph.new_tokens();
    for index in 0..cx.graph.ops.len() {
        let op = &cx.graph.ops[index];
        let (Kind::Binary { op: Binary::Add, scalar: None, .. }, [x, y]) = (&op.kind, &op.args[..]) else {
            continue;
        };
        if x == y {
            continue;
        }
        let (Some(a), Some(b)) =
            (addend(cx, &analysis, OpId::from(index), *x), addend(cx, &analysis, OpId::from(index), *y))
        else {
            continue;
        };
        let (first, second) = if a.flight.start < b.flight.start { (a, b) } else { (b, a) };
        let input = |addend: &Addend| cx.graph.op(addend.flight.start).args[0];
        let (p, q) = (input(&first), input(&second));
        let (ty, out) = (cx.graph.ty(p).dense(), cx.graph.ty(op.outs[0]).clone());
        let fits = first.coll == second.coll
            && cx.is_ours(&first.coll.group)
            && ty == cx.graph.ty(q).dense()
            && ty.dtype == out.dtype
            && ty.numel() == out.numel()
            && (first.views > 0) == (second.views > 0);
        if !fits || !taken.insert(first.flight.start) || !taken.insert(second.flight.start) {
            continue;
        }
        let names = [first.flight.start, second.flight.start].map(|start| cx.graph.op(start).name.clone());
        if ty.dtype.is_float() && cx.options.numerics == Numerics::Same {
            if refused.insert(names.clone())
                && !cx.refusals.iter().any(|old| old.rule == "merge" && old.op == names[1])
            {
                cx.refuse(
                    "merge",
                    &names[1],
                    format!("its sum with {} would be rounded otherwise", names[0]),
                );
            }
            continue;
        }
        let Some(token) = tokens.next() else { continue };
        let result = op.outs[0];
        let add = op.kind.clone();
        let sum = cx.graph.add_value(&mut cx.names, "merged", ty.clone());
        let started = cx.graph.add_value(&mut cx.names, "merged_start", ty.clone());
        let ready = cx.graph.add_value(&mut cx.names, "merged_sum", ty.clone());
        let name = |id: ValueId| cx.graph.name(id).to_owned();
        let place = second.flight.start;
        let ops = [
            Op { name: name(sum), kind: add, args: vec![p, q], outs: vec![sum] },
            Op {
                name: name(started),
                kind: Kind::Start { coll: second.coll.clone(), token },
                args: vec![sum],
                outs: vec![started],
            },
            Op {
                name: name(ready),
                kind: Kind::Wait { tokens: vec![token] },
                args: vec![started],
                outs: vec![ready],
            },
        ];
        let call = name(started);
        new.extend(ops.map(|op| (place, op)));
        let mut ready = ready;
        if *cx.graph.ty(ready) != out {
            let view = cx.graph.add_value(&mut cx.names, "merged_view", out);
            let (name, kind) = (cx.graph.name(view).to_owned(), Kind::View { view: View::Reshape });
            new.push((place, Op { name, kind, args: vec![ready], outs: vec![view] }));
            ready = view;
        }
        by.insert(result, ready);
        let covered: Vec<String> = names.iter().flat_map(|name| cx.covered(name)).collect();
        let text = format!("the sums of {} and {} are one", names[0], names[1]);
        let ranks = cx.graph.group(&second.coll.group).map_or(1, |group| group.size);
        let bound = ty.dtype.is_float().then(|| {
            format!("u·(Σ|a+b| + |a+b|) over {ranks} ranks, u the rounding of {}, instead of u·(|Σa| + |Σb| + |Σa+Σb|)", ty.dtype)
        });
        cx.rewrites.push(Rewrite { rule: "merge".into(), ops: covered.clone(), text, bound });
        cx.covers.insert(call, covered);
        flights.extend([first.flight, second.flight]);
    }
    if new.is_empty() {
        return false;
    }
    replace(&mut cx.graph, &flights, new);
    cx.graph.substitute(&by);
    cx.changed();
    true
}
