//! The view to read.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::common_methods;
use super::raw::Raw;
use crate::{DType, Device, Element, TensorError, TensorViewMut, with_dtype};

/// A borrowed tensor of any element type, to read.
///
/// Like a `&[T]` it is `Copy` and owns nothing. Slices, vectors and arrays of an [`Element`] convert into a
/// one-dimensional view; making one neither allocates nor fails.
///
/// ```
/// use antiphon_tensor::{TensorError, TensorView};
///
/// fn sum<'a>(tensor: impl Into<TensorView<'a>>) -> Result<f32, TensorError> {
///     Ok(tensor.into().as_slice::<f32>()?.iter().sum())
/// }
///
/// let data = vec![1.0_f32, 2.0, 3.0, 4.0];
/// assert_eq!(sum(&data)?, 10.0);
/// assert_eq!(sum(&data[1..])?, 9.0);
/// assert_eq!(sum(TensorView::new(&data, &[2, 2])?.select(0, 1)?)?, 7.0);
/// assert!(matches!(sum(&[1_i32]), Err(TensorError::DTypeMismatch { .. })));
/// # Ok::<(), TensorError>(())
/// ```
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    raw: Raw,
    borrow: PhantomData<&'a [u8]>,
}

// SAFETY: a view is a shared borrow of elements, which are Sync by the bound on `Element`, and it has no interior
// mutability. Memory of a device is never touched from here.
unsafe impl Send for TensorView<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for TensorView<'_> {}

impl<'a> TensorView<'a> {
    common_methods!();

    /// A view of a whole slice in row-major order.
    ///
    /// # Errors
    ///
    /// [`TensorError::LengthMismatch`] unless the slice has as many elements as the shape, and those of
    /// [`Shape::new`](crate::Shape::new).
    #[inline]
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self, TensorError> {
        Raw::shaped(NonNull::from(data), shape).map(Self::wrap)
    }

    /// A view that starts at a slice's first element and steps by `strides` elements. Elements may repeat.
    ///
    /// ```
    /// # use antiphon_tensor::TensorView;
    /// // Two columns of a matrix whose rows are padded to four.
    /// let padded = [1_i32, 2, 0, 0, 3, 4, 0, 0];
    /// let matrix = TensorView::with_strides(&padded, &[2, 2], &[4, 1])?;
    /// assert_eq!(matrix.get_f64(&[1, 0])?, 3.0);
    /// # Ok::<(), antiphon_tensor::TensorError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`TensorError::StrideCount`] unless there is one stride for each size, [`TensorError::OutOfBounds`] if an
    /// index would leave the slice, [`TensorError::StrideOverflow`], and those of
    /// [`Shape::new`](crate::Shape::new).
    pub fn with_strides<T: Element>(
        data: &'a [T],
        shape: &[usize],
        strides: &[isize],
    ) -> Result<Self, TensorError> {
        Raw::strided(NonNull::from(data), shape, strides).map(Self::wrap)
    }

    /// A view of memory at an address, row-major unless strides are given. The address is that of index zero; it
    /// need not be aligned, and may be null if the tensor is empty.
    ///
    /// # Errors
    ///
    /// [`TensorError::NullPointer`], [`TensorError::StrideCount`], [`TensorError::StrideOverflow`], and those of
    /// [`Shape::new`](crate::Shape::new).
    ///
    /// # Safety
    ///
    /// For all of `'a`, every element that the shape and strides reach must be in one allocation on `device`, hold
    /// an initialised value of `dtype`, and not be written by anyone.
    #[inline]
    pub unsafe fn from_raw_parts(
        ptr: *const u8,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[isize]>,
        device: Device,
    ) -> Result<Self, TensorError> {
        // SAFETY: the caller promises what `Raw` needs.
        unsafe { Raw::from_parts(ptr.cast_mut(), dtype, shape, strides, device) }.map(Self::wrap)
    }

    /// The elements in row-major order.
    ///
    /// # Errors
    ///
    /// [`TensorError::DTypeMismatch`], [`TensorError::NotOnHost`], [`TensorError::NotContiguous`] and
    /// [`TensorError::Misaligned`].
    #[inline]
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T], TensorError> {
        let elements = self.raw.elements::<T>()?;
        // SAFETY: `elements` checked type, place, order and alignment, and 'a is the borrow of the memory.
        Ok(unsafe { elements.as_ref() })
    }

    /// The bytes of the elements in row-major order, whatever their type and alignment.
    ///
    /// # Errors
    ///
    /// [`TensorError::NotOnHost`] and [`TensorError::NotContiguous`].
    #[inline]
    pub fn as_bytes(&self) -> Result<&'a [u8], TensorError> {
        let bytes = self.raw.bytes()?;
        // SAFETY: `bytes` checked place and order, elements have no padding, and 'a is the borrow of the memory.
        Ok(unsafe { bytes.as_ref() })
    }

    #[inline]
    pub(super) fn wrap(raw: Raw) -> Self {
        TensorView { raw, borrow: PhantomData }
    }
}

impl fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.describe("TensorView", f)
    }
}

impl<'a, T: Element> From<&'a [T]> for TensorView<'a> {
    #[inline]
    fn from(data: &'a [T]) -> Self {
        Self::wrap(Raw::vector(NonNull::from(data)))
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for TensorView<'a> {
    #[inline]
    fn from(data: &'a Vec<T>) -> Self {
        data.as_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a [T; N]> for TensorView<'a> {
    #[inline]
    fn from(data: &'a [T; N]) -> Self {
        data.as_slice().into()
    }
}

impl<'a> From<&TensorView<'a>> for TensorView<'a> {
    #[inline]
    fn from(view: &TensorView<'a>) -> Self {
        *view
    }
}

impl<'a> From<&'a TensorViewMut<'_>> for TensorView<'a> {
    #[inline]
    fn from(view: &'a TensorViewMut<'_>) -> Self {
        view.as_view()
    }
}

impl<'a> From<TensorViewMut<'a>> for TensorView<'a> {
    #[inline]
    fn from(view: TensorViewMut<'a>) -> Self {
        view.into_view()
    }
}
