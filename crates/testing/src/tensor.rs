//! Tensors that notice a write beside them.

use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::backend::Backend;

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

/// A tensor of a rank, between guards.
pub struct Tensor<B: Backend> {
    memory: B::Memory,
    /// Where the elements begin in the memory.
    start: usize,
    dtype: DType,
    shape: Vec<usize>,
    device: Device,
}

impl<B: Backend> Tensor<B> {
    /// A contiguous tensor with these elements, [aligned](Alignment::Aligned).
    ///
    /// # Panics
    /// Unless there are as many bytes as the elements have.
    pub fn holding(rank: &B, dtype: DType, shape: &[usize], content: &[u8]) -> Self {
        Self::holding_at(rank, dtype, shape, content, Alignment::Aligned)
    }

    /// As [`holding`](Self::holding), beginning elsewhere.
    ///
    /// # Panics
    /// As there.
    pub fn holding_at(rank: &B, dtype: DType, shape: &[usize], content: &[u8], alignment: Alignment) -> Self {
        let behind = match alignment {
            Alignment::Aligned => 0,
            Alignment::Shifted => dtype.size(),
            Alignment::Odd => 1,
        };
        let (start, len) = (GUARD + behind, shape.iter().product::<usize>() * dtype.size());
        assert_eq!(content.len(), len, "bytes of {shape:?} × {dtype}");
        let mut bytes = vec![GUARD_BYTE; start + len + GUARD];
        bytes[start..start + len].copy_from_slice(content);
        let mut memory = rank.allocate(bytes.len());
        B::write(&mut memory, &bytes);
        Self { memory, start, dtype, shape: shape.to_vec(), device: rank.device() }
    }

    /// An output that has not been written.
    pub fn unwritten(rank: &B, dtype: DType, shape: &[usize]) -> Self {
        let len = shape.iter().product::<usize>() * dtype.size();
        Self::holding(rank, dtype, shape, &vec![UNWRITTEN; len])
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extent of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// To read.
    pub fn view(&self) -> TensorView<'_> {
        let at = B::address(&self.memory).cast_mut().wrapping_add(self.start);
        // SAFETY: the elements lie from `start` on, and the memory is borrowed for as long as the view.
        unsafe { TensorView::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }.unwrap()
    }

    /// To write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let at = B::address_mut(&mut self.memory).wrapping_add(self.start);
        // SAFETY: as above, exclusively.
        unsafe { TensorViewMut::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }.unwrap()
    }

    /// Other elements, in the same place.
    ///
    /// # Panics
    /// Unless there are as many bytes as the elements have.
    pub fn write(&mut self, content: &[u8]) {
        let mut bytes = B::read(&self.memory);
        bytes[self.start..][..self.len()].copy_from_slice(content);
        B::write(&mut self.memory, &bytes);
    }

    /// The bytes of the elements, when the calls of the rank are over.
    ///
    /// # Panics
    /// If something beside them was written.
    #[track_caller]
    pub fn content(&self) -> Vec<u8> {
        let mut bytes = B::read(&self.memory);
        let end = self.start + self.len();
        let guards = bytes[..self.start].iter().chain(&bytes[end..end + GUARD]);
        assert!(guards.copied().all(|byte| byte == GUARD_BYTE), "wrote beside a tensor");
        bytes.truncate(end);
        bytes.drain(..self.start);
        bytes
    }

    fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}
