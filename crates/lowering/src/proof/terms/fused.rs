//! The terms of fused calls, with every rounding where the kernels have it.

use super::{Term, Terms};
use crate::{
    graph::Graph,
    numerics::Numerics,
    op::{Binary, Fused, FusedArg, FusedOutput, Quantize, Reduction, Unary},
    places::Places,
    sym::SymExpr,
    types::Type,
    verify::F32,
};

/// The rows of a tensor: how many, and of how many elements.
struct Matrix {
    rows: SymExpr,
    last: SymExpr,
}

impl Matrix {
    fn of(ty: &Type) -> Self {
        Self { rows: ty.rows().expect("of a verified graph"), last: ty.last() }
    }
}

impl Terms {
    /// What a fused all-reduce gives, by its definition.
    pub(crate) fn fused(
        &mut self,
        graph: &Graph,
        fused: &Fused,
        args: &[Term],
        input: &Type,
        output: FusedOutput,
    ) -> Term {
        // The outputs say only which results there are.
        let Fused { group, args: roles, outputs: _, eps, weight_bias, round_before_weight, quantize, scale } =
            fused;
        let operand = |role: FusedArg| roles.iter().position(|arg| *arg == role).map(|at| args[at + 1]);
        let size = graph.group(group).map_or(0, |group| group.size);
        let sum = self.group_sum(group, size, input.dtype, args[0]);
        if output == FusedOutput::Sum {
            return sum;
        }
        let residual = match operand(FusedArg::Residual) {
            Some(residual) => {
                let added = self.binary(Binary::Add, F32, sum, residual);
                self.cast(F32, input.dtype, added)
            }
            None => sum,
        };
        if output == FusedOutput::Residual {
            return residual;
        }
        let matrix = Matrix::of(input);
        let inverse = self.inverse_rms(residual, &matrix, eps.unwrap_or(0.0));
        if output == FusedOutput::InverseRms {
            return inverse;
        }
        let weight = operand(FusedArg::Weight).map(|weight| self.weight_of(weight, &matrix, *weight_bias));
        let inverse = self.column(inverse, &matrix);
        let norm = match (weight, *round_before_weight) {
            (None, _) => self.binary(Binary::Mul, F32, residual, inverse),
            (Some(weight), false) => {
                let weighted = self.binary(Binary::Mul, F32, residual, weight);
                self.binary(Binary::Mul, F32, weighted, inverse)
            }
            (Some(weight), true) => {
                let plain = self.binary(Binary::Mul, F32, residual, inverse);
                let plain = self.cast(F32, input.dtype, plain);
                self.binary(Binary::Mul, F32, plain, weight)
            }
        };
        let norm = self.cast(F32, input.dtype, norm);
        match output {
            FusedOutput::Norm => norm,
            FusedOutput::Codes => match *quantize {
                Quantize::Fp8 => {
                    let given = operand(FusedArg::Scale);
                    let given = given.unwrap_or_else(|| self.number_in(F32, scale.unwrap_or(1.0)));
                    self.given_codes(norm, given, &matrix)
                }
                how => self.codes(how, norm, &matrix).0,
            },
            _ => self.codes(*quantize, norm, &matrix).1,
        }
    }

    /// `1/√(mean(x²) + eps)` of each row, in the steps of the kernels: the sum is multiplied with the number nearest to `1 / n`, and
    /// the root has a rounding of its own.
    fn inverse_rms(&mut self, x: Term, Matrix { rows: _, last }: &Matrix, eps: f64) -> Term {
        let squares = self.binary(Binary::Mul, F32, x, x);
        let mean = match last.as_constant() {
            Some(count) => {
                let sum = self.rows(Reduction::Sum, F32, last, squares);
                let inverse = self.number_in(F32, 1.0 / count as f64);
                self.binary(Binary::Mul, F32, sum, inverse)
            }
            None if self.numerics == Numerics::Close => self.rows(Reduction::Mean, F32, last, squares),
            // No operation but this one has such a factor.
            None => self.fresh(F32),
        };
        let eps = self.number_in(F32, eps);
        let with_eps = self.binary(Binary::Add, F32, mean, eps);
        let root = self.unary(Unary::Sqrt, F32, with_eps);
        self.unary(Unary::Reciprocal, F32, root)
    }

    fn weight_of(&mut self, weight: Term, Matrix { rows, last }: &Matrix, bias: f64) -> Term {
        let places = Places::new(0.into(), [(rows, 0.into()), (last, 1.into())]).expect("two numbers");
        let weight = self.moved(&places, last, weight);
        match bias {
            0.0 => weight,
            bias => {
                let bias = self.number_in(F32, bias);
                self.binary(Binary::Add, F32, bias, weight)
            }
        }
    }

    /// A number of each row, repeated along the row.
    fn column(&mut self, x: Term, Matrix { rows, last }: &Matrix) -> Term {
        let places = Places::new(0.into(), [(rows, 1.into()), (last, 0.into())]).expect("two numbers");
        self.moved(&places, rows, x)
    }

    /// FP8 codes of a norm with one scale: of `n · (1 / scale)`, saturated.
    fn given_codes(&mut self, norm: Term, scale: Term, Matrix { rows, last }: &Matrix) -> Term {
        let places = Places::new(0.into(), [(rows, 0.into()), (last, 0.into())]).expect("two numbers");
        let scale = self.moved(&places, &1.into(), scale);
        let one = self.number(1.0);
        let inverse = self.binary(Binary::Div, F32, one, scale);
        let scaled = self.binary(Binary::Mul, F32, norm, inverse);
        self.saturated(scaled)
    }

    /// FP8 codes of a norm, and their scales: of each row, or of each group of neighbours.
    fn codes(&mut self, how: Quantize, norm: Term, Matrix { rows, last }: &Matrix) -> (Term, Term) {
        let (extent, least) = match how {
            Quantize::Fp8 | Quantize::Fp8Tokens => (last.clone(), Quantize::LEAST_OF_ROW),
            Quantize::Fp8Groups(group) => (i64::from(group).into(), Quantize::LEAST_OF_GROUP),
        };
        let magnitudes = self.unary(Unary::Abs, F32, norm);
        let amax = self.rows(Reduction::Amax, F32, &extent, magnitudes);
        let (most, least) = (self.number(Quantize::MOST), self.number_in(F32, least));
        let scales = self.binary(Binary::Div, F32, amax, most);
        let mut scales = self.binary(Binary::Maximum, F32, scales, least);
        if let Quantize::Fp8Groups(_) = how {
            scales = self.power_above(F32, scales);
        }
        let groups =
            rows.times(last).and_then(|count| count.divided(&extent)).unwrap_or_else(|| rows.clone());
        let repeated = self.column(scales, &Matrix { rows: groups, last: extent });
        let divided = self.binary(Binary::Div, F32, norm, repeated);
        (self.saturated(divided), scales)
    }

    fn saturated(&mut self, scaled: Term) -> Term {
        let (low, high) = (self.number(-Quantize::MOST), self.number(Quantize::MOST));
        let clamped = self.binary(Binary::Maximum, F32, scaled, low);
        let clamped = self.binary(Binary::Minimum, F32, clamped, high);
        self.coded(clamped)
    }
}
