//! The view to write.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::common_methods;
use super::raw::Raw;
use crate::{DType, Device, Element, TensorError, TensorView, with_dtype};

/// A borrowed tensor of any element type, to write.
///
/// Like a `&mut [T]` it is exclusive: no two indices reach the same element, nothing else reaches any, and it is not
/// `Copy`. Methods that give a part consume the view; [`reborrow`](TensorViewMut::reborrow) first to keep it, and
/// [`split_at`](TensorViewMut::split_at) gives two parts at once.
///
/// ```
/// use antiphon_tensor::TensorViewMut;
///
/// let mut data = [0_i32; 6];
/// let mut matrix = TensorViewMut::new(&mut data, &[2, 3])?;
/// matrix.reborrow().select(0, 1)?.as_mut_slice::<i32>()?.fill(7);
/// matrix.transpose(0, 1)?.set_f64(&[2, 0], -1.0)?;
/// assert_eq!(data, [0, 0, -1, 7, 7, 7]);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
///
/// ```compile_fail,E0382
/// # use antiphon_tensor::TensorViewMut;
/// let mut data = [0_i32; 6];
/// let view = TensorViewMut::from(&mut data);
/// let (one, two) = (view, view); // exclusive, so not twice
/// ```
pub struct TensorViewMut<'a> {
    raw: Raw,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is an exclusive borrow of elements, which are Send by the bound on `Element`. Memory of a device is
// never touched from here.
unsafe impl Send for TensorViewMut<'_> {}
// SAFETY: a shared view only reads, and elements are Sync by the bound on `Element`.
unsafe impl Sync for TensorViewMut<'_> {}

impl<'a> TensorViewMut<'a> {
    common_methods!();

    /// A view of a whole slice in row-major order.
    ///
    /// # Errors
    ///
    /// [`TensorError::LengthMismatch`] unless the slice has as many elements as the shape, and those of
    /// [`Shape::new`](crate::Shape::new).
    #[inline]
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self, TensorError> {
        Raw::shaped(NonNull::from(data), shape).map(Self::wrap)
    }

