//! A program as a table in device memory, which the kernel interprets.

use antiphon_plan::ReduceOp;

use super::{family::operator, memory::Places};
use crate::layout::{Operand, Program, Step, Work};

/// Makes an enum of numbers that the kernel knows by the names given here.
macro_rules! numbers {
    ($(#[$meta:meta])* enum $Name:ident { $($Variant:ident = $name:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum $Name {
            $($Variant,)*
        }

        impl $Name {
            pub(super) const ALL: &'static [Self] = &[$(Self::$Variant),*];

            /// The name in the kernel.
            pub(super) const fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)*
                }
            }
        }
    };
}

numbers! {
    /// What a step does.
    enum Kind {
        Meet = "STEP_MEET",
        Barrier = "STEP_BARRIER",
        Signal = "STEP_SIGNAL",
        Release = "STEP_RELEASE",
        Wait = "STEP_WAIT",
        Acquire = "STEP_ACQUIRE",
        Loop = "STEP_LOOP",
        Data = "STEP_DATA",
    }
}
numbers! {
    /// What an item's address counts from.
    enum Base {
        Absolute = "ABSOLUTE",
        OfInput = "OF_INPUT",
        OfOutput = "OF_OUTPUT",
    }
}

/// `plan_item` of ops.cuh.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) at: u64,
    pub(super) base: Base,
    pub(super) rank: usize,
}

/// `plan_step` of ops.cuh.
struct RawStep {
    kind: Kind,
    detail: u32,
    by_turn: bool,
    share: [u64; 2],
    span: [u64; 2],
}

impl RawStep {
    fn new(kind: Kind, detail: u32) -> Self {
        Self { kind, detail, by_turn: false, share: [0; 2], span: [0; 2] }
    }

    const BYTES: usize = 64;
}

/// The most bytes of a loop's turn: as good as infinite, and sums of them do not overflow.
const MOST_UNIT: usize = 1 << 60;

/// The bytes of a table: where the steps of each block begin, the steps, and their items.
pub(super) struct Table {
    pub(super) bytes: Vec<u8>,
    pub(super) steps_at: usize,
    pub(super) items_at: usize,
}

impl Table {
    /// The table of a program, whose memory is where `places` says. None for a program with more than 2^32 items.
    pub(super) fn new(program: &Program, places: &Places<'_>) -> Option<Self> {
        let mut writer = Writer { places, steps: Vec::new(), items: Vec::new() };
        let mut starts = vec![0];
        for block in &program.blocks {
            block.steps.iter().try_for_each(|step| writer.step(step))?;
            starts.push(u32::try_from(writer.steps.len() / RawStep::BYTES).ok()?);
        }
        if program.blocks.is_empty() {
            starts.push(0); // a grid has a block at least
        }
        let mut bytes: Vec<u8> = starts.into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let steps_at = bytes.len();
        bytes.append(&mut writer.steps);
        let items_at = bytes.len();
        for Item { at, base, rank } in writer.items {
            bytes.extend(at.to_le_bytes());
            bytes.extend([base as u32, rank as u32].map(u32::to_le_bytes).as_flattened());
        }
        Some(Self { bytes, steps_at, items_at })
    }
}

struct Writer<'a> {
    places: &'a Places<'a>,
    steps: Vec<u8>,
    items: Vec<Item>,
}

impl Writer<'_> {
    fn step(&mut self, step: &Step) -> Option<()> {
        let places = self.places;
        match step {
            Step::Meet => self.push(RawStep::new(Kind::Meet, 0), [vec![], vec![], vec![], vec![]]),
            Step::Barrier { barrier, of } => self
                .counters(Kind::Barrier, *of, &[*barrier], |barrier| (places.barrier(*barrier), places.rank)),
            Step::Signal { signals, relaxed } => {
                self.counters(Kind::Signal, (*relaxed).into(), signals, |signal| {
                    (places.channel(signal.rank, signal.channel), signal.rank)
                })
            }
            Step::Wait(channels) => self.counters(Kind::Wait, 0, channels, |&channel| {
                (places.channel(places.rank, channel), places.peer(channel))
            }),
            Step::Acquire(ids) => {
                self.counters(Kind::Acquire, 0, ids, |&id| (places.semaphore(id), places.rank))
            }
            Step::Release(ids) => {
                self.counters(Kind::Release, 0, ids, |&id| (places.semaphore(id), places.rank))
            }
            Step::Loop { iterations, unit, steps } => {
                let detail = u32::try_from(*steps).ok()?;
                let share = [*iterations, (*unit).min(MOST_UNIT) as u64];
                self.push(
                    RawStep { share, ..RawStep::new(Kind::Loop, detail) },
                    [vec![], vec![], vec![], vec![]],
                )
            }
            Step::Data { frame, work } => {
                let (op, operands) = operands(work);
                let range = |range: &std::ops::Range<usize>| [range.start as u64, range.end as u64];
                let (share, span) = (range(&frame.share), range(&frame.span));
                let [sources, packets, to, packed] = operands;
                let items = |operands: Vec<Operand>| -> Vec<Item> {
                    operands.into_iter().map(|operand| places.operand(operand, frame.span.start)).collect()
                };
                let step =
                    RawStep { share, span, by_turn: frame.by_turn, ..RawStep::new(Kind::Data, operator(op)) };
                self.push(step, [items(sources), items(packets), items(to), items(packed)])
            }
        }
    }

    fn counters<T>(
        &mut self,
        kind: Kind,
        detail: u32,
        all: &[T],
        of: impl Fn(&T) -> (u64, usize),
    ) -> Option<()> {
        let item = |each| {
            let (at, rank) = of(each);
            Item { at, base: Base::Absolute, rank }
        };
        self.push(RawStep::new(kind, detail), [all.iter().map(item).collect(), vec![], vec![], vec![]])
    }

    fn push(&mut self, step: RawStep, items: [Vec<Item>; 4]) -> Option<()> {
        let RawStep { kind, detail, by_turn, share, span, .. } = step;
        let first = u32::try_from(self.items.len()).ok()?;
        let [a, b, c, d] = items.each_ref().map(|list| list.len() as u32);
        let words = [kind as u32, detail, first, by_turn.into(), a, b, c, d];
        self.steps.extend(words.map(u32::to_le_bytes).as_flattened());
        self.steps.extend([share, span].as_flattened().iter().flat_map(|bytes| bytes.to_le_bytes()));
        self.items.extend(items.into_iter().flatten());
        Some(())
    }
}

/// The operator of some work, and its plain sources, packets, plain destinations and those that get packets.
fn operands(work: &Work) -> (Option<ReduceOp>, [Vec<Operand>; 4]) {
    let none = Vec::new;
    match work {
        Work::Copy { from, to } => (None, [vec![*from], none(), to.clone(), none()]),
        Work::Pack { from, to } => (None, [vec![*from], none(), none(), to.clone()]),
        Work::Unpack { from, to } => (None, [none(), vec![*from], vec![*to], none()]),
        Work::Forward { from, to } => (None, [none(), vec![*from], none(), to.clone()]),
        Work::Reduce(reduction) => {
            let to = std::iter::once(reduction.to).chain(reduction.copies.iter().copied()).collect();
            let operands = [reduction.plain.clone(), reduction.packets.clone(), to, reduction.packed.clone()];
            (Some(reduction.op), operands)
        }
    }
}
