//! A fused all-reduce as a value.

use antiphon::{
    collectives::{
        all_reduce::Algorithm,
        fusion::{Accumulation, FusedAllReduce, InPlace, Quantization, Scale, Source as SourceOf},
    },
    prelude::{CollectiveError, Collectives, Communicator},
    tensor::{ScaleLayout, TensorError, quantize::TokenRule},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{arguments::overlap, call::refused, cuda::ordinal, operand::Tensor};

/// What to do, and with which memory: plain values, so that it can go to another thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fused {
    pub(crate) source: Source,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) accumulation: Accumulation,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) bias: Option<Tensor>,
    pub(crate) has_pre_norm: bool,
    pub(crate) pre_weight: Option<Tensor>,
    pub(crate) residual: Option<Tensor>,
    pub(crate) weight: Option<Tensor>,
    pub(crate) weight_bias: f32,
    pub(crate) eps: f32,
    pub(crate) sum_out: Option<Tensor>,
    pub(crate) residual_out: Option<Tensor>,
    pub(crate) norm_out: Option<Tensor>,
    pub(crate) quantize: Option<Quantize>,
    pub(crate) codes: Option<Tensor>,
    pub(crate) scales: Option<Tensor>,
}

/// See [`SourceOf`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Tensor(Tensor),
    MoeReduction { experts: Tensor, scales: Tensor, shared: Tensor },
    MoeFinalize { rows: Tensor, index: Tensor, scales: Option<Tensor>, shared: Option<Tensor>, routed: f32 },
}

/// See [`Quantization`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Quantize {
    Fp8(Factor),
    Fp8Tokens(TokenRule),
    Fp8Groups(usize),
    NvFp4(Factor, ScaleLayout),
}

/// See [`Scale`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Factor {
    Value(f32),
    Tensor(Tensor),
}

impl Source {
    /// A tensor of the dtype of the sum.
    pub(crate) fn tensor(&self) -> &Tensor {
        match self {
            Self::Tensor(tensor) | Self::MoeReduction { shared: tensor, .. } => tensor,
            Self::MoeFinalize { rows, .. } => rows,
        }
    }

    fn tensors(&self) -> [Option<(&'static str, Tensor)>; 4] {
        match *self {
            Self::Tensor(x) => [Some(("x", x)), None, None, None],
            Self::MoeReduction { experts, scales, shared } => {
                [Some(("experts", experts)), Some(("expert_scales", scales)), Some(("shared", shared)), None]
            }
            Self::MoeFinalize { rows, index, scales, shared, .. } => [
                Some(("rows", rows)),
                Some(("index", index)),
                scales.map(|scales| ("expert_scales", scales)),
                shared.map(|shared| ("shared", shared)),
            ],
        }
    }
}

impl Factor {
    fn tensor(&self) -> Option<Tensor> {
        match *self {
            Self::Value(_) => None,
            Self::Tensor(tensor) => Some(tensor),
        }
    }

    /// # Safety
    /// As [`Tensor::view`].
    unsafe fn scale<'a>(&self) -> Result<Scale<'a>, TensorError> {
        Ok(match self {
            Self::Value(value) => Scale::Value(*value),
            // SAFETY: passed on.
            Self::Tensor(tensor) => Scale::Tensor(unsafe { tensor.view() }?),
        })
    }
}

impl Fused {
    /// The GPU that it is on.
    pub(crate) fn cuda_device(&self) -> Option<u32> {
        ordinal(self.source.tensor().device)
    }

