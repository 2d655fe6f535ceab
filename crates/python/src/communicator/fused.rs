//! The arrays of a fused all-reduce: found, checked, and made where the caller gave none.

use antiphon::{
    collectives::fusion::{Accumulation, Quantization, RmsNorm, Role, Scale, Source},
    prelude::{Collectives, DType},
    tensor::{
        ScaleLayout,
        dlpack::ElementType,
        quantize::{NvFp4, TokenRule},
    },
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    sync::PyOnceLock,
    types::{PyBool, PyFloat, PyInt, PySlice, PyString},
};

use super::{Communicator, prepare::algorithm};
use crate::{
    arguments::Given,
    cuda::RawStream,
    error::Result,
    fused::{Fused, check_overlap, cuda_device},
    interrupt,
    operand::{Operand, Tensor, Usage},
};

/// The keywords of `all_reduce_fused`, as they were given.
#[derive(Clone, Copy, Default)]
pub(super) struct Arguments<'a, 'py> {
    pub(super) x: Given<'a, 'py>,
    pub(super) tokens: Option<usize>,
    pub(super) hidden: Option<usize>,
    pub(super) experts: Given<'a, 'py>,
    pub(super) expert_scales: Given<'a, 'py>,
    pub(super) shared: Given<'a, 'py>,
    pub(super) rows: Given<'a, 'py>,
    pub(super) index: Given<'a, 'py>,
    pub(super) routed_scaling: f32,
    pub(super) bias: Given<'a, 'py>,
    pub(super) pre_norm: bool,
    pub(super) pre_weight: Given<'a, 'py>,
    pub(super) residual: Given<'a, 'py>,
    pub(super) weight: Given<'a, 'py>,
    pub(super) weight_bias: f32,
    pub(super) round_before_weight: bool,
    pub(super) eps: f32,
    pub(super) quantize: Option<&'a str>,
    pub(super) scale: Given<'a, 'py>,
    pub(super) group_size: usize,
    pub(super) scale_layout: Given<'a, 'py>,
    pub(super) sum_out: Given<'a, 'py>,
    pub(super) residual_out: Given<'a, 'py>,
    pub(super) norm_out: Given<'a, 'py>,
    pub(super) inverse_rms_out: Given<'a, 'py>,
    pub(super) codes: Given<'a, 'py>,
    pub(super) scales: Given<'a, 'py>,
    pub(super) rounded: bool,
    pub(super) algorithm: Option<&'a str>,
    pub(super) stream: Option<RawStream>,
}

/// What keeps the memory of a call valid, as it is found.
struct Found {
    usage: Usage,
    operands: Vec<Operand>,
    /// How many elements matrices have, if the caller said so: of longer ones the first count.
    count: Option<usize>,
}

impl Found {
    fn keep(&mut self, operand: Operand) -> Tensor {
        let tensor = operand.tensor;
        self.operands.push(operand);
        tensor
    }

    fn need(&mut self, name: &str, array: Given<'_, '_>) -> Result<Tensor> {
        let array = array.ok_or_else(|| PyTypeError::new_err(format!("all_reduce_fused: pass {name}")))?;
        let operand = Operand::import(array, name, self.usage)?.numeric()?;
        Ok(self.keep(operand))
    }

    fn read(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        array.map(|array| self.need(name, Some(array))).transpose()
    }

    fn write(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        let Some(array) = array else { return Ok(None) };
        let operand = Operand::import(array, name, self.usage)?.writable(name)?;
        Ok(Some(self.keep(operand)))
    }

    fn first(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        let Some(count) = self.count.filter(|&count| count != tensor.count) else { return Ok(tensor) };
        if tensor.count < count {
            let text =
                format!("all_reduce_fused: {name} has {} elements, and {count} are needed", tensor.count);
            return Err(PyValueError::new_err(text).into());
        }
        Ok(Tensor { count, ..tensor })
    }

    fn read_matrix(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        self.read(name, array)?.map(|tensor| self.first(name, tensor)).transpose()
    }

    fn write_matrix(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        self.write(name, array)?.map(|tensor| self.first(name, tensor)).transpose()
    }

    /// Something of which only the bytes count, in whatever order its elements are.
    fn write_bytes(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        let Some(array) = array else { return Ok(None) };
        let operand = Operand::import_span(array, name, self.usage)?.writable(name)?;
        Ok(Some(self.keep(operand)))
    }

