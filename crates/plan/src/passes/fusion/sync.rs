//! Neighbouring synchronisations of a thread block's threads become one.

use crate::op::{DataSync, OpKind};

/// Whether the threads meet first and last thing in an operation. A pipeline begins with its first operation and ends
/// with its last.
fn meets(op: &mut OpKind) -> DataSync {
    match op {
        OpKind::Nop | OpKind::Barrier { .. } => DataSync::BOTH,
        OpKind::Pipeline(pipeline) => DataSync {
            before: pipeline.ops.first_mut().is_some_and(|op| meets(&mut op.kind).before),
            after: pipeline.ops.last_mut().is_some_and(|op| meets(&mut op.kind).after),
        },
        _ => op.data_sync().copied().unwrap_or_default(),
    }
}

/// Whether the threads have met at the end of `current`, so that a nop behind it is none too many. What an operation only
/// asks for is not there yet.
pub(super) fn is_enough_after(current: &mut OpKind, next: &OpKind) -> bool {
    *next == OpKind::Nop && current.data_sync().is_none() && meets(current).after
}

/// The same of a nop before `next`.
pub(super) fn is_enough_before(next: &mut OpKind, current: &OpKind) -> bool {
    *current == OpKind::Nop && next.data_sync().is_none() && meets(next).before
}

/// Takes back what one of two neighbours asks for where the other has the threads meet.
pub(super) fn meet_once(current: &mut OpKind, next: &mut OpKind) {
    let there = meets(next).before;
    match (current.data_sync().is_some(), next.data_sync()) {
        (true, _) if there => current.data_sync().expect("just seen").after = false,
        (false, Some(data_sync)) if meets(current).after => data_sync.before = false,
        _ => {}
    }
}
