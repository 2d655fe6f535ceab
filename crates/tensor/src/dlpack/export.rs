//! Lending memory to another library.

use std::ptr::{self, NonNull};

use super::ElementType;
use super::sys::{self, DLDevice};
use crate::layout::Layout;
use crate::{Device, MAX_RANK, Shape, Strides, TensorError};

/// Memory ready to be lent: its description, and an owner `O` that keeps it alive.
///
/// It becomes a C struct by [`into_versioned`](Exported::into_versioned), whose deleter drops the owner and may be
/// called from any thread; should the owner panic then, the process aborts. Until it becomes one, dropping it drops
/// the owner.
///
/// The [module's page](super) has an example.
#[derive(Debug)]
pub struct Exported<O> {
    owner: O,
    tensor: sys::DLTensor,
    shape: Shape,
    strides: Strides,
    flags: u64,
}

impl<O: Send + 'static> Exported<O> {
    /// Describes memory, row-major unless strides (in elements) are given. `ptr` is the address of the element at
    /// index zero and may be null if there are no elements. On error the owner is dropped.
    ///
    /// # Errors
    ///
    /// [`TensorError::NullPointer`], [`TensorError::RankTooHigh`], [`TensorError::ShapeOverflow`],
    /// [`TensorError::StrideCount`], [`TensorError::StrideOverflow`], and [`TensorError::DeviceOrdinal`] for a device
    /// that DLPack cannot number.
    ///
    /// # Safety
    ///
    /// Until the owner is dropped, wherever it moves, every element that shape and strides reach is in one allocation
    /// on `device`, initialised, and free for the consumer to write unless made [`read_only`](Exported::read_only).
    pub unsafe fn new(
        owner: O,
        ptr: *mut u8,
        element_type: impl Into<ElementType>,
        shape: &[usize],
        strides: Option<&[isize]>,
        device: Device,
    ) -> Result<Self, TensorError> {
        let element_type = element_type.into();
        let mut layout = Layout::SCALAR;
        layout.fill(shape, strides, element_type.bytes_at_most())?;
        if ptr.is_null() && layout.numel() > 0 {
            return Err(TensorError::NullPointer { shape: shape.to_vec() });
        }
        let tensor = sys::DLTensor {
            data: if layout.numel() > 0 { ptr.cast() } else { ptr::null_mut() }, // as the header asks
            device: denote(device)?,
            ndim: shape.len() as i32,
            dtype: element_type.into(),
            shape: ptr::null_mut(), // these two are known when they have an address
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        Ok(Exported { owner, tensor, shape: *layout.shape(), strides: *layout.strides(), flags: 0 })
    }

    /// Forbids the consumer to write.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.flags |= sys::READ_ONLY;
        self
    }

    /// The C struct, with explicit strides as DLPack demands since 1.2. Its consumer must call its deleter once,
    /// which frees it; until then the owner lives.
    pub fn into_versioned(self) -> NonNull<sys::DLManagedTensorVersioned> {
        let flags = self.flags;
        self.into_block(|dl_tensor| sys::DLManagedTensorVersioned {
            version: sys::VERSION,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete::<sys::DLManagedTensorVersioned, O>),
            flags,
            dl_tensor,
        })
    }

    /// The C struct of before DLPack 1.0, for consumers that know no other; otherwise as
    /// [`into_versioned`](Exported::into_versioned).
    ///
    /// # Errors
    ///
    /// [`TensorError::ReadOnlyUnversioned`] for read-only memory, as the struct cannot say so. The owner is dropped.
    pub fn into_unversioned(self) -> Result<NonNull<sys::DLManagedTensor>, TensorError> {
        if self.flags & sys::READ_ONLY != 0 {
            return Err(TensorError::ReadOnlyUnversioned);
        }
        Ok(self.into_block(|dl_tensor| sys::DLManagedTensor {
            dl_tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete::<sys::DLManagedTensor, O>),
        }))
    }

    /// Moves all into one allocation, at whose start `M` is.
    fn into_block<M>(self, managed: impl FnOnce(sys::DLTensor) -> M) -> NonNull<M> {
        let Exported { owner, mut tensor, shape, strides, .. } = self;
        // A raw pointer from the start: the addresses inside would not survive a Box that moves.
        let block = NonNull::from(Box::leak(Box::<Block<M, O>>::new_uninit())).cast::<Block<M, O>>();
        let at = block.as_ptr();
        // SAFETY: the places are fields of a fresh allocation.
        (tensor.shape, tensor.strides) =
            unsafe { ((&raw mut (*at).shape).cast(), (&raw mut (*at).strides).cast()) };
        let content = Block {
            managed: managed(tensor),
            shape: widen(&shape, |size| size as i64),
            strides: widen(&strides, |step| step as i64),
            _owner: owner,
        };
        // SAFETY: the allocation is fresh, and of this type.
        unsafe { block.write(content) };
        block.cast()
    }
}

/// The struct whose first field's address the consumer has.
#[repr(C)]
struct Block<M, O> {
    managed: M,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    _owner: O,
}

/// Frees a block, and drops its owner.
///
/// # Safety
///
/// `managed` is null or what `into_block` of the same types gave, and not used again.
unsafe extern "C" fn delete<M, O>(managed: *mut M) {
    if !managed.is_null() {
        // SAFETY: the caller gives the block back, whose first field is at its address.
        drop(unsafe { Box::from_raw(managed.cast::<Block<M, O>>()) });
    }
}

/// Sizes or steps as C takes them; they fit, as those of a layout fit an `isize`.
fn widen<T: Copy>(values: &[T], wide: impl Fn(T) -> i64) -> [i64; MAX_RANK] {
    std::array::from_fn(|dim| values.get(dim).map_or(0, |&value| wide(value)))
}

/// The device as DLPack denotes it.
fn denote(device: Device) -> Result<DLDevice, TensorError> {
    match device {
        Device::Host => Ok(DLDevice { device_type: DLDevice::CPU, device_id: 0 }),
        Device::Cuda(ordinal) => i32::try_from(ordinal)
            .map(|device_id| DLDevice { device_type: DLDevice::CUDA, device_id })
            .map_err(|_| TensorError::DeviceOrdinal { ordinal: ordinal.into() }),
    }
}
