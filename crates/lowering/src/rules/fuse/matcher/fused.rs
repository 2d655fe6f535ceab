//! The terms of fused calls, with every rounding where the kernels have it.

use super::{Node, Term, Terms};
use crate::{
    graph::Graph,
    numerics::Numerics,
    op::{Binary, Fused, FusedArg, FusedOutput, Quantize, Reduction, Unary},
    types::{Element, Type},
    verify::F32,
};

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
        let operand = |role: FusedArg| fused.args.iter().position(|arg| *arg == role).map(|at| args[at + 1]);
        let size = graph.group(&fused.group).map_or(0, |group| group.size);
        let sum = self.group_sum(&fused.group, size, input.dtype, args[0]);
        if output == FusedOutput::Sum {
            return sum;
        }
        let parts = NormParts {
            residual: operand(FusedArg::Residual),
            weight: operand(FusedArg::Weight),
            weight_bias: fused.weight_bias,
            eps: fused.eps.unwrap_or(0.0),
            round_before_weight: fused.round_before_weight,
        };
        let row = self.norm(sum, &parts, input);
        match output {
            FusedOutput::Sum | FusedOutput::Residual => row.residual,
            FusedOutput::InverseRms => row.inverse_rms,
            FusedOutput::Norm => row.norm,
            FusedOutput::Codes | FusedOutput::Scales => {
                let given = match operand(FusedArg::Scale) {
                    Some(scale) => scale,
                    None => self.number(fused.scale.unwrap_or(1.0)),
                };
                let [codes, scales] = self.quantized(fused.quantize, row.norm, given, input);
                if output == FusedOutput::Codes { codes } else { scales }
            }
        }
    }

    /// Codes of a norm, and their scales: those that are given, or what follows from the norm.
    pub(crate) fn quantized(&mut self, how: Quantize, norm: Term, given: Term, ty: &Type) -> [Term; 2] {
        match how {
            Quantize::Fp8 => [self.codes(norm, given), given],
            Quantize::Fp8Tokens => {
                let scales = self.scales(norm, ty, Quantize::LEAST_OF_ROW);
                [self.divided(norm, scales), scales]
            }
            Quantize::Fp8Groups(group) => {
                let last = ty.last();
                let count = last.as_constant().and_then(|hidden| how.scales_of(hidden)).unwrap_or(1);
                let mut shape = ty.shape.clone();
                shape.pop();
                shape.extend([count.into(), i64::from(group).into()]);
                let groups = Type::new(ty.dtype, shape);
                let split = self.reshaped(norm, ty, &groups);
                let scales = self.scales(split, &groups, Quantize::LEAST_OF_GROUP);
                let scales = self.power_above(scales);
                let codes = self.divided(split, scales);
                let [one, many] = [1.into(), count.into()];
                [self.rows_of(codes, &groups.last(), &last), self.rows_of(scales, &one, &many)]
            }
        }
    }

    /// `max(amax / 448, least)` over the rows of a type.
    fn scales(&mut self, x: Term, ty: &Type, least: f64) -> Term {
        let magnitudes = self.unary(Unary::Abs, x);
        let amax = self.rows(Reduction::Amax, ty, magnitudes);
        let (most, least) = (self.number(Quantize::MOST), self.number(least));
        let scale = self.binary(Binary::Div, amax, most);
        self.binary(Binary::Maximum, scale, least)
    }

    /// FP8 codes of `x / scale`, saturated.
    fn divided(&mut self, x: Term, scale: Term) -> Term {
        let scaled = self.binary(Binary::Div, x, scale);
        self.saturated(scaled)
    }

    fn saturated(&mut self, scaled: Term) -> Term {
        let (low, high) = (self.number(-Quantize::MOST), self.number(Quantize::MOST));
        let clamped = self.binary(Binary::Maximum, scaled, low);
        let clamped = self.binary(Binary::Minimum, clamped, high);
        self.round(Element::E4m3, clamped)
    }

    /// FP8 codes of a norm: of `n · (1 / scale)`, saturated.
    pub(crate) fn codes(&mut self, norm: Term, scale: Term) -> Term {
        let one = self.number(1.0);
        let inverse = self.binary(Binary::Div, one, scale);
        let scaled = self.binary(Binary::Mul, norm, inverse);
        self.saturated(scaled)
    }

    /// The least power of two that is not less. Kernels find it among bits, where a rounded logarithm may miss it.
    fn power_above(&mut self, x: Term) -> Term {
        match self.numerics {
            Numerics::Close => {
                [Unary::Log2, Unary::Ceil, Unary::Exp2].into_iter().fold(x, |x, op| self.unary(op, x))
            }
            Numerics::Same => self.intern(Node::PowerAbove(x), F32),
        }
    }

    /// What is made of a sum, with every rounding where the kernels have it.
    pub(crate) fn norm(&mut self, sum: Term, parts: &NormParts, input: &Type) -> NormTerms {
        let residual = match parts.residual {
            Some(residual) => self.binary(Binary::Add, sum, residual),
            None => sum,
        };
        let residual = self.round(input.dtype, residual);
        let squares = self.binary(Binary::Mul, residual, residual);
        let sum = self.rows(Reduction::Sum, input, squares);
        let inverse = self.number(1.0 / input.last().as_constant().unwrap_or(1) as f64);
        let mean = self.binary(Binary::Mul, sum, inverse);
        let eps = self.number(parts.eps);
        let with_eps = self.binary(Binary::Add, mean, eps);
        let root = self.unary(Unary::Sqrt, with_eps);
        let inverse_rms = self.unary(Unary::Reciprocal, root);
        let weight = parts.weight.map(|weight| match parts.weight_bias {
            0.0 => weight,
            bias => {
                let bias = self.number(bias);
                self.binary(Binary::Add, bias, weight)
            }
        });
        let norm = match (weight, parts.round_before_weight) {
            (None, _) => self.binary(Binary::Mul, residual, inverse_rms),
            (Some(weight), false) => {
                let weighted = self.binary(Binary::Mul, residual, weight);
                self.binary(Binary::Mul, weighted, inverse_rms)
            }
            (Some(weight), true) => {
                let plain = self.binary(Binary::Mul, residual, inverse_rms);
                let plain = self.round(input.dtype, plain);
                self.binary(Binary::Mul, plain, weight)
            }
        };
        NormTerms { residual, inverse_rms, norm: self.round(input.dtype, norm) }
    }
}

/// What a norm is made with.
pub(crate) struct NormParts {
    pub(crate) residual: Option<Term>,
    pub(crate) weight: Option<Term>,
    pub(crate) weight_bias: f64,
    pub(crate) eps: f64,
    pub(crate) round_before_weight: bool,
}

/// What comes of it.
pub(crate) struct NormTerms {
    pub(crate) residual: Term,
    pub(crate) inverse_rms: Term,
    pub(crate) norm: Term,
}
