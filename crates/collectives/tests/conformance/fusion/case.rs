//! Fused calls: every combination of what can be asked for, and what they write.

use antiphon_collectives::{
    Collectives,
    all_reduce::Algorithm,
    fusion::{Accumulation, FusedAllReduce, InPlace, Quantization, Scale},
};
use antiphon_tensor::{
    DType, ScaleLayout, TensorView,
    quantize::{Fp8Groups, GroupRule, NvFp4, TokenRule},
};
use antiphon_testing::Alignment;

use super::data::Data;
use crate::{
    harness::{CollectiveBackend, Tensor},
    values::{Bits, Values},
};

/// What a rank asks for.
#[derive(Debug, Clone)]
pub struct Case {
    pub dtype: DType,
    pub tokens: usize,
    pub hidden: usize,
    pub source: Kind,
    /// Which of the outputs goes in the place of a tensor, instead of memory of its own.
    pub in_place: Option<InPlace>,
    pub accumulation: Accumulation,
    pub algorithm: Option<Algorithm>,
    pub alignment: Alignment,
    pub bias: bool,
    /// With a weight or without.
    pub pre_norm: Option<bool>,
    pub residual: Residual,
    pub gamma: bool,
    pub weight_bias: f32,
    pub round_before_weight: bool,
    pub eps: f32,
    pub sum_out: bool,
    pub residual_out: bool,
    pub norm_out: bool,
    pub inverse_rms_out: bool,
    pub form: Option<Form>,
    /// Bytes that codes and scales are longer than they need be.
    pub spare: usize,
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Tensor,
    MoeReduction { experts: usize },
    MoeFinalize { top_k: usize, scales: bool, shared: bool },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Residual {
    None,
    Apart,
    InPlace,
}

/// How the norm is quantised; a scale may stand in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    Fp8 { scale: f32, in_memory: bool },
    Fp8Tokens { rule: TokenRule },
    Fp8Groups { group: usize },
    NvFp4 { scale: f32, layout: ScaleLayout, in_memory: bool },
}

impl Case {
    /// A bare sum.
    pub fn new(dtype: DType, tokens: usize, hidden: usize) -> Self {
        Self {
            dtype,
            tokens,
            hidden,
            source: Kind::Tensor,
            in_place: None,
            accumulation: Accumulation::F32,
            algorithm: None,
            alignment: Alignment::Aligned,
            bias: false,
            pre_norm: None,
            residual: Residual::None,
            gamma: false,
            weight_bias: 0.0,
            round_before_weight: false,
            eps: 1e-6,
            sum_out: true,
            residual_out: false,
            norm_out: false,
            inverse_rms_out: false,
            form: None,
            spare: 0,
            seed: 0,
        }
    }

    /// Any: what the ranks must agree on follows from the seed, the rest from seed and rank.
    pub fn any(dtype: DType, tokens: usize, hidden: usize, seed: u64, rank: usize) -> Self {
        let mut bits = Bits::new(seed);
        let source = match bits.below(4) {
            0 => Kind::MoeReduction { experts: bits.below(4) },
            1 => Kind::MoeFinalize {
                top_k: bits.below(4),
                scales: bits.below(2) == 0,
                shared: bits.below(2) == 0,
            },
            _ => Kind::Tensor,
        };
        let accumulation = if bits.below(4) == 0 { Accumulation::Rounded } else { Accumulation::F32 };
        let algorithm = [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot)][bits.below(3)];

