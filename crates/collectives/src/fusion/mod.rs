//! Fused all-reduce: the sum and the operations that follow it in a transformer layer, in one call.
//!
//! In a layer an all-reduce is followed by the addition of the residual, the norm, and the quantisation of the activations for
//! the next matrix product. A [`FusedAllReduce`] lists the steps of a call. The call does all of them on each vector of the sum
//! as it arrives, instead of one pass through memory for each step.
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
//! `T` is the dtype of the tensors (f32, f16, bf16), and `T(…)` rounds to it once; all intermediate results are in f32. For each
//! token, a row of `hidden` elements:
//!
//! ```text
//! c  = the source                                 this rank's contribution, see Source
//! s  = T( Σ over the ranks, ascending, of c )     → sum_out          the bits of all_reduce
//! p  = T( T(s + bias) · wₚ · rms(T(s + bias)) )   with pre_norm, else s + bias
//! r  = T( p + residual )                          → residual_out
//! n  = T( r · w · rms(r) )                        → norm_out         w = weight_bias + weight
//!   or T( T(r · rms(r)) · w )                     with round_before_weight
//!      rms(r)                                     → inverse_rms_out
//! q  = quantised n                                → codes, scales    see Quantization
//!
//! rms(x) = 1 / √( Σ x² · (1 / hidden) + eps )
//! ```
//!
//! The order in which squares are added does not depend on the number of threads of a row. The squares of 16 bytes of elements
//! are added one by one. The sums of 32 neighbours are added as in a warp: those 16 apart, then those 8 apart and so on. 32 of
//! these sums are added likewise, and the results in their order. Root and division are those of IEEE. So host and GPU, one-shot and two-shot and every number of
//! tokens give the same bits. A row whose squares overflow f32 (elements beyond 10¹⁹) has `rms` 0, as in other
//! implementations.
//!
//! # Accuracy
//!
//! The table bounds the differences from the exact values. `u` is the relative error of one rounding to `T` (2⁻²⁴ f32, 2⁻¹¹ f16,
//! 2⁻⁸ bf16), and `ε` = 2⁻²⁴ that of one in f32:
//!
//! | input | result | bound of the difference |
//! | --- | --- | --- |
//! | the contributions of `W` ranks | `s` | `u·│s│ + (W − 1)·ε·Σ│c│`: one rounding, after `W − 1` additions |
//! | a weighted row for each of `E` experts, and the shared one | `c` | `u·│c│ + (E + 2)·ε·Σ│term│` |
//! | `s` | `r`, without pre-norm | `u·│r│ + 2ε·(│s│ + │bias│ + │residual│)` |
//! | `s` | `p`, with pre-norm | `(3u + 20ε)·│p│`, and `r` then one rounding |
//! | `r` | `n` | `(u + 16ε)·│n│`, and `ε/2` for each 1024 vectors of a row; `u·│n│` more with `round_before_weight` |
//! | `r` | `rms(r)` | `(13ε)·│rms(r)│`, and `ε/2` for each 1024 vectors of a row |
//! | `n` | codes and scales | 0: they have the bits of `antiphon_tensor::quantize` |
//!
//! Subnormal results lose more, and so do, without `eps`, rows of elements below 10⁻¹⁶, whose squares are subnormal.
//! [`Accumulation::Rounded`] adds another `u` for each addition and product. A code is exact for a norm within these bounds, so it
//! differs from the code of the exact norm only at a boundary between two codes. (`reference`, with which tests compare, computes
//! the sum of these bounds.)
//!
//! The formulas, the layouts and the names of the quantised forms follow FlashInfer 0.6.18's `trtllm_allreduce_fusion`,
//! `trtllm_moe_allreduce_fusion`, `trtllm_moe_finalize_allreduce_fusion` and `trtllm_custom_all_reduce`.

mod call;
pub(crate) mod gpu;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

pub use call::{
    Accumulation, FusedAllReduce, InPlace, Operand, Quantization, RmsNorm, Role, Scale, Source, TensorHandle,
};
pub(crate) use {call::Validated, host::run};
