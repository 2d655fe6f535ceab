//! Neighbours become one operation where one can do the work of both.

mod data;
mod sync;

use super::each_block;
use crate::op::{Op, OpKind};
use crate::plan::Plan;

/// Makes one operation of neighbours in a thread block wherever one can do the work of both, and takes back what one of
/// two neighbours asks of [`DataSync`](crate::DataSync) where the other has the threads meet there already.
///
/// The pass goes from left to right. An operation takes in the next one as long as that is possible; nothing is moved. Reductions with
/// the same first source and the same destination become one with all their sources, also where the destination is another
/// chunk than that source, and so would be overwritten by the second: the fused reduction accumulates. The rules are those
/// of MSCCL++ 0.9.0.
pub fn fuse(plan: Plan) -> Plan {
    each_block(plan, fuse_ops)
}

fn fuse_ops(ops: Vec<Op>) -> Vec<Op> {
    let mut done = Vec::with_capacity(ops.len());
    let mut ops = ops.into_iter();
    let Some(mut current) = ops.next().map(fuse_inside) else { return done };
    for next in ops {
        if let Some(next) = absorb(&mut current, next) {
            done.push(std::mem::replace(&mut current, fuse_inside(next)));
        }
    }
    done.push(current);
    done
}

fn fuse_inside(mut op: Op) -> Op {
    if let OpKind::Pipeline(pipeline) = &mut op.kind {
        pipeline.ops = fuse_ops(std::mem::take(&mut pipeline.ops));
    }
    op
}

/// Makes one operation of two, or gives the second one back.
fn absorb(current: &mut Op, mut next: Op) -> Option<Op> {
    if sync::is_enough_after(&mut current.kind, &next.kind) || data::merge(&mut current.kind, &next.kind) {
        return None;
    }
    if sync::is_enough_before(&mut next.kind, &current.kind) {
        *current = fuse_inside(next);
        return None;
    }
    sync::meet_once(&mut current.kind, &mut next.kind);
    Some(next)
}
