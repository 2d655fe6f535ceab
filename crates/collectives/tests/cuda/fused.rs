//! Fused all-reduces as data: a [`Case`] says which, and the same bytes go through the host and through a GPU.

use antiphon_collectives::{
    CollectiveError, Collectives, ReduceOp, StreamCollectives,
    cuda::Algorithm,
    fusion::{Accumulation, FusedAllReduce, InPlace, Operand, Quantization, Scale, Source},
};
use antiphon_device::cuda::{DeviceMemory, Stream};
use antiphon_tensor::{
    DType, Device, ScaleGrid, ScaleLayout, TensorView, TensorViewMut,
    quantize::{Fp8Groups, GroupRule, TokenRule},
    with_dtype,
};

use crate::{
    harness::{At, Outcome, Rank, What},
    image::{Image, Rows, Slot},
};

/// Where the addends come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum From {
    Tensor,
    Experts(usize),
    /// Finalize.
    Rows {
        top_k: usize,
        weighted: bool,
        shared: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Residual {
    No,
    Apart,
    InPlace,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Norm {
    No,
    Plain,
    Weighted,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    Fp8,
    Fp8Tokens(TokenRule),
    Fp8Groups(usize),
    NvFp4(ScaleLayout),
}

/// A call: what is computed, of what shape, and which results are wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    pub dtype: DType,
    pub tokens: usize,
    pub hidden: usize,
    pub from: From,
    /// Which of the outputs goes in the place of a tensor.
    pub in_place: Option<InPlace>,
    pub rows: Rows,
    pub accumulation: Accumulation,
    pub algorithm: Option<Algorithm>,
    pub bias: bool,
    pub pre_norm: Norm,
    pub residual: Residual,
    pub norm: Norm,
    pub weight_bias: f32,
    pub round_before_weight: bool,
    pub form: Option<Form>,
    /// Whether the scale of `form` is read from memory.
    pub scale_in_memory: bool,
    pub sum_out: bool,
    pub residual_out: bool,
    pub norm_out: bool,
    pub inverse_rms_out: bool,
    /// Whether codes and scales have more bytes than needed.
    pub roomy: bool,
    /// The all-reduce that is not fused, from the source to `sum_out`.
    pub plain: bool,
    /// What tells the values of two equal cases apart.
    pub seed: usize,
}

impl Case {
    /// Sum, residual, norm, all of them written.
    pub fn new(dtype: DType, tokens: usize, hidden: usize) -> Self {
        Self {
            dtype,
            tokens,
            hidden,
            from: From::Tensor,
            in_place: None,
            rows: Rows::Ordinary,
            accumulation: Accumulation::F32,
            algorithm: None,
            bias: false,
            pre_norm: Norm::No,
            residual: Residual::Apart,
            norm: Norm::Weighted,
            weight_bias: 0.0,
            round_before_weight: false,
            form: None,
            scale_in_memory: false,
            sum_out: true,
            residual_out: true,
            norm_out: true,
            inverse_rms_out: false,
            roomy: false,
            plain: false,
            seed: 0,
        }
    }

    /// The norm in a quantised form, beside what goes on in the residual stream: what layers use.
    pub fn quantized(dtype: DType, tokens: usize, hidden: usize, form: Form) -> Self {
        Self { form: Some(form), sum_out: false, norm_out: false, ..Self::new(dtype, tokens, hidden) }
    }

    /// An all-reduce as it is without fusion.
    pub fn plain(dtype: DType, tokens: usize, hidden: usize) -> Self {
        let (residual, norm) = (Residual::No, Norm::No);
        let fused = Self::new(dtype, tokens, hidden);
        Self { residual, norm, residual_out: false, norm_out: false, plain: true, ..fused }
    }

    /// Bytes of what a slot holds; 0 for what there is not.
    pub fn bytes(&self, slot: Slot) -> usize {
        let (size, tokens, hidden) = (self.dtype.size(), self.tokens, self.hidden);
        let (row, matrix) = (size * hidden, size * tokens * hidden);
        let room = if self.roomy { 5 } else { 0 };
        match slot {
            Slot::Source => match self.from {
                From::Tensor => if_wanted(self.in_place.is_none(), matrix),
                From::Experts(count) => count * matrix,
                From::Rows { .. } => self.row_count() * row,
            },
            Slot::ExpertScales => match self.from {
                From::Tensor => 0,
                From::Experts(count) => 4 * count * tokens,
                From::Rows { top_k, weighted, .. } => if_wanted(weighted, size * tokens * top_k),
            },
            Slot::Index => match self.from {
                From::Rows { top_k, .. } => 4 * tokens * top_k,
                _ => 0,
            },
            Slot::Shared => {
                let has_one = matches!(self.from, From::Experts(_) | From::Rows { shared: true, .. });
                if_wanted(has_one, matrix)
            }
            Slot::Bias => if_wanted(self.bias, row),
            Slot::PreWeight => if_wanted(self.pre_norm == Norm::Weighted, row),
            Slot::Residual => if_wanted(self.residual == Residual::Apart, matrix),
            Slot::Gamma => if_wanted(self.norm == Norm::Weighted, row),
            Slot::Scale => 4,
            Slot::SumOut => if_wanted(self.sum_out, matrix),
            Slot::ResidualOut => if_wanted(self.residual_out, matrix),
            Slot::NormOut => if_wanted(self.norm_out, matrix),
            Slot::InverseRmsOut => if_wanted(self.inverse_rms_out, 4 * tokens),
            Slot::Codes => match self.form {
                None => 0,
                Some(Form::NvFp4(_)) => tokens * hidden / 2 + room,
                Some(_) => tokens * hidden + room,
            },
            Slot::Scales => self.form.map_or(0, |form| self.scale_bytes(form) + room),
        }
    }

    fn scale_bytes(&self, form: Form) -> usize {
        match form {
            Form::Fp8 => 0,
            Form::Fp8Tokens(_) => 4 * self.tokens,
            Form::Fp8Groups(group) => {
                let groups = Fp8Groups::new(self.tokens, self.hidden, group, GroupRule::FlashInfer);
                groups.expect("a group of the case").packed_scales().size()
            }
            Form::NvFp4(layout) => {
                ScaleGrid::new(layout, self.tokens, self.hidden / 16).expect("a layout of the case").size()
            }
        }
    }

    /// The slot of the output that goes in the place of a tensor.
    fn slot_in_place(&self) -> Option<Slot> {
        self.in_place.map(|output| match output {
            InPlace::Sum => Slot::SumOut,
            InPlace::Residual => Slot::ResidualOut,
            InPlace::Norm => Slot::NormOut,
        })
    }

    /// Whether a slot is read, though it may be written later.
    pub fn reads(&self, slot: Slot) -> bool {
        let residual_in_place = slot == Slot::ResidualOut && self.residual == Residual::InPlace;
        !slot.is_output() || residual_in_place || self.slot_in_place() == Some(slot)
    }

    /// Rows of the experts for finalize: fewer than there are entries in the index, so that some serve two tokens.
    pub fn row_count(&self) -> usize {
        match self.from {
            From::Rows { top_k, .. } => self.tokens * top_k / 2 + 1,
            _ => self.tokens,
        }
    }

    /// The call, on memory that begins at `base` and holds an [`Image`] of this case; of `tokens` tokens from `first` on.
    ///
    /// # Safety
    /// The memory is valid, and no other code uses it, as long as the call is used.
    unsafe fn call<'a>(
        &self,
        image: &Image,
        base: *mut u8,
        device: Device,
        first: usize,
    ) -> FusedAllReduce<Operand<'a>> {
        let (dtype, tokens, hidden) = (self.dtype, self.tokens, self.hidden);
        let start = |slot: Slot| base.wrapping_add(image.offset(slot) + slot.bytes_before(self, first));
        let has = |slot: Slot| self.bytes(slot) > 0;
        let view = |slot: Slot, dtype: DType, shape: &[usize]| {
            // SAFETY: the image has as many bytes for the slot; the rest is passed on.
            unsafe { TensorView::from_raw_parts(start(slot), dtype, shape, None, device) }.expect("plain")
        };
        let view_mut = |slot: Slot, dtype: DType, shape: &[usize]| {
            // SAFETY: as above.
            unsafe { TensorViewMut::from_raw_parts(start(slot), dtype, shape, None, device) }.expect("plain")
        };
        let matrix = |slot: Slot| view(slot, dtype, &[tokens, hidden]);
        let matrix_mut = |slot: Slot| view_mut(slot, dtype, &[tokens, hidden]);
        let row = |slot: Slot| has(slot).then(|| view(slot, dtype, &[hidden]));
        let source = || match self.from {
            From::Tensor => Source::Tensor { input: matrix(Slot::Source) },
            From::Experts(count) => Source::MoeReduction {
                experts: view(Slot::Source, dtype, &[count, tokens, hidden]),
                scales: view(Slot::ExpertScales, DType::F32, &[count, tokens]),
                shared: matrix(Slot::Shared),
            },
            From::Rows { top_k, weighted, shared } => Source::MoeFinalize {
                rows: view(Slot::Source, dtype, &[self.row_count(), hidden]),
                index: view(Slot::Index, DType::I32, &[tokens, top_k]),
                scales: weighted.then(|| view(Slot::ExpertScales, dtype, &[tokens, top_k])),
                shared: shared.then(|| matrix(Slot::Shared)),
                routed_scaling: 0.75,
            },
        };
        let call = match (self.in_place, self.slot_in_place()) {
            (Some(output), Some(slot)) => FusedAllReduce::of_in_place(matrix_mut(slot), output),
            _ => FusedAllReduce::of_source(source()),
        };
        let is_apart = |output| self.in_place != Some(output);
        let mut call = call.accumulation(self.accumulation).algorithm(self.algorithm);
        if self.sum_out && is_apart(InPlace::Sum) {
            call = call.sum_out(matrix_mut(Slot::SumOut));
        }
        if let Some(bias) = row(Slot::Bias) {
            call = call.bias(bias);
        }
        if self.pre_norm != Norm::No {
            call = call.pre_norm(row(Slot::PreWeight), 1e-5);
        }
        call = match self.residual {
            Residual::InPlace => call.residual_in_place(matrix_mut(Slot::ResidualOut)),
            Residual::Apart => call.residual(matrix(Slot::Residual)),
            Residual::No => call,
        };
        if self.residual_out && self.residual != Residual::InPlace && is_apart(InPlace::Residual) {
            call = call.residual_out(matrix_mut(Slot::ResidualOut));
        }
        if self.norm != Norm::No {
            call = call.rms_norm(row(Slot::Gamma), 1e-6).weight_bias(self.weight_bias);
            call = call.round_before_weight(self.round_before_weight);
        }
        if self.norm_out && is_apart(InPlace::Norm) {
            call = call.norm_out(matrix_mut(Slot::NormOut));
        }
        if self.inverse_rms_out {
            call = call.inverse_rms_out(view_mut(Slot::InverseRmsOut, DType::F32, &[tokens]));
        }
        let Some(form) = self.form else { return call };
        let scale = match self.scale_in_memory {
            true => Scale::Tensor(view(Slot::Scale, DType::F32, &[1])),
            false => Scale::Value(self.scale()),
        };
        let quantization = match form {
            Form::Fp8 => Quantization::Fp8 { scale },
            Form::Fp8Tokens(rule) => Quantization::Fp8Tokens { rule },
            Form::Fp8Groups(group) => Quantization::Fp8Groups { group },
            Form::NvFp4(layout) => Quantization::NvFp4 { scale, layout },
        };
        let bytes = |slot: Slot| view_mut(slot, DType::U8, &[self.bytes(slot)]);
        call.quantize(quantization, bytes(Slot::Codes), has(Slot::Scales).then(|| bytes(Slot::Scales)))
    }

    /// The scale of the form: about the largest norm over 448 for FP8, and its inverse times 6 for FP4.
    pub fn scale(&self) -> f32 {
        if matches!(self.form, Some(Form::NvFp4(_))) { 41.0 } else { 0.127 }
    }
}

