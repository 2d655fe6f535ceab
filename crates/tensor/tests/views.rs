//! What views accept, refuse and say, by example.

use antiphon_tensor::{
    DType, Device, MAX_RANK, Shape, Strides, TensorError, TensorView, TensorViewMut, bf16, f16,
};

fn view_of<'a>(tensor: impl Into<TensorView<'a>>) -> TensorView<'a> {
    tensor.into()
}

fn view_mut_of<'a>(tensor: impl Into<TensorViewMut<'a>>) -> TensorViewMut<'a> {
    tensor.into()
}

fn assert_send_sync<T: Send + Sync>() {}

#[test]
fn anything_that_is_a_slice_is_a_view() {
    let (array, vector) = ([1_i8, 2, 3], vec![bf16::ONE; 2]);
    assert_eq!(view_of(&array).as_slice::<i8>(), Ok(&array[..]));
    assert_eq!(view_of(&array[1..]).as_slice::<i8>(), Ok(&array[1..]));
    assert_eq!(view_of(&vector).as_slice::<bf16>(), Ok(&vector[..]));
    let view = view_of(&vector);
    assert_eq!((view.dtype(), view.shape(), view.strides()), (DType::BF16, &[2][..], &[1][..]));
    assert_eq!((view.numel(), view.num_bytes(), view.device()), (2, 4, Device::Host));
    assert_eq!(TensorView::from(&view).as_ptr(), vector.as_ptr().cast());
}

#[test]
fn anything_that_is_a_mutable_slice_is_a_mutable_view() {
    let (mut array, mut vector) = ([1_i64, 2, 3], vec![f16::ZERO; 2]);
    view_mut_of(&mut array).as_mut_slice::<i64>().unwrap()[0] = 7;
    view_mut_of(&mut array[1..]).as_mut_slice::<i64>().unwrap()[0] = 8;
    view_mut_of(&mut vector).as_mut_slice::<f16>().unwrap()[1] = f16::ONE;
    assert_eq!((array, vector), ([7, 8, 3], vec![f16::ZERO, f16::ONE]));
}

#[test]
fn views_convert_into_each_other() {
    let mut data = [1.0_f32, 2.0];
    let mut view = view_mut_of(&mut data);
    view_mut_of(&mut view).as_mut_slice::<f32>().unwrap()[0] = 3.0;
    assert_eq!(view_of(&view).as_slice::<f32>(), Ok(&[3.0, 2.0][..]));
    assert_eq!(view.as_ptr(), view.as_mut_ptr().cast_const());
    let shared: TensorView<'_> = view.into();
    assert_eq!(shared.as_slice::<f32>(), Ok(&[3.0, 2.0][..]));
}

#[test]
fn views_go_to_other_threads() {
    assert_send_sync::<TensorView<'_>>();
    assert_send_sync::<TensorViewMut<'_>>();
    let mut data = [0_u8; 4];
    let (front, back) = view_mut_of(&mut data).split_at(0, 2).unwrap();
    std::thread::scope(|scope| {
        for (mut half, value) in [(front, 1), (back, 2)] {
            scope.spawn(move || half.as_mut_slice::<u8>().unwrap().fill(value));
        }
    });
    assert_eq!(data, [1, 1, 2, 2]);
}

#[test]
fn a_scalar_has_no_dimensions() {
    let view = TensorView::new(&[5_i32], &[]).unwrap();
    assert_eq!((view.shape(), view.numel(), view.is_contiguous()), (&[][..], 1, true));
    assert_eq!(view.get_f64(&[]), Ok(5.0));
    assert_eq!(view.reshape(&[1, 1]).unwrap().reshape(&[]).unwrap().as_slice::<i32>(), Ok(&[5][..]));
    assert_eq!(view.select(0, 0).unwrap_err(), TensorError::DimOutOfBounds { dim: 0, rank: 0 });
}

#[test]
fn the_length_must_be_the_shapes() {
    let error = TensorView::new(&[0_u8; 5], &[2, 3]).unwrap_err();
    assert_eq!(error, TensorError::LengthMismatch { shape: vec![2, 3], numel: 6, len: 5 });
    assert_eq!(error.to_string(), "shape [2, 3] has 6 elements but the slice has 5");
    assert!(TensorViewMut::new(&mut [0_u8; 7], &[2, 3]).is_err());
}

