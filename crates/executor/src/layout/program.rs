//! A rank's part of a plan as steps: every name resolved, every range checked, for chunks of one size.

use std::ops::Range;

use antiphon_plan::{Place, ReduceOp};

use super::placement::Base;

/// The steps of one thread block.
pub(crate) struct Steps {
    pub(crate) steps: Vec<Step>,
    /// The operation of each step.
    pub(crate) places: Vec<Place>,
}

/// A rank's part of a plan.
pub(crate) struct Program {
    pub(crate) blocks: Vec<Steps>,
    pub(crate) layout: Layout,
    pub(crate) barriers: usize,
    /// The most sources of a reduction, and the most of them that are packets.
    pub(crate) sources: usize,
    pub(crate) packet_sources: usize,
}

/// How large chunks are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Bytes of a chunk.
    pub(crate) chunk: usize,
    /// Whether operands are contiguous only within a chunk.
    pub(crate) cut: bool,
}

impl Layout {
    /// Bytes of a chunk's packets, a whole number of packets of both kinds.
    pub(crate) fn packets(chunk: usize) -> Option<usize> {
        chunk.checked_next_multiple_of(8)?.checked_mul(2)
    }
}

/// One step.
#[derive(Debug)]
pub(crate) enum Step {
    /// The threads of the block meet: each has done all steps before, and sees what the others have done. Where one thread runs a
    /// block, this is nothing.
    Meet,
    /// Thread blocks meet, with their threads.
    Barrier { barrier: usize, of: u32 },
    /// One is added to the counts of peers: behind what the block did before its threads last met, unless it is `relaxed`, as
    /// nothing but signals is ahead.
    Signal { signals: Vec<Signal>, relaxed: bool },
    /// Waits for one more signal on each of these channels.
    Wait(Vec<usize>),
    /// Takes one of each semaphore, as soon as there is one.
    Acquire(Vec<usize>),
    /// Adds one to each semaphore.
    Release(Vec<usize>),
    /// Does the next `steps` steps `iterations` times, each time on `unit` bytes.
    Loop { iterations: u64, unit: usize, steps: usize },
    /// Bytes move.
    Data { frame: Frame, work: Work },
    /// The block has a copy engine do something, behind what it did before its threads last met and what it requested before.
    Engine(Request),
}

/// What a copy engine does; on GPUs alone.
#[derive(Debug)]
pub(crate) enum Request {
    Copy {
        frame: Frame,
        from: Operand,
        to: Operand,
    },
    Signal(Vec<Signal>),
    /// One thread waits until the engine has done all that the block has requested.
    Flush,
}

impl Step {
    /// What a turn of a loop costs with it beyond the turn's part of the data: channels and semaphores, and packets, of
    /// which every turn does all, in cache lines.
    pub(crate) fn cost(&self) -> u64 {
        let items = match self {
            Step::Meet | Step::Barrier { .. } | Step::Loop { .. } => 0,
            Step::Signal { signals, .. } => signals.len(),
            Step::Wait(items) | Step::Acquire(items) | Step::Release(items) => items.len(),
            Step::Engine(Request::Signal(signals)) => signals.len(),
            Step::Engine(Request::Copy { .. } | Request::Flush) => 1,
            Step::Data { frame, .. } if frame.by_turn => 0,
            Step::Data { frame, work } => (frame.window(None).len() / 32).saturating_mul(work.operands()),
        };
        (items as u64).saturating_add(1)
    }

    /// Hands a copy over to an engine.
    pub(crate) fn by_engine(self) -> Self {
        match self {
            Step::Data { frame, work: Work::Copy { from, to } } if to.len() == 1 => {
                Step::Engine(Request::Copy { frame, from, to: to[0] })
            }
            other => other,
        }
    }
}

/// A rank's count of signals.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signal {
    pub(crate) rank: usize,
    /// Its place among the rank's counts.
    pub(crate) channel: usize,
    /// The index of this rank's channel to the peer.
    pub(crate) own: usize,
}

