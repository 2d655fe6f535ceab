//! A program as a table in device memory, which the kernel interprets.

use antiphon_plan::ReduceOp;

use super::{bases::Base, family::operator, memory::Places};
use crate::layout::{Frame, Operand, Program, Signal, Step, Work};

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
        End = "STEP_END",
        IfClearing = "STEP_IF_CLEARING",
        Clear = "STEP_CLEAR",
        Meet = "STEP_MEET",
        Arrive = "STEP_ARRIVE",
        Signal = "STEP_SIGNAL",
        Release = "STEP_RELEASE",
        Wait = "STEP_WAIT",
        Acquire = "STEP_ACQUIRE",
        Loop = "STEP_LOOP",
        Plain = "STEP_PLAIN",
        Packets = "STEP_PACKETS",
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
    first: u32,
    by_turn: bool,
    counts: [u32; 4],
    share: [u64; 2],
    span: [u64; 2],
}

impl RawStep {
    fn new(kind: Kind, detail: u32) -> Self {
        Self { kind, detail, first: 0, by_turn: false, counts: [0; 4], share: [0; 2], span: [0; 2] }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let Self { kind, detail, first, by_turn, counts: [a, b, c, d], share, span } = *self;
        let words = [kind as u32, detail, first, by_turn.into(), a, b, c, d];
        let mut bytes = words.map(u32::to_le_bytes).as_flattened().to_vec();
        bytes.extend([share, span].as_flattened().iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }
}

/// The most bytes of a loop's turn: as good as infinite, and sums of them do not overflow.
const MOST_UNIT: usize = 1 << 60;

/// More steps than any sensible plan has, also where steps are divided by chunks.
const MOST_STEPS: usize = 1 << 22;

/// The bytes of a table: where the steps of each block begin, the steps, and their items.
pub(super) struct Table {
    pub(super) bytes: Vec<u8>,
    pub(super) steps_at: usize,
    pub(super) items_at: usize,
    /// The block and the program's step of each step, if it is of one.
    pub(super) origins: Vec<Option<(u32, u32)>>,
}

impl Table {
    /// The table of a program, whose memory is where `places` says. None for a program with too many steps or items.
    ///
    /// At the end of every block packets are cleared where that is due.
    pub(super) fn new(program: &Program, places: &Places<'_>) -> Option<Self> {
        let mut writer =
            Writer { places, origin: None, origins: Vec::new(), steps: Vec::new(), items: Vec::new() };
        let blocks = program.blocks.len().max(1); // a grid has a block at least
        let mut starts = Vec::with_capacity(blocks);
        for id in 0..blocks {
            starts.push(writer.origins.len() as u32);
            if let Some(block) = program.blocks.get(id) {
                writer.block(id as u32, &block.steps)?;
            }
            writer.origin = None;
            writer.end(blocks as u32)?;
        }
        let mut bytes: Vec<u8> = starts.into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let steps_at = bytes.len();
        bytes.extend(writer.steps.iter().flat_map(RawStep::to_bytes));
        let items_at = bytes.len();
        for Item { at, base, rank } in writer.items {
            bytes.extend(at.to_le_bytes());
            bytes.extend([base.number(rank), rank as u32].map(u32::to_le_bytes).as_flattened());
        }
        Some(Self { bytes, steps_at, items_at, origins: writer.origins })
    }
}

struct Writer<'a> {
    places: &'a Places<'a>,
    origin: Option<(u32, u32)>,
    origins: Vec<Option<(u32, u32)>>,
    steps: Vec<RawStep>,
    items: Vec<Item>,
}