#[test]
fn sizes_beyond_an_address_space_are_refused() {
    let half = 1 << (usize::BITS / 2);
    let overflow = |shape: &[usize], element_size| {
        Err(TensorError::ShapeOverflow { shape: shape.to_vec(), element_size })
    };
    assert_eq!(Shape::new(&[half, half]), overflow(&[half, half], 1));
    assert_eq!(Shape::new(&[0, half, half]), overflow(&[0, half, half], 1));
    assert_eq!(Shape::new(&[isize::MAX as usize]).map(|shape| shape.numel()), Ok(isize::MAX as usize));
    assert_eq!(Shape::new(&[isize::MAX as usize + 1]), overflow(&[isize::MAX as usize + 1], 1));
    // Repeated by stride 0, the elements need no memory, but their bytes would still not be countable.
    let many = [isize::MAX as usize / 2 + 1];
    assert!(TensorView::with_strides(&[0_u8], &many, &[0]).is_ok());
    assert_eq!(TensorView::with_strides(&[f16::ZERO], &many, &[0]).err(), overflow(&many, 2).err());
}

#[test]
fn nine_dimensions_are_too_many() {
    let sizes = [1; MAX_RANK + 1];
    let error = TensorError::RankTooHigh { rank: 9 };
    assert_eq!(Shape::new(&sizes), Err(error.clone()));
    assert_eq!(Strides::new(&[1; MAX_RANK + 1]), Err(error.clone()));
    assert_eq!(TensorView::new(&[1.0_f64], &sizes).unwrap_err(), error);
    assert_eq!(
        view_of(&[1.0_f64]).reshape(&sizes).unwrap_err().to_string(),
        "9 dimensions are more than the 8 supported"
    );
    assert!(TensorView::new(&[1.0_f64], &sizes[1..]).is_ok());
}

#[test]
fn strides_must_stay_inside() {
    let data = [0_i32; 6];
    let strided =
        |shape: &[usize], strides: &[isize]| TensorView::with_strides(&data, shape, strides).map(|_| ());
    let (shape, strides) = (vec![2, 3], vec![4, 1]);
    assert_eq!(
        strided(&shape, &strides),
        Err(TensorError::OutOfBounds { shape: shape.clone(), strides, lowest: 0, highest: 6, len: 6 })
    );
    assert_eq!(
        strided(&shape, &[3, -1]),
        Err(TensorError::OutOfBounds {
            shape: shape.clone(),
            strides: vec![3, -1],
            lowest: -2,
            highest: 3,
            len: 6
        })
    );
    assert_eq!(strided(&shape, &[3]), Err(TensorError::StrideCount { shape, strides: vec![3] }));
    assert_eq!(
        strided(&[3, 3], &[isize::MAX, isize::MAX]),
        Err(TensorError::StrideOverflow { shape: vec![3, 3], strides: vec![isize::MAX; 2] })
    );
    // Two elements span one more than the stride between them, in bytes of an i32.
    let far = isize::MAX / 4;
    assert!(matches!(strided(&[2], &[far]), Err(TensorError::StrideOverflow { .. })));
    assert!(matches!(strided(&[2], &[far - 1]), Err(TensorError::OutOfBounds { .. })));
    assert_eq!(strided(&[3, 0], &[isize::MAX, isize::MIN]), Ok(()), "an empty tensor steps nowhere");
    assert_eq!(strided(&[1, 6], &[isize::MAX, 1]), Ok(()), "a size of 1 is never stepped");
}

#[test]
fn a_mutable_view_must_not_overlap_itself() {
    let mut data = [0_i32; 12];
    let mut strided = |shape: &[usize], strides: &[isize]| {
        TensorViewMut::with_strides(&mut data, shape, strides).map(|_| ()).map_err(|error| error.to_string())
    };
    for (shape, strides) in
        [(&[2, 3][..], &[0, 1][..]), (&[2, 2], &[1, 1]), (&[3, 3], &[2, 1]), (&[3, 2], &[2, 3])]
    {
        let message =
            format!("a mutable tensor of shape {shape:?} may overlap itself with strides {strides:?}");
        assert_eq!(strided(shape, strides), Err(message));
    }
    for (shape, strides) in
        [(&[2, 3][..], &[3, 1][..]), (&[3, 2], &[1, 6]), (&[1, 3], &[0, 1]), (&[9, 0], &[0, 0])]
    {
        assert_eq!(strided(shape, strides), Ok(()), "{shape:?} {strides:?}");
    }
}

#[test]
fn elements_come_out_as_what_they_are() {
    let data = [1_i32, 2, 3, 4];
    let view = view_of(&data);
    let error = view.as_slice::<f32>().unwrap_err();
    assert_eq!(error, TensorError::DTypeMismatch { expected: DType::F32, actual: DType::I32 });
    assert_eq!(error.to_string(), "the tensor's elements are i32, not f32");
    let bytes: Vec<u8> = data.iter().flat_map(|value| value.to_ne_bytes()).collect();
    assert_eq!(view.as_bytes(), Ok(&bytes[..]));
}

