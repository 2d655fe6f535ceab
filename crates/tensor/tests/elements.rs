//! Element types by name, by code and as Rust types.

use std::collections::HashSet;

use antiphon_tensor::{
    DType, Device, Element, TensorError, TensorView, bf16, dlpack::ElementType, f16, with_dtype,
};

#[test]
fn codes_never_change() {
    let codes: Vec<(u8, &str)> = DType::ALL.iter().map(|dtype| (dtype.code(), dtype.name())).collect();
    let numeric =
        [(1, "f64"), (2, "f32"), (3, "f16"), (4, "bf16"), (5, "i64"), (6, "i32"), (7, "i8"), (8, "u8")];
    let stored = [
        (9, "bool"),
        (10, "i16"),
        (11, "u16"),
        (12, "u32"),
        (13, "u64"),
        (14, "complex32"),
        (15, "complex64"),
        (16, "complex128"),
        (17, "float8_e4m3fn"),
        (18, "float8_e4m3fnuz"),
        (19, "float8_e5m2"),
        (20, "float8_e5m2fnuz"),
        (21, "float8_e8m0fnu"),
        (22, "float4_e2m1fn_x2"),
    ];
    assert_eq!(codes, [&numeric[..], &stored].concat());
    assert_eq!(
        DType::NUMERIC.iter().map(|dtype| dtype.code()).collect::<Vec<_>>(),
        numeric.map(|(code, _)| code)
    );
}

