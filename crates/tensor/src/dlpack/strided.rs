//! Views of segments in borrowed memory.

use super::{ElementType, Exported};
use crate::{Device, TensorError};

/// Segments of memory at a stride as a matrix, one row for each: what FlashInfer's `pack_strided_memory` makes of the
/// buffers of all peers when they are mapped one behind the other.
///
/// `segment_size` and `segment_stride` are in *bytes*, `ptr` is the start of the first segment. The tensor has the
/// shape `[num_segments, segment_size / element]`, the strides `[segment_stride / element, 1]`, and owns nothing.
/// Other than FlashInfer's, which marks every float as IEEE's, it keeps the element type: bf16 comes back as bf16,
/// not as f16, and FP8 as itself. The stride may be the size: then the rows touch.
///
/// ```
/// use antiphon_tensor::dlpack::{Imported, strided_memory};
/// use antiphon_tensor::{DType, Device, bf16};
///
/// let mut memory: Vec<bf16> = (0..8).map(|i| bf16::from_f32(i as f32)).collect();
/// let ptr = memory.as_mut_ptr().cast();
/// // SAFETY: the vector outlives the tensor, and is not touched meanwhile.
/// let peers = unsafe { strided_memory(ptr, 4, 8, 2, DType::BF16, Device::Host) }?.into_versioned();
/// // SAFETY: as above, and the struct is fresh.
/// let peers = unsafe { Imported::from_versioned(peers) }?;
/// let view = peers.view()?;
/// assert_eq!((view.dtype(), view.shape(), view.strides()), (DType::BF16, &[2, 2][..], &[4, 1][..]));
/// assert_eq!(view.get_f64(&[1, 0])?, 4.0);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
///
/// # Errors
///
/// * [`TensorError::NotPositive`]: a size, stride or number of 0 or less.
/// * [`TensorError::PartialByte`]: elements that are no whole number of bytes.
/// * [`TensorError::PartialElement`]: a size or stride that is no whole number of elements.
/// * [`TensorError::SegmentOverlap`]: a stride smaller than the size.
/// * [`TensorError::MisalignedElement`]: a pointer that is no multiple of the element's size, or of the largest power
///   of two in it.
/// * Those of [`Exported::new`]: a null pointer, more than an address space, a device that DLPack cannot number.
///
/// # Safety
///
/// Until the deleter of the struct that is made of the result is called, all segments are in one allocation on
/// `device`, initialised, and free for the consumer to write.
pub unsafe fn strided_memory(
    ptr: *mut u8,
    segment_size: i64,
    segment_stride: i64,
    num_segments: i64,
    element_type: impl Into<ElementType>,
    device: Device,
) -> Result<Exported<()>, TensorError> {
    let element_type = element_type.into();
    let element_size = element_type.bytes().ok_or(TensorError::PartialByte { element_type })?;
    let size = elements("segment size", segment_size, element_size)?;
    let stride = elements("segment stride", segment_stride, element_size)?;
    let count = positive("number of segments", num_segments)?;
    if stride < size {
        return Err(TensorError::SegmentOverlap { size: segment_size, stride: segment_stride });
    }
    let (address, align) = (ptr.addr(), 1 << element_size.trailing_zeros());
    if !address.is_multiple_of(align) {
        return Err(TensorError::MisalignedElement { element_type, address, align });
    }
    // SAFETY: the caller promises the memory, which needs no owner.
    unsafe { Exported::new((), ptr, element_type, &[count, size], Some(&[stride as isize, 1]), device) }
}

/// The number of elements in `bytes` bytes.
fn elements(what: &'static str, bytes: i64, element_size: usize) -> Result<usize, TensorError> {
    let count = positive(what, bytes)?;
    if !count.is_multiple_of(element_size) {
        return Err(TensorError::PartialElement { what, bytes, element_size });
    }
    Ok(count / element_size)
}

/// The value, unless it is 0 or less.
fn positive(what: &'static str, value: i64) -> Result<usize, TensorError> {
    usize::try_from(value).ok().filter(|&value| value > 0).ok_or(TensorError::NotPositive { what, value })
}
