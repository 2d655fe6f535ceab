//! Describing a fused all-reduce with views of its tensors.

#![expect(
    clippy::result_large_err,
    reason = "two shapes in place: on the heap they would have to be dropped"
)]

use antiphon_tensor::{TensorView, TensorViewMut};

use super::{
    FusedAllReduce, Operand, Quantization, RmsNorm, Role, Source,
    operand::{Unfit, matrix, shape_of},
};

/// The output that takes the place of the source; see [`FusedAllReduce::of_in_place`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InPlace {
    /// The sum, instead of [`sum_out`](FusedAllReduce::sum_out).
    Sum,
    /// The sum with the residual, instead of [`residual_out`](FusedAllReduce::residual_out).
    Residual,
    /// The norm, instead of [`norm_out`](FusedAllReduce::norm_out).
    Norm,
}

/// Describing a call with views.
impl<'a> FusedAllReduce<Operand<'a>> {
    /// A call whose source is a tensor `T [tokens, hidden]`.
    #[inline]
    pub fn of(input: impl Into<TensorView<'a>>) -> Self {
        Self::of_source(Source::Tensor { input: input.into() })
    }

    /// A call that reduces what a source gives.
    #[inline]
    pub fn of_source(source: Source<TensorView<'a>>) -> Self {
        Self::described(operands(&source))
    }

    /// A call whose source is a tensor `T [tokens, hidden]`, whose place an output takes.
    #[inline]
    pub fn of_in_place(tensor: impl Into<TensorViewMut<'a>>, output: InPlace) -> Self {
        let tensor = tensor.into();
        let shape = matrix(Role::Input, &tensor.as_view());
        let input = shape.and_then(|shape| Ok((Operand::write(Role::Input, tensor)?, shape)));
        let place = input.as_ref().ok().map(|(input, _)| input.same());
        let mut this = Self::described(input.map(|(input, shape)| (Source::Tensor { input }, shape)));
        *match output {
            InPlace::Sum => &mut this.sum_out,
            InPlace::Residual => &mut this.residual_out,
            InPlace::Norm => &mut this.norm_out,
        } = place;
        this
    }

