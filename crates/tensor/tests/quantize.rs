//! Quantised rows worked out by hand, what happens to NaN and infinity, and what is refused.

use antiphon_tensor::quantize::{TokenRule::Quotient, *};
use antiphon_tensor::{E2M1, E4M3, ScaleLayout, TensorError, UE8M0, bf16, f16};

const INFINITY: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

fn e4m3(value: f32) -> u8 {
    E4M3::from_f32(value).to_bits()
}

/// The values of FP4 codes, before any scale.
fn unpack(codes: &[u8]) -> Vec<f32> {
    codes.iter().flat_map(|&pair| [E2M1::unpack(pair).0, E2M1::unpack(pair).1]).map(E2M1::to_f32).collect()
}

/// A row of zeros that starts with some values.
fn row<const N: usize>(values: &[f32]) -> [f32; N] {
    std::array::from_fn(|at| values.get(at).copied().unwrap_or(0.0))
}

#[test]
fn fp8_static_multiplies_by_the_inverse() {
    let x = [3.0_f32, -0.0, 1e9, -INFINITY, NAN, 1e-9];
    let (mut codes, mut values) = ([0; 6], [0.0; 6]);
    fp8_static(&x, 3.0, &mut codes).unwrap();
    assert_eq!(codes, [0x38, 0x80, 0x7E, 0xFE, 0x7F, 0x00]);
    fp8_static_inverse(&codes, 3.0, &mut values).unwrap();
    assert_eq!(values[..4], [3.0, -0.0, 1344.0, -1344.0]);
    assert!(values[4].is_nan());

    fp8_static(&x, -3.0, &mut codes).unwrap();
    assert_eq!(codes, [0xB8, 0x00, 0xFE, 0x7E, 0x7F, 0x80], "a negative scale is a scale");

    // 39.375 / 1.875 is 21, halfway between two codes, and rounds to the even one, 20. The product with the inverse, which
    // is rounded, lies above.
    fp8_static(&[39.375_f32], 1.875, &mut codes[..1]).unwrap();
    assert_eq!([codes[0], e4m3(39.375 / 1.875)], [22.0, 20.0].map(e4m3));
}

#[test]
fn fp8_tokens_have_a_smallest_scale() {
    let x = [0.0_f32, -0.0, 1e-6, 0.0, 448.0, -224.0, 1.0, 0.0];
    let (mut codes, mut scales) = ([0xEE; 8], [0.0; 2]);
    fp8_tokens(&x, 4, Quotient, &mut codes, &mut scales).unwrap();
    assert_eq!(scales, [(1.0 / 512.0) / 448.0, 1.0]);
    assert_eq!(codes, [0x00, 0x80, e4m3(1e-6 / scales[0]), 0x00, 0x7E, 0xF6, 0x38, 0x00]);
}

#[test]
fn a_scale_of_a_token_may_be_a_product_with_the_reciprocal() {
    // 1/448 rounds up: the product with 3 is the neighbour above the quotient, that with a power of two is equal.
    let x = [3.0_f32, 0.1, 2.0, 0.1, 1e-9, 0.0];
    let (mut codes, mut quotients, mut products) = ([0; 6], [0.0; 3], [0.0; 3]);
    fp8_tokens(&x, 2, Quotient, &mut codes, &mut quotients).unwrap();
    fp8_tokens(&x, 2, TokenRule::Reciprocal, &mut codes, &mut products).unwrap();
    assert_eq!(products, [3.0 * (1.0 / 448.0), 2.0 / 448.0, (1.0 / 512.0) / 448.0]);
    assert_eq!([0, 1, 2].map(|row| products[row].to_bits() - quotients[row].to_bits()), [1, 0, 0]);
}

#[test]
fn f16_and_bf16_are_read_exactly() {
    let (mut codes, mut scales) = ([0; 2], [0.0; 1]);
    fp8_tokens(&[f16::from_f32(-7.0), f16::from_f32(3.5)], 2, Quotient, &mut codes, &mut scales).unwrap();
    assert_eq!((codes, scales), ([0xFE, 0x76], [1.0 / 64.0]));
    fp8_tokens(&[bf16::from_f32(-7.0), bf16::from_f32(3.5)], 2, Quotient, &mut codes, &mut scales).unwrap();
    assert_eq!((codes, scales), ([0xFE, 0x76], [1.0 / 64.0]));
}

