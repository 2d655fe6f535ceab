//! What is kept of a call's tensors until it is checked.
//!
//! A view has room for eight dimensions, and fifteen of them in a call would be three kilobytes that every option moves. So the
//! call keeps what counts, without anything to be dropped, and tells later what does not fit.

#![expect(
    clippy::result_large_err,
    reason = "two shapes in place: on the heap they would have to be dropped"
)]

use std::marker::PhantomData;

use antiphon_tensor::{
    DType, Device, ScaleLayout, Shape, Strides, TensorError, TensorView, TensorViewMut, quantize::TokenRule,
};

use super::{Quantization, Scale, Source, checked::OPERATION};
use crate::error::CollectiveError;

type Result<T> = std::result::Result<T, Unfit>;

/// A contiguous tensor, without its shape.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given<'a> {
    /// To be written to only where the tensor was given for that.
    pub(super) data: *mut u8,
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) device: Device,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a view, which is both.
unsafe impl Send for Given<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for Given<'_> {}

impl<'a> Given<'a> {
    /// To read.
    #[inline]
    pub(super) fn read(which: &'static str, tensor: &TensorView<'a>) -> Result<Self> {
        Self::new(which, tensor, tensor.as_ptr().cast_mut())
    }

    /// To write.
    #[inline]
    pub(super) fn write(which: &'static str, mut tensor: TensorViewMut<'a>) -> Result<Self> {
        let data = tensor.as_mut_ptr();
        Self::new(which, &tensor.as_view(), data)
    }

    #[inline]
    fn new(which: &'static str, tensor: &TensorView<'_>, data: *mut u8) -> Result<Self> {
        if !tensor.is_contiguous() {
            return Err(Unfit::strided(which, tensor));
        }
        let (count, dtype, device) = (tensor.numel(), tensor.dtype(), tensor.device());
        Ok(Self { data, count, dtype, device, borrowed: PhantomData })
    }
}

/// A tensor that cannot be what it was given for, wherever it is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unfit {
    Strided(&'static str, Shape, Strides),
    Matrix(&'static str, Shape),
    Experts(Shape),
    ExpertsOf([usize; 2], Shape),
    RowsAndIndex(Shape, Shape),
}

impl Unfit {
    #[cold]
    fn strided(which: &'static str, tensor: &TensorView<'_>) -> Self {
        let strides = Strides::new(tensor.strides()).expect("of a view");
        Self::Strided(which, shape_of(tensor), strides)
    }

    #[cold]
    pub(super) fn error(&self) -> CollectiveError {
        let operation = OPERATION.name();
        let (which, expected) = match self {
            Self::Strided(which, shape, strides) => {
                let (shape, strides) = (shape.to_vec(), strides.to_vec());
                let source = TensorError::NotContiguous { shape, strides };
                return CollectiveError::Tensor { operation, which, source };
            }
            Self::Matrix(which, shape) => (*which, format!("[tokens, hidden], not {shape}")),
            Self::Experts(shape) => ("experts' outputs", format!("[experts, tokens, hidden], not {shape}")),
            Self::ExpertsOf([tokens, hidden], shape) => {
                ("experts' outputs", format!("[experts, {tokens}, {hidden}], not {shape}"))
            }
            Self::RowsAndIndex(rows, index) => {
                ("rows and index", format!("two dimensions each, not {rows} and {index}"))
            }
        };
        CollectiveError::Refused { operation, which, expected }
    }
}

fn shape_of(tensor: &TensorView<'_>) -> Shape {
    Shape::new(tensor.shape()).expect("of a view")
}

/// [`Source`], and what it says of the sum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Summands<'a> {
    pub(super) dtype: DType,
    pub(super) tokens: usize,
    pub(super) hidden: usize,
    pub(super) of: Of<'a>,
}

/// [`Source`], given.
#[derive(Debug, Clone, Copy)]
pub(super) enum Of<'a> {
    Tensor {
        input: Given<'a>,
    },
    MoeReduction {
        experts: Given<'a>,
        count: usize,
        scales: Given<'a>,
        shared: Given<'a>,
    },
    MoeFinalize {
        rows: Given<'a>,
        count: usize,
        index: Given<'a>,
        top_k: usize,
        scales: Option<Given<'a>>,
        shared: Option<Given<'a>>,
        routed_scaling: f32,
    },
}