#[test]
fn types_without_arithmetic_have_a_size_and_refuse_values() {
    for &dtype in DType::ALL {
        let element = ElementType::from(dtype);
        assert_eq!((element.bytes(), element.dtype()), (Some(dtype.size()), Some(dtype)), "{dtype}");
        assert_eq!(dtype.is_numeric(), DType::NUMERIC.contains(&dtype));
    }
    let bytes = [0u8; 4];
    // SAFETY: four bytes are two elements of 16 bits.
    let view = unsafe {
        TensorView::from_raw_parts(bytes.as_ptr().cast_mut(), DType::U16, &[2], None, Device::Host)
    };
    let error = view.unwrap().get_f64(&[0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "u16 has no arithmetic here: pass one of f64, f32, f16, bf16, i64, i32, i8, u8"
    );
}

#[test]
fn codes_lead_back() {
    for code in 0..=u8::MAX {
        let expected = DType::ALL.iter().copied().find(|&dtype| dtype as u8 == code);
        assert_eq!(DType::from_code(code), expected);
    }
    assert_eq!(DType::from_code(0), None, "zeroed memory is no type");
}

#[test]
fn all_are_distinct_and_in_order() {
    assert!(DType::ALL.is_sorted_by(|a, b| a < b));
    assert_eq!(DType::ALL.iter().collect::<HashSet<_>>().len(), DType::ALL.len());
}

#[test]
fn every_dtype_with_arithmetic_dispatches_to_its_own_type() {
    for &dtype in DType::NUMERIC {
        with_dtype!(dtype, T => {
            assert_eq!(T::DTYPE, dtype);
            assert_eq!(size_of::<T>(), dtype.size());
            assert_eq!(<T as Element>::from_f64(0.5).to_f64() == 0.5, dtype.is_float());
            assert_eq!(<T as Element>::from_f64(0.0), T::default());
        });
    }
}

#[test]
fn dispatch_happens_in_place() {
    fn first(dtype: DType, bytes: &[u8]) -> Option<f64> {
        with_dtype!(dtype, T => {
            let bytes = bytes.get(..size_of::<T>())?;
            Some(T::DTYPE.size() as f64 + f64::from(bytes[0]))
        })
    }
    assert_eq!(first(DType::I32, &[1, 0, 0, 0]), Some(5.0));
    assert_eq!(first(DType::I64, &[1, 0, 0, 0]), None);
}

#[test]
fn names_parse_in_any_case() {
    let aliases = [
        (DType::F64, &["f64", "float64", "double"][..]),
        (DType::F32, &["f32", "float32", "float"]),
        (DType::F16, &["f16", "float16", "half"]),
        (DType::BF16, &["bf16", "bfloat16"]),
        (DType::I64, &["i64", "int64"]),
        (DType::I32, &["i32", "int32"]),
        (DType::I8, &["i8", "int8"]),
        (DType::U8, &["u8", "uint8"]),
    ];
    for (dtype, names) in aliases {
        assert_eq!(dtype.to_string(), names[0]);
        for name in names {
            assert_eq!(name.parse(), Ok(dtype));
            assert_eq!(name.to_uppercase().parse(), Ok(dtype));
        }
    }
}

#[test]
fn an_unknown_name_is_told_what_is_known() {
    let error = "fp7".parse::<DType>().unwrap_err();
    assert_eq!(error, TensorError::UnknownDType { input: "fp7".into() });
    let text = error.to_string();
    assert!(
        text.starts_with("unknown dtype \"fp7\": known are f64/float64/double, f32/float32/float"),
        "{text}"
    );
    assert!(text.ends_with("u8/uint8, bool, i16/int16, u16/uint16, u32/uint32, u64/uint64, complex32, complex64, \
         complex128, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, float4_e2m1fn_x2"), "{text}");
}

#[test]
fn serde_writes_names() {
    for &dtype in DType::ALL {
        let json = serde_json::to_string(&dtype).unwrap();
        assert_eq!(json, format!("\"{dtype}\""));
        assert_eq!(serde_json::from_str::<DType>(&json).unwrap(), dtype);
    }
    assert_eq!(serde_json::from_str::<DType>("\"BFloat16\"").unwrap(), DType::BF16);
    let error = serde_json::from_str::<DType>("\"fp7\"").unwrap_err();
    assert!(error.to_string().contains("unknown dtype \"fp7\""), "{error}");
}

#[test]
fn display_pads() {
    assert_eq!(
        format!("{:>5}|{:<6}|{:>8}", DType::F32, Device::Host, Device::Cuda(0)),
        "  f32|host  |  cuda:0"
    );
}

#[test]
fn integers_truncate_and_saturate() {
    assert_eq!([2.9, -2.9, 1e9, -1e9, f64::NAN].map(i8::from_f64), [2, -2, 127, -128, 0]);
    assert_eq!([255.9, -0.5, 256.0, f64::INFINITY].map(u8::from_f64), [255, 0, 255, 255]);
    assert_eq!([f64::MAX, f64::MIN].map(i32::from_f64), [i32::MAX, i32::MIN]);
    assert_eq!([f64::MAX, f64::MIN].map(i64::from_f64), [i64::MAX, i64::MIN]);
}

/// The trait's conversion, which `T::from_f64` means only for a type parameter.
fn narrow<T: Element>(value: f64) -> T {
    T::from_f64(value)
}

#[test]
fn floats_round_once() {
    // Just above a midpoint, by less than f32 can tell: rounding twice would go down to even.
    let above = |unit: f64| 1.0 + unit / 2.0 + 1e-12;
    assert_eq!(narrow::<bf16>(above(1.0 / 128.0)).to_f64(), 1.0 + 1.0 / 128.0);
    assert_eq!(narrow::<f16>(above(1.0 / 1024.0)).to_f64(), 1.0 + 1.0 / 1024.0);
    assert_eq!(narrow::<f32>(1.0 + 1.0 / 16_777_216.0), 1.0);
    assert_eq!(narrow::<f16>(65520.0), f16::INFINITY);
    assert_eq!(narrow::<f16>(65519.99).to_f64(), 65504.0);
}

#[test]
fn floats_have_one_nan() {
    let nan = f64::from_bits(0xFFF0_0000_0000_0001);
    assert_eq!(narrow::<f64>(nan).to_bits(), 0x7FF8_0000_0000_0000);
    assert_eq!(narrow::<f32>(nan).to_bits(), 0x7FC0_0000);
    assert_eq!(narrow::<f16>(nan).to_bits(), 0x7E00);
    assert_eq!(narrow::<bf16>(nan).to_bits(), 0x7FC0);
}

#[test]
fn every_small_value_survives_f64() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        assert!(half.is_nan() || narrow::<f16>(half.to_f64()).to_bits() == bits);
        assert!(brain.is_nan() || narrow::<bf16>(brain.to_f64()).to_bits() == bits);
    }
    for value in i8::MIN..=i8::MAX {
        assert_eq!(i8::from_f64(value.to_f64()), value);
        assert_eq!(u8::from_f64((value as u8).to_f64()), value as u8);
    }
}