#[test]
fn group_rules_have_their_floors_and_roundings() {
    let x = row::<4>(&[0.0, 0.0, 3.0, 1.0]);
    let run = |rule| {
        let (mut codes, mut scales) = ([0; 4], [0.0; 2]);
        Fp8Groups::new(1, 4, 2, rule).unwrap().quantize(&x, &mut codes, &mut scales).unwrap();
        (codes, scales)
    };
    let (codes, scales) = run(GroupRule::FlashInfer);
    assert_eq!(scales, [1e-10, 3.0 / 448.0]);
    assert_eq!(codes, [0, 0, 0x7E, e4m3(1.0 / (3.0 / 448.0))]);
    let (codes, scales) = run(GroupRule::DeepEp);
    assert_eq!(scales, [1e-4 * (1.0 / 448.0), 3.0 * (1.0 / 448.0)]);
    assert_eq!(codes, [0, 0, 0x7E, e4m3(448.0 / 3.0)]);
}

#[test]
fn packed_groups_round_scales_up_and_clear_padding() {
    // 2 tokens of 5 groups of one element: columns of 4 and 2 words.
    let groups = Fp8Groups::new(2, 5, 1, GroupRule::FlashInfer).unwrap();
    let x = [448.0_f32, 449.0, 0.0, 1.0, 224.0, -896.0, 1e-7, 448e6, NAN, -INFINITY];
    let (mut codes, mut scales) = ([0; 10], [0xEE; 24]);
    groups.quantize_packed(&x, &mut codes, &mut scales).unwrap();
    let smallest = 127 - 33; // the power of two above 1e-10
    let mut expected = [0; 24];
    expected[..8].copy_from_slice(&[127, 128, smallest, 127 - 8, 128, 127 - 32, 127 + 20, smallest]);
    (expected[16], expected[20]) = (126, 255);
    assert_eq!(scales, expected);
    let tiny = e4m3(1e-7 * 2.0_f32.powi(32));
    assert_eq!(codes, [0x7E, 0x76, 0, 0x78, 0x7E, 0xFE, tiny, e4m3(448e6 / 1_048_576.0), 0x7F, 0x7F]);

    let mut values = [0.0; 10];
    groups.dequantize_packed(&codes, &scales, &mut values).unwrap();
    assert_eq!(values[..6], [448.0, 448.0, 0.0, 1.0, 224.0, -896.0]);
    assert!(values[8].is_nan() && values[9].is_nan());

    let deep_ep = Fp8Groups::new(1, 2, 1, GroupRule::DeepEp).unwrap();
    let (mut codes, mut scales) = ([0; 2], [0xEE; 4]);
    deep_ep.quantize_packed(&[0.0_f32, 448.0], &mut codes, &mut scales).unwrap();
    assert_eq!((codes, scales), ([0, 0x7E], [127 - 22, 127, 0, 0]), "1e-4 / 448 rounds up to 2⁻²²");
}

#[test]
fn nvfp4_scales_by_sixteens() {
    // Scale 1: of 6 · 2.3 / 6 the nearest E4M3 is 2.25, and the factor its inverse.
    let x = row::<32>(&[13.8, -13.8, 2.25, 1.0, -0.0, 0.5, 5.625, 5.7]);
    let format = NvFp4::new(1, 32, ScaleLayout::Linear).unwrap();
    let (mut codes, mut scales) = ([0xEE; 16], [0xEE; 2]);
    format.quantize(&x, 1.0, &mut codes, &mut scales).unwrap();
    assert_eq!(scales, [e4m3(2.25), 0]);
    assert_eq!(unpack(&codes)[..8], [6.0, -6.0, 1.0, 0.5, -0.0, 0.0, 2.0, 3.0]);
    assert_eq!(codes[2], 0x08, "-0.0 in the low half, 0.0 in the high");
    assert_eq!(codes[8..], [0; 8]);

    let mut values = [0.0; 32];
    format.dequantize(&codes, &scales, 1.0, &mut values).unwrap();
    assert_eq!(values[..8], [13.5, -13.5, 2.25, 1.125, 0.0, 0.0, 4.5, 6.75]);

    // A negative tensor scale makes the block's scale negative and nothing else.
    let (mut negative, mut negative_scales) = ([0; 16], [0; 2]);
    format.quantize(&x, -1.0, &mut negative, &mut negative_scales).unwrap();
    assert_eq!((negative, negative_scales), (codes, [e4m3(-2.25), 0x80]));

    // Too small for a scale: zeros, with their signs.
    format.quantize(&row::<32>(&[1e-4, -1e-4]), 1.0, &mut codes, &mut scales).unwrap();
    assert_eq!((codes[0], scales[0]), (0x80, 0));
}