        let mut bits = Bits::new(seed * 16 + rank as u64 + 1);
        let form = Form::any(&mut bits, dtype, hidden);
        let mut flag = || bits.below(2) == 0;
        let mut case = Self {
            source,
            accumulation,
            algorithm,
            alignment: if flag() { Alignment::Odd } else { Alignment::Aligned },
            bias: flag(),
            pre_norm: flag().then(&mut flag),
            residual: [Residual::None, Residual::Apart, Residual::InPlace, Residual::InPlace]
                [usize::from(flag()) * 2 + usize::from(flag())],
            gamma: flag(),
            weight_bias: if flag() { 1.0 } else { 0.0 },
            round_before_weight: flag(),
            eps: if flag() { 1e-6 } else { 0.0 },
            sum_out: flag(),
            residual_out: flag(),
            norm_out: flag(),
            inverse_rms_out: flag(),
            form,
            spare: if flag() { 7 } else { 0 },
            seed,
            ..Self::new(dtype, tokens, hidden)
        };
        case.residual_out &= case.residual != Residual::InPlace;
        // Some output.
        case.sum_out |= !case.residual_out && !case.norm_out && !case.inverse_rms_out && form.is_none();
        let places = [
            (InPlace::Sum, case.sum_out),
            (InPlace::Residual, case.residual_out),
            (InPlace::Norm, case.norm_out),
        ];
        let wanted = places.into_iter().filter(|&(_, is_wanted)| is_wanted && source == Kind::Tensor);
        let wanted: Vec<InPlace> = wanted.map(|(place, _)| place).collect();
        case.in_place = wanted.get(bits.below(2 * wanted.len().max(1))).copied();
        case
    }

    /// Whether any result needs the norm.
    pub fn has_norm(&self) -> bool {
        self.norm_out || self.inverse_rms_out || self.form.is_some()
    }

    pub fn count(&self) -> usize {
        self.tokens * self.hidden
    }

    /// Bytes of codes and scales.
    pub fn quantized_bytes(&self) -> (usize, usize) {
        let (tokens, hidden) = (self.tokens, self.hidden);
        match self.form {
            None => (0, 0),
            Some(Form::Fp8 { .. }) => (tokens * hidden, 0),
            Some(Form::Fp8Tokens { .. }) => (tokens * hidden, tokens * size_of::<f32>()),
            Some(Form::Fp8Groups { group }) => {
                let groups = Fp8Groups::new(tokens, hidden, group, GroupRule::FlashInfer).unwrap();
                (tokens * hidden, groups.packed_scales().size())
            }
            Some(Form::NvFp4 { layout, .. }) => {
                let format = NvFp4::new(tokens, hidden, layout).unwrap();
                (format.code_bytes(), format.scale_grid().size())
            }
        }
    }

    /// The call, on tensors between guards.
    pub fn run<B: CollectiveBackend>(&self, comm: &B, data: &Data) -> Outcome {
        let (dtype, count, shape) = (self.dtype, self.count(), [self.tokens, self.hidden]);
        let held = |values: &Values| Tensor::<B>::holding(comm, values, self.alignment);
        let output = |wanted: bool, place| {
            let is_apart = wanted && self.in_place != Some(place);
            is_apart.then(|| Tensor::<B>::unwritten(comm, dtype, count, self.alignment))
        };
        let bytes = |count| Tensor::<B>::unwritten(comm, DType::U8, count + self.spare, self.alignment);

        let parts = &data.contributions[comm.rank()];
        let mut source = parts.hold(comm, self.alignment);
        let (bias, gamma) = (held(&data.bias), held(&data.gamma));
        let (pre_weight, mut residual) = (held(&data.pre_weight), held(&data.residual));
        let mut sum_out = output(self.sum_out, InPlace::Sum);
        let mut residual_out = output(self.residual_out, InPlace::Residual);
        let mut norm_out = output(self.norm_out, InPlace::Norm);
        let mut inverse_rms_out = self
            .inverse_rms_out
            .then(|| Tensor::<B>::unwritten(comm, DType::F32, self.tokens, self.alignment));
        let (code_bytes, scale_bytes) = self.quantized_bytes();
        let (mut codes, mut scales) = (bytes(code_bytes), bytes(scale_bytes));
        let factor = self.form.map_or(0.0, Form::factor);
        let factor = held(&Values::of(&[factor]));

        let call = match self.in_place {
            None => FusedAllReduce::of_source(parts.source(shape, &source)),
            Some(output) => {
                let tensor = source[0].view_mut().reshape(&shape).unwrap();
                FusedAllReduce::of_in_place(tensor, output)
            }
        };
        let mut call = call
            .accumulation(self.accumulation)
            .algorithm(self.algorithm)
            .weight_bias(self.weight_bias)
            .round_before_weight(self.round_before_weight);
        if let Some(sum) = &mut sum_out {
            call = call.sum_out(sum.view_mut());
        }
        if self.bias {
            call = call.bias(bias.view());
        }
        if let Some(weighted) = self.pre_norm {
            call = call.pre_norm(weighted.then(|| pre_weight.view()), self.eps);
        }
        call = match self.residual {
            Residual::None => call,
            Residual::Apart => call.residual(residual.view()),
            Residual::InPlace => call.residual_in_place(residual.view_mut()),
        };
        if let Some(sum) = &mut residual_out {
            call = call.residual_out(sum.view_mut());
        }
        if self.has_norm() {
            call = call.rms_norm(self.gamma.then(|| gamma.view()), self.eps);
        }
        if let Some(norm) = &mut norm_out {
            call = call.norm_out(norm.view_mut());
        }
        if let Some(inverse_rms) = &mut inverse_rms_out {
            call = call.inverse_rms_out(inverse_rms.view_mut());
        }
        if let Some(form) = self.form {
            let needed = !matches!(form, Form::Fp8 { .. });
            let scales = needed.then(|| scales.view_mut());
            call = call.quantize(form.quantization(factor.view()), codes.view_mut(), scales);
        }
        comm.all_reduce_fused(call).unwrap_or_else(|error| panic!("{self:?}: {error}"));

        if self.in_place.is_none() {
            for (tensor, values) in source.iter().zip(parts.values()) {
                tensor.assert_holds(&values, "a source");
            }
        }
        let taken = |tensor: Option<Tensor<B>>, place| match tensor {
            Some(tensor) => Some(tensor.values()),
            None => (self.in_place == Some(place)).then(|| source[0].values()),
        };
        let residual_in_place = (self.residual == Residual::InPlace).then(|| residual.values());
        Outcome {
            sum: taken(sum_out, InPlace::Sum),
            residual: taken(residual_out, InPlace::Residual).or(residual_in_place),
            norm: taken(norm_out, InPlace::Norm),
            inverse_rms: inverse_rms_out.map(|tensor| tensor.values()),
            codes: codes.values(),
            scales: scales.values(),
        }
    }
}

