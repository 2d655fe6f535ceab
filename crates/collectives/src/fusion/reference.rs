//! The obvious version of a fused all-reduce, in f64, with the greatest distance of a correct result.
//!
//! Nothing is rounded on the way to [`Expected::exact`]. [`Expected::tolerance`] is the sum of the worst cases of all roundings
//! of the definition: several times the actual errors.

use antiphon_tensor::DType;

use super::Accumulation;
use crate::reference::Expected;

/// A call, with the contributions of all ranks and what one rank does with their sum. Tensors are row-major.
#[derive(Debug, Clone)]
#[allow(missing_docs)] // as in `FusedAllReduce`
pub struct Call {
    pub dtype: DType,
    pub tokens: usize,
    pub hidden: usize,
    pub accumulation: Accumulation,
    /// One of each rank.
    pub contributions: Vec<Contribution>,
    /// The node of each rank.
    pub nodes: Vec<u32>,
    pub bias: Option<Vec<f64>>,
    pub pre_norm: Option<Norm>,
    pub residual: Option<Vec<f64>>,
    pub norm: Option<Norm>,
}

/// [`Source`](super::Source).
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum Contribution {
    Tensor(Vec<f64>),
    MoeReduction {
        experts: Vec<f64>,
        scales: Vec<f64>,
        shared: Vec<f64>,
    },
    MoeFinalize {
        rows: Vec<f64>,
        index: Vec<i32>,
        scales: Option<Vec<f64>>,
        shared: Option<Vec<f64>>,
        routed_scaling: f64,
    },
}

/// A norm; without a weight it is 1, whatever the bias.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Norm {
    pub weight: Option<Vec<f64>>,
    pub weight_bias: f64,
    pub eps: f64,
    pub round_before_weight: bool,
}

/// What must come out.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// `sum_out`.
    pub sum: Vec<Expected>,
    /// `residual_out`.
    pub residual: Vec<Expected>,
    /// `norm_out`; empty if no norm was asked for.
    pub norm: Vec<Expected>,
    /// `inverse_rms_out`, likewise.
    pub inverse_rms: Vec<Expected>,
}

impl Call {
    /// What must come out.
    pub fn outputs(&self) -> Outputs {
        let mut outputs = Outputs::default();
        for token in 0..self.tokens {
            let place = |i: usize| token * self.hidden + i;
            let sum: Vec<Known> = (0..self.hidden).map(|i| self.sum(token, i)).collect();
            let biased = sum.iter().enumerate().map(|(i, &sum)| match &self.bias {
                None => sum,
                Some(bias) => sum.plus(Known::exactly(bias[i])).single(),
            });
            let biased: Vec<Known> = biased.collect();
            let p = match &self.pre_norm {
                None => biased,
                Some(norm) => {
                    let rounded: Vec<Known> = biased.iter().map(|x| x.rounded(self.dtype)).collect();
                    self.normed(&rounded, norm)
                }
            };
            let with_residual = p.iter().enumerate().map(|(i, &p)| match &self.residual {
                None => p.rounded(self.dtype),
                Some(residual) => p.plus(Known::exactly(residual[place(i)])).single().rounded(self.dtype),
            });
            let residual: Vec<Known> = with_residual.collect();
            if let Some(norm) = &self.norm {
                outputs.inverse_rms.push(Self::inverse_rms(&residual, norm).expected());
                outputs.norm.extend(self.normed(&residual, norm).iter().map(Known::expected));
            }
            outputs.sum.extend(sum.iter().map(Known::expected));
            outputs.residual.extend(residual.iter().map(Known::expected));
        }
        outputs
    }

    /// The sum over the ranks: over those of each node, and then over the nodes.
    fn sum(&self, token: usize, i: usize) -> Known {
        let (ranks, add) = (0..self.contributions.len(), |sum: Known, next| self.step(sum.plus(next)));
        let of_rank = |rank: usize| self.contribution(&self.contributions[rank], token, i);
        let of_node = |first: usize| {
            let mates = ranks.clone().filter(|&rank| self.nodes[rank] == self.nodes[first]);
            mates.map(of_rank).reduce(add).expect("a node has a rank")
        };
        let is_first = |&rank: &usize| !self.nodes[..rank].contains(&self.nodes[rank]);
        let sum = ranks.clone().filter(is_first).map(of_node).reduce(add);
        sum.expect("a world has a rank").rounded(self.dtype)
    }

    /// One element of what a rank contributes.
    fn contribution(&self, of_rank: &Contribution, token: usize, i: usize) -> Known {
        let at = token * self.hidden + i;
        let weighted = |x: f64, scale: f64| self.step(Known::exactly(x).times(Known::exactly(scale)));
        let mut sum = Known::exactly(0.0);
        match of_rank {
            Contribution::Tensor(input) => return Known::exactly(input[at]),
            Contribution::MoeReduction { experts, scales, shared } => {
                for (expert, outputs) in experts.chunks_exact(self.tokens * self.hidden).enumerate() {
                    let product = weighted(outputs[at], scales[expert * self.tokens + token]);
                    sum = self.step(sum.plus(product));
                }
                sum = sum.plus(Known::exactly(shared[at]));
            }
            Contribution::MoeFinalize { rows, index, scales, shared, routed_scaling } => {
                let (rows, top_k) = (rows.chunks_exact(self.hidden), index.len() / self.tokens);
                for at in token * top_k..(token + 1) * top_k {
                    let scale = scales.as_ref().map_or(1.0, |scales| scales[at]);
                    let row = usize::try_from(index[at]).ok().and_then(|row| rows.clone().nth(row));
                    sum = match row {
                        _ if index[at] == -1 => sum,
                        Some(row) => self.step(sum.plus(weighted(row[i], scale))),
                        None => Known::exactly(f64::NAN),
                    };
                }
                sum = self.step(sum.times(Known::exactly(*routed_scaling)));
                if let Some(shared) = shared {
                    sum = sum.plus(Known::exactly(shared[at]));
                }
            }
        }
        self.step(sum).rounded(self.dtype)
    }

