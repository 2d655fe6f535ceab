//! Inputs whose every output element is known.
//!
//! Inputs repeat with a prime period, so that a reference in f64 is computed once per period and yet every element of
//! any size is compared, and an element at a wrong place is a wrong element.

use antiphon::{collectives::Communicator, device::ReduceOp, tensor::Element};
use antiphon_collectives::reference::{Expected, reduce_element};

use super::case::{Case, Collective, Segment};

/// Elements after which the input repeats: prime, so that it never falls into step with blocks and pieces.
const PERIOD: usize = 4093;

/// Element `index` of the input of `rank`: a multiple of 1/8 up to 2 in floats, a small number in integers.
fn value<T: Element>(op: ReduceOp, rank: usize, index: usize) -> T {
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
pub(super) fn input<T: Element>(op: ReduceOp, rank: usize, count: usize) -> Vec<T> {
    let period: Vec<T> = (0..PERIOD.min(count)).map(|index| value(op, rank, index)).collect();
    period.iter().copied().cycle().take(count).collect()
}

/// What a rank's output must be.
pub(super) struct Reference {
    case: Case,
    /// Of this rank's output; none if it gets nothing.
    segments: Vec<Segment>,
    /// By position in the period: the reduction of all ranks' inputs there.
    reduced: Vec<Expected>,
}

/// How many elements are wrong, and by how much the worst is off.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wrong {
    pub(super) elements: u64,
    pub(super) worst: f64,
}

impl Reference {
    pub(super) fn new<T: Element>(comm: &Communicator, case: Case) -> Self {
        let (world_size, rank) = (comm.world_size(), comm.rank());
        let reduced = |index| {
            let column: Vec<T> = (0..world_size).map(|rank| value(case.op, rank, index)).collect();
            reduce_element(case.op, &column)
        };
        let reduced = if case.collective.reduces() { (0..PERIOD).map(reduced).collect() } else { Vec::new() };
        let gets = match case.collective {
            Collective::SEND_RECV => rank < 2,
            Collective::Memory => true,
            Collective::Of(_) => case.call(rank, world_size).needs_output(rank),
        };
        let segments = if gets { case.segments(rank, world_size) } else { Vec::new() };
        Self { case, segments, reduced }
    }

    /// The expected value of an element of a segment.
    fn expected<T: Element>(&self, segment: &Segment, index: usize) -> Expected {
        let at = segment.start + index;
        if self.case.collective.reduces() {
            return self.reduced[at % PERIOD];
        }
        Expected { exact: value::<T>(self.case.op, segment.source, at).to_f64(), tolerance: 0.0 }
    }

    /// Compares every element.
    pub(super) fn compare<T: Element>(&self, output: &[T]) -> Wrong {
        let mut wrong = Wrong::default();
        for segment in &self.segments {
            for (index, element) in output[segment.output.clone()].iter().enumerate() {
                let (expected, actual) = (self.expected::<T>(segment, index), element.to_f64());
                if !expected.accepts(actual) {
                    wrong.elements += 1;
                }
                wrong.worst = wrong.worst.max(expected.error(actual));
            }
        }
        wrong
    }
}