#[test]
fn mxfp4_scales_by_powers_of_two() {
    let x = row::<64>(&[6.0, 6.001, -24.0, 5.0]);
    let format = MxFp4::new(1, 64, ScaleLayout::Linear).unwrap();
    let (mut codes, mut scales) = ([0xEE; 32], [0xEE; 2]);
    format.quantize(&x, &mut codes, &mut scales).unwrap();
    assert_eq!(scales, [127 + 2, 0]);
    assert_eq!(unpack(&codes)[..4], [1.5, 1.5, -6.0, 1.0]);

    for (amax, exponent) in [(6.0_f32, 0), (6.0_f32.next_up(), 1), (6.0_f32.next_down(), 0), (3.1, 0)] {
        format.quantize(&row::<64>(&[amax]), &mut codes, &mut scales).unwrap();
        assert_eq!(i32::from(scales[0]) - 127, exponent, "{amax}");
    }
    let mut values = [0.0; 64];
    for extreme in [f32::MIN_POSITIVE, 6.0 * f32::from_bits(1 << 22), f32::from_bits(1 << 22)] {
        format.quantize(&row::<64>(&[extreme]), &mut codes, &mut scales).unwrap();
        format.dequantize(&codes, &scales, &mut values).unwrap();
        assert_eq!(values[0], extreme, "subnormals are not flushed");
    }
    // 6 · 2⁻¹²⁷ is 1.5 · 2⁻¹²⁵, at the smallest scale.
    assert_eq!(UE8M0::from_bits(scales[0]), UE8M0::MIN);
}

#[test]
fn fp8_keeps_a_nan_in_its_place_and_gives_up_at_infinity() {
    let (mut codes, mut scales, mut values) = ([0; 4], [0.0; 1], [0.0; 4]);
    fp8_tokens(&[NAN, -448.0, -NAN, 7.0_f32], 4, Quotient, &mut codes, &mut scales).unwrap();
    assert_eq!((codes, scales), ([0x7F, 0xFE, 0x7F, e4m3(7.0)], [1.0]));
    fp8_tokens(&[NAN; 4], 4, Quotient, &mut codes, &mut scales).unwrap();
    assert_eq!((codes, scales), ([0x7F; 4], [(1.0 / 512.0) / 448.0]));

    fp8_tokens(&[1.0_f32, -INFINITY, -1.0, NAN], 4, Quotient, &mut codes, &mut scales).unwrap();
    assert_eq!((codes, scales), ([0x00, 0x7F, 0x80, 0x7F], [INFINITY]));
    fp8_tokens_inverse(&codes, 4, &scales, &mut values).unwrap();
    assert!(values.iter().all(|value| value.is_nan()));

    for rule in [GroupRule::FlashInfer, GroupRule::DeepEp] {
        let groups = Fp8Groups::new(1, 4, 2, rule).unwrap();
        let mut scales = [0.0; 2];
        groups.quantize(&[1.0_f32, INFINITY, NAN, 0.0], &mut codes, &mut scales).unwrap();
        assert_eq!(codes, [0x00, 0x7F, 0x7F, 0x00], "{rule:?}");
        groups.dequantize(&codes, &scales, &mut values).unwrap();
        assert_eq!(values.map(f32::is_nan), [true, true, true, false], "{rule:?}");

        let mut scales = [0; 4];
        groups.quantize_packed(&[-1.0_f32, INFINITY, NAN, 0.0], &mut codes, &mut scales).unwrap();
        assert_eq!((codes, scales[0]), ([0x80, 0x7F, 0x7F, 0x00], 255), "{rule:?}");
        groups.dequantize_packed(&codes, &scales, &mut values).unwrap();
        assert_eq!(values.map(f32::is_nan), [true, true, true, false], "{rule:?}");
    }
}

#[test]
fn fp4_blocks_with_a_nan_are_nan() {
    let x = row::<64>(&[1.0, NAN]);
    let (mut codes, mut values) = ([0; 32], [0.0; 64]);
    let nv = NvFp4::new(1, 64, ScaleLayout::Linear).unwrap();
    let mut scales = [0; 4];
    nv.quantize(&x, 1.0, &mut codes, &mut scales).unwrap();
    assert_eq!((scales, &codes[..8], codes[8]), ([0x7F, 0, 0, 0], &[0x77; 8][..], 0));
    nv.dequantize(&codes, &scales, 1.0, &mut values).unwrap();
    assert!(values.iter().enumerate().all(|(at, value)| value.is_nan() == (at < 16)));

    let mx = MxFp4::new(1, 64, ScaleLayout::Linear).unwrap();
    let mut scales = [0; 2];
    mx.quantize(&x, &mut codes, &mut scales).unwrap();
    assert_eq!((scales, &codes[..16], codes[16]), ([255, 0], &[0x77; 16][..], 0));
    mx.dequantize(&codes, &scales, &mut values).unwrap();
    assert!(values.iter().enumerate().all(|(at, value)| value.is_nan() == (at < 32)));
}