/// What a call wrote.
pub struct Outcome {
    pub sum: Option<Values>,
    pub residual: Option<Values>,
    pub norm: Option<Values>,
    pub inverse_rms: Option<Values>,
    /// These with what they are longer than they need be.
    pub codes: Values,
    pub scales: Values,
}

impl Form {
    /// One for this dtype and hidden size, or none.
    fn any(bits: &mut Bits, dtype: DType, hidden: usize) -> Option<Self> {
        let (in_memory, sign) = (bits.below(2) == 0, if bits.below(8) == 0 { -1.0 } else { 1.0 });
        Some(match bits.below(7) {
            0 => Self::Fp8 { scale: 0.02 * sign, in_memory },
            1 => {
                Self::Fp8Tokens { rule: [TokenRule::Quotient, TokenRule::Reciprocal][usize::from(in_memory)] }
            }
            2 | 3 => {
                let groups = [1, 3, 6, 8, 16, 20, 80, 128, 208, 512, hidden].map(|group| group.min(hidden));
                let dividing = groups.into_iter().filter(|&group| hidden.is_multiple_of(group));
                let dividing: Vec<usize> = dividing.collect();
                Self::Fp8Groups { group: dividing[bits.below(dividing.len())] }
            }
            4 | 5 if dtype != DType::F32 => {
                let layout = ScaleLayout::ALL[bits.below(3)];
                Self::NvFp4 { scale: 448.0 * 6.0 / 16.0 * sign, layout, in_memory }
            }
            _ => return None,
        })
    }

    /// The scale that is given, 0 if none is.
    pub fn factor(self) -> f32 {
        match self {
            Self::Fp8 { scale, .. } | Self::NvFp4 { scale, .. } => scale,
            _ => 0.0,
        }
    }

    fn quantization(self, at: TensorView<'_>) -> Quantization<TensorView<'_>> {
        let given = |value, in_memory| if in_memory { Scale::Tensor(at) } else { Scale::Value(value) };
        match self {
            Self::Fp8 { scale, in_memory } => Quantization::Fp8 { scale: given(scale, in_memory) },
            Self::Fp8Tokens { rule } => Quantization::Fp8Tokens { rule },
            Self::Fp8Groups { group } => Quantization::Fp8Groups { group },
            Self::NvFp4 { scale, layout, in_memory } => {
                Quantization::NvFp4 { scale: given(scale, in_memory), layout }
            }
        }
    }
}
