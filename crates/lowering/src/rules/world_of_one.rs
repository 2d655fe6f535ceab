//! A collective of one rank is a copy.
//!
//! Applies to collectives over a group of one rank whose results have memory of their own. Those in place are left alone:
//! what they would write is there already, but others may wait for their results.

use super::{context::Context, flight, replace};
use crate::{graph::Op, ids::OpId, lowered::Rewrite, op::Kind};

pub(super) fn apply(cx: &mut Context<'_>) {
    let analysis = cx.analysis();
    let mut flights = Vec::new();
    let mut copies = Vec::new();
    for index in 0..cx.graph.ops.len() {
        let op = &cx.graph.ops[index];
        let Kind::Start { coll, .. } = &op.kind else { continue };
        let alone = cx.graph.group(&coll.group).is_some_and(|group| group.size == 1);
        if !alone || !cx.is_ours(&coll.group) {
            continue;
        }
        let name = op.name.clone();
        match flight(&cx.graph, &analysis, OpId::from(index)) {
            Some((found, coll)) if !coll.in_place => {
                let args = op.args.clone();
                let copy =
                    Op { name: cx.names.fresh("copy"), kind: Kind::Copy, args, outs: vec![found.ready] };
                copies.push((found.start, copy));
                let text = format!("{:?} of one rank is a copy", coll.prim);
                let rewrite = Rewrite { rule: "world_of_one".into(), ops: vec![name], text, bound: None };
                cx.rewrites.push(rewrite);
                flights.push(found);
            }
            _ => cx.refuse("world_of_one", &name, "it is in place, of several tensors, or used in flight"),
        }
    }
    replace(&mut cx.graph, &flights, copies);
}
