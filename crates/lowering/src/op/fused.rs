//! Fused all-reduces.

use std::ops::Not;

use serde::{Deserialize, Serialize};

use super::number;
use crate::{
    sym::SymExpr,
    types::{Element, Type},
    verify::F32,
};

/// A fused all-reduce: `crates/collectives`' `fusion` says what is computed.
///
/// Its operands are the tensor, then those of [`args`](Self::args), in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fused {
    /// The name of the group.
    pub group: String,
    /// The operands behind the first.
    pub args: Vec<FusedArg>,
    /// The results, in the order of the operation's.
    pub outputs: Vec<FusedOutput>,
    /// What is added to the mean of the squares, if there is a norm.
    #[serde(default, with = "number::option", skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// What is added to the norm's weight.
    #[serde(default, with = "number")]
    pub weight_bias: f64,
    /// Whether the norm is rounded before its weight is multiplied, and once more after.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub round_before_weight: bool,
    /// How codes are scaled, if there are any.
    #[serde(default)]
    pub quantize: Quantize,
    /// The dequantisation scale of [`Quantize::Fp8`], where it is a number and no operand.
    #[serde(default, with = "number::option", skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
}

/// How E4M3 codes of a norm `n` are scaled: codes are of `n / scale`, saturated to ±448.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantize {
    /// With one scale, which is given.
    #[default]
    Fp8,
    /// With one for each row: `max(amax / 448, 1 / (512 · 448))` of its magnitudes.
    Fp8Tokens,
    /// With a power of two for each group of this number of neighbours in a row: `max(amax / 448, 1e-10)` of the group, rounded up.
    Fp8Groups(u32),
}

impl Quantize {
    /// The least scale of a row that codes are divided by.
    pub(crate) const LEAST_OF_ROW: f64 = 1.0 / (512.0 * 448.0);
    /// The same of a group.
    pub(crate) const LEAST_OF_GROUP: f64 = 1e-10;
    /// The largest magnitude of a code.
    pub(crate) const MOST: f64 = 448.0;

    /// The number of scales of a row of `hidden` elements, if the scales are results.
    pub fn scales_of(self, hidden: i64) -> Option<i64> {
        match self {
            Self::Fp8 => None,
            Self::Fp8Tokens => Some(1),
            Self::Fp8Groups(group) => {
                (group > 0 && hidden % i64::from(group) == 0).then(|| hidden / i64::from(group))
            }
        }
    }
}

/// An operand of a fused all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FusedArg {
    /// `T [.., hidden]`, added to the sum.
    Residual,
    /// `T [hidden]`, the norm's.
    Weight,
    /// `f32` of one element: the dequantisation scale of FP8 codes.
    Scale,
}

/// A result of a fused all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FusedOutput {
    /// `T [.., hidden]`: the sum over the ranks.
    Sum,
    /// `T [.., hidden]`: the sum with the residual.
    Residual,
    /// `T [.., hidden]`: its norm.
    Norm,
    /// `f32 [.., 1]`: one over the root of the mean of the squares, for a backward pass.
    InverseRms,
    /// `e4m3 [.., hidden]`: the norm quantised.
    Codes,
    /// `f32`, `[.., 1]` or `[.., hidden / group]`: what codes are multiplied with, unless that is given.
    Scales,
}

impl FusedOutput {
    /// Its name in text and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Residual => "residual",
            Self::Norm => "norm",
            Self::InverseRms => "inverse_rms",
            Self::Codes => "codes",
            Self::Scales => "scales",
        }
    }

    /// Whether it is made of the norm.
    pub fn needs_norm(self) -> bool {
        !matches!(self, Self::Sum | Self::Residual)
    }
}

impl Fused {
    /// The elements, and the extent of a row, of a result for an input of this type; none if it has no such result.
    pub fn row(&self, output: FusedOutput, input: &Type) -> Option<(Element, SymExpr)> {
        Some(match output {
            FusedOutput::InverseRms => (F32, 1.into()),
            FusedOutput::Codes => (Element::E4m3, input.last()),
            FusedOutput::Scales => (F32, self.quantize.scales_of(input.last().as_constant()?)?.into()),
            _ => (input.dtype, input.last()),
        })
    }
}