    /// A number, or an array of one. Numbers are told by their type: asking an array for its value would wait for the GPU.
    fn scale(&mut self, array: Given<'_, '_>) -> Result<Scale<Tensor>> {
        Ok(match array {
            None => Scale::Value(1.0),
            Some(array) if array.is_instance_of::<PyFloat>() || array.is_instance_of::<PyInt>() => {
                Scale::Value(array.extract()?)
            }
            Some(array) => Scale::Tensor(self.need("scale", Some(array))?),
        })
    }

    /// The last dimension of what was found last.
    fn columns(&self) -> usize {
        self.operands.last().and_then(|operand| operand.shape().last().copied()).unwrap_or(1)
    }
}

/// How many rows of so many elements there are.
fn rows_of(name: &str, tensor: &Tensor, hidden: usize) -> Result<usize> {
    match tensor.count.checked_rem(hidden) {
        Some(0) => Ok(tensor.count / hidden),
        _ => {
            let text = format!("{name}: {} elements are no rows of {hidden}", tensor.count);
            Err(PyValueError::new_err(text).into())
        }
    }
}

/// A layout of scales as its name or its integer.
fn scale_layout(layout: Given<'_, '_>) -> Result<ScaleLayout> {
    let Some(layout) = layout else { return Ok(ScaleLayout::default()) };
    if layout.is_instance_of::<PyInt>() && !layout.is_instance_of::<PyBool>() {
        return Ok(ScaleLayout::from_code(layout.extract()?)?);
    }
    match layout.cast::<PyString>().map_err(PyErr::from)?.to_cow()?.as_ref() {
        "128x4" => Ok(ScaleLayout::Swizzled128x4),
        "8x4" => Ok(ScaleLayout::Swizzled8x4),
        "linear" => Ok(ScaleLayout::Linear),
        other => {
            let text = format!("unknown layout of scales {other:?}: known are 128x4, 8x4, linear");
            Err(PyValueError::new_err(text).into())
        }
    }
}

impl Arguments<'_, '_> {
    fn gather(&self) -> Result<(Fused, Found)> {
        let mut found =
            Found { usage: Usage::Call(self.stream), operands: Vec::with_capacity(12), count: self.count()? };
        let (source, tokens, hidden) = self.source(&mut found)?;
        let bias = found.read("bias", self.bias)?;
        let pre_weight = found.read("pre_weight", self.pre_weight)?;
        let residual = found.read_matrix("residual", self.residual)?;
        let weight = found.read("weight", self.weight)?;
        let sum_out = found.write_matrix("sum_out", self.sum_out)?;
        let residual_out = found.write_matrix("residual_out", self.residual_out)?;
        let norm_out = found.write_matrix("norm_out", self.norm_out)?;
        let inverse_rms_out = found.write("inverse_rms_out", self.inverse_rms_out)?;
        let quantization = self.quantize(&mut found)?;
        let codes = found.write_bytes("codes", self.codes)?;
        let scales = found.write_bytes("scales", self.scales)?;
        if quantization.is_some() != codes.is_some() {
            let text = "all_reduce_fused: quantize and codes need each other";
            return Err(PyValueError::new_err(text).into());
        }
        let norm = |is_wanted: bool, weight| is_wanted.then_some(RmsNorm { weight, eps: self.eps });
        let wants_norm = norm_out.is_some() || inverse_rms_out.is_some() || codes.is_some();
        let fused = Fused::new(source, tokens, hidden)
            .accumulation(if self.rounded { Accumulation::Rounded } else { Accumulation::F32 })
            .algorithm(self.algorithm.map(algorithm).transpose()?)
            .weight_bias(self.weight_bias)
            .round_before_weight(self.round_before_weight)
            .with_norms(norm(self.pre_norm, pre_weight), norm(wants_norm, weight))
            .with_quantization(quantization)
            .with(Role::Bias, bias)
            .with(Role::Residual, residual)
            .with(Role::SumOut, sum_out)
            .with(Role::ResidualOut, residual_out)
            .with(Role::NormOut, norm_out)
            .with(Role::InverseRmsOut, inverse_rms_out)
            .with(Role::Codes, codes)
            .with(Role::Scales, scales);
        check_overlap(&fused)?;
        Ok((fused, found))
    }

    /// The elements of a matrix, where `tokens` and `hidden` say.
    fn count(&self) -> Result<Option<usize>> {
        let Some(tokens) = self.tokens else { return Ok(None) };
        let count = self.hidden.and_then(|hidden| tokens.checked_mul(hidden));
        if count.is_none() || self.x.is_none() {
            let text = "all_reduce_fused: tokens needs x, and hidden";
            return Err(PyTypeError::new_err(text).into());
        }
        Ok(count)
    }

