//! The tensors of a call, before it is checked.
//!
//! A view has room for eight dimensions, and sixteen views in a call would be three kilobytes that every option moves. So the
//! call keeps only address, number of elements, dtype and device of each tensor, and reports errors when it is checked.

#![expect(
    clippy::result_large_err,
    reason = "two shapes in place: on the heap they would have to be dropped"
)]

use std::marker::PhantomData;

use antiphon_tensor::{DType, Device, Shape, Strides, TensorError, TensorView, TensorViewMut};

use super::{FusedAllReduce, Quantization, RmsNorm, Role, Source, validated::OPERATION};
use crate::error::CollectiveError;

/// A contiguous tensor, without its shape.
///
/// It is not `Clone`: what is written is in one call at a time.
#[derive(Debug)]
pub struct Operand<'a> {
    /// To be written to only where the tensor was given for that.
    pub(super) data: *mut u8,
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) device: Device,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a view, which is both.
unsafe impl Send for Operand<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for Operand<'_> {}

impl<'a> Operand<'a> {
    /// In a call that is spoilt.
    pub(super) const NONE: Self = Self {
        data: std::ptr::null_mut(),
        count: 0,
        dtype: DType::F32,
        device: Device::Host,
        borrowed: PhantomData,
    };

    /// A contiguous tensor of `count` elements.
    ///
    /// # Safety
    /// For `'a`, the memory is valid for the role that the operand has in a call: no other code writes what is read, or uses what is
    /// written.
    #[inline]
    pub unsafe fn from_raw_parts(data: *mut u8, count: usize, dtype: DType, device: Device) -> Self {
        Self { data, count, dtype, device, borrowed: PhantomData }
    }

    /// The same tensor, in another role of the same call.
    #[inline]
    pub(super) fn same(&self) -> Self {
        Self { ..*self }
    }

    /// To read.
    #[inline]
    pub(super) fn read(role: Role, tensor: &TensorView<'a>) -> Result<Self, Unfit> {
        Self::new(role, tensor, tensor.as_ptr().cast_mut())
    }

    /// To write.
    #[inline]
    pub(super) fn write(role: Role, mut tensor: TensorViewMut<'a>) -> Result<Self, Unfit> {
        let data = tensor.as_mut_ptr();
        Self::new(role, &tensor.as_view(), data)
    }

    #[inline]
    fn new(role: Role, tensor: &TensorView<'_>, data: *mut u8) -> Result<Self, Unfit> {
        if !tensor.is_contiguous() {
            return Err(Unfit::strided(role, tensor));
        }
        let (count, dtype, device) = (tensor.numel(), tensor.dtype(), tensor.device());
        Ok(Self { data, count, dtype, device, borrowed: PhantomData })
    }
}

/// The form of a tensor in a language binding: a plain value that knows the tensor's place.
pub trait TensorHandle {
    /// The tensor.
    ///
    /// # Safety
    /// As [`Operand::from_raw_parts`].
    unsafe fn operand<'a>(&self) -> Operand<'a>;
}

/// Calls of a binding: the counts of elements are checked when the call is made, shapes are the binding's own affair.
impl<T: TensorHandle> FusedAllReduce<T> {
    /// A call of a source that gives `tokens` tokens of `hidden` elements each.
    pub fn new(source: Source<T>, tokens: usize, hidden: usize) -> Self {
        Self::empty(source, [tokens, hidden])
    }

    /// With a tensor in a role that is not the source's, a norm's or a quantisation's. None leaves it out.
    pub fn with(mut self, role: Role, tensor: Option<T>) -> Self {
        let place = match role {
            Role::SumOut => &mut self.sum_out,
            Role::Bias => &mut self.bias,
            Role::Residual => &mut self.residual,
            Role::ResidualOut => &mut self.residual_out,
            Role::NormOut => &mut self.norm_out,
            Role::InverseRmsOut => &mut self.inverse_rms_out,
            Role::Codes => &mut self.codes,
            Role::Scales => &mut self.scales,
            _ => panic!("the {} is not given alone", role.name()),
        };
        *place = tensor;
        self
    }

    /// With norms: before the residual is added, and behind.
    pub fn with_norms(mut self, before: Option<RmsNorm<T>>, behind: Option<RmsNorm<T>>) -> Self {
        (self.pre_norm, self.norm) = (before, behind);
        self
    }

    /// With this quantisation.
    pub fn with_quantization(mut self, quantization: Option<Quantization<T>>) -> Self {
        self.quantization = quantization;
        self
    }

    /// The source.
    pub fn source(&self) -> &Source<T> {
        &self.source
    }

    /// The call, to be made.
    ///
    /// # Safety
    /// As [`Operand::from_raw_parts`], for each tensor. One memory may be both `x` and one of the outputs, or the residual and
    /// [`Role::ResidualOut`]; else outputs are apart from each other and from what is read.
    pub unsafe fn bind<'a>(&self) -> FusedAllReduce<Operand<'a>> {
        let bound = self.try_map(|_, tensor| {
            // SAFETY: passed on.
            Ok::<_, std::convert::Infallible>(unsafe { tensor.operand() })
        });
        bound.unwrap_or_else(|never| match never {})
    }
}

/// A tensor that cannot be what it was given for, wherever it is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unfit {
    Strided(Role, Shape, Strides),
    Matrix(Role, Shape),
    Experts(Shape),
    ExpertsOf([usize; 2], Shape),
    RowsAndIndex(Shape, Shape),
    OutputTwice,
    ResidualTwice,
}

impl Unfit {
    #[cold]
    fn strided(role: Role, tensor: &TensorView<'_>) -> Self {
        let strides = Strides::new(tensor.strides()).expect("of a view");
        Self::Strided(role, shape_of(tensor), strides)
    }

    #[cold]
    pub(super) fn error(&self) -> CollectiveError {
        let operation = OPERATION.name();
        let (which, expected) = match self {
            Self::Strided(role, shape, strides) => {
                let (shape, strides) = (shape.to_vec(), strides.to_vec());
                let source = TensorError::NotContiguous { shape, strides };
                return CollectiveError::Tensor { operation, which: role.name(), source };
            }
            Self::Matrix(role, shape) => (role.name(), format!("[tokens, hidden], not {shape}")),
            Self::Experts(shape) => ("experts' outputs", format!("[experts, tokens, hidden], not {shape}")),
            Self::ExpertsOf([tokens, hidden], shape) => {
                ("experts' outputs", format!("[experts, {tokens}, {hidden}], not {shape}"))
            }
            Self::RowsAndIndex(rows, index) => {
                ("rows and index", format!("two dimensions each, not {rows} and {index}"))
            }
            Self::OutputTwice => {
                ("outputs", "given once: in the place of the input, or apart from it".to_owned())
            }
            Self::ResidualTwice => {
                ("residual", "given once: in place, or apart from where the sum with it goes".to_owned())
            }
        };
        CollectiveError::Refused { operation, which, expected }
    }
}

pub(super) fn shape_of(tensor: &TensorView<'_>) -> Shape {
    Shape::new(tensor.shape()).expect("of a view")
}

/// The dimensions of a matrix.
#[inline]
pub(super) fn matrix(role: Role, tensor: &TensorView<'_>) -> Result<[usize; 2], Unfit> {
    tensor.shape().try_into().map_err(|_| Unfit::Matrix(role, shape_of(tensor)))
}
