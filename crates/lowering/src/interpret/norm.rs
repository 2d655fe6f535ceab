//! The fused all-reduce's epilogue, to the bit.

use antiphon_tensor::{DType, E4M3};

use crate::{op::Fused, terms::rounded};

pub(super) struct Call<'g> {
    pub(super) dtype: DType,
    pub(super) hidden: usize,
    pub(super) residual: Option<Vec<f64>>,
    pub(super) weight: Option<Vec<f64>>,
    pub(super) fused: &'g Fused,
    pub(super) scale: f64,
    /// Whether nothing is rounded.
    pub(super) exact: bool,
}

pub(super) struct Results {
    pub(super) residual: Vec<f64>,
    pub(super) norm: Vec<f64>,
    pub(super) inverse_rms: Vec<f64>,
    pub(super) codes: Vec<f64>,
}

impl Call<'_> {
    /// Rounded to f32.
    fn single(&self, value: f64) -> f64 {
        if self.exact { value } else { f64::from(value as f32) }
    }

    /// Rounded to the dtype.
    fn own(&self, value: f64) -> f64 {
        if self.exact { value } else { rounded(self.dtype, value) }
    }

    pub(super) fn run(&self, sum: &[f64]) -> Results {
        let add = |(at, sum): (usize, &f64)| match &self.residual {
            Some(residual) => self.own(self.single(sum + residual[at])),
            None => *sum,
        };
        let residual: Vec<f64> = sum.iter().enumerate().map(add).collect();
        let (mut norm, mut inverse_rms, mut codes) = (Vec::new(), Vec::new(), Vec::new());
        let inverse_scale = self.single(1.0 / self.scale);
        for row in residual.chunks(self.hidden.max(1)) {
            let inverse = self.inverse_rms(row);
            inverse_rms.push(inverse);
            for (i, x) in row.iter().enumerate() {
                let weight =
                    self.weight.as_ref().map(|weight| self.single(self.fused.weight_bias + weight[i]));
                let n = match (weight, self.fused.round_before_weight) {
                    (None, _) => self.single(x * inverse),
                    (Some(weight), false) => self.single(self.single(x * weight) * inverse),
                    (Some(weight), true) => self.single(self.own(self.single(x * inverse)) * weight),
                };
                let n = self.own(n);
                norm.push(n);
                let scaled = self.single(n * inverse_scale);
                codes.push(match self.exact {
                    true => scaled.clamp(-448.0, 448.0),
                    false => E4M3::from_f32(scaled as f32).to_f32().into(),
                });
            }
        }
        Results { residual, norm, inverse_rms, codes }
    }

    /// The sum of the squares is added in the order of a GPU's threads: elements of 16 bytes one by one, the sums of 32
    /// neighbours as a warp adds, 32 of these likewise, and these in their order.
    fn inverse_rms(&self, row: &[f64]) -> f64 {
        let eps = self.fused.eps.unwrap_or(0.0);
        if self.exact {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            return 1.0 / (mean + f64::from(eps as f32)).sqrt();
        }
        let vector = 16 / self.dtype.size();
        let row: Vec<f32> = row.iter().map(|x| *x as f32).collect();
        let squares = |x: &[f32]| x[1..].iter().fold(x[0] * x[0], |sum, x| sum + x * x);
        let warp = |x: &[f32]| add_like_a_warp(x.chunks(vector).map(squares));
        let block = |x: &[f32]| add_like_a_warp(x.chunks(32 * vector).map(warp));
        let sum = row.chunks(32 * 32 * vector).map(block).reduce(|sum, next| sum + next).unwrap_or(0.0);
        f64::from(1.0 / (sum * (1.0 / row.len() as f32) + eps as f32).sqrt())
    }
}

/// Those 16 apart, then those 8 apart and so on.
fn add_like_a_warp(numbers: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0f32; 32];
    lanes.iter_mut().zip(numbers).for_each(|(lane, number)| *lane = number);
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}
