//! Fused all-reduce: the sum and what a transformer layer does with it, in one call.
//!
//! A layer never wants a bare all-reduce. It wants the sum, the residual added, the norm, and the activations quantised for
//! the next matrix product. [`FusedAllReduce`] says which of these, and the call does all of them on each vector of the sum
//! as it arrives, instead of going through memory once for each.
//!
//! ```
//! use antiphon_collectives::{Collectives, CollectiveError, fusion::FusedAllReduce};
//! use antiphon_fabric::LocalWorld;
//! use antiphon_tensor::{TensorView, TensorViewMut};
//!
//! let norms = LocalWorld::run(2, |comm| {
//!     let (tokens, hidden) = (3, 8);
//!     let partial = vec![1.0f32; tokens * hidden];
//!     let (residual, weight) = (vec![2.0f32; tokens * hidden], vec![0.5f32; hidden]);
//!     let (mut sum, mut norm) = (residual.clone(), residual.clone());
//!     comm.all_reduce_fused(
//!         FusedAllReduce::of(TensorView::new(&partial, &[tokens, hidden])?)
//!             .residual(TensorView::from(&residual))
//!             .residual_out(TensorViewMut::from(&mut sum))
//!             .rms_norm(Some(TensorView::from(&weight)), 0.0)
//!             .norm_out(TensorViewMut::from(&mut norm)),
//!     )?;
//!     Ok::<_, Box<dyn std::error::Error + Send + Sync>>((sum[0], norm[0]))
//! });
//! assert_eq!(norms[1].as_ref().unwrap(), &(4.0, 0.5)); // 1 + 1 + 2, and 4 / 4 · 0.5
//! ```
//!
//! # What is computed
//!
//! `T` is the dtype of the tensors (f32, f16, bf16), and `T(…)` rounds to it once; everything between is in f32. For each
//! token, a row of `hidden` elements:
//!
//! ```text
//! c  = the source                                 this rank's contribution, see Source
//! s  = T( Σ over the ranks, ascending, of c )     → sum_out          the bits of all_reduce
//! p  = T( T(s + bias) · wₚ · rms(T(s + bias)) )   where pre_norm is asked for, else s + bias
//! r  = T( p + residual )                          → residual_out
//! n  = T( r · w · rms(r) )                        → norm_out         w = weight_bias + weight
//! q  = quantised n                                → codes, scales    see Quantization
//!
//! rms(x) = 1 / √( Σ x² · (1 / hidden) + eps )
//! ```
//!
//! The squares are added in an order that does not depend on how many threads share a row: those of 16 bytes of elements one
//! by one; the sums of 32 neighbours as a warp adds, those 16 apart, then those 8 apart and so on; 32 of these sums likewise;
//! and these in their order. Root and division are those of IEEE. So host and GPU, one-shot and two-shot and every number of
//! tokens give the same bits. A row whose squares overflow f32 (elements beyond 10¹⁹) has `rms` 0, as in other
//! implementations.
//!
//! # How exact
//!
//! Against the exact values, with `u` for what one rounding to `T` may cost, relatively (2⁻²⁴ f32, 2⁻¹¹ f16, 2⁻⁸ bf16),
//! and `ε` = 2⁻²⁴ for one in f32:
//!
//! | given | | may be off by |
//! | --- | --- | --- |
//! | the contributions of `W` ranks | `s` | `u·│s│ + (W − 1)·ε·Σ│c│`: one rounding, after `W − 1` additions |
//! | a weighted row for each of `E` experts, and the shared one | `c` | `u·│c│ + (E + 2)·ε·Σ│term│` |
//! | `s` | `r`, without pre-norm | `u·│r│ + 2ε·(│s│ + │bias│ + │residual│)` |
//! | `s` | `p`, with pre-norm | `(3u + 20ε)·│p│`, and `r` then one rounding |
//! | `r` | `n` | `(u + 16ε)·│n│`, and `ε/2` for each 1024 vectors of a row |
//! | `n` | codes and scales | nothing: they have the bits that `antiphon_tensor::quantize` gives |
//!
//! to which comes what a subnormal result loses, and, if it has no `eps`, a row of elements below 10⁻¹⁶ whose squares
//! do. [`Accumulation::Rounded`] costs another `u` for each addition and product. Over all, a code is the right one for a
//! norm so little off: another than the exact one only at a boundary between two. (`reference`, which tests compare
//! with, adds these up.)
//!
//! What is computed, the layouts and the names of the quantised forms follow FlashInfer 0.6.18's `trtllm_allreduce_fusion`,
//! `trtllm_moe_allreduce_fusion`, `trtllm_moe_finalize_allreduce_fusion` and `trtllm_custom_all_reduce`.

mod checked;
mod cuda;
mod given;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;
mod teams;

use antiphon_tensor::{ScaleLayout, TensorView, TensorViewMut};

use crate::all_reduce::Algorithm;
#[cfg(test)]
pub(crate) use cuda::Fusion;
use given::{Form, Given, Summands, Unfit};
pub(crate) use {
    checked::Checked,
    host::run,
    teams::{Shape, Teams},
};

