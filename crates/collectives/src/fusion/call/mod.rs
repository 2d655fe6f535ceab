//! A fused all-reduce as a value, generic over the type of its tensors.

use std::convert::Infallible;

use antiphon_tensor::{ScaleLayout, quantize::TokenRule};

mod builder;
mod operand;
pub(super) mod validated;

pub use builder::InPlace;
pub use operand::{Operand, TensorHandle};
pub(crate) use validated::Validated;

use crate::all_reduce::Algorithm;
use operand::Unfit;

/// A rank's contribution to the sum: `tokens × hidden` elements of the call's dtype, here `E`. `T` stands for a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source<T> {
    /// The elements themselves.
    Tensor {
        /// `E [tokens, hidden]`.
        input: T,
    },
    /// The weighted outputs of this rank's experts for every token, and the shared expert's output:
    /// `E( Σₑ experts[e] · scales[e] + shared )`, experts in order, the shared expert last.
    MoeReduction {
        /// `E [experts, tokens, hidden]`.
        experts: T,
        /// `f32 [experts, tokens]`.
        scales: T,
        /// `E [tokens, hidden]`.
        shared: T,
    },
    /// The outputs of this rank's experts for the tokens that were sent to them, in the order of the experts:
    /// `E( routed_scaling · Σₖ rows[index[t, k]] · scales[t, k] + shared )`.
    MoeFinalize {
        /// `E [rows, hidden]`.
        rows: T,
        /// `i32 [tokens, top_k]`: the row for each of a token's experts, −1 where it is on another rank. Any other index
        /// that there is no row for makes the token NaN.
        index: T,
        /// `E [tokens, top_k]`; 1 without.
        scales: Option<T>,
        /// `E [tokens, hidden]`.
        shared: Option<T>,
        /// The factor for the sum over the experts.
        routed_scaling: f32,
    },
}

/// How sums over ranks and experts are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Accumulation {
    /// Accumulated in f32, rounded once. What all collectives here do.
    #[default]
    F32,
    /// Rounded to the dtype after each addition (and each product of an expert and its weight), which is less exact: the
    /// peer's `fp32_acc=False`.
    Rounded,
}

/// A factor that is known when the call is made, or stands in memory when it runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale<T> {
    /// The factor.
    Value(f32),
    /// One f32, where the tensors are.
    Tensor(T),
}

/// How the norm is quantised. `antiphon_tensor::quantize` defines each form to the bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantization<T> {
    /// E4M3 codes of `n · (1 / scale)`, one byte each ([`fp8_static`](antiphon_tensor::quantize::fp8_static)).
    Fp8 {
        /// The *dequantisation* scale.
        scale: Scale<T>,
    },
    /// E4M3 codes with a scale for each token, `f32 [tokens]` ([`fp8_tokens`](antiphon_tensor::quantize::fp8_tokens)).
    Fp8Tokens {
        /// How a scale follows from the token's largest magnitude.
        rule: TokenRule,
    },
    /// E4M3 codes with a power of two for each group of a token's elements, packed
    /// ([`Fp8Groups::quantize_packed`](antiphon_tensor::quantize::Fp8Groups::quantize_packed)).
    Fp8Groups {
        /// How many elements share a scale: any divisor of `hidden`.
        group: usize,
    },
    /// E2M1 codes, two in a byte, with an E4M3 scale for each 16 ([`NvFp4`](antiphon_tensor::quantize::NvFp4)). Not of f32.
    NvFp4 {
        /// The scale that the blocks' scales are multiplied by.
        scale: Scale<T>,
        /// Where the blocks' scales stand.
        layout: ScaleLayout,
    },
}

/// An RMS norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm<T> {
    /// `E [hidden]`; 1 without.
    pub weight: Option<T>,
    /// The number that is added to the mean of the squares.
    pub eps: f32,
}

