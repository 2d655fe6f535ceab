//! A program as the steps that a kernel knows, wherever the memory lies.

use antiphon_plan::ReduceOp;

use super::family::operator;
use crate::layout::{Frame, Operand, Program, Request, Signal, Step, Work};

/// Makes an enum of numbers that the kernel knows by the names given here.
macro_rules! numbers {
    ($(#[$meta:meta])* enum $Name:ident { $($Variant:ident = $name:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
        Copy = "STEP_COPY",
        Raise = "STEP_RAISE",
        Flush = "STEP_FLUSH",
    }
}

/// What a step touches.
#[derive(Debug, Clone, Copy)]
pub(super) enum Touched {
    /// The count of signals of a rank's channel.
    Signals { rank: usize, channel: usize },
    /// That of one of this rank's channels, for which it waits.
    Awaited { channel: usize },
    /// One of this rank's semaphores.
    Semaphore(usize),
    /// The arrivals at one of this rank's barriers.
    Barrier(usize),
    /// This rank's blocks that have cleared packets.
    Cleared,
    /// Bytes, in a step that begins at byte `start` of its operation.
    Bytes { operand: Operand, start: usize },
}

impl Touched {
    fn signals(signal: &Signal) -> Self {
        Self::Signals { rank: signal.rank, channel: signal.channel }
    }
}

/// A step, as `plan_step` of ops.cuh describes it.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) kind: Kind,
    pub(super) detail: u32,
    pub(super) first: u32,
    pub(super) by_turn: bool,
    pub(super) counts: [u32; 4],
    pub(super) share: [u64; 2],
    pub(super) span: [u64; 2],
}

impl Listed {
    fn new(kind: Kind, detail: u32) -> Self {
        Self { kind, detail, first: 0, by_turn: false, counts: [0; 4], share: [0; 2], span: [0; 2] }
    }

    /// How many items it has.
    pub(super) fn items(&self) -> u32 {
        self.counts.iter().sum()
    }
}

/// The most bytes of a loop's turn: as good as infinite, and sums of them do not overflow.
const MOST_UNIT: usize = 1 << 60;

/// More steps than any sensible plan has, also where steps are divided by chunks.
const MOST_STEPS: usize = 1 << 22;

/// The steps of a rank's blocks, one block's behind the other's, and their items.
pub(super) struct Listing {
    /// Where the steps of each block begin.
    starts: Vec<usize>,
    pub(super) steps: Vec<Listed>,
    pub(super) items: Vec<Touched>,
    /// The block and the program's step of each step, if it is of one.
    pub(super) origins: Vec<Option<(u32, u32)>>,
}

impl Listing {
    /// The steps that every block has behind its own.
    pub(super) const END: usize = 6;

    /// The steps of a rank's program, for slices of the chunks if it `is_sliced`. None if they are too many.
    ///
    /// At the end of every block packets are cleared where that is due.
    pub(super) fn new(program: &Program, is_sliced: bool) -> Option<Self> {
        let listing = Self { starts: Vec::new(), steps: Vec::new(), items: Vec::new(), origins: Vec::new() };
        let mut writer = Writer { listing, chunk: program.layout.chunk, is_sliced, origin: None };
        let blocks = program.blocks.len().max(1); // a grid has a block at least
        for id in 0..blocks {
            let start = writer.listing.steps.len();
            writer.listing.starts.push(start);
            if let Some(block) = program.blocks.get(id) {
                writer.block(id as u32, &block.steps)?;
            }
            writer.origin = None;
            writer.end(blocks as u32)?;
        }
        Some(writer.listing)
    }

    /// The steps of each block: the place of the first, and they.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, &[Listed])> {
        let ends = self.starts.iter().skip(1).copied().chain([self.steps.len()]);
        self.starts.iter().zip(ends).map(|(&start, end)| (start, &self.steps[start..end]))
    }
}

struct Writer {
    listing: Listing,
    /// Bytes of a chunk, or of its slice.
    chunk: usize,
    is_sliced: bool,
    origin: Option<(u32, u32)>,
}

