//! Quantised rows against the formulas element by element, and what holds of every row.

#![cfg(not(miri))] // safe arithmetic: nothing for Miri to find, and it would take minutes

mod oracle;

use antiphon_tensor::quantize::*;
use antiphon_tensor::{ScaleLayout, UE8M0, bf16, f16};
use oracle::Table;
use proptest::prelude::*;

const LAYOUTS: &[ScaleLayout] = ScaleLayout::ALL;

/// The larger of two numbers where the second is not NaN.
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The amax as f32, NaN elements passed over.
fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max, &value| larger(max, value.abs()))
}

/// 2 to the power that is next above a positive number, by doubling.
fn power_above(value: f32) -> f64 {
    let mut power = 2.0_f64.powi(-149);
    while power < value.into() {
        power *= 2.0;
    }
    power
}

/// Finite numbers of every magnitude whose squares f32 has, and zeros.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (any::<bool>(), 100_u32..154, 0_u32..1 << 23)
            .prop_map(|(sign, exponent, fraction)| f32::from_bits(u32::from(sign) << 31 | exponent << 23 | fraction)),
        4 => -10.0_f32..10.0,
        1 => prop_oneof![Just(0.0_f32), Just(-0.0)],
    ]
}

/// A row-major matrix of some rows of `columns` elements.
fn matrix(rows: std::ops::Range<usize>, columns: usize) -> impl Strategy<Value = Vec<f32>> {
    rows.prop_flat_map(move |rows| prop::collection::vec(number(), rows * columns))
}

/// The same with one magnitude per row, so that few elements vanish.
fn level_matrix(rows: std::ops::Range<usize>, columns: usize) -> impl Strategy<Value = Vec<f32>> {
    let level = -20_i32..20;
    let row = (level, prop::collection::vec(-8.0_f32..8.0, columns))
        .prop_map(|(level, row)| row.iter().map(|value| value * 2.0_f32.powi(level)).collect::<Vec<_>>());
    prop::collection::vec(row, rows).prop_map(|rows| rows.concat())
}

/// Whether a value is as near to `x` as its code allows: half a step, and some rounding of f32.
fn is_near(table: &Table, code: u8, scale: f64, value: f32, x: f32) -> bool {
    let error = (f64::from(value) - f64::from(x)).abs();
    error <= table.half_step(code) * scale.abs() * (1.0 + 1e-6) + f64::from(x).abs() * 1e-6
}

fn tokens(x: &[f32], columns: usize) -> (Vec<u8>, Vec<f32>) {
    tokens_by(TokenRule::Quotient, x, columns)
}

fn tokens_by(rule: TokenRule, x: &[f32], columns: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / columns]);
    fp8_tokens(x, columns, rule, &mut codes, &mut scales).unwrap();
    (codes, scales)
}

fn tokens_inverse(codes: &[u8], columns: usize, scales: &[f32]) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    fp8_tokens_inverse(codes, columns, scales, &mut values).unwrap();
    values
}

/// Quantises with packed scales, then restores.
fn packed_round_trip(groups: &Fp8Groups, x: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0xEE; x.len()], vec![0xEE; groups.packed_scales().size()]);
    groups.quantize_packed(x, &mut codes, &mut scales).unwrap();
    let mut values = vec![0.0; x.len()];
    groups.dequantize_packed(&codes, &scales, &mut values).unwrap();
    (codes, scales, values)
}

fn nv_round_trip(format: &NvFp4, x: &[f32], scale: f32) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0xEE; format.code_bytes()], vec![0xEE; format.scale_grid().size()]);
    format.quantize(x, scale, &mut codes, &mut scales).unwrap();
    let mut values = vec![0.0; x.len()];
    format.dequantize(&codes, &scales, scale, &mut values).unwrap();
    (codes, scales, values)
}

fn mx_round_trip(format: &MxFp4, x: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0xEE; format.code_bytes()], vec![0xEE; format.scale_grid().size()]);
    format.quantize(x, &mut codes, &mut scales).unwrap();
    let mut values = vec![0.0; x.len()];
    format.dequantize(&codes, &scales, &mut values).unwrap();
    (codes, scales, values)
}

