//! The same collective of the same value is made once.
//!
//! Applies to two collectives over one group that are equal in all but their token, whose operands are computed by the same
//! operations of the same operands ([`numbering`]). The second one's memory must not leave the graph or be written, nor the
//! first one's be written: they become one.

use super::{context::Context, flight, numbering, replace};
use crate::{hash::HashMap, ids::OpId, lowered::Rewrite};

pub(super) fn apply(cx: &mut Context<'_>) {
    let analysis = cx.analysis();
    let numbers = numbering::of(&cx.graph, &analysis);
    let mut first: HashMap<(String, Option<numbering::Number>), (String, crate::ValueId)> =
        HashMap::default();
    let (mut flights, mut by) = (Vec::new(), HashMap::default());
    for index in 0..cx.graph.ops.len() {
        let Some((found, coll)) = flight(&cx.graph, &analysis, OpId::from(index)) else { continue };
        if coll.in_place || !cx.is_ours(&coll.group) {
            continue;
        }
        let op = cx.graph.op(found.start);
        let name = op.name.clone();
        let key = (format!("{coll:?} {}", cx.graph.ty(op.args[0]).dense()), numbers[op.args[0].index()]);
        let Some((other, ready)) = first.get(&key).cloned() else {
            first.insert(key, (name, found.ready));
            continue;
        };
        let storage = |value: crate::ValueId| analysis.store[value.index()];
        // The wait itself writes once.
        let is_left_alone = |value| {
            storage(value).is_some_and(|store| !numbering::is_overwritten(&cx.graph, &analysis, store))
        };
        let escapes = storage(found.ready).is_none_or(|store| analysis.stores[store.index()].escapes);
        if escapes || !is_left_alone(found.ready) || !is_left_alone(ready) {
            cx.refuse(
                "duplicate",
                &name,
                format!("it is {other} again, but its memory is returned or written"),
            );
            continue;
        }
        by.insert(found.ready, ready);
        let covered = cx.covered(&other).into_iter().chain(cx.covered(&name)).collect();
        cx.covers.insert(other.clone(), covered);
        let text = format!("{name} is {other} again");
        cx.rewrites.push(Rewrite { rule: "duplicate".into(), ops: vec![other, name], text, bound: None });
        flights.push(found);
    }
    replace(&mut cx.graph, &flights, Vec::new());
    cx.graph.substitute(&by);
}
