//! Checks that every signal has its wait.

use std::collections::BTreeMap;

use crate::error::PlanError;
use crate::ids::{ChannelIndex, Rank};
use crate::op::{ChannelType, Notify, NotifyKind, Op, OpKind, Put, PutKind};
use crate::plan::Plan;
use crate::resolve::Block;

#[derive(Default)]
struct Count {
    signals: u64,
    waits: u64,
}

/// Checks that each rank waits as often for another as that one signals it, for memory and port channels each.
///
/// Channels of one pair are taken together, relaxed and ordered signals too, and what a pipeline does counts once. That a
/// plan passes is thus necessary for it to end, and by far not sufficient.
///
/// # Errors
/// [`PlanError::Pairing`], for the first such pair in ascending order.
///
/// # Panics
/// Perhaps, on a plan that [`Plan::check`] does not pass.
pub fn check_pairing(plan: &Plan) -> Result<(), PlanError> {
    let mut counts = BTreeMap::<(Rank, Rank, ChannelType), Count>::new();
    for block in Block::all(plan) {
        for op in &block.get().ops {
            count(&block, op, &mut counts);
        }
    }
    let wrong = counts.into_iter().find(|(_, count)| count.signals != count.waits);
    match wrong {
        Some(((from, to, channel_type), Count { signals, waits })) => {
            Err(PlanError::Pairing { from, to, channel_type, signals, waits })
        }
        None => Ok(()),
    }
}

fn count(block: &Block, op: &Op, counts: &mut BTreeMap<(Rank, Rank, ChannelType), Count>) {
    let mut each = |channel_type, channels: &[ChannelIndex], wait: bool| {
        for &channel in channels {
            let (own, peer) = (block.rank(), block.peer(channel_type, channel));
            match wait {
                true => counts.entry((peer, own, channel_type)).or_default().waits += 1,
                false => counts.entry((own, peer, channel_type)).or_default().signals += 1,
            }
        }
    };
    match &op.kind {
        OpKind::Notify(Notify { kind: NotifyKind::Signal, channels, channel_type, .. }) => {
            each(*channel_type, channels, false);
        }
        OpKind::Notify(Notify { kind: NotifyKind::Wait, channels, channel_type, .. }) => {
            each(*channel_type, channels, true);
        }
        OpKind::Put(Put {
            kind: PutKind::WithSignal | PutKind::WithSignalAndFlush,
            channels,
            channel_type,
            ..
        }) => {
            each(*channel_type, channels, false);
        }
        OpKind::Pipeline(pipeline) => pipeline.ops.iter().for_each(|op| count(block, op, counts)),
        _ => {}
    }
}
