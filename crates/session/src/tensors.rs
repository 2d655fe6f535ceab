//! The tensors of a call.

use antiphon_operation::Operation;
use antiphon_tensor::{DType, TensorView, TensorViewMut};

/// The tensors of a call on a GPU.
#[derive(Debug)]
pub enum Tensors<'a> {
    /// No tensor: nothing is read or written.
    Nowhere,
    /// One buffer for input and output.
    InPlace(TensorViewMut<'a>),
    /// An input and an output that do not overlap; on some ranks one is missing.
    Apart(Option<TensorView<'a>>, Option<TensorViewMut<'a>>),
}

impl Tensors<'_> {
    /// The dtype of one of them; all have it.
    pub(crate) fn dtype(&self) -> Option<DType> {
        match self {
            Self::Nowhere => None,
            Self::InPlace(buffer) => Some(buffer.dtype()),
            Self::Apart(input, output) => {
                input.as_ref().map(TensorView::dtype).or(output.as_ref().map(TensorViewMut::dtype))
            }
        }
    }

    /// The bytes of a call's message: the output of an all-gather, else the input.
    pub(crate) fn message_bytes(&self, operation: Operation) -> Option<usize> {
        match self {
            Self::Nowhere => None,
            Self::InPlace(buffer) => Some(buffer.num_bytes()),
            Self::Apart(_, output) if operation == Operation::AllGather => {
                output.as_ref().map(TensorViewMut::num_bytes)
            }
            Self::Apart(input, _) => input.as_ref().map(TensorView::num_bytes),
        }
    }
}

impl<'a> From<TensorViewMut<'a>> for Tensors<'a> {
    fn from(buffer: TensorViewMut<'a>) -> Self {
        Self::InPlace(buffer)
    }
}

impl<'a> From<(TensorView<'a>, TensorViewMut<'a>)> for Tensors<'a> {
    fn from((input, output): (TensorView<'a>, TensorViewMut<'a>)) -> Self {
        Self::Apart(Some(input), Some(output))
    }
}