    /// A call of operands, with the tokens and their elements; or a call that is spoilt.
    #[inline]
    fn described(source: Result<(Source<Operand<'a>>, [usize; 2]), Unfit>) -> Self {
        match source {
            Ok((source, shape)) => Self::empty(source, shape),
            Err(unfit) => {
                Self { unfit: Some(unfit), ..Self::empty(Source::Tensor { input: Operand::NONE }, [0; 2]) }
            }
        }
    }

    /// Where the sum goes: `T [tokens, hidden]`.
    #[inline]
    pub fn sum_out(mut self, sum: impl Into<TensorViewMut<'a>>) -> Self {
        self.refuse_if(self.is_in_place(&self.sum_out), Unfit::OutputTwice);
        self.sum_out = self.keep(Operand::write(Role::SumOut, sum.into()));
        self
    }

    /// Adds `T [hidden]` to each row of the sum.
    #[inline]
    pub fn bias(mut self, bias: impl Into<TensorView<'a>>) -> Self {
        self.bias = self.keep(Operand::read(Role::Bias, &bias.into()));
        self
    }

    /// Norms before the residual is added, with a weight `T [hidden]` (1 without): Gemma 2's.
    #[inline]
    pub fn pre_norm(mut self, weight: Option<TensorView<'a>>, eps: f32) -> Self {
        self.pre_norm = Some(self.norm_of(Role::PreNormWeight, weight, eps));
        self
    }

    /// Adds `T [tokens, hidden]`.
    #[inline]
    pub fn residual(mut self, residual: impl Into<TensorView<'a>>) -> Self {
        self.refuse_if(self.has_residual_in_place(), Unfit::ResidualTwice);
        self.residual = self.keep(Operand::read(Role::Residual, &residual.into()));
        self
    }

    /// Adds `T [tokens, hidden]`, and puts the sum in its place: instead of [`residual`](Self::residual) and
    /// [`residual_out`](Self::residual_out).
    #[inline]
    pub fn residual_in_place(mut self, residual: impl Into<TensorViewMut<'a>>) -> Self {
        self.refuse_if(self.residual.is_some() || self.residual_out.is_some(), Unfit::ResidualTwice);
        self.residual = self.keep(Operand::write(Role::Residual, residual.into()));
        self.residual_out = self.residual.as_ref().map(Operand::same);
        self
    }

    /// Where the sum with the residual goes: `T [tokens, hidden]`.
    #[inline]
    pub fn residual_out(mut self, sum: impl Into<TensorViewMut<'a>>) -> Self {
        self.refuse_if(self.has_residual_in_place(), Unfit::ResidualTwice);
        self.refuse_if(self.is_in_place(&self.residual_out), Unfit::OutputTwice);
        self.residual_out = self.keep(Operand::write(Role::ResidualOut, sum.into()));
        self
    }

    /// Norms, with a weight `T [hidden]` (1 without).
    #[inline]
    pub fn rms_norm(mut self, weight: Option<TensorView<'a>>, eps: f32) -> Self {
        self.norm = Some(self.norm_of(Role::Weight, weight, eps));
        self
    }

    /// Where the norm goes: `T [tokens, hidden]`.
    #[inline]
    pub fn norm_out(mut self, norm: impl Into<TensorViewMut<'a>>) -> Self {
        self.refuse_if(self.is_in_place(&self.norm_out), Unfit::OutputTwice);
        self.norm_out = self.keep(Operand::write(Role::NormOut, norm.into()));
        self
    }

    /// Where `rms(r)` of each token goes, one over the root of the mean of the squares that its norm divides by:
    /// `f32 [tokens]`. The gradient of the norm needs it.
    #[inline]
    pub fn inverse_rms_out(mut self, inverse_rms: impl Into<TensorViewMut<'a>>) -> Self {
        self.inverse_rms_out = self.keep(Operand::write(Role::InverseRmsOut, inverse_rms.into()));
        self
    }

    /// Quantises the norm. Of `codes` and `scales` only the bytes count, not the dtype; they may be longer than needed.
    /// `scales` is needed by all forms but [`Fp8`](Quantization::Fp8). Padding among the scales is written as 0.
    #[inline]
    pub fn quantize(
        mut self,
        quantization: Quantization<TensorView<'a>>,
        codes: impl Into<TensorViewMut<'a>>,
        scales: Option<TensorViewMut<'a>>,
    ) -> Self {
        self.quantization = self.keep(quantization.try_map(&mut Operand::read));
        self.codes = self.keep(Operand::write(Role::Codes, codes.into()));
        self.scales = scales.and_then(|scales| self.keep(Operand::write(Role::Scales, scales)));
        self
    }

    /// What fits; else the call is spoilt.
    #[inline]
    fn keep<T>(&mut self, given: Result<T, Unfit>) -> Option<T> {
        given.map_err(|unfit| self.unfit = Some(unfit)).ok()
    }

    #[inline]
    fn refuse_if(&mut self, is_wrong: bool, unfit: Unfit) {
        if is_wrong {
            self.unfit = Some(unfit);
        }
    }

    /// Whether an output was put in the place of the input.
    #[inline]
    fn is_in_place(&self, output: &Option<Operand<'a>>) -> bool {
        match (&self.source, output) {
            (Source::Tensor { input }, Some(output)) => input.data == output.data,
            _ => false,
        }
    }

    /// Whether the sum with the residual was put in the place of the residual.
    #[inline]
    fn has_residual_in_place(&self) -> bool {
        matches!((&self.residual, &self.residual_out), (Some(residual), Some(out)) if residual.data == out.data)
    }

    #[inline]
    fn norm_of(&mut self, role: Role, weight: Option<TensorView<'a>>, eps: f32) -> RmsNorm<Operand<'a>> {
        RmsNorm { weight: weight.and_then(|weight| self.keep(Operand::read(role, &weight))), eps }
    }
}

/// What is kept of a source, with the tokens and their elements.
#[inline]
fn operands<'a>(source: &Source<TensorView<'a>>) -> Result<(Source<Operand<'a>>, [usize; 2]), Unfit> {
    let shape = match source {
        Source::Tensor { input } => matrix(Role::Input, input)?,
        Source::MoeReduction { experts, shared, .. } => {
            let [tokens, hidden] = matrix(Role::Shared, shared)?;
            let &[_, of_tokens, of_hidden] = experts.shape() else {
                return Err(Unfit::Experts(shape_of(experts)));
            };
            if (of_tokens, of_hidden) != (tokens, hidden) {
                return Err(Unfit::ExpertsOf([tokens, hidden], shape_of(experts)));
            }
            [tokens, hidden]
        }
        Source::MoeFinalize { rows, index, .. } => {
            let (&[_, hidden], &[tokens, _]) = (rows.shape(), index.shape()) else {
                return Err(Unfit::RowsAndIndex(shape_of(rows), shape_of(index)));
            };
            [tokens, hidden]
        }
    };
    Ok((source.try_map(&mut Operand::read)?, shape))
}