    /// The source, with its tokens and their elements.
    fn source(&self, found: &mut Found) -> Result<(Source<Tensor>, usize, usize)> {
        match (self.x, self.experts, self.rows) {
            (Some(x), None, None) => {
                let x = found.need("x", Some(x))?;
                let x = found.first("x", x)?;
                let hidden = self.hidden.unwrap_or_else(|| found.columns());
                Ok((Source::Tensor { input: x }, rows_of("x", &x, hidden)?, hidden))
            }
            (None, Some(experts), None) => {
                let shared = found.need("shared", self.shared)?;
                let hidden = self.hidden.unwrap_or_else(|| found.columns());
                let tokens = rows_of("shared", &shared, hidden)?;
                let experts = found.need("experts", Some(experts))?;
                if shared.count > 0 {
                    rows_of("experts", &experts, shared.count)?;
                }
                let scales = found.need("expert_scales", self.expert_scales)?;
                Ok((Source::MoeReduction { experts, scales, shared }, tokens, hidden))
            }
            (None, None, Some(rows)) => {
                let rows = found.need("rows", Some(rows))?;
                let hidden = self.hidden.unwrap_or_else(|| found.columns());
                rows_of("rows", &rows, hidden)?;
                let index = found.need("index", self.index)?;
                let tokens = rows_of("index", &index, found.columns())?;
                let source = Source::MoeFinalize {
                    rows,
                    index,
                    scales: found.read("expert_scales", self.expert_scales)?,
                    shared: found.read("shared", self.shared)?,
                    routed_scaling: self.routed_scaling,
                };
                Ok((source, tokens, hidden))
            }
            _ => {
                let text =
                    "all_reduce_fused: pass x, or experts with expert_scales and shared, or rows with index";
                Err(PyTypeError::new_err(text).into())
            }
        }
    }

    fn quantize(&self, found: &mut Found) -> Result<Option<Quantization<Tensor>>> {
        let Some(name) = self.quantize else { return Ok(None) };
        Ok(Some(match name {
            "fp8" => Quantization::Fp8 { scale: found.scale(self.scale)? },
            "fp8-tokens" => Quantization::Fp8Tokens { rule: TokenRule::Quotient },
            "fp8-tokens-reciprocal" => Quantization::Fp8Tokens { rule: TokenRule::Reciprocal },
            "fp8-groups" => Quantization::Fp8Groups { group: self.group_size },
            "nvfp4" => Quantization::NvFp4 {
                scale: found.scale(self.scale)?,
                layout: scale_layout(self.scale_layout)?,
            },
            other => {
                let known = "fp8, fp8-tokens, fp8-tokens-reciprocal, fp8-groups, nvfp4";
                let text = format!("unknown quantisation {other:?}: known are {known}");
                return Err(PyValueError::new_err(text).into());
            }
        }))
    }
}

impl Communicator {
    /// Waits for a fused all-reduce on the host; puts one on a GPU into the stream, or the current one of the arrays'
    /// library.
    pub(super) fn run_fused(&self, py: Python<'_>, arguments: &Arguments<'_, '_>) -> Result<()> {
        let queue = self.queue()?;
        let (fused, found) = arguments.gather()?;
        match (cuda_device(&fused), arguments.stream) {
            (Some(device), stream) => {
                let current = || found.operands.iter().find_map(|operand| operand.stream);
                let stream = stream.or_else(current).unwrap_or(0);
                // SAFETY: as in `run`.
                interrupt::detached(py, || unsafe { self.gpus.run_fused(&queue, device, stream, &fused) })?;
                self.gpus.keep_stream(py, stream, &[crate::cuda::Order::Collectives])?;
            }
            (None, Some(stream)) => {
                let text = format!("all_reduce_fused: host memory has no stream {stream}");
                return Err(PyValueError::new_err(text).into());
            }
            (None, None) => {
                // SAFETY: the operands, and the references of the caller, live until this returns.
                let run = |comm: &_| Collectives::all_reduce_fused(comm, unsafe { fused.bind() });
                interrupt::detached(py, || queue.run(run))?;
            }
        }
        Ok(())
    }

