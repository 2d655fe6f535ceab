//! Inputs whose every output element is known.
//!
//! Inputs repeat with a prime period, so that a reference in f64 is computed once per period and yet every element of
//! any size is compared, and an element at a wrong place is a wrong element.

use antiphon::{collectives::Communicator, device::ReduceOp, tensor::Element};
use antiphon_collectives::reference::{Expected, reduce_element};

use crate::case::{Case, Collective, Segment};

/// Elements after which the input repeats: prime, so that it never falls into step with blocks and pieces.
const PERIOD: usize = 4093;

/// Element `index` of the input of `rank`: a multiple of 1/8 up to 2 in floats, a small number in integers.
pub(crate) fn value<T: Element>(op: ReduceOp, rank: usize, index: usize) -> T {
    let mixed = ((index % PERIOD + 1) * 2_654_435_761 + rank * 40_503) >> 7;
    let step = (mixed % 33) as f64;
    T::from_f64(match (T::DTYPE.is_float(), op) {
        // Products of many ranks stay in range and are exact.
        (true, ReduceOp::Prod) => [0.5, 1.0, -1.0, 2.0][mixed % 4],
        (true, _) => (step - 16.0) / 8.0,
        (false, _) => step,
    })
}

/// The whole input of a rank.
pub(crate) fn input<T: Element>(op: ReduceOp, rank: usize, count: usize) -> Vec<T> {
    let period: Vec<T> = (0..PERIOD.min(count)).map(|index| value(op, rank, index)).collect();
    period.iter().copied().cycle().take(count).collect()
}

/// The expected output of a rank.
pub(crate) struct Reference {
    /// The segments of this rank's output, none if it gets nothing, each with the values that are expected by position in the period.
    segments: Vec<(Segment, Vec<Expected>)>,
}

/// The wrong elements of an output.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wrong {
    /// How many.
    pub elements: u64,
    /// By how much the worst is off.
    pub worst: f64,
}

impl Wrong {
    /// Compares elements with what they must be.
    pub(crate) fn of<T: Element>(actual: &[T], expected: impl Iterator<Item = Expected>) -> Self {
        let mut wrong = Self::default();
        let mut expected = expected.fuse();
        for element in actual.iter().map(|element| element.to_f64()) {
            let (accepted, error) = match expected.next() {
                Some(expected) => (expected.accepts(element), expected.error(element)),
                None => (false, f64::INFINITY),
            };
            wrong.elements += u64::from(!accepted);
            wrong.worst = wrong.worst.max(error);
        }
        wrong
    }

    /// Those of two comparisons.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { elements: self.elements + other.elements, worst: self.worst.max(other.worst) }
    }
}

/// What is copied, and so exact.
pub(crate) fn exactly(exact: f64) -> Expected {
    Expected { exact, tolerance: 0.0 }
}

impl Reference {
    pub(crate) fn new<T: Element>(comm: &Communicator, case: Case) -> Self {
        let (world_size, rank) = (comm.world_size(), comm.rank());
        let gets = match case.collective {
            Collective::SEND_RECV => rank < 2,
            Collective::Memory | Collective::Engine | Collective::Mixed(_) => true,
            Collective::Of(_) => case.call(rank, world_size).needs_output(rank),
        };
        let expected = |sources: &[usize], index| {
            if case.collective.reduces() {
                let column: Vec<T> = sources.iter().map(|&rank| value(case.op, rank, index)).collect();
                return reduce_element(case.op, &column);
            }
            exactly(value::<T>(case.op, sources[0], index).to_f64())
        };
        let with_expected = |segment: Segment| {
            let period = (0..PERIOD).map(|index| expected(&segment.sources, index)).collect();
            (segment, period)
        };
        let segments = if gets { case.segments(rank, world_size) } else { Vec::new() };
        Self { segments: segments.into_iter().map(with_expected).collect() }
    }

    /// Compares every element.
    pub(crate) fn compare<T: Element>(&self, output: &[T]) -> Wrong {
        let of_segment = |(segment, period): &(Segment, Vec<Expected>)| {
            let expected = (segment.start..).map(|index| period[index % PERIOD]);
            Wrong::of(&output[segment.output.clone()], expected)
        };
        self.segments.iter().map(of_segment).fold(Wrong::default(), Wrong::and)
    }
}