/// One fused all-reduce: a source, what is done with the sum, and which of the results are wanted.
///
/// `T` stands for a tensor: an [`Operand`](super::Operand) where views are given to the methods that describe a call, or a
/// [`TensorHandle`](super::TensorHandle) of a binding's own.
///
/// Tensors are contiguous, where the collectives' tensors are; on GPUs they begin at multiples of 16 bytes. `hidden` is a
/// multiple of 16 bytes. Outputs do not overlap each other or the inputs, with two exceptions: the sum with the residual may
/// replace [the residual](Self::residual_in_place), and one output may replace [the input](Self::of_in_place), with every
/// algorithm. All ranks read such an input before an output replaces it.
///
/// All ranks pass the same shape, dtype, accumulation and algorithm. What is done with the sum is each rank's own affair.
#[derive(Debug, Clone, Copy)]
#[must_use = "this describes a call"]
pub struct FusedAllReduce<T> {
    /// A view that does not fit, of which the call tells.
    unfit: Option<Unfit>,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) source: Source<T>,
    pub(crate) accumulation: Accumulation,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) sum_out: Option<T>,
    pub(crate) bias: Option<T>,
    pub(crate) pre_norm: Option<RmsNorm<T>>,
    pub(crate) residual: Option<T>,
    pub(crate) residual_out: Option<T>,
    pub(crate) norm: Option<RmsNorm<T>>,
    pub(crate) weight_bias: f32,
    pub(crate) round_before_weight: bool,
    pub(crate) norm_out: Option<T>,
    pub(crate) inverse_rms_out: Option<T>,
    pub(crate) quantization: Option<Quantization<T>>,
    pub(crate) codes: Option<T>,
    pub(crate) scales: Option<T>,
}

/// The role of a tensor in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// [`Source::Tensor`]'s.
    Input,
    /// The experts' outputs, all of them.
    Experts,
    /// The weights of the experts.
    ExpertScales,
    /// The shared expert's output.
    Shared,
    /// The experts' outputs, by rows.
    Rows,
    /// The rows of each token.
    Index,
    /// The bias, which is added to each row.
    Bias,
    /// The weight of the norm before the residual is added.
    PreNormWeight,
    /// The residual, which is added to the sum.
    Residual,
    /// The weight of the norm.
    Weight,
    /// The factor of a quantisation.
    Scale,
    /// Where the sum goes.
    SumOut,
    /// Where the sum with the residual goes.
    ResidualOut,
    /// Where the norm goes.
    NormOut,
    /// Where one over each token's root mean square goes.
    InverseRmsOut,
    /// Where the codes go.
    Codes,
    /// Where their scales go.
    Scales,
}

impl Role {
    /// The roles of outputs.
    pub const OUTPUTS: [Self; 6] =
        [Self::SumOut, Self::ResidualOut, Self::NormOut, Self::InverseRmsOut, Self::Codes, Self::Scales];

    /// As errors name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Experts => "experts' outputs",
            Self::ExpertScales => "experts' scales",
            Self::Shared => "shared expert's output",
            Self::Rows => "rows",
            Self::Index => "index",
            Self::Bias => "bias",
            Self::PreNormWeight => "pre-norm weight",
            Self::Residual => "residual",
            Self::Weight => "weight",
            Self::Scale => "scale",
            Self::SumOut => "sum_out",
            Self::ResidualOut => "residual_out",
            Self::NormOut => "norm_out",
            Self::InverseRmsOut => "inverse_rms_out",
            Self::Codes => "codes",
            Self::Scales => "scales",
        }
    }
}

impl<T> Source<T> {
    /// The same source, of what `map` makes of its tensors.
    #[inline]
    pub(super) fn try_map<U, E>(
        &self,
        map: &mut impl FnMut(Role, &T) -> Result<U, E>,
    ) -> Result<Source<U>, E> {
        Ok(match self {
            Self::Tensor { input } => Source::Tensor { input: map(Role::Input, input)? },
            Self::MoeReduction { experts, scales, shared } => Source::MoeReduction {
                experts: map(Role::Experts, experts)?,
                scales: map(Role::ExpertScales, scales)?,
                shared: map(Role::Shared, shared)?,
            },
            Self::MoeFinalize { rows, index, scales, shared, routed_scaling } => Source::MoeFinalize {
                rows: map(Role::Rows, rows)?,
                index: map(Role::Index, index)?,
                scales: scales.as_ref().map(|scales| map(Role::ExpertScales, scales)).transpose()?,
                shared: shared.as_ref().map(|shared| map(Role::Shared, shared)).transpose()?,
                routed_scaling: *routed_scaling,
            },
        })
    }
}

impl<T> Quantization<T> {
    /// The same quantisation, of what `map` makes of its factor.
    #[inline]
    pub(super) fn try_map<U, E>(
        &self,
        map: &mut impl FnMut(Role, &T) -> Result<U, E>,
    ) -> Result<Quantization<U>, E> {
        let mut scale = |scale: &Scale<T>| {
            Ok(match scale {
                Scale::Value(value) => Scale::Value(*value),
                Scale::Tensor(tensor) => Scale::Tensor(map(Role::Scale, tensor)?),
            })
        };
        Ok(match self {
            Self::Fp8 { scale: factor } => Quantization::Fp8 { scale: scale(factor)? },
            Self::Fp8Tokens { rule } => Quantization::Fp8Tokens { rule: *rule },
            Self::Fp8Groups { group } => Quantization::Fp8Groups { group: *group },
            Self::NvFp4 { scale: factor, layout } => {
                Quantization::NvFp4 { scale: scale(factor)?, layout: *layout }
            }
        })
    }
}