fn if_wanted(wanted: bool, bytes: usize) -> usize {
    if wanted { bytes } else { 0 }
}

/// A case on a GPU, with what it should leave there.
pub struct Fused<'a> {
    rank: &'a Rank,
    case: Case,
    before: Image,
    expected: Image,
    memory: DeviceMemory,
}

impl<'a> Fused<'a> {
    /// Does it on the host, and prepares it on the GPU.
    pub fn new(rank: &'a Rank, case: Case) -> Outcome<Self> {
        let mut fused = Self::without_host(rank, case)?;
        let (before, expected) = (&fused.before, &mut fused.expected);
        if case.plain {
            with_dtype!(case.dtype, T => {
                let input = before.elements::<T>(Slot::Source);
                rank.comm.all_reduce(input, expected.elements_mut::<T>(Slot::SumOut), ReduceOp::Sum)?;
            });
        } else {
            // SAFETY: the image is this call's alone while it lasts.
            rank.comm.all_reduce_fused(unsafe { case.call(before, expected.base(), Device::Host, 0) })?;
        }
        before.check_around(expected, &format!("{case:?} on the host"))?;
        fused.prepare()?;
        Ok(fused)
    }

    /// Loads the kernels of the case, and meets the ranks that share the GPU before any of them waits in a kernel.
    fn prepare(&self) -> Outcome {
        if !self.case.plain {
            let device = Device::Cuda(self.rank.collectives.context().device().ordinal());
            let base = self.memory.pointer().0 as usize as *mut u8;
            // SAFETY: the call is not made.
            let call = unsafe { self.case.call(&self.before, base, device, 0) };
            self.rank.collectives.prepare_fused(&call)?;
        }
        self.rank.meet()
    }