    /// A view that starts at a slice's first element and steps by `strides` elements.
    ///
    /// # Errors
    ///
    /// [`TensorError::Overlap`] unless every dimension, taken by growing stride, steps over all that the former ones
    /// reach; otherwise as [`TensorView::with_strides`].
    pub fn with_strides<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[isize],
    ) -> Result<Self, TensorError> {
        let raw = Raw::strided(NonNull::from(data), shape, strides)?;
        raw.check_overlap()?;
        Ok(Self::wrap(raw))
    }

    /// A view of memory at an address, row-major unless strides are given. The address is that of index zero; it
    /// need not be aligned, and may be null if the tensor is empty.
    ///
    /// # Errors
    ///
    /// [`TensorError::Overlap`] as for [`with_strides`](TensorViewMut::with_strides); otherwise as
    /// [`TensorView::from_raw_parts`].
    ///
    /// # Safety
    ///
    /// For all of `'a`, every element that the shape and strides reach must be in one allocation on `device`, hold
    /// an initialised value of `dtype`, and be read or written through this view only.
    #[inline]
    pub unsafe fn from_raw_parts(
        ptr: *mut u8,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[isize]>,
        device: Device,
    ) -> Result<Self, TensorError> {
        // SAFETY: the caller promises what `Raw` needs.
        let raw = unsafe { Raw::from_parts(ptr, dtype, shape, strides, device) }?;
        if strides.is_some() {
            raw.check_overlap()?;
        }
        Ok(Self::wrap(raw))
    }

    /// The address of the element at index zero, to write; otherwise as [`as_ptr`](TensorViewMut::as_ptr).
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.raw.ptr().as_ptr()
    }

    /// The same tensor for a shorter time, after which this view can be used again.
    #[inline]
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut::wrap(self.raw)
    }

    /// The same tensor to read, while this view rests.
    #[inline]
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView::wrap(self.raw)
    }

    /// The same tensor to read, for as long as it was borrowed.
    #[inline]
    pub fn into_view(self) -> TensorView<'a> {
        TensorView::wrap(self.raw)
    }

    /// The elements in row-major order.
    ///
    /// # Errors
    ///
    /// As [`TensorView::as_slice`].
    #[inline]
    pub fn as_slice<T: Element>(&self) -> Result<&[T], TensorError> {
        self.as_view().as_slice()
    }

    /// The elements in row-major order, to write.
    ///
    /// # Errors
    ///
    /// As [`TensorView::as_slice`].
    #[inline]
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], TensorError> {
        self.reborrow().into_mut_slice()
    }

    /// The elements in row-major order, to write for as long as they were borrowed.
    ///
    /// # Errors
    ///
    /// As [`TensorView::as_slice`].
    #[inline]
    pub fn into_mut_slice<T: Element>(self) -> Result<&'a mut [T], TensorError> {
        let mut elements = self.raw.elements::<T>()?;
        // SAFETY: `elements` checked type, place, order and alignment; 'a is the exclusive borrow of the memory, and
        // the view that holds it ends here.
        Ok(unsafe { elements.as_mut() })
    }

    /// The bytes of the elements in row-major order, whatever their type and alignment.
    ///
    /// # Errors
    ///
    /// As [`TensorView::as_bytes`].
    #[inline]
    pub fn as_bytes(&self) -> Result<&[u8], TensorError> {
        self.as_view().as_bytes()
    }

    /// The bytes of the elements in row-major order, to write.
    ///
    /// # Errors
    ///
    /// As [`TensorView::as_bytes`].
    #[inline]
    pub fn as_mut_bytes(&mut self) -> Result<&mut [u8], TensorError> {
        let mut bytes = self.raw.bytes()?;
        // SAFETY: `bytes` checked place and order; elements have no padding and any bytes are valid for them; `self`
        // is borrowed exclusively for as long as the result.
        Ok(unsafe { bytes.as_mut() })
    }

    /// Replaces the element at an index by what [`Element::from_f64`] makes of the value. Works for any strides and
    /// alignment.
    ///
    /// # Errors
    ///
    /// As [`get_f64`](TensorViewMut::get_f64).
    pub fn set_f64(&mut self, index: &[usize], value: f64) -> Result<(), TensorError> {
        let address = self.raw.address(index)?.as_ptr();
        self.dtype().numeric()?;
        with_dtype!(self.dtype(), T => {
            // SAFETY: the address is that of an element inside the memory that `self` borrows exclusively, of the type
            // that DType names.
            unsafe { address.cast::<T>().write_unaligned(<T as Element>::from_f64(value)) }
        });
        Ok(())
    }

    /// The parts with the indices `..middle` and `middle..` of a dimension, both to write.
    ///
    /// ```
    /// # use antiphon_tensor::TensorViewMut;
    /// let mut data = [0_u8; 6];
    /// let (mut left, mut right) = TensorViewMut::new(&mut data, &[2, 3])?.split_at(1, 1)?;
    /// assert_eq!((left.shape(), right.shape()), (&[2, 1][..], &[2, 2][..]));
    /// left.set_f64(&[1, 0], 1.0)?;
    /// right.set_f64(&[0, 1], 2.0)?;
    /// assert_eq!(data, [0, 0, 2, 1, 0, 0]);
    /// # Ok::<(), antiphon_tensor::TensorError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`TensorError::DimOutOfBounds`] and [`TensorError::RangeOutOfBounds`].
    pub fn split_at(self, dim: usize, middle: usize) -> Result<(Self, Self), TensorError> {
        // No two indices reach the same element, so the halves share none.
        let front = self.raw.narrow(dim, 0, middle)?;
        let back = self.raw.narrow(dim, middle, self.shape()[dim] - middle)?;
        Ok((Self::wrap(front), Self::wrap(back)))
    }

    #[inline]
    fn wrap(raw: Raw) -> Self {
        TensorViewMut { raw, borrow: PhantomData }
    }
}

impl fmt::Debug for TensorViewMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.describe("TensorViewMut", f)
    }
}

impl<'a, T: Element> From<&'a mut [T]> for TensorViewMut<'a> {
    #[inline]
    fn from(data: &'a mut [T]) -> Self {
        Self::wrap(Raw::vector(NonNull::from(data)))
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for TensorViewMut<'a> {
    #[inline]
    fn from(data: &'a mut Vec<T>) -> Self {
        data.as_mut_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a mut [T; N]> for TensorViewMut<'a> {
    #[inline]
    fn from(data: &'a mut [T; N]) -> Self {
        data.as_mut_slice().into()
    }
}

impl<'a> From<&'a mut TensorViewMut<'_>> for TensorViewMut<'a> {
    #[inline]
    fn from(view: &'a mut TensorViewMut<'_>) -> Self {
        view.reborrow()
    }
}
