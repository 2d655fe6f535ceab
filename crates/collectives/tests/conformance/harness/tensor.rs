//! Tensors that notice a write beside them.

use std::fmt::Display;

use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use super::{Backend, assert_same_bits};
use crate::values::Values;

/// Where a tensor begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alignment {
    /// At a multiple of 64 bytes.
    Aligned,
    /// One element after that.
    Shifted,
    /// One byte after that: a reference to an element would be undefined there.
    Odd,
}

/// Guard bytes on either side of a tensor.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xA5;
/// What an output holds before: neither zero nor anything that results are.
pub const UNWRITTEN: u8 = 0x5C;

/// A tensor between guards.
pub struct Tensor<B: Backend> {
    memory: B::Memory,
    start: usize,
    dtype: DType,
    count: usize,
    device: Device,
}

impl<B: Backend> Tensor<B> {
    /// In memory of a rank.
    pub fn holding(comm: &B, values: &Values, alignment: Alignment) -> Self {
        let (dtype, count) = (values.dtype(), values.len());
        let behind = match alignment {
            Alignment::Aligned => 0,
            Alignment::Shifted => dtype.size(),
            Alignment::Odd => 1,
        };
        let start = GUARD + behind;
        let end = start + count * dtype.size();
        let mut content = vec![GUARD_BYTE; end + GUARD];
        content[start..end].copy_from_slice(values.bytes());
        let mut memory = comm.allocate(content.len());
        B::write(&mut memory, &content);
        Self { memory, start, dtype, count, device: comm.device() }
    }

    /// An output that has not been written.
    pub fn unwritten(comm: &B, dtype: DType, count: usize, alignment: Alignment) -> Self {
        Self::holding(comm, &Values::from_bytes(dtype, vec![UNWRITTEN; count * dtype.size()]), alignment)
    }

    /// To read; it is exclusive because that is how [`Backend`] gives addresses.
    pub fn view(&mut self) -> TensorView<'_> {
        self.view_mut().into_view()
    }

    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let base = B::address(&mut self.memory);
        // SAFETY: `count` elements lie from `start` on, and the memory is borrowed for as long as the view.
        unsafe {
            TensorViewMut::from_raw_parts(
                base.wrapping_add(self.start),
                self.dtype,
                &[self.count],
                None,
                self.device,
            )
        }
        .unwrap()
    }

    /// What the tensor holds. Panics unless its guards are whole.
    pub fn values(&self, what: impl Display) -> Values {
        let mut content = B::read(&self.memory);
        let end = self.start + self.count * self.dtype.size();
        let guards = content[..self.start].iter().chain(&content[end..end + GUARD]);
        assert!(guards.copied().all(|byte| byte == GUARD_BYTE), "{what}: wrote beside a tensor");
        content.truncate(end);
        content.drain(..self.start);
        Values::from_bytes(self.dtype, content)
    }

    /// Panics unless the tensor holds these values and its guards are whole.
    pub fn assert_holds(&self, expected: &Values, what: impl Display) {
        assert_same_bits(&self.values(&what), expected, what);
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
        let (base, like) = (B::address(&mut self.memory), self.like);
        let strides = [isize::try_from(like.stride).unwrap()];
        // SAFETY: there is room for as many elements, so far apart, and the memory is borrowed for as long as the view; one that is
        // said to lie elsewhere is refused.
        unsafe { TensorViewMut::from_raw_parts(base, like.dtype, &[like.count], Some(&strides), self.device) }
            .unwrap()
    }
}
