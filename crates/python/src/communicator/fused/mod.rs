//! Fused all-reduces: their keywords, which the stub lists, and the arrays of a call: found, checked, and made where the
//! caller gave none.

mod outputs;

use antiphon::{
    collectives::fusion::{Accumulation, Quantization, RmsNorm, Role, Scale, Source},
    prelude::Collectives,
    session::Order,
    tensor::quantize::TokenRule,
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    sync::PyOnceLock,
    types::{PyFloat, PyInt},
};

use outputs::{Outputs, scale_layout};

use super::{Communicator, prepare::algorithm};
use crate::{
    arguments::{Argument, Given},
    error::Result,
    fused::{Fused, check_overlap, cuda_device},
    interrupt,
    operand::{Operand, Tensor, Usage, refuse_gradient},
    stream::RawStream,
};

/// Defines `all_reduce_fused` from its keywords in the stub.
macro_rules! define_fused {
    ($signature:tt [$($keyword:ident: $type:ty,)*]) => {
        /// The keywords of `all_reduce_fused`, as the caller gave them.
        #[derive(Clone, Copy, Default)]
        struct Arguments<'a, 'py> {
            $($keyword: $type,)*
        }

        #[pymethods]
        impl Communicator {
            #[doc = stub!(Communicator.all_reduce_fused)]
            #[pyo3(signature = $signature)]
            #[expect(clippy::too_many_arguments, reason = "a call of keywords")]
            fn all_reduce_fused<'a, 'py>(&self, py: Python<'py>, $($keyword: $type,)*) -> Result<()> {
                self.run_fused(py, "all_reduce_fused", &Arguments { $($keyword,)* })
            }
        }
    };
}
keywords!(all_reduce_fused => define_fused);

/// Defines `all_reduce_rms_norm` from its keywords in the stub; `$same` are those that `all_reduce_fused` has too.
macro_rules! define_rms_norm {
    ($signature:tt [$($keyword:ident: $type:ty,)*] [$($same:ident)*]) => {
        /// The keywords of `all_reduce_rms_norm`, as the caller gave them.
        struct RmsNormArguments<'a, 'py> {
            $($keyword: $type,)*
        }

        impl<'a, 'py> RmsNormArguments<'a, 'py> {
            fn to_fused(&self) -> Arguments<'a, 'py> {
                let (x, norm_out) = (Some(self.x), self.out);
                Arguments { x, norm_out, $($same: self.$same,)* ..Arguments::default() }
            }
        }

        #[pymethods]
        impl Communicator {
            #[doc = stub!(Communicator.all_reduce_rms_norm)]
            #[pyo3(signature = $signature)]
            #[expect(clippy::too_many_arguments, reason = "a call of keywords")]
            fn all_reduce_rms_norm<'a, 'py>(
                &self,
                py: Python<'py>,
                $($keyword: $type,)*
            ) -> Result<Bound<'py, PyAny>> {
                self.run_rms_norm(py, &RmsNormArguments { $($keyword,)* })
            }
        }
    };
}
keywords!(all_reduce_rms_norm => define_rms_norm);

/// The operands of a call, collected one by one, which keep its memory valid.
struct Found {
    /// The method that the caller called, for errors.
    call: &'static str,
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
        let array = array.ok_or_else(|| PyTypeError::new_err(format!("{}: pass {name}", self.call)))?;
        refuse_gradient(array, self.call)?;
        let operand = Operand::import(array, name, self.usage)?.numeric()?;
        Ok(self.keep(operand))
    }

    fn read(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        array.map(|array| self.need(name, Some(array))).transpose()
    }

    fn write(&mut self, name: &str, array: Given<'_, '_>) -> Result<Option<Tensor>> {
        let Some(array) = array else { return Ok(None) };
        let operand = Operand::import_output(array, name, self.usage)?;
        Ok(Some(self.keep(operand)))
    }

    fn first(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        let Some(count) = self.count.filter(|&count| count != tensor.count) else { return Ok(tensor) };
        if tensor.count < count {
            let text = format!("{}: {name} has {} elements, and {count} are needed", self.call, tensor.count);
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
        let operand = Operand::import_span(array, name, self.usage)?.written(array, name)?;
        Ok(Some(self.keep(operand)))
    }

    /// A number, or an array of one. A number is recognised by its type: asking an array for its value would wait for the GPU.
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

/// The number of rows of `hidden` elements in a tensor.
fn rows_of(name: &str, tensor: &Tensor, hidden: usize) -> Result<usize> {
    match tensor.count.checked_rem(hidden) {
        Some(0) => Ok(tensor.count / hidden),
        _ => {
            let text = format!("{name}: {} elements are no rows of {hidden}", tensor.count);
            Err(PyValueError::new_err(text).into())
        }
    }
}

impl Arguments<'_, '_> {
    fn gather(&self, call: &'static str) -> Result<(Fused, Found)> {
        let (usage, count) = (Usage::Call(self.stream), self.count(call)?);
        let mut found = Found { call, usage, operands: Vec::with_capacity(12), count };
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
            let text = format!("{call}: quantize and codes need each other");
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
        check_overlap(call, &fused)?;
        Ok((fused, found))
    }

    /// The elements of a matrix, where `tokens` and `hidden` say.
    fn count(&self, call: &str) -> Result<Option<usize>> {
        let Some(tokens) = self.tokens else { return Ok(None) };
        let count = self.hidden.and_then(|hidden| tokens.checked_mul(hidden));
        if count.is_none() || self.x.is_none() {
            let text = format!("{call}: tokens needs x, and hidden");
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
                let sources = "pass x, or experts with expert_scales and shared, or rows with index";
                let text = format!("{}: {sources}", found.call);
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
    /// library. Errors name `call`.
    fn run_fused(&self, py: Python<'_>, call: &'static str, arguments: &Arguments<'_, '_>) -> Result<()> {
        let queue = self.queue()?;
        let (fused, found) = arguments.gather(call)?;
        match (cuda_device(&fused), arguments.stream) {
            (Some(device), stream) => {
                let current = || found.operands.iter().find_map(|operand| operand.stream);
                let stream = stream.or_else(current).unwrap_or(0);
                // SAFETY: as in `run`.
                interrupt::detached(py, || unsafe { self.gpus.run_fused(device, stream, &fused) })?;
                self.gpus.keep_stream(py, stream, &[Order::Collectives])?;
            }
            (None, Some(stream)) => {
                let text = format!("{call}: host memory has no stream {stream}");
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

    /// The result of `all_reduce_rms_norm`. Outputs that the caller did not give are made.
    fn run_rms_norm<'py>(
        &self,
        py: Python<'py>,
        given: &RmsNormArguments<'_, 'py>,
    ) -> Result<Bound<'py, PyAny>> {
        let (x, arguments) = (given.x, given.to_fused());
        let outputs = Outputs { x, like: Operand::import(x, "x", Usage::Call(arguments.stream))?, arguments };
        let wants_norm = arguments.quantize.is_none() || given.keep_norm;
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
        self.run_fused(py, "all_reduce_rms_norm", &complete)?;
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
