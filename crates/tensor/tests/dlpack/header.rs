//! What `dlpack.h` fixes: the layout of its structs, and the codes of types.

use std::mem::offset_of;

use antiphon_tensor::DType;
use antiphon_tensor::dlpack::{ElementType, sys};

#[test]
#[cfg(target_pointer_width = "64")]
fn structs_are_laid_out_as_in_c() {
    use sys::{
        DLDataType, DLManagedTensor, DLManagedTensorVersioned, DLPackExchangeAPI, DLPackExchangeAPIHeader,
        DLTensor,
    };
    let sizes = [
        size_of::<sys::DLPackVersion>(),
        size_of::<sys::DLDevice>(),
        size_of::<DLDataType>(),
        size_of::<DLTensor>(),
    ];
    assert_eq!(sizes, [8, 8, 4, 48]);
    assert_eq!(
        [offset_of!(DLDataType, code), offset_of!(DLDataType, bits), offset_of!(DLDataType, lanes)],
        [0, 1, 2]
    );
    assert_eq!(
        [
            offset_of!(DLTensor, data),
            offset_of!(DLTensor, device),
            offset_of!(DLTensor, ndim),
            offset_of!(DLTensor, dtype),
            offset_of!(DLTensor, shape),
            offset_of!(DLTensor, strides),
            offset_of!(DLTensor, byte_offset),
        ],
        [0, 8, 16, 20, 24, 32, 40]
    );
    assert_eq!(
        [
            offset_of!(DLManagedTensor, dl_tensor),
            offset_of!(DLManagedTensor, manager_ctx),
            offset_of!(DLManagedTensor, deleter),
            size_of::<DLManagedTensor>(),
        ],
        [0, 48, 56, 64]
    );
    assert_eq!(
        [
            offset_of!(DLManagedTensorVersioned, version),
            offset_of!(DLManagedTensorVersioned, manager_ctx),
            offset_of!(DLManagedTensorVersioned, deleter),
            offset_of!(DLManagedTensorVersioned, flags),
            offset_of!(DLManagedTensorVersioned, dl_tensor),
            size_of::<DLManagedTensorVersioned>(),
        ],
        [0, 8, 16, 24, 32, 80]
    );
    assert_eq!(
        [offset_of!(DLPackExchangeAPIHeader, version), offset_of!(DLPackExchangeAPIHeader, prev_api)],
        [0, 8]
    );
    assert_eq!(
        [
            offset_of!(DLPackExchangeAPI, header),
            offset_of!(DLPackExchangeAPI, managed_tensor_allocator),
            offset_of!(DLPackExchangeAPI, managed_tensor_from_py_object_no_sync),
            offset_of!(DLPackExchangeAPI, managed_tensor_to_py_object_no_sync),
            offset_of!(DLPackExchangeAPI, dltensor_from_py_object_no_sync),
            offset_of!(DLPackExchangeAPI, current_work_stream),
            size_of::<DLPackExchangeAPI>(),
        ],
        [0, 16, 24, 32, 40, 48, 56]
    );
}

#[test]
fn element_types_have_the_codes_of_the_header() {
    let codes = |dtype| {
        let sys::DLDataType { code, bits, lanes } = ElementType::from(dtype).into();
        (code, bits, lanes)
    };
    assert_eq!(codes(DType::I8), (0, 8, 1));
    assert_eq!(codes(DType::I32), (0, 32, 1));
    assert_eq!(codes(DType::I64), (0, 64, 1));
    assert_eq!(codes(DType::U8), (1, 8, 1));
    assert_eq!(codes(DType::F16), (2, 16, 1));
    assert_eq!(codes(DType::F32), (2, 32, 1));
    assert_eq!(codes(DType::F64), (2, 64, 1));
    assert_eq!(codes(DType::BF16), (4, 16, 1));
    for &dtype in DType::ALL {
        let element_type = ElementType::from(dtype);
        assert_eq!((element_type.dtype(), element_type.bytes()), (Some(dtype), Some(dtype.size())));
        assert_eq!(element_type.to_string().parse(), Ok(dtype));
    }
    // Four floats are not one.
    assert_eq!(ElementType::new(2, 32, 4).dtype(), None);
}

#[test]
fn element_types_have_names_also_those_without_a_dtype() {
    for (name, (code, bits, lanes), bytes) in [
        ("int16", (0, 16, 1), Some(2)),
        ("uint16", (1, 16, 1), Some(2)),
        ("uint32", (1, 32, 1), Some(4)),
        ("uint64", (1, 64, 1), Some(8)),
        ("complex64", (5, 64, 1), Some(8)),
        ("complex128", (5, 128, 1), Some(16)),
        ("bool", (6, 8, 1), Some(1)),
        ("float8_e4m3fn", (10, 8, 1), Some(1)),
        ("float8_e4m3fnuz", (11, 8, 1), Some(1)),
        ("float8_e5m2", (12, 8, 1), Some(1)),
        ("float8_e5m2fnuz", (13, 8, 1), Some(1)),
        ("float8_e8m0fnu", (14, 8, 1), Some(1)),
        ("float6_e2m3fn", (15, 6, 1), None),
        ("float4_e2m1fn", (17, 4, 1), None),
        ("float4_e2m1fn_x2", (17, 4, 2), Some(1)),
    ] {
        let element_type = ElementType::new(code, bits, lanes);
        assert_eq!((element_type.to_string(), element_type.bytes()), (name.to_owned(), bytes));
        assert_eq!(ElementType::named(name), Some(element_type));
        let dtype = name.parse::<DType>().ok();
        assert_eq!((element_type.dtype(), dtype.is_some()), (dtype, bytes.is_some()), "{name}");
    }
    let unknown = ElementType::new(99, 8, 1);
    assert_eq!((unknown.to_string(), unknown.name()), ("code 99, 8 bits, 1 lanes".to_owned(), None));
    assert_eq!(ElementType::new(2, 32, 4).to_string(), "code 2, 32 bits, 4 lanes");
    assert_eq!(ElementType::new(0, 0, 1).bytes(), None);
    assert_eq!(ElementType::named("float7"), None);
}
