//! The common part of the two views: an address with its layout, without a lifetime.

use std::fmt;
use std::ptr::{self, NonNull};

use crate::layout::{Layout, Part};
use crate::{DType, Device, Element, TensorError};

/// A tensor's address and description. Its wrappers add the lifetime and the kind of access.
///
/// Promised: unless it is empty, `ptr` points into memory on `device` that holds, for the lifetime of the wrapper,
/// an initialised element of `dtype` wherever `layout` reaches from there.
#[derive(Clone, Copy)]
pub(super) struct Raw {
    ptr: NonNull<u8>,
    layout: Layout,
    dtype: DType,
    device: Device,
}

impl Raw {
    /// All elements of a slice, in one dimension.
    #[inline]
    pub(super) fn vector<T: Element>(data: NonNull<[T]>) -> Raw {
        Raw { ptr: data.cast(), layout: Layout::vector(data.len()), dtype: T::DTYPE, device: Device::Host }
    }

    /// All elements of a slice, in row-major order.
    #[inline]
    pub(super) fn shaped<T: Element>(data: NonNull<[T]>, shape: &[usize]) -> Result<Raw, TensorError> {
        let mut raw = Raw { layout: Layout::SCALAR, ..Raw::vector(data) };
        raw.layout.fill(shape, None, size_of::<T>())?;
        let (numel, len) = (raw.layout.numel(), data.len());
        if numel != len {
            return Err(TensorError::LengthMismatch { shape: shape.to_vec(), numel, len });
        }
        Ok(raw)
    }

    /// The elements of a slice that the strides reach from its first one.
    pub(super) fn strided<T: Element>(
        data: NonNull<[T]>,
        shape: &[usize],
        strides: &[isize],
    ) -> Result<Raw, TensorError> {
        let mut raw = Raw { layout: Layout::SCALAR, ..Raw::vector(data) };
        raw.layout.fill(shape, Some(strides), size_of::<T>())?;
        let len = data.len();
        match raw.layout.reach() {
            Some(reach) if reach.lowest < 0 || reach.highest >= len as isize => {
                Err(TensorError::OutOfBounds {
                    shape: shape.to_vec(),
                    strides: strides.to_vec(),
                    lowest: reach.lowest,
                    highest: reach.highest,
                    len,
                })
            }
            _ => Ok(raw),
        }
    }

    /// A tensor at an address. An empty one may be at null, and is then moved to a dangling address.
    ///
    /// # Safety
    ///
    /// The promise of the type.
    // Always, as views are made on every call, and moving one takes half the time of making it.
    #[inline(always)]
    pub(super) unsafe fn from_parts(
        ptr: *mut u8,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[isize]>,
        device: Device,
    ) -> Result<Raw, TensorError> {
        let at = NonNull::new(ptr);
        let mut raw = Raw { ptr: at.unwrap_or(dangling(dtype)), layout: Layout::SCALAR, dtype, device };
        raw.layout.fill(shape, strides, dtype.size())?;
        if at.is_none() && raw.layout.numel() > 0 {
            return Err(TensorError::NullPointer { shape: shape.to_vec() });
        }
        Ok(raw)
    }

    #[inline]
    pub(super) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    #[inline]
    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    #[inline]
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    #[inline]
    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// Checks that no two indices reach the same element.
    pub(super) fn check_overlap(&self) -> Result<(), TensorError> {
        if self.layout.may_overlap() {
            let (shape, strides) = (self.layout.shape().to_vec(), self.layout.strides().to_vec());
            return Err(TensorError::Overlap { shape, strides });
        }
        Ok(())
    }

