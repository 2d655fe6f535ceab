//! A call that has been validated: what the backends work with.

use std::ptr::{null, null_mut};

use antiphon_device::ReduceOp;
use antiphon_fabric::{Operation, Signature};
use antiphon_tensor::{
    DType, Device, ScaleGrid, ScaleLayout,
    quantize::{Fp8Groups, GroupRule, NvFp4, TokenRule},
};

use super::{
    Accumulation, FusedAllReduce, InPlace, Norm,
    given::{Factor, Form, Given, Of, Summands},
};
use crate::{all_reduce::Algorithm, arguments::has_count, error::CollectiveError};

/// The error stays in a box until all is checked: there are many small steps, whose results had better fit registers.
type Result<T> = std::result::Result<T, Box<CollectiveError>>;

pub(super) const OPERATION: Operation = Operation::FusedAllReduce;

/// Bytes that GPUs move at once.
const VECTOR: usize = 16;

/// Plain addresses and numbers; null for what there is not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    pub(crate) dtype: DType,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) source: CheckedSource,
    pub(crate) accumulation: Accumulation,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) sum_out: *mut u8,
    pub(crate) bias: *const u8,
    pub(crate) pre_norm: Option<CheckedNorm>,
    pub(crate) residual: *const u8,
    pub(crate) residual_out: *mut u8,
    pub(crate) norm: Option<CheckedNorm>,
    pub(crate) weight_bias: f32,
    pub(crate) norm_out: *mut u8,
    pub(crate) quantization: Option<CheckedQuantization>,
    pub(crate) codes: *mut u8,
    pub(crate) scales: *mut u8,
}

/// [`Source`](super::Source), by addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CheckedSource {
    Tensor {
        input: *const u8,
    },
    MoeReduction {
        experts: *const u8,
        count: usize,
        scales: *const u8,
        shared: *const u8,
    },
    MoeFinalize {
        rows: *const u8,
        count: usize,
        index: *const u8,
        top_k: usize,
        scales: *const u8,
        shared: *const u8,
        routed_scaling: f32,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct CheckedNorm {
    pub(crate) weight: *const u8,
    pub(crate) eps: f32,
}

/// [`Quantization`](super::Quantization), by addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CheckedQuantization {
    Fp8 { scale: CheckedScale },
    Fp8Tokens { rule: TokenRule },
    Fp8Groups { groups: Fp8Groups, group: usize },
    NvFp4 { format: NvFp4, scale: CheckedScale, layout: ScaleLayout },
}

/// A factor: at an address unless that is null.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CheckedScale {
    pub(crate) at: *const u8,
    pub(crate) value: f32,
}

impl Checked {
    /// Refuses whatever a backend that serves this device could not do, before anything happens.
    pub(crate) fn new(serves: Device, call: &FusedAllReduce<'_>) -> crate::error::Result<Self> {
        Self::check(serves, call).map_err(|error| *error)
    }

