//! Tensors of values, and ones that are not used.

use std::fmt::Display;

use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_testing::{self as testing, Alignment, backend::Backend};

use super::assert_same_bits;
use crate::values::Values;

/// A tensor of one dimension, between guards.
pub struct Tensor<B: Backend>(testing::Tensor<B>);

impl<B: Backend> Tensor<B> {
    /// In memory of a rank.
    pub fn holding(comm: &B, values: &Values, alignment: Alignment) -> Self {
        Self(testing::Tensor::holding_at(comm, values.dtype(), &[values.len()], values.bytes(), alignment))
    }

    /// An output that has not been written.
    pub fn unwritten(comm: &B, dtype: DType, count: usize, alignment: Alignment) -> Self {
        let content = vec![testing::UNWRITTEN; count * dtype.size()];
        Self(testing::Tensor::holding_at(comm, dtype, &[count], &content, alignment))
    }

    pub fn view(&self) -> TensorView<'_> {
        self.0.view()
    }

    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        self.0.view_mut()
    }

    /// What the tensor holds. Panics unless its guards are whole.
    #[track_caller]
    pub fn values(&self) -> Values {
        Values::from_bytes(self.0.dtype(), self.0.content())
    }

    /// Panics unless the tensor holds these values and its guards are whole.
    #[track_caller]
    pub fn assert_holds(&self, expected: &Values, what: impl Display) {
        assert_same_bits(&self.values(), expected, what);
    }
}

/// How a tensor looks to a call that does not use what it holds.
#[derive(Debug, Clone, Copy)]
pub struct Like {
    pub dtype: DType,
    pub count: usize,
    pub stride: usize,
}

impl Like {
    /// Contiguous.
    pub fn of(dtype: DType, count: usize) -> Self {
        Self { dtype, count, stride: 1 }
    }
}

/// A tensor that looks like that.
pub struct Loose<B: Backend> {
    memory: B::Memory,
    like: Like,
    device: Device,
}

impl<B: Backend> Loose<B> {
    pub fn new(comm: &B, like: Like) -> Self {
        let bytes = (like.count * like.stride).max(1) * like.dtype.size();
        Self { memory: comm.allocate(bytes), like, device: comm.device() }
    }

    /// That is said to lie elsewhere.
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    pub fn view(&mut self) -> TensorView<'_> {
        self.view_mut().into_view()
    }

    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (base, like) = (B::address_mut(&mut self.memory), self.like);
        let strides = [isize::try_from(like.stride).unwrap()];
        // SAFETY: there is room for as many elements, so far apart, and the memory is borrowed for as long as the view; one that is
        // said to lie elsewhere is refused.
        unsafe { TensorViewMut::from_raw_parts(base, like.dtype, &[like.count], Some(&strides), self.device) }
            .unwrap()
    }
}