impl Writer<'_> {
    /// What a block does behind its last step, in a grid of `blocks` blocks.
    fn end(&mut self, blocks: u32) -> Option<()> {
        let condition = self.steps.len();
        self.plain(Kind::IfClearing, 0)?;
        self.barrier(self.places.cleared(), blocks)?;
        self.plain(Kind::Clear, 0)?;
        self.steps[condition].detail = (self.steps.len() - condition - 1) as u32;
        self.plain(Kind::End, 0)
    }

    fn block(&mut self, block: u32, steps: &[Step]) -> Option<()> {
        let mut at = 0;
        while let Some(step) = steps.get(at) {
            self.origin = Some((block, at as u32));
            at += 1;
            let Step::Loop { iterations, unit, steps: inside } = step else {
                self.step(step)?;
                continue;
            };
            // A loop without turns is nothing; one without steps has none.
            let inside = at..at + inside;
            at = inside.end;
            if *iterations == 0 || inside.is_empty() {
                continue;
            }
            let head = self.steps.len();
            let share = [*iterations, (*unit).min(MOST_UNIT) as u64];
            self.push(RawStep { share, ..RawStep::new(Kind::Loop, 0) }, Default::default())?;
            for at in inside {
                self.origin = Some((block, at as u32));
                self.step(&steps[at])?;
            }
            self.steps[head].detail = (self.steps.len() - head - 1) as u32;
        }
        Some(())
    }

    fn step(&mut self, step: &Step) -> Option<()> {
        let places = self.places;
        let own = places.rank;
        match step {
            Step::Meet => self.plain(Kind::Meet, 0),
            Step::Barrier { barrier, of } => self.barrier(places.barrier(*barrier), *of),
            Step::Signal { signals, relaxed } => {
                let counter = |signal: &Signal| (places.channel(signal.rank, signal.channel), signal.rank);
                self.counters(Kind::Signal, (*relaxed).into(), signals, counter)
            }
            Step::Wait(channels) => {
                let counter = |&channel: &usize| (places.channel(own, channel), places.peer(channel));
                self.counters(Kind::Wait, 0, channels, counter)
            }
            Step::Acquire(ids) => self.counters(Kind::Acquire, 0, ids, |&id| (places.semaphore(id), own)),
            Step::Release(ids) => self.counters(Kind::Release, 0, ids, |&id| (places.semaphore(id), own)),
            Step::Loop { .. } => unreachable!("loops do not nest"),
            Step::Data { frame, work } => self.data(frame, work),
        }
    }

    fn data(&mut self, frame: &Frame, work: &Work) -> Option<()> {
        let (op, operands) = operands(work);
        let packets = !operands[1].is_empty() || !operands[3].is_empty();
        let Places { slicing, slice, .. } = *self.places;
        // Slices do not begin where those of the chunk before end, nor do packets that are padded: each chunk is a step.
        let is_cut = slicing.cuts() || packets && !slice.is_multiple_of(8);
        let most = if is_cut { slice } else { usize::MAX };
        let mut start = frame.span.start;
        loop {
            let end = frame.span.end.min(start.saturating_add(most));
            let items = operands.each_ref().map(|list| {
                list.iter().map(|operand| self.places.operand(*operand, start)).collect::<Vec<_>>()
            });
            let kind = if packets { Kind::Packets } else { Kind::Plain };
            let share = [frame.share.start as u64, frame.share.end as u64];
            let span = [start as u64, end as u64];
            let step = RawStep { share, span, by_turn: frame.by_turn, ..RawStep::new(kind, operator(op)) };
            self.push(step, items)?;
            start = end;
            if start >= frame.span.end {
                return Some(());
            }
        }
    }

    /// Blocks meet, `of` of them, with their threads.
    fn barrier(&mut self, counter: u64, of: u32) -> Option<()> {
        self.plain(Kind::Meet, 0)?;
        self.counters(Kind::Arrive, of, &[counter], |&counter| (counter, self.places.rank))?;
        self.plain(Kind::Meet, 0)
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

    fn plain(&mut self, kind: Kind, detail: u32) -> Option<()> {
        self.push(RawStep::new(kind, detail), Default::default())
    }

    fn push(&mut self, step: RawStep, items: [Vec<Item>; 4]) -> Option<()> {
        let first = u32::try_from(self.items.len()).ok()?;
        let counts = items.each_ref().map(|list| list.len() as u32);
        self.steps.push(RawStep { first, counts, ..step });
        self.origins.push(self.origin);
        self.items.extend(items.into_iter().flatten());
        (self.steps.len() <= MOST_STEPS).then_some(())
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