impl<'a> Summands<'a> {
    /// Of a tensor in whose place something goes.
    #[inline]
    pub(super) fn in_place(tensor: TensorViewMut<'a>) -> Result<Self> {
        let [tokens, hidden] = matrix("input", &tensor.as_view())?;
        let (dtype, input) = (tensor.dtype(), Given::write("input", tensor)?);
        Ok(Self { dtype, tokens, hidden, of: Of::Tensor { input } })
    }

    #[inline]
    pub(super) fn new(source: &Source<'a>) -> Result<Self> {
        match source {
            Source::Tensor { input } => {
                let [tokens, hidden] = matrix("input", input)?;
                let of = Of::Tensor { input: Given::read("input", input)? };
                Ok(Self { dtype: input.dtype(), tokens, hidden, of })
            }
            Source::MoeReduction { experts, scales, shared } => {
                let [tokens, hidden] = matrix("shared expert's output", shared)?;
                let &[count, of_tokens, of_hidden] = experts.shape() else {
                    return Err(Unfit::Experts(shape_of(experts)));
                };
                if (of_tokens, of_hidden) != (tokens, hidden) {
                    return Err(Unfit::ExpertsOf([tokens, hidden], shape_of(experts)));
                }
                let of = Of::MoeReduction {
                    experts: Given::read("experts' outputs", experts)?,
                    count,
                    scales: Given::read("experts' scales", scales)?,
                    shared: Given::read("shared expert's output", shared)?,
                };
                Ok(Self { dtype: shared.dtype(), tokens, hidden, of })
            }
            Source::MoeFinalize { rows, index, scales, shared, routed_scaling } => {
                let (&[count, hidden], &[tokens, top_k]) = (rows.shape(), index.shape()) else {
                    return Err(Unfit::RowsAndIndex(shape_of(rows), shape_of(index)));
                };
                let read = |which, tensor: &Option<TensorView<'a>>| {
                    tensor.as_ref().map(|tensor| Given::read(which, tensor)).transpose()
                };
                let of = Of::MoeFinalize {
                    rows: Given::read("rows", rows)?,
                    count,
                    index: Given::read("index", index)?,
                    top_k,
                    scales: read("experts' scales", scales)?,
                    shared: read("shared expert's output", shared)?,
                    routed_scaling: *routed_scaling,
                };
                Ok(Self { dtype: rows.dtype(), tokens, hidden, of })
            }
        }
    }
}

#[inline]
fn matrix(which: &'static str, tensor: &TensorView<'_>) -> Result<[usize; 2]> {
    tensor.shape().try_into().map_err(|_| Unfit::Matrix(which, shape_of(tensor)))
}

/// [`Scale`], given.
#[derive(Debug, Clone, Copy)]
pub(super) enum Factor<'a> {
    Value(f32),
    Tensor(Given<'a>),
}

impl<'a> Factor<'a> {
    #[inline]
    fn new(scale: &Scale<'a>) -> Result<Self> {
        Ok(match scale {
            Scale::Value(value) => Self::Value(*value),
            Scale::Tensor(tensor) => Self::Tensor(Given::read("scale", tensor)?),
        })
    }
}

/// [`Quantization`], given.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form<'a> {
    Fp8 { scale: Factor<'a> },
    Fp8Tokens { rule: TokenRule },
    Fp8Groups { group: usize },
    NvFp4 { scale: Factor<'a>, layout: ScaleLayout },
}

impl<'a> Form<'a> {
    #[inline]
    pub(super) fn new(quantization: &Quantization<'a>) -> Result<Self> {
        Ok(match quantization {
            Quantization::Fp8 { scale } => Self::Fp8 { scale: Factor::new(scale)? },
            Quantization::Fp8Tokens { rule } => Self::Fp8Tokens { rule: *rule },
            Quantization::Fp8Groups { group } => Self::Fp8Groups { group: *group },
            Quantization::NvFp4 { scale, layout } => {
                Self::NvFp4 { scale: Factor::new(scale)?, layout: *layout }
            }
        })
    }
}
