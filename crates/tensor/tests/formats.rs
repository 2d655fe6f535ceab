//! The formats of eight and four bits, against tables in exact arithmetic.

#![cfg(not(miri))] // safe arithmetic: nothing for Miri to find, and it would take minutes

mod oracle;

use antiphon_tensor::{E2M1, E4M3, E5M2, UE8M0, bf16, f16, round};
use oracle::Table;
use proptest::prelude::*;

/// A format with its conversions.
struct Format {
    table: Table,
    decode: fn(u8) -> f32,
    from_f32: fn(f32) -> u8,
    from_f16: fn(f16) -> u8,
    from_bf16: fn(bf16) -> u8,
    /// The conversion that does not saturate, if that is another one.
    nonsaturating: Option<fn(f32) -> u8>,
    /// The code that it overflows to.
    overflow: u8,
}

/// The formats as they are, beside the tables.
fn formats() -> [Format; 3] {
    [
        Format {
            table: Table::e4m3(),
            decode: |code| E4M3::from_bits(code).to_f32(),
            from_f32: |value| E4M3::from_f32(value).to_bits(),
            from_f16: |value| E4M3::from_f16(value).to_bits(),
            from_bf16: |value| E4M3::from_bf16(value).to_bits(),
            nonsaturating: Some(|value| E4M3::from_f32_nonsaturating(value).to_bits()),
            overflow: 0x7F,
        },
        Format {
            table: Table::e5m2(),
            decode: |code| E5M2::from_bits(code).to_f32(),
            from_f32: |value| E5M2::from_f32(value).to_bits(),
            from_f16: |value| E5M2::from_f16(value).to_bits(),
            from_bf16: |value| E5M2::from_bf16(value).to_bits(),
            nonsaturating: Some(|value| E5M2::from_f32_nonsaturating(value).to_bits()),
            overflow: 0x7C,
        },
        Format {
            table: Table::e2m1(),
            decode: |code| E2M1::from_bits(code).to_f32(),
            from_f32: |value| E2M1::from_f32(value).to_bits(),
            from_f16: |value| E2M1::from_f16(value).to_bits(),
            from_bf16: |value| E2M1::from_bf16(value).to_bits(),
            nonsaturating: None,
            overflow: 0x7,
        },
    ]
}

impl Format {
    fn check(&self, value: f32) {
        let (found, expected) = ((self.from_f32)(value), self.table.encode(f64::from(value)));
        assert_eq!(found, expected, "{value:e} as {} became {found:#04x}", self.table.name);
        if let Some(encode) = self.nonsaturating {
            let (found, expected) = (encode(value), self.table.encode_or(f64::from(value), self.overflow));
            assert_eq!(
                found, expected,
                "{value:e} as {}, not saturated, became {found:#04x}",
                self.table.name
            );
        }
    }

    fn check_with_neighbours(&self, value: f64) {
        let exact = value as f32;
        assert_eq!(f64::from(exact), value, "f32 holds every value and midpoint");
        for value in [exact, -exact] {
            [value.next_down(), value, value.next_up()].into_iter().for_each(|value| self.check(value));
        }
    }
}

