//! What a kernel that gave up says of the operation.

use antiphon_device::cuda::WaitReport;
use antiphon_plan::{Place, Plan, Rank};

use crate::{
    Waiting,
    layout::{Program, Step, channels},
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
        Step::Wait(waited) => {
            let channel = |place: usize| channels(plan, rank.index()).nth(place);
            let of_peer =
                |place: &&usize| channel(**place).is_some_and(|(.., peer)| peer == Rank(report.peer));
            let place = *waited.iter().find(of_peer).or(waited.first())?;
            let (channel_type, channel, peer) = channel(place)?;
            Waiting::Signal { peer, channel_type, channel, expected, seen }
        }
        Step::Acquire(ids) => Waiting::Semaphore { semaphore: *ids.first()? },
        Step::Barrier { of, .. } => {
            let before = expected.saturating_sub(u64::from(*of));
            Waiting::Barrier { arrived: seen.saturating_sub(before) as u32, expected: *of }
        }
        Step::Engine(_) => Waiting::Engine { expected, seen },
        Step::Data { .. } => Waiting::Packet { expected: expected as u32, seen: seen as u32, byte: 0 },
        _ => return None,
    };
    Some((*place, waiting))
}

#[cfg(test)]
mod tests {
    use antiphon_device::cuda::GaveUp;
    use antiphon_language::library::{Setting, find};
    use antiphon_plan::{ChannelId, Extent, ThreadBlockId, Wiring};

    use super::*;
    use crate::{
        PacketKind,
        layout::{Placements, Ports, Target, compile},
    };

    /// What a report of each step of a rank's first block is said to be.
    fn reported(algorithm: &str) -> Vec<(Place, Waiting)> {
        let plan = find(algorithm).unwrap().plan(&Setting::new(3)).unwrap();
        let (placements, wiring) = (Placements::new(&plan, false), Wiring::new(&plan));
        let bytes = plan.gpus[1].input_chunks * 64;
        let program = compile(Target {
            plan: &plan,
            wiring: &wiring,
            placements: &placements,
            rank: 1,
            packets: PacketKind::LL16,
            ports: Ports::Blocks,
            element: 4,
            extent: Extent::new(&plan, bytes, bytes).unwrap(),
            sliced: false,
        })
        .unwrap();
        let report = WaitReport {
            reason: GaveUp::Deadline,
            rank: 1,
            peer: 2,
            doing: [0; 2],
            block: 0,
            thread: 0,
            expected: 7,
            seen: [6, 1],
            waited_ns: 1,
        };
        let steps = 0..program.blocks[0].steps.len();
        steps.filter_map(|step| waiting(&plan, Rank(1), &program, (0, step as u32), &report)).collect()
    }

    #[test]
    fn a_report_names_the_operation_and_what_it_waited_for() {
        let signals = reported("two-shot-all-reduce");
        let of_peer = |(place, waiting): &(Place, Waiting)| {
            assert_eq!((place.rank, place.threadblock), (Rank(1), ThreadBlockId(0)));
            // Rank 1's channels lead to rank 2, and then around to rank 0.
            matches!(
                waiting,
                Waiting::Signal { peer: Rank(2), channel: ChannelId(0), expected: 7, seen: 6, .. }
            )
        };
        assert!(signals.iter().filter(|each| of_peer(each)).count() >= 2, "{signals:?}");
        let packets = reported("packet-all-reduce");
        let of_launch =
            |(_, waiting): &(Place, Waiting)| matches!(waiting, Waiting::Packet { expected: 7, seen: 6, .. });
        assert!(packets.iter().any(of_launch), "{packets:?}");
    }
}
