//! What operations do with one number, or with the numbers of a row.

use antiphon_operation::ReduceOp;
use antiphon_tensor::{DType, E4M3};

use super::memory::each_index;
use crate::{
    numerics::{rounded, wrapped},
    op::{Binary, Reduction, Unary},
    types::Element,
};

/// Arithmetic as kernels do it, or on real numbers.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    /// Whether floating-point numbers are not rounded.
    pub(super) exact: bool,
}

/// A number as an element: rounded to nearest, or towards zero to an integer.
pub(super) fn full(element: Element, value: f64) -> f64 {
    match element {
        Element::Number(dtype) => rounded(dtype, value),
        Element::Bool => f64::from(value != 0.0),
        Element::E4m3 => E4M3::from_f32(value as f32).to_f32().into(),
        Element::Opaque(_) => value,
    }
}

fn is_integer(element: Element) -> Option<DType> {
    element.number().filter(|dtype| !dtype.is_float())
}

impl Numbers {
    /// A number as a step of arithmetic in these elements leaves it.
    pub(super) fn step(self, element: Element, value: f64) -> f64 {
        match element.number() {
            Some(dtype) if !self.exact => rounded(dtype, value),
            _ => value,
        }
    }

    /// An element as one of another type.
    pub(super) fn convert(self, from: Element, to: Element, value: f64) -> f64 {
        match (is_integer(from), is_integer(to)) {
            _ if from == to => value,
            (Some(_), Some(dtype)) => wrapped(dtype, value as i64) as f64,
            (_, Some(dtype)) => rounded(dtype, value),
            _ if self.exact && (to.is_float() || to == Element::E4m3) => value,
            _ => full(to, value),
        }
    }

    pub(super) fn unary(self, op: Unary, element: Element, x: f64) -> f64 {
        if let Some(dtype) = is_integer(element) {
            let x = x as i64;
            let result = match op {
                Unary::Neg => x.wrapping_neg(),
                Unary::Abs => x.wrapping_abs(),
                _ => x.max(0),
            };
            return wrapped(dtype, result) as f64;
        }
        self.step(element, unary(op, x))
    }

    pub(super) fn binary(self, op: Binary, element: Element, x: f64, y: f64) -> f64 {
        let Some(dtype) = is_integer(element) else { return self.step(element, binary(op, x, y)) };
        let (x, y) = (x as i64, y as i64);
        let result = match op {
            Binary::Add => x.wrapping_add(y),
            Binary::Sub => x.wrapping_sub(y),
            Binary::Mul => x.wrapping_mul(y),
            Binary::Maximum => x.max(y),
            Binary::Minimum => x.min(y),
            Binary::Div | Binary::Pow => unreachable!("not of a verified graph"),
        };
        wrapped(dtype, result) as f64
    }

    /// A reduction over dimensions; sums of floating-point numbers in f64, as their order is free.
    pub(super) fn reduce(
        self,
        op: Reduction,
        element: Element,
        (data, shape): (&Vec<f64>, &[usize]),
        dims: &[usize],
        count: usize,
    ) -> Vec<f64> {
        let start = if op == Reduction::Amax { f64::NEG_INFINITY } else { 0.0 };
        let mut results = vec![start; count];
        let mut at = 0;
        each_index(shape, |index| {
            let kept = index.iter().enumerate().filter(|(dim, _)| !dims.contains(dim));
            let place = kept.fold(0, |place, (dim, i)| place * shape[dim] + i);
            let (result, value) = (&mut results[place], data[at]);
            *result = match (op, is_integer(element)) {
                (Reduction::Amax, _) => binary(Binary::Maximum, *result, value),
                (_, Some(_)) => self.binary(Binary::Add, element, *result, value),
                (_, None) => *result + value,
            };
            at += 1;
        });
        let extent: usize = dims.iter().map(|dim| shape[*dim]).product();
        if op == Reduction::Mean {
            results.iter_mut().for_each(|result| *result /= extent as f64);
        }
        results.into_iter().map(|result| self.step(element, result)).collect()
    }

    /// A reduction over ranks, in ascending order: accumulated in f32, in f64 for f64, and wrapping for integers.
    pub(super) fn reduced(
        self,
        red: ReduceOp,
        of: Element,
        values: impl ExactSizeIterator<Item = f64>,
    ) -> f64 {
        let count = values.len();
        if let Some(dtype) = is_integer(of) {
            let total = values.map(|value| value as i64).reduce(|a, b| match red {
                ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
                ReduceOp::Prod => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::Band => a & b,
                ReduceOp::Bor => a | b,
                ReduceOp::Bxor => a ^ b,
            });
            let total = total.unwrap_or(0);
            let total = if red == ReduceOp::Avg { total / count.max(1) as i64 } else { total };
            return wrapped(dtype, total) as f64;
        }
        let wide = Element::Number(if of == DType::F64.into() { DType::F64 } else { DType::F32 });
        let total = values.reduce(|a, b| match red {
            ReduceOp::Sum | ReduceOp::Avg => self.step(wide, a + b),
            ReduceOp::Prod => self.step(wide, a * b),
            ReduceOp::Min => binary(Binary::Minimum, a, b),
            ReduceOp::Max => binary(Binary::Maximum, a, b),
            // Only integers have bits.
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => f64::NAN,
        });
        let total = total.unwrap_or(0.0);
        let total = if red == ReduceOp::Avg { self.step(wide, total / count as f64) } else { total };
        self.convert(wide, of, total)
    }
}

fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Exp => x.exp(),
        Unary::Exp2 => x.exp2(),
        Unary::Log2 => x.log2(),
        Unary::Ceil => x.ceil(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::Relu => binary(Binary::Maximum, x, 0.0),
        Unary::Tanh => x.tanh(),
    }
}

/// The greater and the lesser number are NaN if one is, and of zeros the positive one is the greater.
fn binary(op: Binary, x: f64, y: f64) -> f64 {
    match op {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        // Torch computes a product, from which `powf` may differ in the last bit.
        Binary::Pow if y == 2.0 => x * x,
        Binary::Pow => x.powf(y),
        Binary::Maximum | Binary::Minimum if x.is_nan() || y.is_nan() => f64::NAN,
        Binary::Maximum => {
            if x.total_cmp(&y).is_gt() {
                x
            } else {
                y
            }
        }
        Binary::Minimum => {
            if x.total_cmp(&y).is_lt() {
                x
            } else {
                y
            }
        }
    }
}
