//! Inserts the synchronisations of threads that a program asks for.

use super::each_block;
use crate::op::{DataSync, Op, OpKind};
use crate::plan::Plan;

impl OpKind {
    /// Where a signal, wait, flush, acquire or release has the block's threads meet; other operations have no say.
    pub(super) fn data_sync(&mut self) -> Option<&mut DataSync> {
        match self {
            OpKind::Notify(notify) => Some(&mut notify.data_sync),
            OpKind::Semaphore(semaphore) => Some(&mut semaphore.data_sync),
            _ => None,
        }
    }
}

/// Puts a [`OpKind::Nop`] on each side on which an operation asks for it by its [`DataSync`], which is [`DataSync::NONE`]
/// afterwards.
pub fn insert_data_sync(plan: Plan) -> Plan {
    each_block(plan, insert)
}

fn insert(ops: Vec<Op>) -> Vec<Op> {
    let mut done = Vec::with_capacity(ops.len());
    for mut op in ops {
        if let OpKind::Pipeline(pipeline) = &mut op.kind {
            pipeline.ops = insert(std::mem::take(&mut pipeline.ops));
        }
        let DataSync { before, after } = op.kind.data_sync().map(std::mem::take).unwrap_or_default();
        let nop = Op { kind: OpKind::Nop, origin: op.origin };
        done.extend(before.then(|| nop.clone()));
        done.push(op);
        done.extend(after.then_some(nop));
    }
    done
}
