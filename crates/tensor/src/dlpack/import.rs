//! Borrowing the memory of another library.

use std::ptr::{self, NonNull};

use super::ElementType;
use super::sys::{self, DLDevice};
use crate::layout::Layout;
use crate::{Device, MAX_RANK, Shape, Strides, TensorError, TensorView, TensorViewMut};

/// A tensor that another library lends, checked. Dropping it ends the loan: the lender's deleter is called, exactly
/// once, on the thread that drops.
///
/// The [module's page](super) has an example.
#[derive(Debug)]
pub struct Imported {
    description: Description,
    read_only: bool,
    _loan: Loan,
}

// SAFETY: the library that made it promised that the deleter may be called on any thread. The rest is plain data, and elements,
// which are Send and Sync by the bound on `Element`.
unsafe impl Send for Imported {}
// SAFETY: a shared `Imported` only reads.
unsafe impl Sync for Imported {}

impl Imported {
    /// Takes a versioned tensor, also on error: its deleter is called either way.
    ///
    /// # Errors
    ///
    /// [`TensorError::DlpackVersion`] unless the major version is 1, and for a description that cannot be right
    /// [`TensorError::NegativeRank`], [`TensorError::RankTooHigh`], [`TensorError::NullShape`],
    /// [`TensorError::SizeOutOfRange`], [`TensorError::ShapeOverflow`], [`TensorError::StrideOverflow`],
    /// [`TensorError::NullPointer`] and [`TensorError::ByteOffset`].
    ///
    /// # Safety
    ///
    /// * `managed` points to a tensor as its version's `dlpack.h` describes it, with `ndim` sizes and, unless null,
    ///   strides. No other code calls its deleter, which may be called on any thread. (PyTorch's and NumPy's may: they
    ///   take the interpreter's lock.)
    /// * Until the deleter is called, every element that shape and strides reach is in one allocation on the device
    ///   and initialised. While a [`view`](Imported::view) lives, no other code writes elements, and while a
    ///   [`view_mut`](Imported::view_mut) lives, no other code reads them either.
    pub unsafe fn from_versioned(
        managed: NonNull<sys::DLManagedTensorVersioned>,
    ) -> Result<Self, TensorError> {
        let loan = Loan::Versioned(managed); // every return from here on drops it
        let managed = managed.as_ptr();
        // SAFETY: the version comes first in every version; the caller promises that the struct is there.
        let sys::DLPackVersion { major, minor } = unsafe { (*managed).version };
        if major != sys::VERSION.major {
            return Err(TensorError::DlpackVersion { major, minor });
        }
        // SAFETY: with this major version the struct is the one we know.
        let (flags, tensor) = unsafe { ((*managed).flags, (*managed).dl_tensor) };
        // SAFETY: the caller promises what the description says.
        let description = unsafe { Description::read(tensor) }?;
        Ok(Imported { description, read_only: flags & sys::READ_ONLY != 0, _loan: loan })
    }

    /// Takes an unversioned tensor, as those before DLPack 1.0 were, also on error: its deleter is called either way.
    ///
    /// # Errors
    ///
    /// As [`from_versioned`](Imported::from_versioned), the version apart.
    ///
    /// # Safety
    ///
    /// As [`from_versioned`](Imported::from_versioned). The struct cannot say that a tensor is read-only, so the caller
    /// promises for [`view_mut`](Imported::view_mut) that it is not.
    pub unsafe fn from_unversioned(managed: NonNull<sys::DLManagedTensor>) -> Result<Self, TensorError> {
        let loan = Loan::Unversioned(managed);
        // SAFETY: the caller promises a valid struct, and what its description says.
        let description = unsafe { Description::read((*managed.as_ptr()).dl_tensor) }?;
        Ok(Imported { description, read_only: false, _loan: loan })
    }

    /// The type of the elements, of which there are more than a [`view`](Imported::view) can have.
    pub fn element_type(&self) -> ElementType {
        self.description.element_type
    }

    /// Where the memory is. Page-locked host memory is host memory.
    ///
    /// # Errors
    ///
    /// [`TensorError::UnknownDlpackDevice`] for devices other than CPU and CUDA, [`TensorError::DeviceOrdinal`] for a
    /// negative one.
    pub fn device(&self) -> Result<Device, TensorError> {
        self.description.device.try_into()
    }

