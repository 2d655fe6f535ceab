//! What is lent comes back as it was, and its owner is dropped once.

use antiphon_tensor::dlpack::{Exported, Imported, sys};
use antiphon_tensor::{DType, Device, Element, MAX_RANK, TensorError, TensorView, bf16, with_dtype};
use proptest::prelude::*;

use crate::{Drops, import, import_unversioned, leak_free};

/// Elements that say when they are dropped.
#[derive(Debug)]
struct Owner<T> {
    _data: Vec<T>,
    drops: Drops,
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        *self.drops.0.lock().unwrap() += 1;
    }
}

fn export<T: Element>(
    drops: &Drops,
    mut data: Vec<T>,
    shape: &[usize],
    strides: Option<&[isize]>,
) -> Result<Exported<Owner<T>>, TensorError> {
    let ptr = data.as_mut_ptr().cast();
    let owner = Owner { _data: data, drops: drops.clone() };
    // SAFETY: the owner keeps the vector's memory, and every test stays inside it.
    unsafe { Exported::new(owner, ptr, T::DTYPE, shape, strides, Device::Host) }
}

#[test]
fn every_dtype_makes_the_round_trip() {
    for &dtype in DType::NUMERIC {
        with_dtype!(dtype, T => {
            let drops = Drops::default();
            let data: Vec<T> = (0..6).map(|i| <T as Element>::from_f64(f64::from(i))).collect();
            let exported = export(&drops, data.clone(), &[2, 3], None).unwrap();
            let mut imported = import(exported.into_versioned()).unwrap();
            assert_eq!(imported.element_type(), dtype.into());
            assert_eq!(imported.device(), Ok(Device::Host));
            assert_eq!(imported.shape(), [2, 3]);
            assert_eq!(imported.strides(), Some(&[3, 1][..]), "always explicit");
            assert!(!imported.is_read_only());
            assert_eq!(imported.view().unwrap().as_slice::<T>(), Ok(&data[..]));
            imported.view_mut().unwrap().set_f64(&[1, 1], 7.0).unwrap();
            assert_eq!(imported.view().unwrap().get_f64(&[1, 1]), Ok(7.0));
            assert_eq!(drops.count(), 0);
            drop(imported);
            assert_eq!(drops.count(), 1);
        });
    }
}

#[test]
fn strides_make_the_round_trip() {
    let exported = export(&Drops::default(), (0..6).collect(), &[3, 2], Some(&[1, 3])).unwrap();
    let imported = import(exported.into_versioned()).unwrap();
    let view = imported.view().unwrap();
    assert_eq!((view.shape(), view.strides()), (&[3, 2][..], &[1, 3][..]));
    assert_eq!(view.get_f64(&[2, 1]), Ok(5.0));
    assert_eq!(view.get_f64(&[1, 0]), Ok(1.0));
}

#[test]
fn scalars_and_empty_tensors_make_the_round_trip() {
    let scalar = import(export(&Drops::default(), vec![5_i64], &[], None).unwrap().into_versioned()).unwrap();
    assert_eq!((scalar.shape(), scalar.strides()), (&[][..], Some(&[][..])));
    assert_eq!(scalar.view().unwrap().as_slice::<i64>(), Ok(&[5][..]));

    let exported = export(&Drops::default(), vec![0.0_f32; 9], &[4, 0, 2], None).unwrap();
    let empty = import(exported.into_versioned()).unwrap();
    assert_eq!((empty.shape(), empty.strides()), (&[4, 0, 2][..], Some(&[2, 2, 1][..])));
    assert!(empty.data_ptr().is_null(), "as the header asks");
    assert_eq!(empty.view().unwrap().as_slice::<f32>(), Ok(&[][..]));

    let all = import(export(&Drops::default(), vec![1_u8], &[1; MAX_RANK], None).unwrap().into_versioned())
        .unwrap();
    assert_eq!(all.view().unwrap().shape(), [1; MAX_RANK]);
}

#[test]
fn an_export_says_what_the_header_asks_for() {
    let exported = export(&Drops::default(), vec![bf16::ONE; 6], &[2, 3], None).unwrap().read_only();
    let managed = exported.into_versioned();
    // SAFETY: it was just made, with two sizes and strides.
    let (versioned, shape, strides) = unsafe {
        let versioned = *managed.as_ptr();
        let of = |values: *mut i64| [*values, *values.add(1)];
        (versioned, of(versioned.dl_tensor.shape), of(versioned.dl_tensor.strides))
    };
    assert_eq!((versioned.version.major, versioned.version.minor, versioned.flags), (1, 3, sys::READ_ONLY));
    let tensor = versioned.dl_tensor;
    assert_eq!((tensor.ndim, shape, strides, tensor.byte_offset), (2, [2, 3], [3, 1], 0));
    assert_eq!(tensor.dtype, sys::DLDataType { code: 4, bits: 16, lanes: 1 });
    assert_eq!(tensor.device, sys::DLDevice { device_type: 1, device_id: 0 });
    drop(import(managed));
}

#[test]
fn memory_of_a_cuda_device_keeps_its_ordinal() {
    let at = std::ptr::without_provenance_mut::<u8>(0x7000_0000_0000);
    let on = |ordinal| {
        // SAFETY: nothing touches memory of a device from here.
        unsafe { Exported::new((), at, DType::F16, &[4], None, Device::Cuda(ordinal)) }
    };
    let imported = import(on(3).unwrap().into_versioned()).unwrap();
    assert_eq!(imported.device(), Ok(Device::Cuda(3)));
    let view = imported.view().unwrap();
    assert_eq!((view.device(), view.as_ptr()), (Device::Cuda(3), at.cast_const()));
    assert_eq!(
        on(u32::MAX).unwrap_err().to_string(),
        "4294967295 is no ordinal of a CUDA device: they are 0 to 2147483647"
    );
}

