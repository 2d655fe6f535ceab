//! What fused calls read.

use antiphon_collectives::fusion::Source;
use antiphon_tensor::{DType, Element, TensorView, with_dtype};
use antiphon_testing::Alignment;

use super::case::{Case, Kind};
use crate::{
    harness::{CollectiveBackend, Tensor},
    values::{Bits, Values},
};

/// What a call reads: the contributions of all ranks, and a rank's own of the rest.
pub struct Data {
    pub contributions: Vec<Parts>,
    pub bias: Values,
    pub pre_weight: Values,
    pub residual: Values,
    pub gamma: Values,
}

impl Data {
    /// Moderate numbers; the sources of all ranks follow from the case's seed.
    pub fn moderate(case: &Case, world: usize, rank: usize) -> Self {
        let seed = |what: usize, rank: usize| case.seed * 1000 + (what * 16 + rank) as u64;
        let values = |what, count| Values::moderate(case.dtype, seed(what, rank), count);
        Self {
            contributions: (0..world).map(|rank| Parts::moderate(case, seed(0, rank))).collect(),
            bias: values(1, case.hidden),
            pre_weight: values(2, case.hidden),
            residual: values(3, case.count()),
            gamma: values(4, case.hidden),
        }
    }

    /// Tensors whose rows are of all the kinds at which arithmetic goes wrong.
    pub fn troublesome(case: &Case, world: usize, rank: usize) -> Self {
        let rows = |seed| troublesome_rows(case, seed);
        let weight = |seed| rows(seed).first(case.hidden);
        Self {
            contributions: (0..world).map(|rank| Parts::Tensor(rows(rank))).collect(),
            residual: rows(10 + rank),
            // As its first row is: of zeros with signs, and of numbers.
            pre_weight: weight(case.seed as usize % 2 * 8),
            gamma: weight(case.seed as usize / 2 % 2 * 8),
            ..Self::moderate(case, world, rank)
        }
    }
}

/// Rows with signed zeros, subnormals, huge numbers, an infinity, a NaN; each row of another kind for each seed.
fn troublesome_rows(case: &Case, seed: usize) -> Values {
    with_dtype!(case.dtype, T => {
        let largest = if case.dtype == DType::F16 { 60_000.0 } else { 3e38 };
        let least = if case.dtype == DType::F16 { 2f64.powi(-24) } else { 2f64.powi(-133) };
        let mut bits = Bits::new(seed as u64 + 99);
        let element = |at: usize| {
            let (kind, i) = ((at / case.hidden + seed) % 9, at % case.hidden);
            let number = f64::from(bits.next() as i32) / 2f64.powi(31);
            let sign = number.signum();
            match kind {
                0 => sign * 0.0,
                1 => -0.0,
                2 => number * 100.0 * least,
                3 => number * largest,
                4 => number * largest.sqrt(),
                5 if i == 3 => f64::INFINITY,
                6 if i == 5 => f64::NAN,
                7 => number * 1e-20,
                _ => number,
            }
        };
        Values::of(&(0..case.count()).map(element).map(<T as Element>::from_f64).collect::<Vec<T>>())
    })
}

/// The tensors of a source.
#[derive(Clone)]
pub enum Parts {
    Tensor(Values),
    MoeReduction {
        experts: Values,
        scales: Values,
        shared: Values,
    },
    MoeFinalize {
        rows: Values,
        index: Vec<i32>,
        scales: Option<Values>,
        shared: Option<Values>,
        routed_scaling: f32,
    },
}

impl Parts {
    fn moderate(case: &Case, seed: u64) -> Self {
        let (tokens, hidden) = (case.tokens, case.hidden);
        let of = |dtype, what: u64, count| Values::moderate(dtype, seed * 8 + what, count);
        let tensor = |what, count| of(case.dtype, what, count);
        match case.source {
            Kind::Tensor => Self::Tensor(tensor(0, case.count())),
            Kind::MoeReduction { experts } => Self::MoeReduction {
                experts: tensor(1, experts * case.count()),
                scales: of(DType::F32, 2, experts * tokens),
                shared: tensor(3, case.count()),
            },
            Kind::MoeFinalize { top_k, scales, shared } => {
                let (mut bits, rows) = (Bits::new(seed), tokens.div_ceil(2) + 3);
                let mut any = || match bits.below(64) {
                    0..20 => -1,
                    20 if seed.is_multiple_of(4) => [rows as i32, -2, i32::MIN, i32::MAX][bits.below(4)],
                    _ => bits.below(rows) as i32,
                };
                Self::MoeFinalize {
                    rows: tensor(4, rows * hidden),
                    index: (0..tokens * top_k).map(|_| any()).collect(),
                    scales: scales.then(|| tensor(5, tokens * top_k)),
                    shared: shared.then(|| tensor(6, case.count())),
                    routed_scaling: [1.0, 2.5][usize::from(seed.is_multiple_of(2))],
                }
            }
        }
    }

    /// All tensors, in the order of their names.
    pub fn values(&self) -> Vec<Values> {
        match self {
            Self::Tensor(input) => vec![input.clone()],
            Self::MoeReduction { experts, scales, shared } => {
                vec![experts.clone(), scales.clone(), shared.clone()]
            }
            Self::MoeFinalize { rows, index, scales, shared, .. } => {
                let required = [rows.clone(), Values::of(index)];
                required.into_iter().chain(scales.clone()).chain(shared.clone()).collect()
            }
        }
    }

    pub fn hold<B: CollectiveBackend>(&self, comm: &B, alignment: Alignment) -> Vec<Tensor<B>> {
        self.values().iter().map(|values| Tensor::holding(comm, values, alignment)).collect()
    }

    /// The source that these tensors are, which hold its values.
    pub fn source<'t, B: CollectiveBackend>(
        &self,
        shape: [usize; 2],
        tensors: &'t [Tensor<B>],
    ) -> Source<TensorView<'t>> {
        let [tokens, hidden] = shape;
        let mut views = tensors.iter().map(Tensor::view);
        let mut next = || views.next().unwrap();
        let shaped = |view: TensorView<'t>, shape: &[usize]| view.reshape(shape).unwrap();
        match self {
            Self::Tensor(_) => Source::Tensor { input: shaped(next(), &shape) },
            Self::MoeReduction { scales, .. } => {
                let experts = scales.len().checked_div(tokens).unwrap_or(2);
                Source::MoeReduction {
                    experts: shaped(next(), &[experts, tokens, hidden]),
                    scales: next(),
                    shared: shaped(next(), &shape),
                }
            }
            Self::MoeFinalize { rows, index, scales, shared, routed_scaling } => Source::MoeFinalize {
                rows: shaped(next(), &[rows.len() / hidden, hidden]),
                index: shaped(next(), &[tokens, index.len().checked_div(tokens).unwrap_or(2)]),
                scales: scales.as_ref().map(|_| next()),
                shared: shared.as_ref().map(|_| next()),
                routed_scaling: *routed_scaling,
            },
        }
    }
}