    /// Refuses outputs that share memory with something else, but for those that [`FusedAllReduce`] does in place: one in
    /// the place of `x`, and `residual_out` in that of the residual.
    pub(crate) fn check_overlap(&self) -> PyResult<()> {
        let outputs = [
            ("sum_out", self.sum_out),
            ("residual_out", self.residual_out),
            ("norm_out", self.norm_out),
            ("codes", self.codes),
            ("scales", self.scales),
        ];
        let factor = match &self.quantize {
            Some(Quantize::Fp8(scale) | Quantize::NvFp4(scale, _)) => scale.tensor(),
            _ => None,
        };
        let named = |name, tensor: Option<Tensor>| tensor.map(|tensor| (name, tensor));
        let more = [
            named("bias", self.bias),
            named("pre_weight", self.pre_weight),
            named("residual", self.residual),
            named("weight", self.weight),
            named("scale", factor),
        ];
        let is_in_place_of_x = matches!(self.in_place(), Some((_, InPlace::Residual)));
        for (index, (name, output)) in outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            let after = outputs[index + 1..].iter().map(|&(name, tensor)| named(name, tensor));
            let others = after.chain(self.source.tensors()).chain(more).flatten();
            for (other, tensor) in others {
                let may_be_same = match other {
                    "x" => matches!(*name, "sum_out" | "residual_out" | "norm_out"),
                    "residual" => *name == "residual_out" && !is_in_place_of_x,
                    _ => false,
                };
                if overlap(output, &tensor) && !(may_be_same && same_place(output, &tensor)) {
                    return Err(too_close(name, output, other, &tensor, may_be_same));
                }
            }
        }
        Ok(())
    }

    fn has_residual_in_place(&self) -> bool {
        matches!((&self.residual, &self.residual_out), (Some(residual), Some(out)) if same_place(residual, out))
    }

    /// The output that goes in the place of `x`, if one does.
    fn in_place(&self) -> Option<(Tensor, InPlace)> {
        let Source::Tensor(x) = self.source else { return None };
        let outputs = [
            (self.sum_out, InPlace::Sum),
            (self.residual_out, InPlace::Residual),
            (self.norm_out, InPlace::Norm),
        ];
        let taken = |(tensor, output): (Option<Tensor>, _)| {
            Some((tensor.filter(|tensor| same_place(tensor, &x))?, output))
        };
        outputs.into_iter().find_map(taken)
    }

    /// Takes part in the call.
    ///
    /// # Safety
    /// The memory is valid until this returns; nobody writes what is read, or uses what is written, meanwhile.
    pub(crate) unsafe fn run(&self, comm: &Communicator) -> Result<(), CollectiveError> {
        // SAFETY: passed on.
        comm.all_reduce_fused(unsafe { self.call() }.map_err(refused)?)
    }

