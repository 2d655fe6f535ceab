//! Tensors that other libraries lend, well-formed and not.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use antiphon_tensor::dlpack::{Imported, sys};
use antiphon_tensor::{Device, TensorError};
use proptest::prelude::*;

use crate::{Drops, import, import_unversioned, leak_free};

static SHAPE: [i64; 2] = [2, 3];
static STRIDES: [i64; 2] = [3, 1];
static DATA: [i32; 6] = [0, 1, 2, 3, 4, 5];

/// A tensor of another library: 2 by 3 i32 on the host.
fn foreign_tensor() -> sys::DLTensor {
    sys::DLTensor {
        data: (&raw const DATA).cast_mut().cast(),
        device: sys::DLDevice { device_type: 1, device_id: 0 },
        ndim: 2,
        dtype: sys::DLDataType { code: 0, bits: 32, lanes: 1 },
        shape: (&raw const SHAPE).cast_mut().cast(),
        strides: (&raw const STRIDES).cast_mut().cast(),
        byte_offset: 0,
    }
}

/// Imports a read-only tensor of another library, with a deleter that counts its calls.
fn foreign(
    drops: &Drops,
    change: impl FnOnce(&mut sys::DLManagedTensorVersioned),
) -> Result<Imported, TensorError> {
    unsafe extern "C" fn deleter(managed: *mut sys::DLManagedTensorVersioned) {
        // SAFETY: called once, with the box from below and the context in it.
        let managed = unsafe { Box::from_raw(managed) };
        // SAFETY: as above.
        let drops = unsafe { Box::from_raw(managed.manager_ctx.cast::<Drops>()) };
        *drops.0.lock().unwrap() += 1;
    }
    let mut managed = Box::new(sys::DLManagedTensorVersioned {
        version: sys::VERSION,
        manager_ctx: Box::into_raw(Box::new(drops.clone())).cast(),
        deleter: Some(deleter),
        flags: sys::READ_ONLY,
        dl_tensor: foreign_tensor(),
    });
    change(&mut managed);
    import(NonNull::from(Box::leak(managed)))
}

/// The error for a foreign tensor with this change, after checking that its deleter was called once.
fn refusal(change: impl FnOnce(&mut sys::DLTensor)) -> TensorError {
    let drops = Drops::default();
    let error = foreign(&drops, |managed| change(&mut managed.dl_tensor)).unwrap_err();
    assert_eq!(drops.count(), 1, "{error}");
    error
}

#[test]
fn foreign_tensors_are_read_as_the_header_says() {
    let drops = Drops::default();
    let plain = foreign(&drops, |_| ()).unwrap();
    assert_eq!(plain.view().unwrap().as_slice::<i32>(), Ok(&DATA[..]));
    drop(plain);
    assert_eq!(drops.count(), 1);

    // No strides, as was allowed before 1.2, are row-major.
    let old = foreign(&drops, |managed| managed.dl_tensor.strides = ptr::null_mut()).unwrap();
    assert_eq!((old.strides(), old.view().unwrap().strides()), (None, &[3, 1][..]));

    // Index zero is at the byte offset, and sizes may be anywhere.
    static PACKED: [u8; 9] = [0xFF, 2, 0, 0, 0, 0, 0, 0, 0];
    let late = foreign(&drops, |managed| {
        managed.dl_tensor.byte_offset = 8;
        managed.dl_tensor.ndim = 1;
        managed.dl_tensor.shape = PACKED[1..].as_ptr().cast_mut().cast();
        managed.dl_tensor.strides = ptr::null_mut();
    });
    assert_eq!(late.unwrap().view().unwrap().as_slice::<i32>(), Ok(&[2, 3][..]));

    // A scalar needs neither sizes nor strides, and an empty tensor no data.
    let scalar = foreign(&drops, |managed| {
        managed.dl_tensor.ndim = 0;
        (managed.dl_tensor.shape, managed.dl_tensor.strides) = (ptr::null_mut(), ptr::null_mut());
    });
    assert_eq!(scalar.unwrap().view().unwrap().get_f64(&[]), Ok(0.0));
    static EMPTY: [i64; 2] = [7, 0];
    let empty = foreign(&drops, |managed| {
        managed.dl_tensor.shape = EMPTY.as_ptr().cast_mut();
        (managed.dl_tensor.data, managed.dl_tensor.byte_offset) = (ptr::null_mut(), u64::MAX);
    });
    assert_eq!(empty.unwrap().view().unwrap().as_slice::<i32>(), Ok(&[][..]));

    // A later minor version and unknown flags change nothing.
    let newer =
        foreign(&drops, |managed| (managed.version.minor, managed.flags) = (99, !sys::READ_ONLY)).unwrap();
    assert!(!newer.is_read_only() && newer.view().is_ok());
}