    /// The size in each dimension, in elements, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.description.shape
    }

    /// The step between neighbours in each dimension, in elements; `None` if the lender gave none, which means
    /// row-major.
    pub fn strides(&self) -> Option<&[isize]> {
        self.description.strides.as_deref()
    }

    /// The address of the element at index zero on the tensor's device, the byte offset included. It may be null if
    /// there are no elements.
    pub fn data_ptr(&self) -> *mut u8 {
        self.description.ptr
    }

    /// Whether the lender forbids writing. An unversioned tensor cannot say so: for it the answer is always no.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The tensor to read.
    ///
    /// # Errors
    ///
    /// [`TensorError::NoDType`] for elements that have no [`DType`](crate::DType), and those of
    /// [`device`](Imported::device).
    pub fn view(&self) -> Result<TensorView<'_>, TensorError> {
        let (Description { ptr, shape, .. }, dtype) = (&self.description, self.dtype()?);
        // SAFETY: the library that made `self` promised memory that is readable, and not written, while it is borrowed.
        unsafe { TensorView::from_raw_parts(*ptr, dtype, shape, self.strides(), self.device()?) }
    }

    /// The tensor to write.
    ///
    /// # Errors
    ///
    /// [`TensorError::ReadOnly`], [`TensorError::Overlap`] if two indices may reach the same element, and those of
    /// [`view`](Imported::view).
    pub fn view_mut(&mut self) -> Result<TensorViewMut<'_>, TensorError> {
        if self.read_only {
            return Err(TensorError::ReadOnly);
        }
        let (Description { ptr, shape, .. }, dtype) = (&self.description, self.dtype()?);
        // SAFETY: the library that made `self` promised memory that only this view reaches while `self` is borrowed.
        unsafe { TensorViewMut::from_raw_parts(*ptr, dtype, shape, self.strides(), self.device()?) }
    }

    fn dtype(&self) -> Result<crate::DType, TensorError> {
        let element_type = self.element_type();
        element_type.dtype().ok_or(TensorError::NoDType { element_type })
    }
}

impl TryFrom<DLDevice> for Device {
    type Error = TensorError;

    fn try_from(DLDevice { device_type, device_id }: DLDevice) -> Result<Self, TensorError> {
        match device_type {
            DLDevice::CPU | DLDevice::CUDA_HOST => Ok(Device::Host),
            DLDevice::CUDA => u32::try_from(device_id)
                .map(Device::Cuda)
                .map_err(|_| TensorError::DeviceOrdinal { ordinal: device_id.into() }),
            _ => Err(TensorError::UnknownDlpackDevice { device_type, device_id }),
        }
    }
}

/// The description of a tensor, copied from the C struct. Shape and strides fit an address space.
#[derive(Debug)]
struct Description {
    ptr: *mut u8,
    element_type: ElementType,
    device: DLDevice,
    shape: Shape,
    strides: Option<Strides>,
}

impl Description {
    /// Checks and copies.
    ///
    /// # Safety
    ///
    /// Unless null, `shape` and `strides` point to `ndim` readable values.
    unsafe fn read(tensor: sys::DLTensor) -> Result<Self, TensorError> {
        let sys::DLTensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
        let element_type = ElementType::from(dtype);
        let rank = usize::try_from(ndim).map_err(|_| TensorError::NegativeRank { ndim })?;
        if rank > MAX_RANK {
            return Err(TensorError::RankTooHigh { rank });
        }
        if rank > 0 && shape.is_null() {
            return Err(TensorError::NullShape { rank });
        }

        let (mut sizes, mut steps) = ([0; MAX_RANK], [0; MAX_RANK]);
        for (dim, place) in sizes[..rank].iter_mut().enumerate() {
            // SAFETY: the caller promises `ndim` sizes; C may have put them at any address.
            let size = unsafe { shape.add(dim).read_unaligned() };
            *place = usize::try_from(size).map_err(|_| TensorError::SizeOutOfRange { dim, size })?;
        }
        let steps = (!strides.is_null()).then(|| {
            for (dim, place) in steps[..rank].iter_mut().enumerate() {
                // SAFETY: as for the sizes.
                let step = unsafe { strides.add(dim).read_unaligned() };
                // A step that an isize cannot hold stays too long for any layout.
                *place = step.clamp(isize::MIN as i64, isize::MAX as i64) as isize;
            }
            &steps[..rank]
        });
        let mut layout = Layout::SCALAR;
        layout.fill(&sizes[..rank], steps, element_type.bytes_at_most())?;

        if data.is_null() && layout.numel() > 0 {
            return Err(TensorError::NullPointer { shape: layout.shape().to_vec() });
        }
        let ptr = if data.is_null() { ptr::null_mut() } else { offset(data.cast(), byte_offset)? };
        let strides = steps.map(|_| *layout.strides());
        Ok(Description { ptr, element_type, device, shape: *layout.shape(), strides })
    }
}

/// The address `byte_offset` bytes behind `base`.
fn offset(base: *mut u8, byte_offset: u64) -> Result<*mut u8, TensorError> {
    let address = base.addr();
    usize::try_from(byte_offset)
        .ok()
        .filter(|&offset| address.checked_add(offset).is_some())
        // Wrapping, because the rules of `add` are about Rust's own allocations, and a device's is none.
        .map(|offset| base.wrapping_add(offset))
        .ok_or(TensorError::ByteOffset { address, byte_offset })
}

/// The right and duty to call a deleter once.
#[derive(Debug)]
enum Loan {
    Versioned(NonNull<sys::DLManagedTensorVersioned>),
    Unversioned(NonNull<sys::DLManagedTensor>),
}

impl Drop for Loan {
    fn drop(&mut self) {
        match *self {
            Loan::Versioned(managed) => {
                let managed = managed.as_ptr();
                // SAFETY: the deleter is at the same place in every version; the tensor was given to us, so it has not
                // been called, and nothing uses the tensor after this.
                unsafe { (*managed).deleter.map(|deleter| deleter(managed)) }
            }
            Loan::Unversioned(managed) => {
                let managed = managed.as_ptr();
                // SAFETY: the tensor was given to us, and nothing uses it after this.
                unsafe { (*managed).deleter.map(|deleter| deleter(managed)) }
            }
        };
    }
}
