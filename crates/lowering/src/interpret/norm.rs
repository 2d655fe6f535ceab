//! The fused all-reduce's epilogue, to the bit.

use antiphon_tensor::{DType, E4M3};

use crate::{
    numerics::rounded,
    op::{Fused, Quantize},
};

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
    pub(super) scales: Vec<f64>,
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
        let (mut norm, mut inverse_rms) = (Vec::new(), Vec::new());
        let bias = f64::from(self.fused.weight_bias as f32);
        for row in residual.chunks(self.hidden.max(1)) {
            let inverse = self.inverse_rms(row);
            inverse_rms.push(inverse);
            for (i, x) in row.iter().enumerate() {
                let weight = self.weight.as_ref().map(|weight| self.single(bias + weight[i]));
                let n = match (weight, self.fused.round_before_weight) {
                    (None, _) => self.single(x * inverse),
                    (Some(weight), false) => self.single(self.single(x * weight) * inverse),
                    (Some(weight), true) => self.single(self.own(self.single(x * inverse)) * weight),
                };
                norm.push(self.own(n));
            }
        }
        let (codes, scales) = self.quantized(&norm);
        Results { residual, norm, inverse_rms, codes, scales }
    }

    /// Codes, and the scales that are results.
    fn quantized(&self, norm: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let code = |scaled: f64| match self.exact {
            true => scaled.clamp(-Quantize::MOST, Quantize::MOST),
            false => E4M3::from_f32(self.single(scaled) as f32).to_f32().into(),
        };
        let group = match self.fused.quantize {
            Quantize::Fp8 => {
                let inverse = self.single(1.0 / f64::from(self.scale as f32));
                return (norm.iter().map(|n| code(n * inverse)).collect(), Vec::new());
            }
            Quantize::Fp8Tokens => self.hidden,
            Quantize::Fp8Groups(group) => group as usize,
        };
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for part in norm.chunks(group.max(1)) {
            let amax = part.iter().fold(0.0, |most: f64, n| most.max(n.abs()));
            let scale = self.single(amax / Quantize::MOST);
            let scale = match self.fused.quantize {
                Quantize::Fp8Groups(_) => scale.max(Quantize::LEAST_OF_GROUP).log2().ceil().exp2(),
                _ => scale.max(self.single(Quantize::LEAST_OF_ROW)),
            };
            codes.extend(part.iter().map(|n| code(n / scale)));
            scales.push(scale);
        }
        (codes, scales)
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