#[test]
fn a_missing_deleter_is_nothing_to_call() {
    let mut managed =
        sys::DLManagedTensor { dl_tensor: foreign_tensor(), manager_ctx: ptr::null_mut(), deleter: None };
    let imported = import_unversioned(NonNull::from(&mut managed)).unwrap();
    assert_eq!(imported.view().unwrap().get_f64(&[1, 2]), Ok(5.0));
}

#[test]
fn of_another_major_version_only_the_deleter_is_used() {
    /// What every version has in common, and no more, so that more would be read from beyond an allocation.
    #[repr(C)]
    struct Stable {
        version: sys::DLPackVersion,
        manager_ctx: *mut c_void,
        deleter: Option<unsafe extern "C" fn(*mut sys::DLManagedTensorVersioned)>,
    }
    unsafe extern "C" fn deleter(managed: *mut sys::DLManagedTensorVersioned) {
        // SAFETY: called once, with the box from below and the context in it.
        let stable = unsafe { Box::from_raw(managed.cast::<Stable>()) };
        // SAFETY: the counter outlives the import.
        *unsafe { &*stable.manager_ctx.cast::<Drops>() }.0.lock().unwrap() += 1;
    }
    let drops = Drops::default();
    for (count, major) in [0, 2, u32::MAX].into_iter().enumerate() {
        leak_free(|| {
            let stable = Box::new(Stable {
                version: sys::DLPackVersion { major, minor: 5 },
                manager_ctx: (&raw const drops).cast_mut().cast(),
                deleter: Some(deleter),
            });
            let error = import(NonNull::from(Box::leak(stable)).cast()).unwrap_err();
            assert_eq!(error, TensorError::DlpackVersion { major, minor: 5 });
        });
        assert_eq!(drops.count(), count + 1);
    }
    let error = TensorError::DlpackVersion { major: 2, minor: 0 };
    assert_eq!(error.to_string(), "a tensor of DLPack 2.0 cannot be read: only 1.x is known");
}

#[test]
fn impossible_ranks_and_shapes_are_refused() {
    assert_eq!(refusal(|tensor| tensor.ndim = -1), TensorError::NegativeRank { ndim: -1 });
    assert_eq!(refusal(|tensor| tensor.ndim = 65), TensorError::RankTooHigh { rank: 65 });
    assert_eq!(
        refusal(|tensor| tensor.ndim = i32::MAX),
        TensorError::RankTooHigh { rank: i32::MAX as usize }
    );
    assert_eq!(refusal(|tensor| tensor.shape = ptr::null_mut()), TensorError::NullShape { rank: 2 });

    let shaped = |sizes: [i64; 2]| refusal(|tensor| tensor.shape = sizes.as_ptr().cast_mut());
    assert_eq!(shaped([2, -3]), TensorError::SizeOutOfRange { dim: 1, size: -3 });
    assert_eq!(shaped([i64::MIN, 1]), TensorError::SizeOutOfRange { dim: 0, size: i64::MIN });
    let overflow = |sizes: [i64; 2], element_size| TensorError::ShapeOverflow {
        shape: sizes.map(|size| size as usize).to_vec(),
        element_size,
    };
    assert_eq!(shaped([i64::MAX, 2]), overflow([i64::MAX, 2], 1));
    assert_eq!(shaped([i64::MAX / 2, 1]), overflow([i64::MAX / 2, 1], 4), "in bytes");

    let strided = |steps: [i64; 2]| refusal(|tensor| tensor.strides = steps.as_ptr().cast_mut());
    for steps in [[i64::MAX, 1], [i64::MIN, 1], [1 << 61, 1], [i64::MAX, i64::MIN]] {
        let strides = steps.map(|step| step as isize).to_vec();
        assert_eq!(strided(steps), TensorError::StrideOverflow { shape: vec![2, 3], strides });
    }
}

