//! Segments of memory without an owner.

use std::ptr;

use antiphon_tensor::dlpack::{ElementType, Imported, strided_memory};
use antiphon_tensor::{DType, Device, TensorError, bf16};

use crate::import;

/// A matrix of bf16 over a memory's start, by [`strided_memory`].
fn segments(memory: &mut [bf16], size: i64, stride: i64, count: i64) -> Result<Imported, TensorError> {
    // SAFETY: the tests stay inside the memory, and touch it after the tensor is gone.
    let exported =
        unsafe { strided_memory(memory.as_mut_ptr().cast(), size, stride, count, DType::BF16, Device::Host) };
    import(exported?.into_versioned())
}

#[test]
fn strided_memory_is_a_matrix_of_the_segments() {
    let mut memory: Vec<bf16> = (0..64).map(|i| bf16::from_f32(i as f32)).collect();
    let base = memory.as_ptr().addr();
    // Three segments of 8 bytes, 32 bytes apart.
    let mut imported = segments(&mut memory, 8, 32, 3).unwrap();
    assert_eq!(imported.element_type(), DType::BF16.into(), "not f16");
    let view = imported.view().unwrap();
    assert_eq!((view.shape(), view.strides()), (&[3, 4][..], &[16, 1][..]));
    for (row, column) in [(0, 0), (0, 3), (1, 0), (2, 3)] {
        let element = view.select(0, row).unwrap().select(0, column).unwrap();
        assert_eq!(element.as_ptr().addr(), base + 32 * row + 2 * column);
        assert_eq!(element.get_f64(&[]), Ok((16 * row + column) as f64));
    }
    imported.view_mut().unwrap().set_f64(&[2, 1], -1.0).unwrap();
    drop(imported);
    assert_eq!(memory[33], bf16::from_f32(-1.0), "the memory itself is written, and not freed");

    // Touching segments are one piece; one segment may be all there is.
    assert!(segments(&mut memory, 8, 8, 3).unwrap().view().unwrap().is_contiguous());
    assert_eq!(segments(&mut memory, 128, 128, 1).unwrap().shape(), [1, 64]);
}

#[test]
fn strided_memory_keeps_fp8_and_the_device() {
    let fp8 = ElementType::named("float8_e5m2").unwrap();
    let at = ptr::without_provenance_mut(0x7001);
    // SAFETY: nothing touches memory of a device from here.
    let exported = unsafe { strided_memory(at, 3, 5, 2, fp8, Device::Cuda(1)) }.unwrap();
    let imported = import(exported.into_versioned()).unwrap();
    assert_eq!((imported.element_type(), imported.device()), (fp8, Ok(Device::Cuda(1))));
    assert_eq!((imported.shape(), imported.strides()), (&[2, 3][..], Some(&[5, 1][..])));
    assert_eq!(imported.data_ptr(), at);
}

#[test]
fn strided_memory_refuses_what_is_not_segments() {
    let memory = &mut [bf16::ZERO; 64];
    let mut refusal = |size, stride, count| segments(memory, size, stride, count).unwrap_err();
    let not_positive = |what, value| TensorError::NotPositive { what, value };
    for value in [0, -2, i64::MIN] {
        assert_eq!(refusal(value, 16, 2), not_positive("segment size", value));
        assert_eq!(refusal(8, value, 2), not_positive("segment stride", value));
        assert_eq!(refusal(8, 16, value), not_positive("number of segments", value));
    }
    let partial = |what, bytes| TensorError::PartialElement { what, bytes, element_size: 2 };
    assert_eq!(refusal(7, 16, 2), partial("segment size", 7));
    assert_eq!(refusal(8, 15, 2), partial("segment stride", 15));
    assert_eq!(
        refusal(8, 15, 2).to_string(),
        "the segment stride of 15 bytes is no whole number of elements of 2 bytes"
    );
    assert_eq!(refusal(8, 6, 2), TensorError::SegmentOverlap { size: 8, stride: 6 });
    assert!(matches!(refusal(8, 8, i64::MAX), TensorError::ShapeOverflow { .. }));
    assert!(matches!(refusal(8, i64::MAX - 1, 3), TensorError::StrideOverflow { .. }));
}

#[test]
fn strided_memory_refuses_impossible_addresses_and_elements() {
    let refusal = |address, element_type: ElementType| {
        let ptr = ptr::without_provenance_mut(address);
        // SAFETY: it is refused.
        unsafe { strided_memory(ptr, 16, 16, 2, element_type, Device::Host) }.unwrap_err()
    };
    assert_eq!(refusal(0, DType::F32.into()), TensorError::NullPointer { shape: vec![2, 4] });
    let error = refusal(0x1002, DType::F32.into());
    assert_eq!(error.to_string(), "address 0x1002 is not aligned to the 4 bytes that float32 needs");
    let element_type = ElementType::named("float4_e2m1fn").unwrap();
    assert_eq!(refusal(0x1000, element_type), TensorError::PartialByte { element_type });
    assert_eq!(
        refusal(0x1000, element_type).to_string(),
        "elements of type float4_e2m1fn are no whole number of bytes"
    );
}
