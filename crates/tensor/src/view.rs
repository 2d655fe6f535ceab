//! Borrowed tensors: [`TensorView`] to read, [`TensorViewMut`] to write.

mod exclusive;
mod raw;
mod shared;

pub use exclusive::TensorViewMut;
pub use shared::TensorView;

/// The methods that both views have alike: what a tensor is, and the parts of it. Parts take the view by value,
/// which copies a [`TensorView`] and moves a [`TensorViewMut`].
macro_rules! common_methods {
    () => {
        /// The type of the elements.
        #[inline]
        pub fn dtype(&self) -> DType {
            self.raw.dtype()
        }

        /// The size in each dimension, outermost first; empty for a scalar.
        #[inline]
        pub fn shape(&self) -> &[usize] {
            self.raw.layout().shape()
        }

        /// The step between neighbours in each dimension, in elements.
        #[inline]
        pub fn strides(&self) -> &[isize] {
            self.raw.layout().strides()
        }

        /// The number of elements.
        #[inline]
        pub fn numel(&self) -> usize {
            self.raw.layout().numel()
        }

        /// The number of bytes of all elements together, gaps between them not counted.
        #[inline]
        pub fn num_bytes(&self) -> usize {
            self.numel() * self.dtype().size()
        }

        /// Where the memory is.
        #[inline]
        pub fn device(&self) -> Device {
            self.raw.device()
        }

        /// The address of the element at index zero: on [`device`](Self::device), not null, and dangling if the
        /// tensor is empty. Not necessarily aligned.
        #[inline]
        pub fn as_ptr(&self) -> *const u8 {
            self.raw.ptr().as_ptr()
        }

        /// Whether the elements lie in row-major order without gaps. The stride of a dimension of size 1 does not
        /// matter, and an empty tensor is always contiguous.
        #[inline]
        pub fn is_contiguous(&self) -> bool {
            self.raw.layout().is_contiguous()
        }

        /// Checks that the tensor [is contiguous](Self::is_contiguous).
        ///
        /// # Errors
        ///
        /// [`TensorError::NotContiguous`], with the shape and the strides.
        #[inline]
        pub fn contiguous(&self) -> Result<(), TensorError> {
            self.raw.contiguous()
        }

        /// The element at an index, as [`Element::to_f64`] gives it. Works for any strides and alignment; slow, so
        /// for looking, not for computing.
        ///
        /// # Errors
        ///
        /// [`TensorError::IndexOutOfBounds`] if the index has another rank or leaves the shape,
        /// [`TensorError::NotOnHost`] if the memory is not the CPU's, [`TensorError::NotNumeric`] for a dtype without
        /// arithmetic.
        pub fn get_f64(&self, index: &[usize]) -> Result<f64, TensorError> {
            let address = self.raw.address(index)?.as_ptr();
            self.dtype().numeric()?;
            Ok(with_dtype!(self.dtype(), T => {
                // SAFETY: the address is that of an element inside the borrowed memory, of the type that DType names.
                let element = unsafe { address.cast::<T>().read_unaligned() };
                <T as Element>::to_f64(element)
            }))
        }

        /// The part at one index of a dimension, without that dimension.
        ///
        /// # Errors
        ///
        /// [`TensorError::DimOutOfBounds`] and [`TensorError::RangeOutOfBounds`].
        pub fn select(self, dim: usize, index: usize) -> Result<Self, TensorError> {
            self.raw.select(dim, index).map(Self::wrap)
        }

        /// The part with the indices `start..start + len` of a dimension; `len` may be 0.
        ///
        /// # Errors
        ///
        /// [`TensorError::DimOutOfBounds`] and [`TensorError::RangeOutOfBounds`].
        pub fn narrow(self, dim: usize, start: usize, len: usize) -> Result<Self, TensorError> {
            self.raw.narrow(dim, start, len).map(Self::wrap)
        }

        /// The tensor with two dimensions exchanged, which may be the same.
        ///
        /// # Errors
        ///
        /// [`TensorError::DimOutOfBounds`].
        pub fn transpose(self, first: usize, second: usize) -> Result<Self, TensorError> {
            self.raw.transpose(first, second).map(Self::wrap)
        }

        /// The same elements, in the same row-major order of indices, under another shape. Works wherever no copy
        /// is needed: always for a contiguous tensor, and for one with gaps if no new dimension spans a gap.
        ///
        /// # Errors
        ///
        /// [`TensorError::ReshapeCount`] if the number of elements differs, [`TensorError::ReshapeNeedsCopy`] if
        /// no strides would do, and those of [`Shape::new`](crate::Shape::new).
        pub fn reshape(self, shape: &[usize]) -> Result<Self, TensorError> {
            self.raw.reshape(shape).map(Self::wrap)
        }
    };
}

use common_methods;