/// The code of an element in packed FP4 codes.
fn nibble(codes: &[u8], at: usize) -> u8 {
    codes[at / 2] >> (at % 2 * 4) & 0xF
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fp8_static_is_its_formula(x in matrix(1..4, 9), scale in number()) {
        let e4m3 = Table::e4m3();
        let (mut codes, mut values) = (vec![0; x.len()], vec![0.0; x.len()]);
        fp8_static(&x, scale, &mut codes).unwrap();
        fp8_static_inverse(&codes, scale, &mut values).unwrap();
        for at in 0..x.len() {
            let scaled = x[at] * (1.0 / scale);
            prop_assert_eq!(codes[at], e4m3.encode(scaled.into()));
            if scaled.abs() <= 448.0 {
                prop_assert!(is_near(&e4m3, codes[at], scale.into(), values[at], x[at]));
            }
        }
    }

    #[test]
    fn fp8_tokens_are_their_formula(
        x in matrix(0..4, 40),
        rule in prop::sample::select(vec![TokenRule::Quotient, TokenRule::Reciprocal]),
    ) {
        let e4m3 = Table::e4m3();
        let (codes, scales) = tokens_by(rule, &x, 40);
        let values = tokens_inverse(&codes, 40, &scales);
        for at in 0..x.len() {
            let row = at / 40;
            let largest = amax(&x[row * 40..][..40]);
            let scale = match rule {
                TokenRule::Quotient => largest / 448.0,
                TokenRule::Reciprocal => largest * (1.0 / 448.0),
            };
            let scale = larger(scale, (1.0 / 512.0) / 448.0);
            prop_assert_eq!(scales[row], scale);
            prop_assert_eq!(codes[at], e4m3.encode((x[at] / scale).clamp(-448.0, 448.0).into()));
            prop_assert!(is_near(&e4m3, codes[at], scale.into(), values[at], x[at]));
        }
    }

    #[test]
    fn fp8_tokens_keep_the_codes_of_what_they_restore(x in level_matrix(1..4, 24)) {
        let (codes, scales) = tokens(&x, 24);
        let (again, scales_again) = tokens(&tokens_inverse(&codes, 24, &scales), 24);
        prop_assert_eq!(codes, again);
        // 448 · scale, rounded, divided by 448 may be the neighbour.
        prop_assert!(scales.iter().zip(&scales_again).all(|(a, b)| a.to_bits().abs_diff(b.to_bits()) <= 1));
    }

    #[test]
    fn groups_are_their_formula(
        x in matrix(1..6, 48),
        group in prop::sample::select(vec![1_usize, 3, 8, 16, 48]),
        rule in prop::sample::select(vec![GroupRule::FlashInfer, GroupRule::DeepEp]),
    ) {
        let (tokens, e4m3) = (x.len() / 48, Table::e4m3());
        let groups = Fp8Groups::new(tokens, 48, group, rule).unwrap();
        let (mut codes, mut scales) = (vec![0; x.len()], vec![0.0; groups.scale_count()]);
        groups.quantize(&x, &mut codes, &mut scales).unwrap();
        let mut values = vec![0.0; x.len()];
        groups.dequantize(&codes, &scales, &mut values).unwrap();
        let (packed_codes, packed_scales, packed_values) = packed_round_trip(&groups, &x);

        for at in 0..x.len() {
            let (token, column) = (at / 48, at % 48);
            let largest = amax(&x[at / group * group..][..group]);
            let (scale, scaled) = match rule {
                GroupRule::FlashInfer => {
                    let scale = larger(largest / 448.0, 1e-10);
                    (scale, x[at] / scale)
                }
                GroupRule::DeepEp => {
                    let largest = larger(largest, 1e-4);
                    (largest * (1.0 / 448.0), x[at] * (448.0 / largest))
                }
            };
            prop_assert_eq!(scales[at / group], scale);
            prop_assert_eq!(codes[at], e4m3.encode(scaled.into()));
            prop_assert!(is_near(&e4m3, codes[at], scale.into(), values[at], x[at]));

            let power = power_above(scale);
            let byte = groups.packed_scales().offset(token, column / group).unwrap();
            prop_assert_eq!(f64::from(UE8M0::from_bits(packed_scales[byte]).to_f32()), power);
            prop_assert_eq!(packed_codes[at], e4m3.encode(f64::from(x[at]) / power));
            prop_assert!(is_near(&e4m3, packed_codes[at], power, packed_values[at], x[at]));
        }
        for (byte, &scale) in packed_scales.iter().enumerate() {
            prop_assert!(groups.packed_scales().position(byte).is_some() || scale == 0, "padding is zero");
        }
    }

    #[test]
    fn packed_groups_restore_what_they_restored(x in level_matrix(1..4, 32)) {
        let groups = Fp8Groups::new(x.len() / 32, 32, 8, GroupRule::FlashInfer).unwrap();
        let (_, _, values) = packed_round_trip(&groups, &x);
        let (_, _, again) = packed_round_trip(&groups, &values);
        prop_assert_eq!(values, again);
    }

    #[test]
    fn nvfp4_is_its_formula(
        x in matrix(1..4, 48),
        scale in prop_oneof![number(), Just(1.0_f32), Just(-0.25)],
        layout in prop::sample::select(LAYOUTS),
    ) {
        let (e2m1, e4m3) = (Table::e2m1(), Table::e4m3());
        let format = NvFp4::new(x.len() / 48, 48, layout).unwrap();
        let (codes, scales, values) = nv_round_trip(&format, &x, scale);
        for at in 0..x.len() {
            let byte = scales[format.scale_grid().offset(at / 48, at % 48 / 16).unwrap()];
            prop_assert_eq!(byte, e4m3.encode((scale * (amax(&x[at / 16 * 16..][..16]) / 6.0)).into()));
            let sf = e4m3.decode(byte) as f32;
            let factor = if sf == 0.0 { 0.0 } else { scale / sf };
            let code = nibble(&codes, at);
            prop_assert_eq!(code, e2m1.encode((x[at] * factor).into()));
            let value = (e2m1.decode(code) * f64::from(sf)) as f32 / scale;
            prop_assert!(values[at] == value || value.is_nan() && scale == 0.0, "{} is not {}", values[at], value);
            // For scales between the smallest normal one and the largest, only 1/16 of ±6 is lost to saturation.
            if (1.0 / 64.0..448.0).contains(&sf.abs()) {
                prop_assert!(is_near(&e2m1, code, f64::from(sf) / f64::from(scale), values[at], x[at]));
            }
        }
        for (byte, &scale) in scales.iter().enumerate() {
            prop_assert!(format.scale_grid().position(byte).is_some() || scale == 0, "padding is zero");
        }
    }

    #[test]
    fn nvfp4_keeps_what_it_restored(x in level_matrix(1..3, 32), exponent in -3_i32..4) {
        let (format, scale) = (NvFp4::new(x.len() / 32, 32, ScaleLayout::Linear).unwrap(), 2.0_f32.powi(exponent));
        // Blocks with scales that are normal numbers, and some that are less and need not come back.
        let x: Vec<f32> = x.iter().map(|value| value / larger(amax(&x), 1e-30) * 20.0).collect();
        let (codes, scales, values) = nv_round_trip(&format, &x, scale);
        let (codes_again, scales_again, values_again) = nv_round_trip(&format, &values, scale);
        for at in 0..values.len() {
            if scales[at / 16] >= 0x08 {
                prop_assert_eq!((codes[at / 2], scales[at / 16]), (codes_again[at / 2], scales_again[at / 16]));
                prop_assert_eq!(values[at], values_again[at]);
            }
        }
    }

    #[test]
    fn mxfp4_is_its_formula(x in matrix(1..4, 96), layout in prop::sample::select(LAYOUTS)) {
        let e2m1 = Table::e2m1();
        let format = MxFp4::new(x.len() / 96, 96, layout).unwrap();
        let (codes, scales, values) = mx_round_trip(&format, &x);
        for at in 0..x.len() {
            let byte = scales[format.scale_grid().offset(at / 96, at % 96 / 32).unwrap()];
            let largest = amax(&x[at / 32 * 32..][..32]);
            let power = f64::from(UE8M0::from_bits(byte).to_f32());
            prop_assert!(f64::from(largest) <= 6.0 * power);
            prop_assert!(f64::from(largest) > 3.0 * power || byte == 0, "no smaller power of two would do");
            let code = nibble(&codes, at);
            prop_assert_eq!(code, e2m1.encode(f64::from(x[at]) / power));
            prop_assert_eq!(f64::from(values[at]), e2m1.decode(code) * power);
            prop_assert!(is_near(&e2m1, code, power, values[at], x[at]));
        }
        let (_, _, again) = mx_round_trip(&format, &values);
        prop_assert_eq!(values, again);
    }

    #[test]
    fn powers_of_two_are_exact(exponents in prop::collection::vec(-3_i32..=0, 32), level in -6_i32..6) {
        // 448 and 6 are no powers of two, so the largest magnitude becomes another one's code, and every other power
        // within the format's reach is a code too.
        let mut x: Vec<f32> = exponents.iter().map(|&exponent| 2.0_f32.powi(exponent + level)).collect();
        x[0] = 2.0_f32.powi(level);
        let groups = Fp8Groups::new(1, 32, 32, GroupRule::DeepEp).unwrap();
        prop_assert_eq!(&packed_round_trip(&groups, &x).2, &x);
        let mut values = vec![0.0; 32];
        let mut static_codes = vec![0; 32];
        fp8_static(&x, 2.0_f32.powi(level - 2), &mut static_codes).unwrap();
        fp8_static_inverse(&static_codes, 2.0_f32.powi(level - 2), &mut values).unwrap();
        prop_assert_eq!(&values, &x);
        let mx = MxFp4::new(1, 32, ScaleLayout::Linear).unwrap();
        prop_assert_eq!(&mx_round_trip(&mx, &x).2, &x);
    }

    #[test]
    fn half_types_are_as_their_f32(x in level_matrix(2..4, 32)) {
        let rows = x.len() / 32;
        let half: Vec<f16> = x.iter().map(|&value| f16::from_f32(value)).collect();
        let brain: Vec<bf16> = x.iter().map(|&value| bf16::from_f32(value)).collect();
        let widened = |values: Vec<f32>| nv_round_trip(&NvFp4::new(rows, 32, LAYOUTS[0]).unwrap(), &values, 3.0);
        let format = NvFp4::new(rows, 32, LAYOUTS[0]).unwrap();
        let (mut codes, mut scales) = (vec![0; format.code_bytes()], vec![0; format.scale_grid().size()]);
        format.quantize(&half, 3.0, &mut codes, &mut scales).unwrap();
        let expected = widened(half.iter().map(|value| value.to_f32()).collect());
        prop_assert_eq!((&codes, &scales), (&expected.0, &expected.1));
        format.quantize(&brain, 3.0, &mut codes, &mut scales).unwrap();
        let expected = widened(brain.iter().map(|value| value.to_f32()).collect());
        prop_assert_eq!((&codes, &scales), (&expected.0, &expected.1));
    }

    #[test]
    fn rows_one_by_one_are_the_matrix(x in level_matrix(1..7, 64), layout in prop::sample::select(LAYOUTS)) {
        let rows = x.len() / 64;
        let (nv, mx) = (NvFp4::new(rows, 64, layout).unwrap(), MxFp4::new(rows, 64, layout).unwrap());
        let groups = Fp8Groups::new(rows, 64, 16, GroupRule::FlashInfer).unwrap();
        let (mut nv_codes, mut nv_scales) = (vec![0; nv.code_bytes()], vec![0; nv.scale_grid().size()]);
        let (mut mx_codes, mut mx_scales) = (vec![0; mx.code_bytes()], vec![0; mx.scale_grid().size()]);
        let (mut codes, mut scales) = (vec![0; x.len()], vec![0; groups.packed_scales().size()]);
        for row in (0..rows).rev() {
            let (x, half) = (&x[row * 64..][..64], row * 32);
            nv.quantize_row(row, x, 2.0, &mut nv_codes[half..][..32], &mut nv_scales).unwrap();
            mx.quantize_row(row, x, &mut mx_codes[half..][..32], &mut mx_scales).unwrap();
            groups.quantize_packed_token(row, x, &mut codes[row * 64..][..64], &mut scales).unwrap();
        }
        let (expected_codes, expected_scales, _) = nv_round_trip(&nv, &x, 2.0);
        prop_assert_eq!((nv_codes, nv_scales), (expected_codes, expected_scales));
        let (expected_codes, expected_scales, _) = mx_round_trip(&mx, &x);
        prop_assert_eq!((mx_codes, mx_scales), (expected_codes, expected_scales));
        let (expected_codes, expected_scales, _) = packed_round_trip(&groups, &x);
        prop_assert_eq!((codes, scales), (expected_codes, expected_scales));
    }
}