    /// What `all_reduce_rms_norm` returns, for arguments with an `x`: outputs that were not given are made.
    pub(super) fn run_rms_norm<'py>(
        &self,
        py: Python<'py>,
        arguments: Arguments<'_, 'py>,
        keep_norm: bool,
    ) -> Result<Bound<'py, PyAny>> {
        let x = arguments.x.expect("the method has it");
        let outputs = Outputs { x, like: Operand::import(x, "x", Usage::Call(arguments.stream))?, arguments };
        let wants_norm = arguments.quantize.is_none() || keep_norm;
        let norm = outputs.make(arguments.norm_out, wants_norm, |outputs| outputs.new_like())?;
        let wants_residual = arguments.residual.is_some();
        let residual = outputs.make(arguments.residual_out, wants_residual, |outputs| outputs.new_like())?;
        let quantizes = arguments.quantize.is_some();
        let codes = outputs.make(arguments.codes, quantizes, Outputs::new_codes)?;
        let needs_scales = quantizes && arguments.quantize != Some("fp8");
        let scales = outputs.make(arguments.scales, needs_scales, Outputs::new_scales)?;
        let complete = Arguments {
            norm_out: norm.as_ref(),
            residual_out: residual.as_ref(),
            codes: codes.as_ref(),
            scales: scales.as_ref(),
            ..arguments
        };
        self.run_fused(py, &complete)?;
        let made_groups = arguments.scales.is_none() && arguments.quantize == Some("fp8-groups");
        let scales = match &scales {
            Some(made) if made_groups => Some(outputs.packed(made)?),
            _ => scales,
        };
        static RESULT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let class = RESULT.get_or_try_init(py, || {
            Ok::<_, PyErr>(py.import("antiphon._results")?.getattr("RmsNormResult")?.unbind())
        })?;
        Ok(class.bind(py).call1((norm, residual, codes, scales))?)
    }
}

/// Makes the outputs of a call.
struct Outputs<'a, 'py> {
    x: &'a Bound<'py, PyAny>,
    like: Operand,
    arguments: Arguments<'a, 'py>,
}

impl<'py> Outputs<'_, 'py> {
    /// What was given, or something new if it is wanted.
    fn make(
        &self,
        given: Given<'_, 'py>,
        is_wanted: bool,
        new: impl FnOnce(&Self) -> Result<Bound<'py, PyAny>>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        match given {
            Some(given) => Ok(Some(given.clone())),
            None if is_wanted => {
                self.like.allocates_in_order(Usage::Call(self.arguments.stream))?;
                new(self).map(Some)
            }
            None => Ok(None),
        }
    }

    fn empty(&self, element: ElementType, shape: &[usize]) -> Result<Bound<'py, PyAny>> {
        Ok(self.like.new_of(self.x, element, shape, Usage::Call(self.arguments.stream))?.0)
    }

    fn new_like(&self) -> Result<Bound<'py, PyAny>> {
        self.empty(self.like.element, self.like.shape())
    }

    /// Tokens and their elements.
    fn size(&self) -> (usize, usize) {
        let hidden = self.like.shape().last().copied().unwrap_or(1);
        (self.like.tensor.count.checked_div(hidden).unwrap_or(0), hidden)
    }

    /// The shape of `x` with another last dimension.
    fn with_columns(&self, columns: usize) -> Vec<usize> {
        let mut shape = self.like.shape().to_vec();
        shape.pop();
        shape.push(columns);
        shape
    }

    fn new_codes(&self) -> Result<Bound<'py, PyAny>> {
        let (_, hidden) = self.size();
        match self.arguments.quantize {
            Some("nvfp4") => self.empty(DType::U8.into(), &self.with_columns(hidden / 2)),
            _ => self.empty(self.like.float8(self.x)?, self.like.shape()),
        }
    }

    fn new_scales(&self) -> Result<Bound<'py, PyAny>> {
        let (tokens, hidden) = self.size();
        match self.arguments.quantize {
            Some("fp8-groups") => {
                let packs = (hidden / self.arguments.group_size.max(1)).div_ceil(4);
                self.empty(DType::I32.into(), &[packs, tokens.next_multiple_of(4)])
            }
            Some("nvfp4") => {
                let (columns, padded) = (hidden / NvFp4::BLOCK, (hidden / NvFp4::BLOCK).next_multiple_of(4));
                let shape = match scale_layout(self.arguments.scale_layout)? {
                    ScaleLayout::Swizzled128x4 => [tokens.next_multiple_of(128), padded],
                    ScaleLayout::Swizzled8x4 => [tokens.next_multiple_of(8), padded],
                    ScaleLayout::Linear => [tokens, columns],
                };
                self.empty(DType::U8.into(), &shape)
            }
            _ => self.empty(DType::F32.into(), &self.with_columns(1)),
        }
    }

    /// Whole columns of packed scales as `[tokens, packs]`.
    fn packed(&self, columns: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let (py, tokens) = (columns.py(), self.size().0 as isize);
        let (all, first) = (PySlice::full(py), PySlice::new(py, 0, tokens, 1));
        Ok(columns.get_item((all, first))?.getattr("T")?)
    }
}
