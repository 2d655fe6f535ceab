//! A validated call, on which the backends work.

use std::ops::Deref;

use antiphon_device::ReduceOp;
use antiphon_fabric::{Operation, Signature};
use antiphon_tensor::{
    DType, Device, ScaleGrid, ScaleLayout, TensorError,
    quantize::{Fp8Groups, GroupRule, NvFp4},
};

use super::{Accumulation, FusedAllReduce, Operand, Quantization, Role, Source};
use crate::{arguments::has_count, error::CollectiveError};

/// The error stays in a box until all is checked: there are many small steps, whose results had better fit registers.
type Result<T> = std::result::Result<T, Box<CollectiveError>>;

pub(super) const OPERATION: Operation = Operation::FusedAllReduce;

/// Bytes that GPUs move at once.
const VECTOR: usize = 16;

/// A call of plain addresses, every one of which has what its role needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Validated {
    call: FusedAllReduce<*mut u8>,
    pub(crate) dtype: DType,
    pub(crate) counts: Counts,
}

/// The sizes that follow from a source's tensors; 0 for those that it does not have.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Experts of this rank.
    pub(crate) experts: usize,
    /// Rows of experts' outputs.
    pub(crate) rows: usize,
    /// Experts of a token.
    pub(crate) top_k: usize,
}

impl Deref for Validated {
    type Target = FusedAllReduce<*mut u8>;

    #[inline(always)]
    fn deref(&self) -> &Self::Target {
        &self.call
    }
}

impl Validated {
    /// Refuses whatever a backend that serves this device could not do, before anything happens.
    pub(crate) fn new(serves: Device, call: &FusedAllReduce<Operand<'_>>) -> crate::error::Result<Self> {
        Self::check(serves, call).map_err(|error| *error)
    }