/// What a rank contributes to the sum: `tokens × hidden` elements of `T`.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// The elements themselves.
    Tensor {
        /// `T [tokens, hidden]`.
        input: TensorView<'a>,
    },
    /// What the experts on this rank computed for every token, weighted, and the shared expert's:
    /// `T( Σₑ experts[e] · scales[e] + shared )`, experts in order, the shared expert last.
    MoeReduction {
        /// `T [experts, tokens, hidden]`.
        experts: TensorView<'a>,
        /// `f32 [experts, tokens]`.
        scales: TensorView<'a>,
        /// `T [tokens, hidden]`.
        shared: TensorView<'a>,
    },
    /// What the experts on this rank computed for the tokens that were sent to them, in the order of the experts:
    /// `T( routed_scaling · Σₖ rows[index[t, k]] · scales[t, k] + shared )`.
    MoeFinalize {
        /// `T [rows, hidden]`.
        rows: TensorView<'a>,
        /// `i32 [tokens, top_k]`: the row for each of a token's experts, −1 where it is on another rank. Any other index
        /// that there is no row for makes the token NaN.
        index: TensorView<'a>,
        /// `T [tokens, top_k]`; 1 without.
        scales: Option<TensorView<'a>>,
        /// `T [tokens, hidden]`.
        shared: Option<TensorView<'a>>,
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
    /// Rounded to `T` after each addition (and each product of an expert and its weight), which is less exact: the peer's
    /// `fp32_acc=False`.
    Rounded,
}

/// A factor that is known when the call is made, or stands in memory when it runs.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// The factor.
    Value(f32),
    /// One f32, where the tensors are.
    Tensor(TensorView<'a>),
}

/// How the norm is quantised. `antiphon_tensor::quantize` defines each form to the bit.
#[derive(Debug, Clone, Copy)]
pub enum Quantization<'a> {
    /// E4M3 codes of `n · (1 / scale)`, one byte each ([`fp8_static`](antiphon_tensor::quantize::fp8_static)).
    Fp8 {
        /// The *dequantisation* scale.
        scale: Scale<'a>,
    },
    /// E4M3 codes with a scale for each token, `f32 [tokens]` ([`fp8_tokens`](antiphon_tensor::quantize::fp8_tokens)).
    Fp8Tokens,
    /// E4M3 codes with a power of two for each group of a token's elements, packed
    /// ([`Fp8Groups::quantize_packed`](antiphon_tensor::quantize::Fp8Groups::quantize_packed)).
    Fp8Groups {
        /// How many elements share a scale: any divisor of `hidden`.
        group: usize,
    },
    /// E2M1 codes, two in a byte, with an E4M3 scale for each 16 ([`NvFp4`](antiphon_tensor::quantize::NvFp4)). Not of f32.
    NvFp4 {
        /// The scale that the blocks' scales are multiplied by.
        scale: Scale<'a>,
        /// Where the blocks' scales stand.
        layout: ScaleLayout,
    },
}

/// One fused all-reduce: a source, what is done with the sum, and which of the results are wanted.
///
/// Tensors are contiguous, where the collectives' tensors are; on GPUs they begin at multiples of 16 bytes. `hidden` is a
/// multiple of 16 bytes. Outputs are apart from each other and from what is read, but for two: the residual may have
/// the sum with it put [in its place](Self::residual_in_place), and a tensor one of the outputs [in its
/// own](Self::of_in_place), by every algorithm. What is in the way of an output is read before, on all ranks.
///
/// All ranks pass the same shape, dtype, accumulation and algorithm. What is done with the sum is each rank's own affair.
#[derive(Debug)]
#[must_use = "this describes a call"]
pub struct FusedAllReduce<'a> {
    /// Or a tensor that does not fit, of which the call tells.
    source: Result<Summands<'a>, Unfit>,
    in_place: Option<InPlace>,
    accumulation: Accumulation,
    algorithm: Option<Algorithm>,
    sum_out: Option<Given<'a>>,
    bias: Option<Given<'a>>,
    pre_norm: Option<Norm<'a>>,
    residual: Option<Given<'a>>,
    residual_out: Option<Given<'a>>,
    residual_in_place: Option<Given<'a>>,
    norm: Option<Norm<'a>>,
    weight_bias: f32,
    norm_out: Option<Given<'a>>,
    quantization: Option<Form<'a>>,
    codes: Option<Given<'a>>,
    scales: Option<Given<'a>>,
}

/// Which output goes where the tensor was, see [`FusedAllReduce::of_in_place`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InPlace {
    /// The sum, instead of [`sum_out`](FusedAllReduce::sum_out).
    Sum,
    /// The sum with the residual, instead of [`residual_out`](FusedAllReduce::residual_out).
    Residual,
    /// The norm, instead of [`norm_out`](FusedAllReduce::norm_out).
    Norm,
}

/// An RMS norm.
#[derive(Debug, Clone, Copy)]
struct Norm<'a> {
    weight: Option<Given<'a>>,
    eps: f32,
}