#[test]
fn only_contiguous_memory_is_a_slice() {
    let mut data = [1_i32, 2, 3, 4];
    let mut columns = TensorViewMut::new(&mut data, &[2, 2]).unwrap().transpose(0, 1).unwrap();
    let error = TensorError::NotContiguous { shape: vec![2, 2], strides: vec![1, 2] };
    assert_eq!(columns.contiguous(), Err(error.clone()));
    assert_eq!(columns.as_slice::<i32>(), Err(error.clone()));
    assert_eq!(columns.as_bytes(), Err(error.clone()));
    assert_eq!(columns.as_mut_bytes(), Err(error.clone()));
    assert_eq!(columns.as_mut_slice::<i32>(), Err(error));
}

#[test]
fn strides_of_single_and_empty_dimensions_do_not_matter() {
    let data = [0_u8; 6];
    for (shape, strides) in
        [(&[1, 6][..], &[99, 1][..]), (&[2, 1, 3], &[3, -7, 1]), (&[2, 0], &[5, 5]), (&[1], &[0])]
    {
        let view = TensorView::with_strides(&data, shape, strides).unwrap();
        assert!(view.is_contiguous(), "{shape:?} {strides:?}");
        assert_eq!(view.as_slice::<u8>().unwrap().len(), view.numel());
    }
}

#[test]
fn indices_are_checked() {
    let view = TensorView::new(&[1_u8, 2, 3, 4, 5, 6], &[2, 3]).unwrap();
    assert_eq!(view.get_f64(&[1, 2]), Ok(6.0));
    for index in [&[2, 0][..], &[0, 3], &[0], &[0, 0, 0], &[usize::MAX, 0]] {
        let error = TensorError::IndexOutOfBounds { index: index.to_vec(), shape: vec![2, 3] };
        assert_eq!(view.get_f64(index), Err(error));
    }
    let narrowed = |start, len| view.narrow(1, start, len).map(|view| view.numel());
    assert_eq!(narrowed(3, 0), Ok(0));
    assert_eq!(narrowed(2, 2), Err(TensorError::RangeOutOfBounds { dim: 1, start: 2, len: 2, size: 3 }));
    assert_eq!(
        narrowed(2, usize::MAX),
        Err(TensorError::RangeOutOfBounds { dim: 1, start: 2, len: usize::MAX, size: 3 })
    );
    assert_eq!(
        view.select(0, 2).unwrap_err().to_string(),
        "indices 2..2+1 leave dimension 0, whose size is 2"
    );
    assert_eq!(view.transpose(0, 2).unwrap_err(), TensorError::DimOutOfBounds { dim: 2, rank: 2 });
}

#[test]
fn empty_parts_point_nowhere_else() {
    let data = [0_u8; 5];
    let spaced = TensorView::with_strides(&data, &[3], &[2]).unwrap();
    // Index 3 would lie behind the end of the slice, and the strides of an empty tensor may be anything.
    assert_eq!(spaced.narrow(0, 3, 0).unwrap().as_ptr(), data.as_ptr());
    let empty = TensorView::with_strides(&data, &[3, 0], &[isize::MAX, 1]).unwrap();
    assert_eq!(empty.narrow(0, 2, 1).unwrap().as_ptr(), data.as_ptr());
    assert_eq!(empty.select(0, 2).unwrap().as_ptr(), data.as_ptr());
}

#[test]
fn reshape_says_what_is_wrong() {
    let view = TensorView::new(&[0_u8; 6], &[2, 3]).unwrap();
    assert_eq!(
        view.reshape(&[4]).unwrap_err().to_string(),
        "cannot reshape [2, 3] (6 elements) to [4] (4 elements)"
    );
    assert_eq!(
        view.transpose(0, 1).unwrap().reshape(&[6]).unwrap_err().to_string(),
        "cannot reshape [3, 2] with strides [1, 3] to [6] without a copy: make it contiguous (row-major) first"
    );
}

#[test]
fn rows_with_a_pitch_split_into_heads_without_a_copy() {
    let data: Vec<f32> = (0..20_u8).map(f32::from).collect();
    let rows = TensorView::with_strides(&data, &[2, 6], &[10, 1]).unwrap();
    let heads = rows.reshape(&[2, 3, 2]).unwrap();
    assert_eq!((heads.strides(), heads.get_f64(&[1, 2, 1])), (&[10, 2, 1][..], Ok(15.0)));
    assert!(rows.reshape(&[12]).is_err(), "the pitch is in between");
}

#[test]
fn written_values_are_rounded_once() {
    let mut data = [bf16::ZERO; 2];
    let mut view = view_mut_of(&mut data);
    view.set_f64(&[0], 1.0 + 1.0 / 256.0 + 1e-12).unwrap();
    view.set_f64(&[1], -f64::NAN).unwrap();
    assert_eq!(data.map(bf16::to_bits), [0x3F81, 0x7FC0]);
}