#[test]
fn the_tables_are_those_of_the_standards() {
    let [e4m3, e5m2, e2m1] = formats().map(|format| format.table);
    assert_eq!(e2m1.values, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert_eq!((e4m3.values[0x7E], e4m3.values[0x08], e4m3.beyond), (448.0, 1.0 / 64.0, 480.0));
    assert_eq!((e5m2.values[0x7B], e5m2.values[0x04], e5m2.beyond), (57344.0, 1.0 / 16384.0, 65536.0));
    assert_eq!([e4m3.values[0x38], e5m2.values[0x3C]], [1.0, 1.0]);
}

#[test]
fn every_code_has_its_value_and_comes_back() {
    for Format { table, decode, from_f32, .. } in formats() {
        for code in 0..2 * table.sign as u16 {
            let code = code as u8;
            let value = decode(code);
            if code & (table.sign - 1) > table.last() {
                continue; // special: below
            }
            assert_eq!(
                f64::from(value).to_bits(),
                table.decode(code).to_bits(),
                "{} {code:#04x}",
                table.name
            );
            assert_eq!(from_f32(value), code, "{} {code:#04x} comes back", table.name);
        }
    }
}

#[test]
fn special_codes() {
    let nan = |value: f32| value.to_bits() == round::F32_NAN;
    assert!([0x7F, 0xFF].into_iter().all(|code| nan(E4M3::from_bits(code).to_f32())));
    assert!((0..=255).all(|code| E4M3::from_bits(code).is_nan() == E4M3::from_bits(code).to_f32().is_nan()));
    assert_eq!((0..=255).filter(|&code| E4M3::from_bits(code).is_nan()).count(), 2);

    assert!([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF].into_iter().all(|code| nan(E5M2::from_bits(code).to_f32())));
    assert_eq!((0..=255).filter(|&code| E5M2::from_bits(code).is_nan()).count(), 6);
    assert_eq!(E5M2::from_bits(0x7C).to_f32(), f32::INFINITY);
    assert_eq!(E5M2::from_bits(0xFC).to_f32(), f32::NEG_INFINITY);
    for code in 0..=255 {
        let number = E5M2::from_bits(code);
        assert_eq!(number.is_finite(), number.to_f32().is_finite());
        // It is the upper half of an f16.
        let half = f16::from_bits(u16::from(code) << 8).to_f32();
        assert!(half.is_nan() && number.is_nan() || half == number.to_f32());
    }

    assert_eq!(E2M1::from_bits(0xF3), E2M1::from_bits(0x3), "the upper half of the byte is dropped");
    for pair in 0..=255 {
        let (first, second) = E2M1::unpack(pair);
        assert_eq!((first.to_bits(), second.to_bits()), (pair % 16, pair / 16));
        assert_eq!(E2M1::pack(first, second), pair);
    }
}

#[test]
fn every_f16_and_bf16_becomes_the_nearest() {
    for format in formats() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert_eq!((format.from_f16)(half), format.table.encode(half.to_f64()), "f16 {half}");
            assert_eq!((format.from_bf16)(brain), format.table.encode(brain.to_f64()), "bf16 {brain}");
            format.check(half.to_f32());
            format.check(brain.to_f32());
        }
    }
}

#[test]
fn every_value_and_midpoint_rounds_right_with_its_neighbours() {
    for format in formats() {
        let Table { values, midpoints, beyond, .. } = &format.table;
        values.iter().chain(midpoints).chain([beyond]).for_each(|&value| format.check_with_neighbours(value));
    }
}

#[test]
fn extremes_and_nans() {
    for format in formats() {
        for value in [0.0, f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX, f32::INFINITY] {
            [value, -value].into_iter().for_each(|value| format.check(value));
        }
        for bits in [0x7F80_0001, 0x7FA0_0000, 0x7FC0_0000, 0x7FFF_FFFF_u32] {
            [bits, bits | 1 << 31].into_iter().for_each(|bits| format.check(f32::from_bits(bits)));
        }
    }
    assert_eq!([E4M3::from_f32(f32::INFINITY), E4M3::from_f32(-1e9)].map(E4M3::to_f32), [448.0, -448.0]);
    assert_eq!([E5M2::from_f32(f32::INFINITY), E5M2::from_f32(-1e9)].map(E5M2::to_f32), [57344.0, -57344.0]);
    assert_eq!([E2M1::from_f32(f32::NAN), E2M1::from_f32(-f32::NAN)], [E2M1::MAX, E2M1::MAX]);
    assert_eq!(E4M3::from_f32_nonsaturating(464.0), E4M3::MAX);
    assert_eq!(E4M3::from_f32_nonsaturating(464.0_f32.next_up()).to_bits(), 0x7F);
    assert_eq!(E4M3::from_f32_nonsaturating(f32::NEG_INFINITY).to_bits(), 0xFF);
    assert_eq!(E5M2::from_f32_nonsaturating(61440.0), E5M2::INFINITY);
    assert_eq!(E5M2::from_f32_nonsaturating(61440.0_f32.next_down()), E5M2::MAX);
}

#[test]
fn numbers_are_written_as_their_values() {
    assert_eq!(format!("{} {:?}", E4M3::from_bits(0x7E), E4M3::NAN), "448 E4M3(NaN)");
    assert_eq!(format!("{:5.1}|{:?}", E2M1::MAX, E2M1::from_bits(0x8)), "  6.0|E2M1(-0.0)");
    assert_eq!(format!("{} {:?}", E5M2::INFINITY, E5M2::MIN_POSITIVE_SUBNORMAL), "inf E5M2(1.5258789e-5)");
    assert_eq!(format!("{} {:?}", UE8M0::ONE, UE8M0::from_bits(124)), "1 UE8M0(0.125)");
    assert_eq!((f32::from(E4M3::MIN_POSITIVE), f32::from(UE8M0::default())), (1.0 / 64.0, 1.0));
}