    /// For calls that fail, after which the content of outputs is not defined.
    pub fn without_host(rank: &'a Rank, case: Case) -> Outcome<Self> {
        let before = Image::new(&case, rank.comm.rank());
        let (expected, memory) = (before.clone(), rank.upload(before.bytes())?);
        Ok(Self { rank, case, before, expected, memory })
    }

    pub fn queue(&self) -> Result<(), CollectiveError> {
        self.queue_on(&self.rank.stream)
    }

    pub fn queue_on(&self, stream: &Stream) -> Result<(), CollectiveError> {
        match self.case.plain {
            true => self.queue_plain(stream),
            false => self.queue_tokens_on(0, self.case.tokens, stream),
        }
    }

    fn queue_plain(&self, stream: &Stream) -> Result<(), CollectiveError> {
        let count = self.case.tokens * self.case.hidden;
        let at = |slot| At(self.memory.pointer().0 + self.before.offset(slot) as u64, self.case.dtype, count);
        let what = What::AllReduce(ReduceOp::Sum, self.case.algorithm);
        self.rank.queue_on(what, at(Slot::Source), at(Slot::SumOut), stream)
    }

    /// Some of the tokens only, of a case whose results have a row for each token.
    pub fn queue_tokens(&self, first: usize, tokens: usize) -> Result<(), CollectiveError> {
        self.queue_tokens_on(first, tokens, &self.rank.stream)
    }