    fn check(serves: Device, call: &FusedAllReduce<'_>) -> Result<Self> {
        let &Summands { dtype, tokens, hidden, ref of } = match &call.source {
            Ok(source) => source,
            Err(unfit) => return Err(Box::new(unfit.error())),
        };
        let door = Door { serves, dtype, tokens, hidden };
        door.check_dtype()?;
        door.check_outputs(call)?;
        let source = door.source(of)?;
        let (mut sum_out, mut residual_out, mut norm_out) =
            (call.sum_out.as_ref(), call.residual_out.as_ref(), call.norm_out.as_ref());
        if let (Some(output), Of::Tensor { input }) = (call.in_place, of) {
            *match output {
                InPlace::Sum => &mut sum_out,
                InPlace::Residual => &mut residual_out,
                InPlace::Norm => &mut norm_out,
            } = Some(input);
        }
        let (residual, residual_out) = match &call.residual_in_place {
            Some(residual) => {
                let residual = door.matrix("residual", Some(residual))?;
                (residual, residual)
            }
            None => {
                (door.matrix("residual", call.residual.as_ref())?, door.matrix("residual_out", residual_out)?)
            }
        };
        Ok(Self {
            dtype,
            tokens,
            hidden,
            source,
            accumulation: call.accumulation,
            algorithm: call.algorithm,
            sum_out: door.matrix("sum_out", sum_out)?,
            bias: door.row("bias", call.bias.as_ref())?,
            pre_norm: door.norm("pre-norm weight", call.pre_norm.as_ref())?,
            residual,
            residual_out,
            norm: door.norm("weight", call.norm.as_ref())?,
            weight_bias: call.weight_bias,
            norm_out: door.matrix("norm_out", norm_out)?,
            quantization: call
                .quantization
                .as_ref()
                .map(|quantization| door.quantization(quantization))
                .transpose()?,
            codes: door.bytes_out(
                "codes",
                call.codes.as_ref(),
                code_bytes(call.quantization.as_ref(), tokens, hidden),
                VECTOR,
            )?,
            scales: door.scales(call.quantization.as_ref(), call.scales.as_ref())?,
        })
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Bytes of the sum.
    pub(crate) fn num_bytes(&self) -> usize {
        self.tokens * self.hidden * self.dtype.size()
    }

    /// What the ranks must agree on, once the algorithm is known.
    pub(crate) fn signature(&self, algorithm: u8) -> Signature {
        let rounded = u8::from(self.accumulation == Accumulation::Rounded);
        Signature {
            dtype: Some(self.dtype),
            reduce: Some(ReduceOp::Sum),
            algorithm: algorithm | rounded << 4,
            detail: self.hidden as u32,
            count: (self.tokens * self.hidden) as u64,
            ..Signature::new(OPERATION)
        }
    }
}

#[cold]
fn refused(which: &'static str, expected: String) -> Box<CollectiveError> {
    Box::new(CollectiveError::Refused { operation: OPERATION.name(), which, expected })
}

fn code_bytes(quantization: Option<&Form<'_>>, tokens: usize, hidden: usize) -> usize {
    match quantization {
        None => 0,
        Some(Form::NvFp4 { .. }) => tokens * hidden / 2,
        Some(_) => tokens * hidden,
    }
}

/// Where tensors come in, and what they are held to.
struct Door {
    serves: Device,
    dtype: DType,
    tokens: usize,
    hidden: usize,
}

impl Door {
    fn check_dtype(&self) -> Result<()> {
        let dtype = self.dtype;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Box::new(CollectiveError::NotNumeric { operation: OPERATION.name(), dtype }));
        }
        if self.hidden == 0 || !self.hidden.is_multiple_of(16 / dtype.size()) {
            let text =
                format!("a multiple of {} elements of {dtype}, not {}", 16 / dtype.size(), self.hidden);
            return Err(refused("hidden size", text));
        }
        if u32::try_from(self.hidden).is_err() || self.tokens.checked_mul(self.hidden * 4).is_none() {
            return Err(refused("shape", format!("less than {} × {}", self.tokens, self.hidden)));
        }
        Ok(())
    }

    /// Some output is wanted, and what it is made of is there.
    fn check_outputs(&self, call: &FusedAllReduce<'_>) -> Result<()> {
        let in_place = |output| call.in_place == Some(output);
        let has_residual_out = call.residual_out.is_some() || in_place(InPlace::Residual);
        if call.residual_in_place.is_some() && (call.residual.is_some() || has_residual_out) {
            return Err(refused(
                "residual",
                "given once: in place, or apart from where the sum with it goes".into(),
            ));
        }
        let twice = [
            (&call.sum_out, InPlace::Sum),
            (&call.residual_out, InPlace::Residual),
            (&call.norm_out, InPlace::Norm),
        ];
        if twice.into_iter().any(|(apart, output)| apart.is_some() && in_place(output)) {
            return Err(refused("outputs", "given once: in the place of the input, or apart from it".into()));
        }
        let outputs =
            [&call.sum_out, &call.residual_out, &call.residual_in_place, &call.norm_out, &call.codes];
        if call.in_place.is_none() && outputs.iter().all(|output| output.is_none()) {
            return Err(refused("outputs", "at least one".into()));
        }
        let has_norm = call.norm_out.is_some() || in_place(InPlace::Norm);
        if call.norm.is_none() && (has_norm || call.codes.is_some()) {
            return Err(refused(
                "outputs",
                "a norm for norm_out and codes, as no rms_norm is asked for".into(),
            ));
        }
        if self.dtype == DType::F32 && matches!(call.quantization, Some(Form::NvFp4 { .. })) {
            return Err(refused("dtype", "f16 or bf16 for FP4, not f32".into()));
        }
        Ok(())
    }

    fn source(&self, source: &Of<'_>) -> Result<CheckedSource> {
        Ok(match source {
            Of::Tensor { input } => CheckedSource::Tensor { input: self.matrix("input", Some(input))? },
            Of::MoeReduction { experts, count, scales, shared } => {
                let elements = count * self.tokens * self.hidden;
                CheckedSource::MoeReduction {
                    experts: self.tensor("experts' outputs", experts, self.dtype, elements)?,
                    count: *count,
                    scales: self.unaligned("experts' scales", scales, DType::F32, count * self.tokens)?,
                    shared: self.matrix("shared expert's output", Some(shared))?,
                }
            }
            Of::MoeFinalize { rows, count, index, top_k, scales, shared, routed_scaling } => {
                let entries = self.tokens * top_k;
                let scales = scales.as_ref();
                let scales =
                    scales.map(|scales| self.unaligned("experts' scales", scales, self.dtype, entries));
                CheckedSource::MoeFinalize {
                    rows: self.tensor("rows", rows, self.dtype, count * self.hidden)?,
                    count: *count,
                    index: self.unaligned("index", index, DType::I32, entries)?,
                    top_k: *top_k,
                    scales: scales.transpose()?.unwrap_or(null_mut()),
                    shared: self.matrix("shared expert's output", shared.as_ref())?,
                    routed_scaling: *routed_scaling,
                }
            }
        })
    }

    fn norm(&self, which: &'static str, norm: Option<&Norm<'_>>) -> Result<Option<CheckedNorm>> {
        let checked = |norm: &Norm<'_>| {
            Ok(CheckedNorm { weight: self.row(which, norm.weight.as_ref())?, eps: norm.eps })
        };
        norm.map(checked).transpose()
    }

    fn quantization(&self, quantization: &Form<'_>) -> Result<CheckedQuantization> {
        let tensor = |source| {
            Box::new(CollectiveError::Tensor { operation: OPERATION.name(), which: "codes", source })
        };
        let (tokens, hidden) = (self.tokens, self.hidden);
        Ok(match quantization {
            Form::Fp8 { scale } => CheckedQuantization::Fp8 { scale: self.scale(scale)? },
            &Form::Fp8Tokens { rule } => CheckedQuantization::Fp8Tokens { rule },
            &Form::Fp8Groups { group } => {
                let groups = Fp8Groups::new(tokens, hidden, group, GroupRule::FlashInfer).map_err(tensor)?;
                CheckedQuantization::Fp8Groups { groups, group }
            }
            Form::NvFp4 { scale, layout } => {
                let format = NvFp4::new(tokens, hidden, *layout).map_err(tensor)?;
                CheckedQuantization::NvFp4 { format, scale: self.scale(scale)?, layout: *layout }
            }
        })
    }

    fn scale(&self, scale: &Factor<'_>) -> Result<CheckedScale> {
        Ok(match scale {
            Factor::Value(value) => CheckedScale { at: null(), value: *value },
            Factor::Tensor(tensor) => {
                CheckedScale { at: self.unaligned("scale", tensor, DType::F32, 1)?, value: 0.0 }
            }
        })
    }

    /// The scales that a form of quantisation writes.
    fn scales(&self, quantization: Option<&Form<'_>>, scales: Option<&Given<'_>>) -> Result<*mut u8> {
        let tensor = |source| {
            Box::new(CollectiveError::Tensor { operation: OPERATION.name(), which: "scales", source })
        };
        let needed = match quantization {
            None | Some(Form::Fp8 { .. }) => return Ok(null_mut()),
            Some(Form::Fp8Tokens { .. }) => self.tokens * size_of::<f32>(),
            Some(Form::Fp8Groups { group }) => {
                let groups = Fp8Groups::new(self.tokens, self.hidden, *group, GroupRule::FlashInfer);
                groups.map_err(tensor)?.packed_scales().size()
            }
            Some(Form::NvFp4 { layout, .. }) => {
                ScaleGrid::new(*layout, self.tokens, self.hidden / NvFp4::BLOCK).map_err(tensor)?.size()
            }
        };
        if scales.is_none() {
            return Err(refused("scales", format!("{needed} bytes, not nothing")));
        }
        self.bytes_out("scales", scales, needed, 4)
    }

    #[inline]
    fn matrix(&self, which: &'static str, tensor: Option<&Given<'_>>) -> Result<*mut u8> {
        let count = self.tokens * self.hidden;
        tensor.map_or(Ok(null_mut()), |tensor| self.tensor(which, tensor, self.dtype, count))
    }

    #[inline]
    fn row(&self, which: &'static str, tensor: Option<&Given<'_>>) -> Result<*mut u8> {
        tensor.map_or(Ok(null_mut()), |tensor| self.tensor(which, tensor, self.dtype, self.hidden))
    }

    /// Something that is moved in vectors.
    fn tensor(&self, which: &'static str, tensor: &Given<'_>, dtype: DType, count: usize) -> Result<*mut u8> {
        let at = self.unaligned(which, tensor, dtype, count)?;
        self.aligned(which, at, VECTOR)?;
        Ok(at)
    }

    fn unaligned(
        &self,
        which: &'static str,
        tensor: &Given<'_>,
        dtype: DType,
        count: usize,
    ) -> Result<*mut u8> {
        self.served(which, tensor)?;
        self.holds(which, tensor.dtype, dtype)?;
        has_count(OPERATION, which, tensor.count, count, || self.rule()).map_err(Box::new)?;
        Ok(tensor.data)
    }

    /// Something of which only the bytes count.
    fn bytes_out(
        &self,
        which: &'static str,
        tensor: Option<&Given<'_>>,
        needed: usize,
        alignment: usize,
    ) -> Result<*mut u8> {
        let Some(tensor) = tensor else { return Ok(null_mut()) };
        self.served(which, tensor)?;
        let bytes = tensor.count * tensor.dtype.size();
        if bytes < needed {
            return Err(refused(which, format!("at least {needed} bytes, not {bytes}")));
        }
        self.aligned(which, tensor.data, alignment)?;
        Ok(tensor.data)
    }

    fn served(&self, which: &'static str, tensor: &Given<'_>) -> Result<()> {
        if tensor.device == self.serves {
            return Ok(());
        }
        let (operation, serves) = (OPERATION.name(), self.serves);
        Err(Box::new(CollectiveError::Device { operation, which, device: tensor.device, serves }))
    }

    fn holds(&self, which: &'static str, actual: DType, expected: DType) -> Result<()> {
        if actual == expected {
            return Ok(());
        }
        Err(refused(which, format!("elements of {expected}, not {actual}")))
    }

    /// GPUs move whole vectors, and scales in words.
    fn aligned(&self, which: &'static str, at: *const u8, alignment: usize) -> Result<()> {
        if self.serves == Device::Host || at.addr().is_multiple_of(alignment) {
            return Ok(());
        }
        Err(refused(which, format!("a tensor at a multiple of {alignment} bytes, not at {at:p}")))
    }

    fn rule(&self) -> String {
        format!("of {} tokens of {} elements", self.tokens, self.hidden)
    }
}