/// 2⁻¹²⁷ and its doubles, exactly.
fn powers_of_two() -> Vec<f64> {
    (0..255).scan(1.0 / 2.0_f64.powi(127), |next, _| Some(std::mem::replace(next, *next * 2.0))).collect()
}

/// The exponent code of a magnitude rounded up and rounded to the nearest power of two, by search.
fn reference_exponents(value: f32, powers: &[f64]) -> (u8, u8) {
    let magnitude = f64::from(value).abs();
    let up = powers.partition_point(|&power| power < magnitude).min(254) as u8;
    let nearest = powers.partition_point(|&power| power * 1.5 <= magnitude) as u8;
    if magnitude.is_nan() { (255, 255) } else { (up, nearest) }
}

fn check_exponents(value: f32, powers: &[f64]) {
    let found = (UE8M0::from_f32_up(value).to_bits(), UE8M0::from_f32_nearest(value).to_bits());
    assert_eq!(found, reference_exponents(value, powers), "{value:e}, up and to nearest");
}

#[test]
fn ue8m0_is_right_everywhere() {
    let powers = powers_of_two();
    for code in 0..=254 {
        let scale = UE8M0::from_bits(code);
        assert_eq!(f64::from(scale.to_f32()), powers[usize::from(code)]);
        assert_eq!(f64::from(scale.recip().to_f32()) * powers[usize::from(code)], 1.0);
        assert_eq!(
            (UE8M0::from_f32_up(scale.to_f32()), UE8M0::from_f32_nearest(scale.to_f32())),
            (scale, scale)
        );
        for boundary in [1.0, 1.5, 2.0].map(|factor| (powers[usize::from(code)] * factor) as f32) {
            for value in [boundary.next_down(), boundary, boundary.next_up()] {
                [value, -value].into_iter().for_each(|value| check_exponents(value, &powers));
            }
        }
    }
    assert_eq!(UE8M0::NAN.to_f32().to_bits(), round::F32_NAN);
    assert_eq!((UE8M0::NAN.recip(), UE8M0::NAN.is_nan()), (UE8M0::NAN, true));
    for bits in 0..=u16::MAX {
        check_exponents(f16::from_bits(bits).to_f32(), &powers);
        check_exponents(bf16::from_bits(bits).to_f32(), &powers);
    }
    for extreme in [0.0, f32::from_bits(1), f32::MAX, f32::INFINITY, f32::NAN, -f32::NAN] {
        check_exponents(extreme, &powers);
    }
    assert_eq!((UE8M0::from_f32_up(0.0), UE8M0::from_f32_up(f32::INFINITY)), (UE8M0::MIN, UE8M0::MAX));
    assert_eq!(UE8M0::from_f32_nearest(f32::INFINITY), UE8M0::NAN);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 50_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_f32_becomes_the_nearest(bits in any::<u32>(), exponent in 100_u32..150) {
        // Any at all, and one where the formats have values.
        for value in [f32::from_bits(bits), f32::from_bits(bits & 0x807F_FFFF | exponent << 23)] {
            formats().iter().for_each(|format| format.check(value));
            check_exponents(value, &powers_of_two());
        }
    }
}

/// Numbers of every exponent in ascending order, so that the expected code only ever moves on. With `STRIDE=1` these are all numbers
/// that there are, which takes a minute or two with --release.
#[test]
fn numbers_of_every_exponent_become_the_nearest() {
    let stride = std::env::var("STRIDE").map_or(4099, |stride| stride.parse().expect("STRIDE is a number"));
    for Format { table, from_f32, .. } in formats() {
        let mut code = 0;
        for bits in (0..0x7F80_0000_u32).step_by(stride).chain([0x7F80_0000]) {
            let value = f32::from_bits(bits);
            // Where a midpoint rounds to the even code above, the code changes at it, otherwise after it.
            let moves_on = |code: u8| {
                let midpoint = table.midpoints[usize::from(code)];
                midpoint < value.into() || code % 2 == 1 && midpoint == value.into()
            };
            while code < table.last() && moves_on(code) {
                code += 1;
            }
            assert_eq!((from_f32(value), from_f32(-value)), (code, code | table.sign), "{value:e}");
        }
        assert_eq!(code, table.last());
        for bits in (0x7F80_0001..=0x7FFF_FFFF_u32).step_by(stride) {
            let nan = f32::from_bits(bits);
            assert_eq!((from_f32(nan), from_f32(-nan)), (table.nan, table.nan));
        }
    }
}
