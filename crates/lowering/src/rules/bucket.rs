//! Neighbouring collectives of one kind become one of several tensors: a bucket.
//!
//! Applies where [`Options::overlap`](crate::Options::overlap) asks for it, to starts of one group, operation and dtype, of one
//! tensor each, between which the group makes no other call. A bucket starts where its last member did, and is waited for where
//! the first one was; so a tensor joins only if it is there before any member is needed, which also tells that no member
//! depends on another. No tensor is copied: the call takes a list. Where the predicted time would not become less, everything stays.

use super::{Flight, flight, replace};
use crate::{
    costs::size_of,
    graph::{Graph, Op},
    hash::HashMap,
    ids::{OpId, TokenId},
    lower::Context,
    op::{Coll, Kind, Prim},
    plan::Rewrite,
    types::Element,
    verify::verify,
};

/// The most tensors of a bucket, and the most bytes.
const MOST_MEMBERS: usize = 64;
const MOST_BYTES: u64 = 64 << 20;

struct Bucket {
    coll: Coll,
    dtype: Element,
    members: Vec<Flight>,
    bytes: u64,
    /// Where the first member is waited for.
    need: OpId,
}

pub(super) fn apply(cx: &mut Context<'_>) {
    if !cx.options.overlap {
        return;
    }
    let buckets: Vec<Bucket> = collect(cx).into_iter().filter(|bucket| bucket.members.len() > 1).collect();
    if buckets.is_empty() {
        return;
    }
    let (before, names) = (cx.costs.predict(&cx.graph), cx.names.clone());
    let mut graph = cx.graph.clone();
    let (mut flights, mut new, mut by, mut rewrites) =
        (Vec::new(), Vec::new(), HashMap::default(), Vec::new());
    let first_token = cx.token();
    for (number, bucket) in buckets.into_iter().enumerate() {
        let token = TokenId(first_token.0.wrapping_add(number as u32));
        let name = cx.names.fresh("bucket");
        let wait_name = cx.names.fresh(&format!("{name}_wait"));
        let (mut args, mut started, mut ready) = (Vec::new(), Vec::new(), Vec::new());
        for (index, member) in bucket.members.iter().enumerate() {
            let op = cx.graph.op(member.start);
            let ty = graph.ty(op.outs[0]).clone();
            args.push(op.args[0]);
            started.push(graph.add_value(&mut cx.names, &format!("{name}_{index}"), ty.clone()));
            let done = graph.add_value(&mut cx.names, &format!("{wait_name}_{index}"), ty);
            ready.push(done);
            by.insert(member.ready, done);
        }
        let last = bucket.members.last().expect("two at least").start;
        let ops = bucket.members.iter().map(|member| cx.graph.op(member.start).name.clone());
        let ops: Vec<String> = ops.flat_map(|name| cx.covered(&name)).collect();
        let text = format!("{} calls of {} bytes are one", ops.len(), bucket.bytes);
        let kind = Kind::Start { coll: bucket.coll, token };
        new.push((last, Op { name: name.clone(), kind, args, outs: started.clone() }));
        let kind = Kind::Wait { tokens: vec![token] };
        new.push((bucket.need, Op { name: wait_name, kind, args: started, outs: ready }));
        rewrites.push((name, Rewrite { rule: "bucket".into(), ops, text, bound: None }));
        flights.extend(bucket.members);
    }
    replace(&mut graph, &flights, new);
    graph.substitute(&by);
    let after = cx.costs.predict(&graph);
    if after >= before || !verify(&graph).is_empty() {
        cx.names = names;
        let op = cx.graph.op(flights[0].start).name.clone();
        cx.refuse("bucket", &op, format!("{before} ns are predicted to become {after} ns"));
        return;
    }
    for (name, rewrite) in rewrites {
        cx.covers.insert(name, rewrite.ops.clone());
        cx.rewrites.push(rewrite);
    }
    cx.graph = graph;
}

/// Starts that may be one, in order.
fn collect(cx: &Context<'_>) -> Vec<Bucket> {
    let (graph, analysis) = (&cx.graph, cx.graph.analyse());
    let (mut open, mut done) = (HashMap::<String, Bucket>::default(), Vec::new());
    for (index, op) in graph.ops.iter().enumerate().filter(|(_, op)| op.kind.communicates()) {
        let Some(group) = op.kind.group() else {
            done.extend(open.drain().map(|(_, bucket)| bucket));
            continue;
        };
        let found = flight(graph, &analysis, OpId::from(index));
        let Some((found, coll)) = found.filter(|(_, coll)| cx.is_ours(group) && is_served(graph, op, coll))
        else {
            done.extend(open.remove(group));
            continue;
        };
        let ty = graph.ty(op.args[0]);
        let (bytes, dtype, need) = (size_of(graph, ty), ty.dtype, found.wait);
        let joins = |bucket: &Bucket| {
            (&bucket.coll, bucket.dtype) == (&coll, dtype)
                && index < bucket.need.index()
                && bucket.members.len() < MOST_MEMBERS
                && bucket.bytes + bytes <= MOST_BYTES
        };
        match open.get_mut(group) {
            Some(bucket) if joins(bucket) => {
                bucket.members.push(found);
                bucket.bytes += bytes;
                bucket.need = bucket.need.min(need);
            }
            _ => {
                done.extend(open.remove(group));
                open.insert(group.to_owned(), Bucket { coll, dtype, members: vec![found], bytes, need });
            }
        }
    }
    done.extend(open.into_values());
    done.sort_by_key(|bucket| bucket.members[0].start);
    done
}

/// Whether frameworks have such a call of several tensors.
fn is_served(graph: &Graph, op: &Op, coll: &Coll) -> bool {
    graph.ty(op.args[0]).is_contiguous()
        && !coll.in_place
        && matches!(coll.prim, Prim::AllReduce | Prim::AllGather | Prim::ReduceScatter)
}