    /// A step of an accumulation.
    fn step(&self, sum: Known) -> Known {
        match self.accumulation {
            Accumulation::F32 => sum.single(),
            Accumulation::Rounded => sum.single().rounded(self.dtype),
        }
    }

    fn inverse_rms(x: &[Known], norm: &Norm) -> Known {
        let squares = x.iter().map(|&x| x.times(x).single()).reduce(Known::plus).expect("a row has elements");
        // Those of a vector, two halvings of 32, and then 1024 vectors at a time.
        let additions = 7 + 5 + 5 + x.len() / 4096;
        let squares = (0..additions).fold(squares, |squares, _| squares.single());
        let mean = squares.times(Known::exactly(1.0 / x.len() as f64)).single();
        mean.plus(Known::exactly(norm.eps)).single().sqrt().single().recip().single()
    }

    fn normed(&self, x: &[Known], norm: &Norm) -> Vec<Known> {
        let rms = Self::inverse_rms(x, norm);
        let normed = x.iter().enumerate().map(|(i, x)| {
            let weight = norm.weight.as_ref().map_or(1.0, |weight| norm.weight_bias + weight[i]);
            let weight = Known::exactly(weight).single();
            let product = match norm.round_before_weight && norm.weight.is_some() {
                true => x.times(rms).single().rounded(self.dtype).times(weight),
                false => x.times(weight).single().times(rms),
            };
            product.single().rounded(self.dtype)
        });
        normed.collect()
    }
}

/// The largest magnitude of a row or a group.
pub fn amax(norm: &[Expected]) -> Expected {
    let largest = |of: fn(&Expected) -> f64| norm.iter().map(of).fold(0.0, f64::max);
    Expected { exact: largest(|x| x.exact.abs()), tolerance: largest(|x| x.tolerance) }
}

/// Whether `value` is what `nearest` makes of a number that `x / divisor` may be: a neighbouring code is right only if
/// the boundary between the two is within the tolerance. Scales are codes of the [`amax`].
pub fn is_code_of(x: &Expected, divisor: f64, nearest: impl Fn(f32) -> f32, value: f32) -> bool {
    let end = |x: f64, outwards: f64| {
        let quotient = x / divisor;
        nearest((quotient + outwards * 4.0 * f64::from(f32::EPSILON) * quotient.abs()) as f32)
    };
    let (low, high) = (x.exact - x.tolerance, x.exact + x.tolerance);
    let (low, high) = if divisor < 0.0 { (high, low) } else { (low, high) };
    end(low, -1.0) <= value && value <= end(high, 1.0)
}

/// A number and how far what was computed may be from it.
#[derive(Clone, Copy)]
struct Known {
    exact: f64,
    error: f64,
}

impl Known {
    fn exactly(exact: f64) -> Self {
        Self { exact, error: 0.0 }
    }

    fn expected(&self) -> Expected {
        Expected { exact: self.exact, tolerance: self.error }
    }

    /// What is infinite or NaN is so exactly; a number that may be infinite is not known at all.
    fn new(exact: f64, error: f64) -> Self {
        match exact.is_finite() {
            true => Self { exact, error: if error.is_nan() { f64::INFINITY } else { error } },
            false => Self::exactly(exact),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self::new(self.exact + other.exact, self.error + other.error)
    }

    fn times(self, other: Self) -> Self {
        let error = self.exact.abs() * other.error + (other.exact.abs() + other.error) * self.error;
        Self::new(self.exact * other.exact, error)
    }

    fn sqrt(self) -> Self {
        let root = self.exact.sqrt();
        Self::new(root, if self.error == 0.0 { 0.0 } else { root - (self.exact - self.error).sqrt() })
    }

    fn recip(self) -> Self {
        let least = self.exact.abs() - self.error;
        let error = if least > 0.0 { self.error / (self.exact.abs() * least) } else { f64::INFINITY };
        Self::new(1.0 / self.exact, if self.error == 0.0 { 0.0 } else { error })
    }

    fn single(self) -> Self {
        self.rounded(DType::F32)
    }

    /// Rounded once, to nearest.
    fn rounded(self, dtype: DType) -> Self {
        let (unit, least, greatest) = match dtype {
            DType::F32 => (2f64.powi(-24), 2f64.powi(-149), f64::from(f32::MAX)),
            DType::F16 => (2f64.powi(-11), 2f64.powi(-24), 65504.0),
            _ => (2f64.powi(-8), 2f64.powi(-133), 3.389_531_389_251_535_5e38),
        };
        let magnitude = self.exact.abs();
        if self.error == 0.0 && self.exact == 0.0 {
            self
        } else if magnitude - self.error > greatest * (1.0 + unit) {
            Self::exactly(self.exact.signum() * f64::INFINITY)
        } else if magnitude + self.error > greatest {
            Self::new(self.exact, f64::INFINITY)
        } else {
            Self::new(self.exact, self.error + unit * (magnitude + self.error) + least / 2.0)
        }
    }
}
