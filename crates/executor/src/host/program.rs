//! A rank's part of a plan as steps: every name resolved, every range checked, for chunks of one size.

use std::ops::Range;

use antiphon_plan::{Extent, GroupShare, Place, ReduceOp};

use super::home::Base;

/// What one thread block does.
pub(super) struct Steps {
    pub(super) steps: Vec<Step>,
    /// Which operation each step belongs to.
    pub(super) places: Vec<Place>,
}

/// A rank's part of a plan.
pub(super) struct Program {
    pub(super) blocks: Vec<Steps>,
    pub(super) layout: Layout,
    pub(super) barriers: usize,
    /// The most sources of a reduction, and the most of them that are packets.
    pub(super) sources: usize,
    pub(super) packet_sources: usize,
}

/// How large chunks are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) extent: Extent,
    /// Bytes of a chunk.
    pub(super) chunk: usize,
    /// Whether operands are contiguous only within a chunk.
    pub(super) cut: bool,
}

impl Layout {
    /// Bytes of a chunk's packets, a whole number of packets of both kinds.
    pub(super) fn packets(chunk: usize) -> Option<usize> {
        chunk.checked_next_multiple_of(8)?.checked_mul(2)
    }
}

/// One step.
#[derive(Debug)]
pub(super) enum Step {
    /// Thread blocks meet.
    Barrier { barrier: usize, of: u32 },
    /// One is added to the counts of peers.
    Signal(Vec<Signal>),
    /// Waits for one more signal on each of these channels.
    Wait(Vec<usize>),
    /// Takes one of each semaphore, as soon as there is one.
    Acquire(Vec<usize>),
    /// Adds one to each semaphore.
    Release(Vec<usize>),
    /// The next `steps` steps so many times, each time on `unit` bytes.
    Loop { iterations: u64, unit: usize, steps: usize },
    /// Bytes move.
    Data { frame: Frame, work: Work },
}

/// Somebody's count of signals.
#[derive(Debug, Clone, Copy)]
pub(super) struct Signal {
    pub(super) rank: usize,
    /// Its place among the rank's counts.
    pub(super) channel: usize,
    /// Which of this rank's channels leads there.
    pub(super) own: usize,
}

/// Which bytes of an operation a step is about.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// Bytes of the operation.
    pub(super) total: usize,
    /// The block's share of them.
    pub(super) group: Option<GroupShare>,
    /// The step's part of them.
    pub(super) span: Range<usize>,
}

impl Frame {
    /// The bytes, of the given turn of a loop with this unit.
    pub(super) fn window(&self, turn: Option<(u64, usize)>, extent: &Extent) -> Range<usize> {
        let at = |turn: u64, unit: usize| (turn as usize).saturating_mul(unit).min(self.total);
        let whole = turn.map_or(0..self.total, |(turn, unit)| at(turn, unit)..at(turn + 1, unit));
        let share = match self.group {
            None => whole,
            Some(group) => {
                let share = extent.share(&(whole.start as u64..whole.end as u64), group);
                share.start as usize..share.end as usize
            }
        };
        let start = share.start.max(self.span.start);
        start..share.end.min(self.span.end).max(start)
    }
}

/// Chunks as somebody's address book has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Operand {
    /// Whose book, and which.
    pub(super) slot: usize,
    /// The chunk where the operation begins. It may lie before the book's first if the step begins later.
    pub(super) chunk: usize,
}

impl Operand {
    pub(super) fn new(rank: usize, base: Base, chunk: usize) -> Self {
        Operand { slot: slot(rank, base), chunk }
    }

    pub(super) fn rank(&self) -> usize {
        self.slot / Base::COUNT
    }
}

/// A place in the list of all ranks' address books.
pub(super) fn slot(rank: usize, base: Base) -> usize {
    rank * Base::COUNT + base as usize
}

/// What is done with bytes.
#[derive(Debug)]
pub(super) enum Work {
    /// Plain to plain.
    Copy { from: Operand, to: Vec<Operand> },
    /// Plain to packets.
    Pack { from: Operand, to: Vec<Operand> },
    /// Packets, as soon as they are there, to plain.
    Unpack { from: Operand, to: Operand },
    /// Packets, as soon as they are there, to packets.
    Forward { from: Operand, to: Vec<Operand> },
    /// Plain sources, then packets, to one plain destination, and from there to others.
    Reduce(Box<Reduction>),
}

/// A reduction and where its result goes.
#[derive(Debug)]
pub(super) struct Reduction {
    pub(super) op: ReduceOp,
    pub(super) plain: Vec<Operand>,
    pub(super) packets: Vec<Operand>,
    pub(super) to: Operand,
    pub(super) copies: Vec<Operand>,
    pub(super) packed: Vec<Operand>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon_plan::Plan;

    fn extent() -> Extent {
        let text = r#"{"name": null, "collective": "test", "gpus": [{"id": 0, "input_chunks": 1, "output_chunks": 1,
            "scratch_chunks": 0, "threadblocks": [], "channels": []}]}"#;
        Extent::new(&Plan::from_json(text.as_bytes()).unwrap(), 160, 160).unwrap()
    }

    /// Every byte of an operation belongs to exactly one share of one turn, also where nothing divides evenly.
    #[test]
    fn windows_cover_all_bytes_once() {
        for (total, unit, blocks) in [(160, 48, 3), (160, 160, 4), (160, 1000, 1), (16, 16, 5), (0, 16, 2)] {
            let mut seen = vec![0; total];
            for turn in 0..(total as u64).div_ceil(unit as u64) {
                for tb_id in 0..blocks {
                    let group = Some(GroupShare { tb_id, tbg_size: blocks });
                    for span in [0..total / 3, total / 3..total] {
                        let frame = Frame { total, group, span };
                        frame.window(Some((turn, unit)), &extent()).for_each(|byte| seen[byte] += 1);
                    }
                }
            }
            assert_eq!(seen, vec![1; total], "{total} bytes by {unit}, {blocks} blocks");
        }
    }

    #[test]
    fn a_turn_far_beyond_the_end_is_empty() {
        let frame = Frame { total: 100, group: None, span: 0..100 };
        assert!(frame.window(Some((1 << 62, 1 << 20)), &extent()).is_empty());
    }
}