    /// All elements as the slice of `T` that they are: aligned, and valid to borrow as the wrapper borrows.
    #[inline]
    pub(super) fn elements<T: Element>(&self) -> Result<NonNull<[T]>, TensorError> {
        if T::DTYPE != self.dtype {
            return Err(TensorError::DTypeMismatch { expected: T::DTYPE, actual: self.dtype });
        }
        let (ptr, numel) = (self.contiguous_on_host()?.cast::<T>(), self.layout.numel());
        if numel == 0 {
            // An empty tensor may come from anywhere; its address means nothing.
            return Ok(NonNull::slice_from_raw_parts(NonNull::dangling(), 0));
        }
        if !ptr.is_aligned() {
            let (address, align) = (ptr.addr().get(), align_of::<T>());
            return Err(TensorError::Misaligned { dtype: self.dtype, address, align });
        }
        Ok(NonNull::slice_from_raw_parts(ptr, numel))
    }

    /// The bytes of all elements, valid to borrow as the wrapper borrows: elements have no padding.
    #[inline]
    pub(super) fn bytes(&self) -> Result<NonNull<[u8]>, TensorError> {
        let ptr = self.contiguous_on_host()?;
        Ok(NonNull::slice_from_raw_parts(ptr, self.layout.numel() * self.dtype.size()))
    }

    /// The address of the element at an index.
    #[inline]
    pub(super) fn address(&self, index: &[usize]) -> Result<NonNull<u8>, TensorError> {
        self.on_host()?;
        let offset = self.layout.offset(index)?;
        Ok(self.step(offset))
    }

    pub(super) fn select(&self, dim: usize, index: usize) -> Result<Raw, TensorError> {
        self.layout.select(dim, index).map(|part| self.part(part))
    }

    pub(super) fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Raw, TensorError> {
        self.layout.narrow(dim, start, len).map(|part| self.part(part))
    }

    pub(super) fn transpose(&self, first: usize, second: usize) -> Result<Raw, TensorError> {
        Ok(Raw { layout: self.layout.transpose(first, second)?, ..*self })
    }

    pub(super) fn reshape(&self, shape: &[usize]) -> Result<Raw, TensorError> {
        Ok(Raw { layout: self.layout.reshape(shape)?, ..*self })
    }

    fn part(&self, part: Part) -> Raw {
        Raw { ptr: self.step(part.offset), layout: part.layout, ..*self }
    }

    /// The address of an element that the layout reaches, or of no element if `offset` is 0.
    #[inline]
    fn step(&self, offset: isize) -> NonNull<u8> {
        // Wrapping, because the rules of `offset` are about Rust's own allocations, and a device's is none.
        let address = self.ptr.as_ptr().wrapping_offset(offset * self.dtype.size() as isize);
        // SAFETY: by the promise of the type the address is that of an element in the same memory as `ptr`, or `ptr`
        // itself, so it is not null.
        unsafe { NonNull::new_unchecked(address) }
    }

    /// An error unless the elements lie in row-major order without gaps.
    #[inline]
    pub(super) fn contiguous(&self) -> Result<(), TensorError> {
        if self.layout.is_contiguous() { Ok(()) } else { Err(self.not_contiguous()) }
    }

    #[cold]
    fn not_contiguous(&self) -> TensorError {
        let (shape, strides) = (self.layout.shape().to_vec(), self.layout.strides().to_vec());
        TensorError::NotContiguous { shape, strides }
    }

    #[inline]
    fn contiguous_on_host(&self) -> Result<NonNull<u8>, TensorError> {
        self.on_host()?;
        self.contiguous()?;
        Ok(self.ptr)
    }

    #[inline]
    fn on_host(&self) -> Result<(), TensorError> {
        if self.device.is_host() { Ok(()) } else { Err(TensorError::NotOnHost { device: self.device }) }
    }

    /// Writes the description, not the elements, under the wrapper's name.
    pub(super) fn describe(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("dtype", &self.dtype)
            .field("shape", self.layout.shape())
            .field("strides", self.layout.strides())
            .field("device", &self.device)
            .field("ptr", &self.ptr)
            .finish()
    }
}

/// An address that is not null and aligned for the type.
fn dangling(dtype: DType) -> NonNull<u8> {
    NonNull::new(ptr::without_provenance_mut(dtype.size())).unwrap_or(NonNull::dangling())
}