    /// The call.
    ///
    /// # Safety
    /// For `'a` the memory is valid; nobody writes what is read, or uses what is written.
    pub(crate) unsafe fn call<'a>(&self) -> Result<FusedAllReduce<'a>, TensorError> {
        // SAFETY: the caller answers for all memory.
        let read = |tensor: Option<Tensor>| tensor.map(|tensor| unsafe { tensor.view() }).transpose();
        // SAFETY: as above; outputs were checked to be apart, or are given for what they take the place of.
        let write = |tensor: Option<Tensor>| tensor.map(|tensor| unsafe { tensor.view_mut() }).transpose();
        let (call, in_place) = match self.in_place() {
            Some((tensor, output)) => {
                // SAFETY: as above.
                let tensor = unsafe { tensor.view_mut() }?.reshape(&[self.tokens, self.hidden])?;
                (FusedAllReduce::of_in_place(tensor, output), Some(output))
            }
            // SAFETY: as above.
            None => (FusedAllReduce::of_source(unsafe { self.source_of() }?), None),
        };
        let apart = |tensor: Option<Tensor>, output| tensor.filter(|_| in_place != Some(output));
        let mut call = call.accumulation(self.accumulation).algorithm(self.algorithm);
        if let Some(sum) = write(apart(self.sum_out, InPlace::Sum))? {
            call = call.sum_out(sum);
        }
        if let Some(bias) = read(self.bias)? {
            call = call.bias(bias);
        }
        if self.has_pre_norm {
            call = call.pre_norm(read(self.pre_weight)?, self.eps);
        }
        let has_residual_in_place = self.has_residual_in_place();
        if let Some(residual) = write(apart(self.residual_out, InPlace::Residual))? {
            call = match has_residual_in_place {
                true => call.residual_in_place(residual),
                false => call.residual_out(residual),
            };
        }
        if let Some(residual) = read(self.residual.filter(|_| !has_residual_in_place))? {
            call = call.residual(residual);
        }
        if self.norm_out.is_some() || self.codes.is_some() {
            call = call.rms_norm(read(self.weight)?, self.eps).weight_bias(self.weight_bias);
        }
        if let Some(norm) = write(apart(self.norm_out, InPlace::Norm))? {
            call = call.norm_out(norm);
        }
        if let (Some(quantize), Some(codes)) = (&self.quantize, write(self.codes)?) {
            // SAFETY: as above.
            let quantization = unsafe { quantize.quantization() }?;
            call = call.quantize(quantization, codes, write(self.scales)?);
        }
        Ok(call)
    }

    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn source_of<'a>(&self) -> Result<SourceOf<'a>, TensorError> {
        let (tokens, hidden) = (self.tokens, self.hidden);
        // SAFETY: the caller answers for the memory; that the counts are right was found when these were gathered.
        let of = |tensor: &Tensor, shape: &[usize]| unsafe { tensor.view_as(shape) };
        Ok(match &self.source {
            Source::Tensor(x) => SourceOf::Tensor { input: of(x, &[tokens, hidden])? },
            Source::MoeReduction { experts, scales, shared } => {
                let count = experts.count.checked_div(tokens * hidden).unwrap_or(0);
                SourceOf::MoeReduction {
                    experts: of(experts, &[count, tokens, hidden])?,
                    scales: of(scales, &[scales.count])?,
                    shared: of(shared, &[tokens, hidden])?,
                }
            }
            Source::MoeFinalize { rows, index, scales, shared, routed } => SourceOf::MoeFinalize {
                rows: of(rows, &[rows.count / hidden, hidden])?,
                index: of(index, &[tokens, index.count.checked_div(tokens).unwrap_or(0)])?,
                scales: scales.map(|scales| of(&scales, &[scales.count])).transpose()?,
                shared: shared.map(|shared| of(&shared, &[shared.count])).transpose()?,
                routed_scaling: *routed,
            },
        })
    }
}

/// Whether these are the same bytes, and any.
fn same_place(a: &Tensor, b: &Tensor) -> bool {
    a.data == b.data && a.bytes() == b.bytes() && a.bytes() > 0
}

#[cold]
fn too_close(name: &str, output: &Tensor, other: &str, tensor: &Tensor, may_be_same: bool) -> PyErr {
    let place = |tensor: &Tensor| format!("{} bytes at {:p}", tensor.bytes(), tensor.data);
    let rule = if may_be_same { "apart, or the same" } else { "apart" };
    let places = format!("{} and {}", place(output), place(tensor));
    PyValueError::new_err(format!(
        "all_reduce_fused: {name} and {other} overlap: they must be {rule}, not {places}"
    ))
}

impl Quantize {
    /// # Safety
    /// As [`Tensor::view`].
    unsafe fn quantization<'a>(&self) -> Result<Quantization<'a>, TensorError> {
        Ok(match self {
            // SAFETY: passed on.
            Self::Fp8(scale) => Quantization::Fp8 { scale: unsafe { scale.scale() }? },
            Self::Fp8Tokens(rule) => Quantization::Fp8Tokens { rule: *rule },
            Self::Fp8Groups(group) => Quantization::Fp8Groups { group: *group },
            Self::NvFp4(scale, layout) => {
                // SAFETY: passed on.
                Quantization::NvFp4 { scale: unsafe { scale.scale() }?, layout: *layout }
            }
        })
    }
}