impl<T> FusedAllReduce<T> {
    /// A call that does nothing with the sum yet.
    #[inline]
    pub(super) const fn empty(source: Source<T>, [tokens, hidden]: [usize; 2]) -> Self {
        Self {
            unfit: None,
            tokens,
            hidden,
            source,
            accumulation: Accumulation::F32,
            algorithm: None,
            sum_out: None,
            bias: None,
            pre_norm: None,
            residual: None,
            residual_out: None,
            norm: None,
            weight_bias: 0.0,
            round_before_weight: false,
            norm_out: None,
            inverse_rms_out: None,
            quantization: None,
            codes: None,
            scales: None,
        }
    }

    /// How sums are rounded.
    #[inline]
    pub fn accumulation(mut self, accumulation: Accumulation) -> Self {
        self.accumulation = accumulation;
        self
    }

    /// Uses this algorithm instead of the one that was measured to be faster.
    #[inline]
    pub fn algorithm(mut self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        self.algorithm = algorithm.into();
        self
    }

    /// Sets the number that is added to the norm's weight: 1 for Gemma and Qwen 3.5, whose weights are differences from 1.
    /// Without a weight, which is 1 then, it means nothing.
    #[inline]
    pub fn weight_bias(mut self, weight_bias: f32) -> Self {
        self.weight_bias = weight_bias;
        self
    }

    /// Whether the norm is rounded before it is multiplied with its weight, and once more behind: as Hugging Face's models do.
    /// Without a weight there is nothing to multiply with, and it means nothing.
    #[inline]
    pub fn round_before_weight(mut self, round_before_weight: bool) -> Self {
        self.round_before_weight = round_before_weight;
        self
    }

    /// The same call, of what `map` makes of its tensors.
    #[inline]
    pub(super) fn try_map<U, E>(
        &self,
        mut map: impl FnMut(Role, &T) -> Result<U, E>,
    ) -> Result<FusedAllReduce<U>, E> {
        let map = &mut map;
        fn optional<T, U, E>(
            map: &mut impl FnMut(Role, &T) -> Result<U, E>,
            role: Role,
            tensor: &Option<T>,
        ) -> Result<Option<U>, E> {
            tensor.as_ref().map(|tensor| map(role, tensor)).transpose()
        }
        fn norm<T, U, E>(
            map: &mut impl FnMut(Role, &T) -> Result<U, E>,
            role: Role,
            norm: &Option<RmsNorm<T>>,
        ) -> Result<Option<RmsNorm<U>>, E> {
            let Some(RmsNorm { weight, eps }) = norm else { return Ok(None) };
            Ok(Some(RmsNorm { weight: optional(map, role, weight)?, eps: *eps }))
        }
        Ok(FusedAllReduce {
            unfit: self.unfit,
            tokens: self.tokens,
            hidden: self.hidden,
            source: self.source.try_map(map)?,
            accumulation: self.accumulation,
            algorithm: self.algorithm,
            sum_out: optional(map, Role::SumOut, &self.sum_out)?,
            bias: optional(map, Role::Bias, &self.bias)?,
            pre_norm: norm(map, Role::PreNormWeight, &self.pre_norm)?,
            residual: optional(map, Role::Residual, &self.residual)?,
            residual_out: optional(map, Role::ResidualOut, &self.residual_out)?,
            norm: norm(map, Role::Weight, &self.norm)?,
            weight_bias: self.weight_bias,
            round_before_weight: self.round_before_weight,
            norm_out: optional(map, Role::NormOut, &self.norm_out)?,
            inverse_rms_out: optional(map, Role::InverseRmsOut, &self.inverse_rms_out)?,
            quantization: match &self.quantization {
                None => None,
                Some(quantization) => Some(quantization.try_map(map)?),
            },
            codes: optional(map, Role::Codes, &self.codes)?,
            scales: optional(map, Role::Scales, &self.scales)?,
        })
    }

    /// Calls `look` with each tensor of the call.
    pub fn for_each(&self, mut look: impl FnMut(Role, &T)) {
        let seen = self.try_map(|role, tensor| {
            look(role, tensor);
            Ok::<_, Infallible>(())
        });
        let _: FusedAllReduce<()> = seen.unwrap_or_else(|never| match never {});
    }
}
