//! The obvious versions of the arithmetic, in f64 and i128, with which tests and the benchmark compare.

use antiphon_tensor::Element;

use crate::ReduceOp;

/// The result that a reduction of one element must have, from the contributions in rank order.
///
/// `exact` is computed in f64 (integers: exactly, then wrapped to the type), `tolerance` bounds how far a result that
/// was accumulated in f32 (f64 for f64) and rounded once may be from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// The result in f64.
    pub exact: f64,
    /// How far from it a correct result may be.
    pub tolerance: f64,
}

impl Expected {
    /// Whether `actual` is a correct result. NaN is expected to be NaN, and an infinity itself.
    pub fn accepts(&self, actual: f64) -> bool {
        if self.exact.is_nan() || self.exact.is_infinite() {
            return actual.is_nan() == self.exact.is_nan() && (actual.is_nan() || actual == self.exact);
        }
        (actual - self.exact).abs() <= self.tolerance
    }

    /// How far `actual` is off.
    pub fn error(&self, actual: f64) -> f64 {
        if self.accepts(actual) && !self.exact.is_finite() { 0.0 } else { (actual - self.exact).abs() }
    }
}

/// The expected reduction of one element.
pub fn reduce_element<T: Element>(op: ReduceOp, contributions: &[T]) -> Expected {
    if T::DTYPE.is_float() { reduce_floats(op, contributions) } else { reduce_integers(op, contributions) }
}

fn reduce_floats<T: Element>(op: ReduceOp, contributions: &[T]) -> Expected {
    let values: Vec<f64> = contributions.iter().map(|x| x.to_f64()).collect();
    let any_nan = values.iter().any(|x| x.is_nan());
    let exact = match op {
        _ if any_nan => f64::NAN,
        ReduceOp::Sum => values.iter().sum(),
        ReduceOp::Prod => values.iter().product(),
        ReduceOp::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Avg => values.iter().sum::<f64>() / values.len() as f64,
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => unreachable!("{op} is for integers"),
    };
    let magnitude = match op {
        ReduceOp::Sum | ReduceOp::Avg => values.iter().map(|x| x.abs()).sum(),
        _ => exact.abs(),
    };
    // One accumulation step per contribution, and the final rounding.
    let accumulator = if T::DTYPE.size() == 8 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let steps = values.len() as f64 * accumulator * magnitude;
    // Half the distance to the next value of the type is less than that from the exact result to its neighbours.
    let rounded = T::from_f64(exact).to_f64();
    let rounding = if exact.is_finite() { (rounded - exact).abs() + spacing::<T>(exact) } else { 0.0 };
    Expected { exact, tolerance: steps + rounding }
}

/// The distance between neighbouring values of the type around `x`.
fn spacing<T: Element>(x: f64) -> f64 {
    let (digits, least) = match T::DTYPE.name() {
        "f64" => (52, -1074),
        "f32" => (23, -149),
        "f16" => (10, -24),
        _ => (7, -133),
    };
    let exponent = if x == 0.0 { least } else { x.abs().log2().floor() as i32 - digits };
    2f64.powi(exponent.max(least))
}

fn reduce_integers<T: Element>(op: ReduceOp, contributions: &[T]) -> Expected {
    // Through f64 a 64-bit integer would lose its last bits; tests keep those small enough.
    let values: Vec<i128> = contributions.iter().map(|x| x.to_f64() as i128).collect();
    let exact = match op {
        ReduceOp::Sum => values.iter().sum(),
        ReduceOp::Prod => values.iter().fold(1i128, |a, &b| a.wrapping_mul(b)),
        ReduceOp::Min => values.iter().copied().min().unwrap_or(0),
        ReduceOp::Max => values.iter().copied().max().unwrap_or(0),
        ReduceOp::Avg => values.iter().sum::<i128>() / values.len().max(1) as i128,
        ReduceOp::Band => values.iter().fold(-1, |a, b| a & b),
        ReduceOp::Bor => values.iter().fold(0, |a, b| a | b),
        ReduceOp::Bxor => values.iter().fold(0, |a, b| a ^ b),
    };
    let wrapped = match T::DTYPE.name() {
        "i8" => exact as i8 as i128,
        "u8" => exact as u8 as i128,
        "i32" => exact as i32 as i128,
        _ => exact as i64 as i128,
    };
    Expected { exact: wrapped as f64, tolerance: 0.0 }
}