#[test]
fn an_owner_is_dropped_once_and_nothing_leaks() {
    let drops = Drops::default();
    let exported = || export(&drops, vec![1.0_f32; 6], &[2, 3], None).unwrap();
    // The vector and the block with everything else.
    let round_trip = || {
        let imported = import(exported().into_versioned()).unwrap();
        assert_eq!(imported.view().unwrap().as_slice::<f32>(), Ok(&[1.0; 6][..]));
    };
    assert_eq!((leak_free(round_trip), drops.count()), (2, 1));
    // Unversioned.
    leak_free(|| drop(import_unversioned(exported().into_unversioned().unwrap()).unwrap()));
    assert_eq!(drops.count(), 2);
    // Never lent.
    leak_free(|| drop(exported()));
    assert_eq!(drops.count(), 3);
    // Refused.
    leak_free(|| drop(export(&drops, vec![1.0_f32; 6], &[usize::MAX, 2], None).unwrap_err()));
    assert_eq!(drops.count(), 4);
    leak_free(|| drop(exported().read_only().into_unversioned().unwrap_err()));
    assert_eq!(drops.count(), 5);
}

#[test]
fn the_loan_may_end_on_another_thread() {
    fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<Imported>();
    let drops = Drops::default();
    let imported = import(export(&drops, vec![1_i8; 4], &[4], None).unwrap().into_versioned()).unwrap();
    std::thread::spawn(move || drop(imported)).join().unwrap();
    assert_eq!(drops.count(), 1);
}

#[test]
fn what_is_read_only_stays_so() {
    let exported = || export(&Drops::default(), vec![1.0_f32; 6], &[6], None).unwrap().read_only();
    let mut imported = import(exported().into_versioned()).unwrap();
    assert!(imported.is_read_only());
    assert!(imported.view().is_ok());
    let error = imported.view_mut().unwrap_err();
    assert_eq!(
        (error.to_string(), error),
        ("the tensor is read-only: copy it to write".to_owned(), TensorError::ReadOnly)
    );
    assert_eq!(exported().into_unversioned().unwrap_err(), TensorError::ReadOnlyUnversioned);
}

#[test]
fn an_unversioned_tensor_is_a_tensor_too() {
    let drops = Drops::default();
    let exported = export(&drops, (0..6).collect(), &[2, 3], Some(&[1, 2])).unwrap();
    let mut imported = import_unversioned(exported.into_unversioned().unwrap()).unwrap();
    assert!(!imported.is_read_only());
    imported.view_mut().unwrap().set_f64(&[0, 1], 9.0).unwrap();
    assert_eq!(imported.view().unwrap().get_f64(&[0, 1]), Ok(9.0));
    assert_eq!((imported.shape(), imported.strides()), (&[2, 3][..], Some(&[1, 2][..])));
    drop(imported);
    assert_eq!(drops.count(), 1);
}

#[test]
fn broadcast_elements_cannot_be_written() {
    let mut imported =
        import(export(&Drops::default(), vec![1_i32], &[5], Some(&[0])).unwrap().into_versioned()).unwrap();
    assert_eq!(imported.view().unwrap().get_f64(&[4]), Ok(1.0));
    assert_eq!(imported.view_mut().unwrap_err(), TensorError::Overlap { shape: vec![5], strides: vec![0] });
}

/// Shapes with strides over them, some backwards or repeating.
fn layouts() -> impl Strategy<Value = (Vec<usize>, Option<Vec<isize>>)> {
    prop::collection::vec(0_usize..4, 0..=4).prop_flat_map(|shape| {
        let strides = prop::option::of(prop::collection::vec(-6_isize..=6, shape.len()));
        (Just(shape), strides)
    })
}

proptest! {
    /// The tensor that comes back is the tensor that was lent.
    #[test]
    fn any_layout_makes_the_round_trip((shape, strides) in layouts(), versioned: bool) {
        // Index zero is in the middle, farther from both ends than any layout reaches.
        let mut data: Vec<i32> = (0..200).collect();
        let (ptr, drops) = (data.as_mut_ptr().wrapping_add(100).cast::<u8>(), Drops::default());
        let owner = Owner { _data: Vec::<u8>::new(), drops: drops.clone() };
        let strides = strides.as_deref();
        // SAFETY: the vector outlives the loan, and is not touched meanwhile.
        let exported = unsafe { Exported::new(owner, ptr, DType::I32, &shape, strides, Device::Host) }.unwrap();
        let imported = if versioned {
            import(exported.into_versioned())
        } else {
            import_unversioned(exported.into_unversioned().unwrap())
        };
        let imported = imported.unwrap();
        let view = imported.view().unwrap();
        // SAFETY: as above.
        let direct = unsafe { TensorView::from_raw_parts(ptr, DType::I32, &shape, strides, Device::Host) }.unwrap();
        prop_assert_eq!(view.shape(), direct.shape());
        prop_assert_eq!(view.strides(), direct.strides());
        prop_assert_eq!(view.is_contiguous(), direct.is_contiguous());
        if view.numel() > 0 {
            prop_assert_eq!(view.as_ptr(), direct.as_ptr());
            let last: Vec<usize> = shape.iter().map(|size| size - 1).collect();
            let offset: isize = last.iter().zip(view.strides()).map(|(&at, step)| at as isize * step).sum();
            prop_assert_eq!(view.get_f64(&last), Ok((100 + offset) as f64));
        }
        drop(imported);
        prop_assert_eq!(drops.count(), 1);
    }
}