    fn queue_tokens_on(&self, first: usize, tokens: usize, stream: &Stream) -> Result<(), CollectiveError> {
        let case = Case { tokens, ..self.case };
        let device = Device::Cuda(self.rank.collectives.context().device().ordinal());
        let base = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: the tests keep this until they have synchronised with the stream, which keeps calls apart.
        unsafe {
            let call = case.call(&self.before, base, device, first);
            self.rank.collectives.all_reduce_fused(call, stream.borrow())
        }
    }

    /// Puts everything back as it was before the first call.
    pub fn reset(&self) -> Outcome {
        Ok(self.memory.write(&self.rank.stream, 0, self.before.bytes())?)
    }

    /// That the GPU has what the host has: in the results, behind them and everywhere else.
    pub fn check(&self) -> Outcome {
        let got = self.rank.download(&self.memory, 0, self.before.bytes().len())?;
        self.expected.same(&got, self.case.dtype, &format!("{:?}", self.case))
    }
}

impl Rank {
    /// Does a case on GPUs and on the host, and compares the bits.
    pub fn fuse(&self, case: Case) -> Outcome {
        let fused = Fused::new(self, case)?;
        fused.queue()?;
        fused.check()
    }

    /// Compares the results of every algorithm with one result of the host.
    pub fn fuse_by_all(&self, case: Case) -> Outcome {
        let mut fused = Fused::new(self, case)?;
        for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
            fused.case.algorithm = algorithm;
            fused.prepare()?;
            fused.reset()?;
            fused.queue()?;
            fused.check()?;
        }
        Ok(())
    }
}