/// The bytes of an operation that a step handles.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    /// The block's share of the operation's bytes.
    pub(crate) share: Range<usize>,
    /// The step's part of the operation's bytes.
    pub(crate) span: Range<usize>,
    /// Whether the turns of a loop each do a part of the share. Packets carry no turn: every turn does all of them.
    pub(crate) by_turn: bool,
}

impl Frame {
    /// The bytes, in a turn of a loop with this unit: of the share its `turn`-th unit, of that the step's part.
    pub(crate) fn window(&self, turn: Option<(u64, usize)>) -> Range<usize> {
        let Range { start, end } = self.share;
        let at = |turn: u64, unit| start.saturating_add((turn as usize).saturating_mul(unit)).min(end);
        let share = match turn.filter(|_| self.by_turn) {
            None => start..end,
            Some((turn, unit)) => at(turn, unit)..at(turn + 1, unit),
        };
        let start = share.start.max(self.span.start);
        start..share.end.min(self.span.end).max(start)
    }
}

/// Chunks in a region of some rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operand {
    /// The rank and its region: a [`slot`].
    pub(crate) slot: usize,
    /// The chunk where the operation begins. It may lie before the region's first if the step begins later.
    pub(crate) chunk: usize,
}

impl Operand {
    pub(crate) fn new(rank: usize, base: Base, chunk: usize) -> Self {
        Operand { slot: slot(rank, base), chunk }
    }

    pub(crate) fn rank(&self) -> usize {
        self.slot / Base::COUNT
    }

    pub(crate) fn base(&self) -> Base {
        Base::ALL[self.slot % Base::COUNT]
    }
}

/// The index of a rank's region in the list of all ranks' chunk addresses.
pub(crate) fn slot(rank: usize, base: Base) -> usize {
    rank * Base::COUNT + base as usize
}

/// The work on bytes.
#[derive(Debug)]
pub(crate) enum Work {
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

impl Work {
    /// How many places it touches.
    fn operands(&self) -> usize {
        match self {
            Work::Copy { to, .. } | Work::Pack { to, .. } | Work::Forward { to, .. } => 1 + to.len(),
            Work::Unpack { .. } => 2,
            Work::Reduce(reduction) => {
                let Reduction { plain, packets, copies, packed, .. } = &**reduction;
                1 + plain.len() + packets.len() + copies.len() + packed.len()
            }
        }
    }
}

/// A reduction and where its result goes.
#[derive(Debug)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) plain: Vec<Operand>,
    pub(crate) packets: Vec<Operand>,
    pub(crate) to: Operand,
    pub(crate) copies: Vec<Operand>,
    pub(crate) packed: Vec<Operand>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of a share belongs to exactly one turn and one step, also where nothing divides evenly.
    #[test]
    fn turns_cover_a_share_once() {
        for (share, unit) in [(0..160, 48), (40..160, 160), (100..101, 1000), (16..16, 16)] {
            let mut seen = [0; 160];
            for turn in 0..(160u64).div_ceil(unit as u64) {
                for span in [0..53, 53..160] {
                    let frame = Frame { share: share.clone(), span, by_turn: true };
                    frame.window(Some((turn, unit))).for_each(|byte| seen[byte] += 1);
                }
            }
            let expected: Vec<_> = (0..160).map(|byte| i32::from(share.contains(&byte))).collect();
            assert_eq!(seen[..], expected, "{share:?} by {unit}");
        }
    }

    /// A block's share is cut into turns, and not each turn into shares.
    #[test]
    fn turns_begin_where_the_share_begins() {
        let frame = Frame { share: 64..128, span: 0..128, by_turn: true };
        assert_eq!([0, 1, 2].map(|turn| frame.window(Some((turn, 48)))), [64..112, 112..128, 128..128]);
    }

    #[test]
    fn every_turn_does_all_packets() {
        let frame = Frame { share: 64..128, span: 0..128, by_turn: false };
        assert_eq!([0, 1].map(|turn| frame.window(Some((turn, 48)))), [64..128, 64..128]);
    }

    #[test]
    fn a_turn_far_beyond_the_end_is_empty() {
        let frame = Frame { share: 0..100, span: 0..100, by_turn: true };
        assert!(frame.window(Some((1 << 62, 1 << 20))).is_empty());
    }
}