#[test]
fn bytes_can_be_written() {
    let mut data = [0_i32; 2];
    view_mut_of(&mut data).as_mut_bytes().unwrap()[4..].copy_from_slice(&(-5_i32).to_ne_bytes());
    assert_eq!(data, [0, -5]);
}

#[test]
fn unaligned_memory_can_be_looked_at() {
    let mut bytes = [0_u8; 16];
    let odd = 1 + bytes.as_ptr().align_offset(4);
    let ptr = bytes[odd..odd + 8].as_mut_ptr();
    // SAFETY: the eight bytes behind `ptr` are two elements, used through this view only.
    let mut view =
        unsafe { TensorViewMut::from_raw_parts(ptr, DType::I32, &[2], None, Device::Host) }.unwrap();
    view.set_f64(&[1], -2.0).unwrap();
    assert_eq!(view.get_f64(&[1]), Ok(-2.0));
    assert_eq!(view.as_bytes().unwrap()[4..], (-2_i32).to_ne_bytes());
    let address = view.as_ptr().addr();
    assert_eq!(view.as_slice::<i32>(), Err(TensorError::Misaligned { dtype: DType::I32, address, align: 4 }));
}

#[test]
fn null_is_only_for_empty_tensors() {
    let null = |shape: &[usize]| {
        // SAFETY: null is refused unless there are no elements.
        unsafe { TensorView::from_raw_parts(std::ptr::null(), DType::F64, shape, None, Device::Host) }
    };
    assert_eq!(null(&[3]).unwrap_err(), TensorError::NullPointer { shape: vec![3] });
    assert_eq!(null(&[]).unwrap_err(), TensorError::NullPointer { shape: vec![] });
    let empty = null(&[3, 0]).unwrap();
    assert!(!empty.as_ptr().is_null());
    assert_eq!(empty.as_slice::<f64>(), Ok(&[][..]));
    assert_eq!(empty.as_bytes(), Ok(&[][..]));
}

#[test]
fn raw_parts_are_checked_like_slices() {
    let mut data = [0_u8; 4];
    let mut raw = |shape: &[usize], strides: &[isize]| {
        let ptr = data.as_mut_ptr();
        // SAFETY: what reaches outside `data` is refused, since the strides overflow, overlap or are too few.
        unsafe { TensorViewMut::from_raw_parts(ptr, DType::U8, shape, Some(strides), Device::Host) }
            .map(|_| ())
    };
    assert!(matches!(raw(&[2, 2], &[0, 1]), Err(TensorError::Overlap { .. })));
    assert!(matches!(raw(&[3, 3], &[isize::MIN, 1]), Err(TensorError::StrideOverflow { .. })));
    assert!(matches!(raw(&[2, 2], &[1]), Err(TensorError::StrideCount { .. })));
    assert_eq!(raw(&[2, 2], &[2, 1]), Ok(()));
}

#[test]
fn memory_of_a_device_is_never_touched() {
    let address = std::ptr::without_provenance_mut(0x7F00_0000_0000);
    let device = Device::Cuda(1);
    // SAFETY: the memory is said to be a device's, so nothing here reads it, which is what is tested.
    let mut view =
        unsafe { TensorViewMut::from_raw_parts(address, DType::F32, &[2, 3], None, device) }.unwrap();
    assert_eq!(view.as_view().select(0, 1).unwrap().as_ptr().addr(), address.addr() + 12);
    let error = TensorError::NotOnHost { device };
    assert_eq!(error.to_string(), "the tensor is on cuda:1: copy it to the host to access its elements");
    assert_eq!(view.get_f64(&[0, 0]), Err(error.clone()));
    assert_eq!(view.set_f64(&[0, 0], 1.0), Err(error.clone()));
    assert_eq!(view.as_slice::<f32>(), Err(error.clone()));
    assert_eq!(view.as_mut_slice::<f32>(), Err(error.clone()));
    assert_eq!(view.as_bytes(), Err(error.clone()));
    assert_eq!(view.as_mut_bytes(), Err(error));
}

#[test]
fn debug_shows_the_description() {
    let data = [0_u8; 6];
    let shown = format!("{:?}", TensorView::new(&data, &[2, 3]).unwrap());
    assert!(
        shown.starts_with("TensorView { dtype: U8, shape: [2, 3], strides: [3, 1], device: Host, ptr: 0x"),
        "{shown}"
    );
    assert_eq!(
        format!("{} {}", Shape::new(&[2, 3]).unwrap(), Strides::new(&[3, -1]).unwrap()),
        "[2, 3] [3, -1]"
    );
}
