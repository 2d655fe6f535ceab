//! What a kernel that gave up says of the operation.

use antiphon_device::cuda::WaitReport;
use antiphon_plan::{ChannelId, ChannelType, Place, Plan, Rank};

use crate::{
    Waiting,
    layout::{Program, Step},
};

/// The operation that waited in vain, and for what; none if nothing is awaited in this step, the `at`-th of the
/// block.
pub(super) fn waiting(
    plan: &Plan,
    rank: Rank,
    program: &Program,
    (block, at): (u32, u32),
    report: &WaitReport,
) -> Option<(Place, Waiting)> {
    let (block, at) = (program.blocks.get(block as usize)?, at as usize);
    let (step, place) = (block.steps.get(at)?, block.places.get(at)?);
    let (expected, seen) = (report.expected, report.seen[0]);
    let waiting = match step {
        Step::Wait(channels) => {
            let peer = Rank(report.peer);
            let of = |channel: &&usize| channel_of(plan, rank, **channel).is_some_and(|(.., of)| of == peer);
            let channel = *channels.iter().find(of).or(channels.first())?;
            let (channel_type, channel, peer) = channel_of(plan, rank, channel)?;
            Waiting::Signal { peer, channel_type, channel, expected, seen }
        }
        Step::Acquire(ids) => Waiting::Semaphore { semaphore: *ids.first()? },
        Step::Barrier { of, .. } => {
            let before = expected.saturating_sub(u64::from(*of));
            Waiting::Barrier { arrived: seen.saturating_sub(before) as u32, expected: *of }
        }
        Step::Data { .. } => Waiting::Packet { expected: expected as u32, seen: seen as u32, byte: 0 },
        _ => return None,
    };
    Some((*place, waiting))
}

/// A channel of a rank by its place among all of them: memory channels, then port channels.
fn channel_of(plan: &Plan, rank: Rank, place: usize) -> Option<(ChannelType, ChannelId, Rank)> {
    let gpu = &plan.gpus[rank.index()];
    let of = |channel_type| {
        let peers = gpu.peers(channel_type).iter().enumerate();
        peers.map(move |(id, &peer)| (channel_type, ChannelId(id as u32), peer))
    };
    of(ChannelType::Memory).chain(of(ChannelType::Port)).nth(place)
}