#[test]
fn fp4_blocks_with_an_infinity_saturate() {
    let x = row::<32>(&[-INFINITY, 448.0, 1.0]);
    let (mut codes, mut values) = ([0; 16], [0.0; 32]);
    let nv = NvFp4::new(1, 32, ScaleLayout::Linear).unwrap();
    let mut scales = [0; 2];
    nv.quantize(&x, 1.0, &mut codes, &mut scales).unwrap();
    nv.dequantize(&codes, &scales, 1.0, &mut values).unwrap();
    assert_eq!(values[..3], [-6.0 * 448.0, 448.0, 0.0]);

    let mx = MxFp4::new(1, 32, ScaleLayout::Linear).unwrap();
    let mut scales = [0; 1];
    mx.quantize(&x, &mut codes, &mut scales).unwrap();
    mx.dequantize(&codes, &scales, &mut values).unwrap();
    assert_eq!(values[..3], [-INFINITY, 0.0, 0.0]);
}

#[test]
fn nothing_is_something() {
    for rows in [0, 3] {
        let (mut codes, mut scales) = (vec![], vec![0.0; rows]);
        let groups = Fp8Groups::new(rows, 0, 128, GroupRule::DeepEp).unwrap();
        groups.quantize::<f32>(&[], &mut codes, &mut []).unwrap();
        groups.quantize_packed::<f32>(&[], &mut codes, &mut []).unwrap();
        NvFp4::new(rows, 0, ScaleLayout::Linear)
            .unwrap()
            .quantize::<f32>(&[], 1.0, &mut [], &mut [])
            .unwrap();
        MxFp4::new(0, 32 * rows, ScaleLayout::Linear)
            .unwrap()
            .quantize::<f32>(&[], &mut [], &mut [])
            .unwrap();
        scales.clear();
        fp8_tokens::<f32>(&[], 7, Quotient, &mut [], &mut scales).unwrap();
        fp8_static::<f32>(&[], 1.0, &mut []).unwrap();
    }
}

#[test]
fn wrong_sizes_are_refused_with_numbers() {
    let text = |result: Result<(), TensorError>| result.unwrap_err().to_string();
    let x = [0.0_f32; 96];
    assert_eq!(text(fp8_static(&x, 1.0, &mut [0; 95])), "the buffer of codes has 95 entries instead of 96");
    assert_eq!(
        text(fp8_tokens(&x, 7, Quotient, &mut [0; 96], &mut [0.0; 13])),
        "rows of 96 elements do not divide into blocks of 7"
    );
    assert!(fp8_tokens(&x, 0, Quotient, &mut [0; 96], &mut []).is_err());
    assert_eq!(
        text(fp8_tokens(&x, 48, Quotient, &mut [0; 96], &mut [0.0; 3])),
        "the buffer of scales has 3 entries instead of 2"
    );
    for (columns, block) in [(96, 0), (96, 128), (100, 16)] {
        let error = Fp8Groups::new(2, columns, block, GroupRule::FlashInfer).unwrap_err();
        assert_eq!(error, TensorError::BlockSize { columns, block });
    }
    assert_eq!(
        NvFp4::new(1, 24, ScaleLayout::Linear).unwrap_err().to_string(),
        "rows of 24 elements do not divide into blocks of 16"
    );
    assert!(MxFp4::new(1, 48, ScaleLayout::Linear).is_err());
    assert!(matches!(
        MxFp4::new(usize::MAX / 32, 64, ScaleLayout::Linear),
        Err(TensorError::ShapeOverflow { .. })
    ));

    let groups = Fp8Groups::new(2, 48, 16, GroupRule::FlashInfer).unwrap();
    assert_eq!(
        text(groups.quantize_packed(&x, &mut [0; 96], &mut [0; 6])),
        "the buffer of packed scales has 6 entries instead of 8"
    );
    assert_eq!(
        text(groups.quantize_packed_token(2, &x[..48], &mut [0; 48], &mut [0; 8])),
        "index [2, 0] leaves a tensor of shape [2, 48]"
    );
    let nv = NvFp4::new(2, 48, ScaleLayout::Swizzled8x4).unwrap();
    assert_eq!(
        text(nv.quantize(&x, 1.0, &mut [0; 48], &mut [0; 6])),
        "the buffer of scales has 6 entries instead of 32"
    );
    assert_eq!(
        text(nv.quantize_row(1, &x, 1.0, &mut [0; 24], &mut [0; 32])),
        "the buffer of elements has 96 entries instead of 48"
    );
}
