//! Checks that every signal has its wait.

use std::collections::BTreeMap;

use crate::error::PlanError;
use crate::ids::{ChannelIndex, OriginId, Rank};
use crate::op::{ChannelType, Notify, NotifyKind, Op, OpKind, Put, PutKind};
use crate::plan::{Origin, Plan};
use crate::resolve::Block;

/// The signals of a rank to another, and the waits for them: the lines that made them, as far as they are known.
#[derive(Default)]
struct Count {
    signals: Vec<Option<OriginId>>,
    waits: Vec<Option<OriginId>>,
}

impl Count {
    fn is_paired(&self) -> bool {
        self.signals.len() == self.waits.len()
    }

    /// The lines of those that there are too many of, each once.
    fn lines(&self, plan: &Plan) -> Vec<Origin> {
        let more = if self.signals.len() > self.waits.len() { &self.signals } else { &self.waits };
        let mut lines: Vec<Origin> = Vec::new();
        for origin in more.iter().filter_map(|&origin| plan.origin(origin)) {
            if !lines.contains(origin) {
                lines.push(origin.clone());
            }
        }
        lines
    }
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
    let wrong = counts.into_iter().find(|(_, count)| !count.is_paired());
    match wrong {
        Some(((from, to, channel_type), count)) => {
            let (signals, waits) = (count.signals.len() as u64, count.waits.len() as u64);
            let lines = count.lines(plan);
            Err(PlanError::Pairing { from, to, channel_type, signals, waits, lines })
        }
        None => Ok(()),
    }
}

fn count(block: &Block, op: &Op, counts: &mut BTreeMap<(Rank, Rank, ChannelType), Count>) {
    let mut each = |channel_type, channels: &[ChannelIndex], wait: bool| {
        for &channel in channels {
            let (own, peer) = (block.rank(), block.peer(channel_type, channel));
            match wait {
                true => counts.entry((peer, own, channel_type)).or_default().waits.push(op.origin),
                false => counts.entry((own, peer, channel_type)).or_default().signals.push(op.origin),
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