impl Writer {
    /// What a block does behind its last step, in a grid of `blocks` blocks.
    fn end(&mut self, blocks: u32) -> Option<()> {
        let condition = self.listing.steps.len();
        self.plain(Kind::IfClearing, 0)?;
        self.barrier(Touched::Cleared, blocks)?;
        self.plain(Kind::Clear, 0)?;
        self.listing.steps[condition].detail = (self.listing.steps.len() - condition - 1) as u32;
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
            let head = self.listing.steps.len();
            let share = [*iterations, (*unit).min(MOST_UNIT) as u64];
            self.push(Listed { share, ..Listed::new(Kind::Loop, 0) }, Default::default())?;
            for at in inside {
                self.origin = Some((block, at as u32));
                self.step(&steps[at])?;
            }
            self.listing.steps[head].detail = (self.listing.steps.len() - head - 1) as u32;
        }
        Some(())
    }

    fn step(&mut self, step: &Step) -> Option<()> {
        match step {
            Step::Meet => self.plain(Kind::Meet, 0),
            Step::Barrier { barrier, of } => self.barrier(Touched::Barrier(*barrier), *of),
            Step::Signal { signals, relaxed } => {
                self.counters(Kind::Signal, (*relaxed).into(), signals, Touched::signals)
            }
            Step::Wait(channels) => {
                self.counters(Kind::Wait, 0, channels, |&channel| Touched::Awaited { channel })
            }
            Step::Acquire(ids) => self.counters(Kind::Acquire, 0, ids, |&id| Touched::Semaphore(id)),
            Step::Release(ids) => self.counters(Kind::Release, 0, ids, |&id| Touched::Semaphore(id)),
            Step::Loop { .. } => unreachable!("loops do not nest"),
            Step::Data { frame, work } => {
                let (op, operands) = operands(work);
                let packets = !operands[1].is_empty() || !operands[3].is_empty();
                let kind = if packets { Kind::Packets } else { Kind::Plain };
                self.data(frame, kind, operator(op), operands)
            }
            Step::Engine(Request::Copy { frame, from, to }) => {
                self.data(frame, Kind::Copy, 0, [vec![*from], vec![], vec![*to], vec![]])
            }
            Step::Engine(Request::Signal(signals)) => {
                self.counters(Kind::Raise, 0, signals, Touched::signals)
            }
            Step::Engine(Request::Flush) => self.plain(Kind::Flush, 0),
        }
    }

    fn data(&mut self, frame: &Frame, kind: Kind, operator: u32, operands: [Vec<Operand>; 4]) -> Option<()> {
        let packets = kind == Kind::Packets;
        // Slices do not begin where those of the chunk before end, nor do packets that are padded: each chunk is a step.
        let is_cut = self.is_sliced || packets && !self.chunk.is_multiple_of(8);
        let most = if is_cut { self.chunk } else { usize::MAX };
        let mut start = frame.span.start;
        loop {
            let end = frame.span.end.min(start.saturating_add(most));
            let items = operands.each_ref().map(|list| {
                list.iter().map(|&operand| Touched::Bytes { operand, start }).collect::<Vec<_>>()
            });
            let share = [frame.share.start as u64, frame.share.end as u64];
            let span = [start as u64, end as u64];
            let step = Listed { share, span, by_turn: frame.by_turn, ..Listed::new(kind, operator) };
            self.push(step, items)?;
            start = end;
            if start >= frame.span.end {
                return Some(());
            }
        }
    }

    /// Blocks meet, `of` of them, with their threads.
    fn barrier(&mut self, counter: Touched, of: u32) -> Option<()> {
        self.plain(Kind::Meet, 0)?;
        self.counters(Kind::Arrive, of, &[counter], |&counter| counter)?;
        self.plain(Kind::Meet, 0)
    }

    fn counters<T>(
        &mut self,
        kind: Kind,
        detail: u32,
        all: &[T],
        counter: impl Fn(&T) -> Touched,
    ) -> Option<()> {
        self.push(Listed::new(kind, detail), [all.iter().map(counter).collect(), vec![], vec![], vec![]])
    }

    fn plain(&mut self, kind: Kind, detail: u32) -> Option<()> {
        self.push(Listed::new(kind, detail), Default::default())
    }

    fn push(&mut self, step: Listed, items: [Vec<Touched>; 4]) -> Option<()> {
        let listing = &mut self.listing;
        let first = u32::try_from(listing.items.len()).ok()?;
        let counts = items.each_ref().map(|list| list.len() as u32);
        listing.steps.push(Listed { first, counts, ..step });
        listing.origins.push(self.origin);
        listing.items.extend(items.into_iter().flatten());
        (listing.steps.len() <= MOST_STEPS).then_some(())
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