impl<'a> FusedAllReduce<'a> {
    /// Of a tensor `T [tokens, hidden]`.
    #[inline]
    pub fn of(input: impl Into<TensorView<'a>>) -> Self {
        Self::of_source(Source::Tensor { input: input.into() })
    }

    /// Of what a source gives.
    #[inline]
    pub fn of_source(source: Source<'a>) -> Self {
        Self::new(Summands::new(&source), None)
    }

    /// Of a tensor `T [tokens, hidden]`, in whose place an output goes.
    #[inline]
    pub fn of_in_place(tensor: impl Into<TensorViewMut<'a>>, output: InPlace) -> Self {
        Self::new(Summands::in_place(tensor.into()), Some(output))
    }

    #[inline]
    fn new(source: Result<Summands<'a>, Unfit>, in_place: Option<InPlace>) -> Self {
        Self {
            source,
            in_place,
            accumulation: Accumulation::F32,
            algorithm: None,
            sum_out: None,
            bias: None,
            pre_norm: None,
            residual: None,
            residual_out: None,
            residual_in_place: None,
            norm: None,
            weight_bias: 0.0,
            norm_out: None,
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

    /// By this algorithm instead of the one that was measured to be faster.
    #[inline]
    pub fn algorithm(mut self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        self.algorithm = algorithm.into();
        self
    }

    /// Where the sum goes: `T [tokens, hidden]`.
    #[inline]
    pub fn sum_out(mut self, sum: impl Into<TensorViewMut<'a>>) -> Self {
        self.sum_out = self.keep(Given::write("sum_out", sum.into()));
        self
    }

    /// Adds `T [hidden]` to each row of the sum.
    #[inline]
    pub fn bias(mut self, bias: impl Into<TensorView<'a>>) -> Self {
        self.bias = self.keep(Given::read("bias", &bias.into()));
        self
    }

    /// Norms before the residual is added, with a weight `T [hidden]` (1 without): Gemma 2's.
    #[inline]
    pub fn pre_norm(mut self, weight: Option<TensorView<'a>>, eps: f32) -> Self {
        self.pre_norm = Some(self.norm_of("pre-norm weight", weight, eps));
        self
    }

    /// Adds `T [tokens, hidden]`.
    #[inline]
    pub fn residual(mut self, residual: impl Into<TensorView<'a>>) -> Self {
        self.residual = self.keep(Given::read("residual", &residual.into()));
        self
    }

    /// Adds `T [tokens, hidden]`, and puts the sum in its place: instead of [`residual`](Self::residual) and
    /// [`residual_out`](Self::residual_out).
    #[inline]
    pub fn residual_in_place(mut self, residual: impl Into<TensorViewMut<'a>>) -> Self {
        self.residual_in_place = self.keep(Given::write("residual", residual.into()));
        self
    }

    /// Where the sum with the residual goes: `T [tokens, hidden]`.
    #[inline]
    pub fn residual_out(mut self, sum: impl Into<TensorViewMut<'a>>) -> Self {
        self.residual_out = self.keep(Given::write("residual_out", sum.into()));
        self
    }

    /// Norms, with a weight `T [hidden]` (1 without).
    #[inline]
    pub fn rms_norm(mut self, weight: Option<TensorView<'a>>, eps: f32) -> Self {
        self.norm = Some(self.norm_of("weight", weight, eps));
        self
    }

    /// What is added to the norm's weight: 1 for Gemma's and Qwen 3.5's, whose weights are kept as differences from 1.
    /// Without a weight, which is 1 then, it means nothing.
    #[inline]
    pub fn weight_bias(mut self, weight_bias: f32) -> Self {
        self.weight_bias = weight_bias;
        self
    }

    /// Where the norm goes: `T [tokens, hidden]`.
    #[inline]
    pub fn norm_out(mut self, norm: impl Into<TensorViewMut<'a>>) -> Self {
        self.norm_out = self.keep(Given::write("norm_out", norm.into()));
        self
    }

    /// Quantises the norm. Of `codes` and `scales` only the bytes count, not the dtype; they may be longer than needed.
    /// `scales` is needed by all forms but [`Fp8`](Quantization::Fp8). Padding among the scales is written as 0.
    #[inline]
    pub fn quantize(
        mut self,
        quantization: Quantization<'a>,
        codes: impl Into<TensorViewMut<'a>>,
        scales: Option<TensorViewMut<'a>>,
    ) -> Self {
        self.quantization = self.keep(Form::new(&quantization));
        self.codes = self.keep(Given::write("codes", codes.into()));
        self.scales = scales.and_then(|scales| self.keep(Given::write("scales", scales)));
        self
    }

    /// What fits; else the call is spoilt.
    #[inline]
    fn keep<T>(&mut self, given: Result<T, Unfit>) -> Option<T> {
        given.map_err(|unfit| self.source = Err(unfit)).ok()
    }

    #[inline]
    fn norm_of(&mut self, which: &'static str, weight: Option<TensorView<'a>>, eps: f32) -> Norm<'a> {
        Norm { weight: weight.and_then(|weight| self.keep(Given::read(which, &weight))), eps }
    }
}