#[test]
fn impossible_addresses_are_refused() {
    let null =
        |byte_offset| refusal(|tensor| (tensor.data, tensor.byte_offset) = (ptr::null_mut(), byte_offset));
    assert_eq!(null(0), TensorError::NullPointer { shape: vec![2, 3] });
    // An address that is given as an offset from nowhere is not guessed at.
    assert_eq!(null(0x1000), TensorError::NullPointer { shape: vec![2, 3] });
    let address = (&raw const DATA).addr();
    assert_eq!(
        refusal(|tensor| tensor.byte_offset = u64::MAX),
        TensorError::ByteOffset { address, byte_offset: u64::MAX }
    );
}

#[test]
fn refused_imports_leak_nothing() {
    leak_free(|| {
        let negative = [-1, 3];
        drop(refusal(|tensor| tensor.ndim = -1));
        drop(refusal(|tensor| tensor.shape = negative.as_ptr().cast_mut()));
        drop(refusal(|tensor| tensor.data = ptr::null_mut()));
    });
}

#[test]
fn what_cannot_be_viewed_can_still_be_described() {
    let drops = Drops::default();
    let fp8 = foreign(&drops, |managed| {
        managed.dl_tensor.dtype = sys::DLDataType { code: 7, bits: 8, lanes: 1 };
    });
    let fp8 = fp8.unwrap();
    assert_eq!((fp8.element_type().to_string(), fp8.shape()), ("float8_e3m4".to_owned(), &[2, 3][..]));
    let error = fp8.view().unwrap_err();
    assert_eq!(error, TensorError::NoDType { element_type: fp8.element_type() });
    assert!(
        error
            .to_string()
            .starts_with("elements of type float8_e3m4 can be moved as bytes only: known are f64/")
    );

    let on = |device_type, device_id| {
        let device = sys::DLDevice { device_type, device_id };
        foreign(&drops, |managed| managed.dl_tensor.device = device).unwrap()
    };
    assert_eq!(on(sys::DLDevice::CUDA_HOST, 0).device(), Ok(Device::Host));
    assert_eq!(on(sys::DLDevice::CUDA, 1).device(), Ok(Device::Cuda(1)));
    assert_eq!(on(sys::DLDevice::CUDA, -1).device(), Err(TensorError::DeviceOrdinal { ordinal: -1 }));
    let rocm = on(10, 2);
    let error = TensorError::UnknownDlpackDevice { device_type: 10, device_id: 2 };
    assert_eq!((rocm.device(), rocm.view().err()), (Err(error.clone()), Some(error.clone())));
    assert_eq!(
        error.to_string(),
        "DLPack device type 10 (ordinal 2) is none of CPU (1), CUDA (2) and CUDA host (3)"
    );
}

proptest! {
    /// Whatever is in a struct, import neither panics nor forgets the deleter.
    #[test]
    fn any_description_is_taken_or_refused(
        ndim in -2..=10,
        shape in prop::array::uniform10(prop_oneof![9 => 0_i64..4, 1 => any::<i64>()]),
        strides in prop::option::of(prop::array::uniform10(prop_oneof![9 => -9_i64..9, 1 => any::<i64>()])),
        (code, bits, lanes) in any::<(u8, u8, u16)>(),
        (device_type, device_id) in any::<(i32, i32)>(),
        (data, byte_offset) in any::<(usize, u64)>(),
    ) {
        let drops = Drops::default();
        let imported = foreign(&drops, |managed| {
            managed.dl_tensor = sys::DLTensor {
                data: ptr::without_provenance_mut(data),
                device: sys::DLDevice { device_type, device_id },
                ndim,
                dtype: sys::DLDataType { code, bits, lanes },
                shape: shape.as_ptr().cast_mut(),
                strides: strides.as_ref().map_or(ptr::null_mut(), |strides| strides.as_ptr().cast_mut()),
                byte_offset,
            };
        });
        if let Ok(imported) = imported {
            prop_assert_eq!(imported.shape().len() as i32, ndim);
            let _ = (imported.element_type().to_string(), imported.device(), imported.view().map(|_| ()));
        }
        prop_assert_eq!(drops.count(), 1);
    }
}