    fn check(serves: Device, call: &FusedAllReduce<Operand<'_>>) -> Result<Self> {
        if let Some(unfit) = &call.unfit {
            return Err(Box::new(unfit.error()));
        }
        let validator = Validator::new(serves, call);
        validator.check_dtype()?;
        validator.check_outputs()?;
        let checked = call.try_map(|role, operand| validator.check(role, operand))?;
        validator.check_scales()?;
        Ok(Self { call: checked, dtype: validator.dtype, counts: validator.counts })
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Bytes of the sum.
    pub(crate) fn num_bytes(&self) -> usize {
        self.tokens * self.hidden * self.dtype.size()
    }

    /// The places of codes and scales, if `group` elements share a scale.
    pub(in crate::fusion) fn groups(&self, group: usize) -> Fp8Groups {
        groups([self.tokens, self.hidden], group).expect("a checked group")
    }

    /// Where codes and scales of FP4 stand.
    pub(in crate::fusion) fn blocks(&self, layout: ScaleLayout) -> NvFp4 {
        NvFp4::new(self.tokens, self.hidden, layout).expect("a checked layout")
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

fn groups([tokens, hidden]: [usize; 2], group: usize) -> std::result::Result<Fp8Groups, TensorError> {
    Fp8Groups::new(tokens, hidden, group, GroupRule::FlashInfer)
}

#[cold]
fn refused(which: &'static str, expected: String) -> Box<CollectiveError> {
    Box::new(CollectiveError::Refused { operation: OPERATION.name(), which, expected })
}

/// The rules for a call and its tensors.
struct Validator<'c, 't> {
    call: &'c FusedAllReduce<Operand<'t>>,
    serves: Device,
    dtype: DType,
    tokens: usize,
    hidden: usize,
    counts: Counts,
}

impl<'c, 't> Validator<'c, 't> {
    fn new(serves: Device, call: &'c FusedAllReduce<Operand<'t>>) -> Self {
        let &FusedAllReduce { tokens, hidden, .. } = call;
        let whole = |count: usize, of: usize| count.checked_div(of).unwrap_or(0);
        let (dtype, counts) = match &call.source {
            Source::Tensor { input } => (input.dtype, Counts::default()),
            Source::MoeReduction { experts, shared, .. } => {
                let experts = whole(experts.count, tokens.saturating_mul(hidden));
                (shared.dtype, Counts { experts, ..Counts::default() })
            }
            Source::MoeFinalize { rows, index, .. } => {
                let (dtype, rows) = (rows.dtype, whole(rows.count, hidden));
                let top_k = whole(index.count, tokens);
                (dtype, Counts { rows, top_k, experts: 0 })
            }
        };
        Self { call, serves, dtype, tokens, hidden, counts }
    }

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

    /// At least one output is given, and so are the tensors that it is computed from.
    fn check_outputs(&self) -> Result<()> {
        let call = self.call;
        let outputs = [&call.sum_out, &call.residual_out, &call.norm_out, &call.inverse_rms_out, &call.codes];
        if outputs.iter().all(|output| output.is_none()) {
            return Err(refused("outputs", "at least one".into()));
        }
        if call.norm.is_none() && outputs[2..].iter().any(|output| output.is_some()) {
            return Err(refused(
                "outputs",
                "a norm for norm_out, inverse_rms_out and codes, as no rms_norm is asked for".into(),
            ));
        }
        if self.dtype == DType::F32 && matches!(call.quantization, Some(Quantization::NvFp4 { .. })) {
            return Err(refused("dtype", "f16 or bf16 for FP4, not f32".into()));
        }
        if call.quantization.is_some() != call.codes.is_some() {
            return Err(refused("codes", "given with a quantisation, and only then".into()));
        }
        self.check_groups()
    }

    /// The scales that the quantisation writes have a place.
    fn check_scales(&self) -> Result<()> {
        match self.needs_scales() && self.call.scales.is_none() {
            true => Err(refused("scales", format!("{} bytes, not nothing", self.scale_bytes()?))),
            false => Ok(()),
        }
    }

    /// Whether the quantisation writes scales.
    fn needs_scales(&self) -> bool {
        !matches!(self.call.quantization, None | Some(Quantization::Fp8 { .. }))
    }

    /// The rule for each role.
    fn check(&self, role: Role, tensor: &Operand<'_>) -> Result<*mut u8> {
        let (matrix, Counts { experts, rows, top_k }) = (self.tokens * self.hidden, self.counts);
        let (dtype, count, alignment) = match role {
            Role::Input
            | Role::Shared
            | Role::Residual
            | Role::SumOut
            | Role::ResidualOut
            | Role::NormOut => (self.dtype, matrix, VECTOR),
            Role::Bias | Role::PreNormWeight | Role::Weight => (self.dtype, self.hidden, VECTOR),
            Role::Experts => (self.dtype, experts * matrix, VECTOR),
            Role::Rows => (self.dtype, rows * self.hidden, VECTOR),
            Role::InverseRmsOut => (DType::F32, self.tokens, size_of::<f32>()),
            Role::Index => (DType::I32, self.tokens * top_k, 1),
            Role::ExpertScales => match &self.call.source {
                Source::MoeFinalize { .. } => (self.dtype, self.tokens * top_k, 1),
                _ => (DType::F32, experts * self.tokens, 1),
            },
            Role::Scale => (DType::F32, 1, 1),
            // Codes and scales may have any dtype: only their number of bytes is checked.
            Role::Codes => return self.bytes(role, tensor, self.code_bytes(), VECTOR),
            Role::Scales if !self.needs_scales() => return Ok(tensor.data),
            Role::Scales => return self.bytes(role, tensor, self.scale_bytes()?, 4),
        };
        self.served(role, tensor)?;
        if tensor.dtype != dtype {
            return Err(refused(role.name(), format!("elements of {dtype}, not {}", tensor.dtype)));
        }
        let rule = || format!("of {} tokens of {} elements", self.tokens, self.hidden);
        has_count(OPERATION, role.name(), tensor.count, count, rule).map_err(Box::new)?;
        self.aligned(role, tensor.data, alignment)?;
        Ok(tensor.data)
    }

    /// Something of which only the bytes count.
    fn bytes(&self, role: Role, tensor: &Operand<'_>, needed: usize, alignment: usize) -> Result<*mut u8> {
        self.served(role, tensor)?;
        let bytes = tensor.count * tensor.dtype.size();
        if bytes < needed {
            return Err(refused(role.name(), format!("at least {needed} bytes, not {bytes}")));
        }
        self.aligned(role, tensor.data, alignment)?;
        Ok(tensor.data)
    }

    /// The bytes of all codes.
    fn code_bytes(&self) -> usize {
        match self.call.quantization {
            None => 0,
            Some(Quantization::NvFp4 { .. }) => self.tokens * self.hidden / 2,
            Some(_) => self.tokens * self.hidden,
        }
    }

    /// Whether rows fall into groups that share a scale.
    fn check_groups(&self) -> Result<()> {
        let shape = [self.tokens, self.hidden];
        let outcome = match self.call.quantization {
            Some(Quantization::Fp8Groups { group }) => groups(shape, group).map(drop),
            Some(Quantization::NvFp4 { layout, .. }) => NvFp4::new(shape[0], shape[1], layout).map(drop),
            _ => Ok(()),
        };
        outcome.map_err(|source| self.tensor_error(Role::Codes, source))
    }

    /// The bytes of all scales that a quantisation writes.
    fn scale_bytes(&self) -> Result<usize> {
        let size = match self.call.quantization {
            None | Some(Quantization::Fp8 { .. }) => Ok(0),
            Some(Quantization::Fp8Tokens { .. }) => Ok(self.tokens * size_of::<f32>()),
            Some(Quantization::Fp8Groups { group }) => {
                groups([self.tokens, self.hidden], group).map(|groups| groups.packed_scales().size())
            }
            Some(Quantization::NvFp4 { layout, .. }) => {
                ScaleGrid::new(layout, self.tokens, self.hidden / NvFp4::BLOCK).map(|grid| grid.size())
            }
        };
        size.map_err(|source| self.tensor_error(Role::Scales, source))
    }

    #[cold]
    fn tensor_error(&self, role: Role, source: TensorError) -> Box<CollectiveError> {
        Box::new(CollectiveError::Tensor { operation: OPERATION.name(), which: role.name(), source })
    }

    fn served(&self, role: Role, tensor: &Operand<'_>) -> Result<()> {
        if tensor.device == self.serves {
            return Ok(());
        }
        let (operation, which, serves) = (OPERATION.name(), role.name(), self.serves);
        Err(Box::new(CollectiveError::Device { operation, which, device: tensor.device, serves }))
    }

    /// GPUs move whole vectors, and scales in words.
    fn aligned(&self, role: Role, at: *const u8, alignment: usize) -> Result<()> {
        if self.serves == Device::Host || at.addr().is_multiple_of(alignment) {
            return Ok(());
        }
        Err(refused(role.name(), format!("a tensor at a multiple of {alignment} bytes, not at {at:p}")))
    }
}
