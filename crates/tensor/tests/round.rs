//! The 16-bit conversions against exact arithmetic, at every place where rounding decides.

#![cfg(not(miri))] // safe arithmetic: nothing for Miri to find, and it would take minutes

use antiphon_tensor::round::*;
use antiphon_tensor::{bf16, f16};
use proptest::prelude::*;

/// A 16-bit float format with what is tested of it.
struct Format {
    fraction_bits: i32,
    /// The exponent of the smallest normal number, a power of two.
    smallest_exponent: i32,
    infinity: u16,
    nan: u16,
    widen: fn(u16) -> f32,
    narrow_f32: fn(f32) -> u16,
    narrow_f64: fn(f64) -> u16,
}

const BF16: Format = Format {
    fraction_bits: 7,
    smallest_exponent: -126,
    infinity: 0x7F80,
    nan: 0x7FC0,
    widen: bf16_to_f32,
    narrow_f32: f32_to_bf16,
    narrow_f64: f64_to_bf16,
};

const F16: Format = Format {
    fraction_bits: 10,
    smallest_exponent: -14,
    infinity: 0x7C00,
    nan: 0x7E00,
    widen: f16_to_f32,
    narrow_f32: f32_to_f16,
    narrow_f64: f64_to_f16,
};

/// 2 to a power within the normal numbers, exactly: `powi` does not promise that.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

impl Format {
    /// The value of a code without sign, exactly. Infinity has the value that would come after the largest finite
    /// one, which is where the midpoint that overflows lies in between.
    fn value(&self, code: u16) -> f64 {
        let exponent = i32::from(code >> self.fraction_bits);
        let fraction = f64::from(code & ((1 << self.fraction_bits) - 1));
        let hidden = if exponent == 0 { 0.0 } else { f64::from(1 << self.fraction_bits) };
        (hidden + fraction) * power_of_two(self.smallest_exponent - self.fraction_bits + exponent.max(1) - 1)
    }

    /// The midpoint of a code without sign and its successor. Exact: it has one bit more than a code's value.
    fn midpoint(&self, code: u16) -> f64 {
        (self.value(code) + self.value(code + 1)) / 2.0
    }

    /// The code that a value rounds to, by comparing it with midpoints.
    fn reference(&self, value: f64) -> u16 {
        if value.is_nan() {
            return self.nan;
        }
        let magnitude = value.abs();
        // The first code whose midpoint with its successor is not below the value.
        let (mut low, mut high) = (0, self.infinity);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.midpoint(middle) < magnitude { low = middle + 1 } else { high = middle }
        }
        let tie_to_successor = low < self.infinity && self.midpoint(low) == magnitude && low % 2 == 1;
        (low + u16::from(tie_to_successor)) | if value.is_sign_negative() { 0x8000 } else { 0 }
    }

    fn check_f64(&self, value: f64) {
        let (found, expected) = ((self.narrow_f64)(value), self.reference(value));
        assert_eq!(found, expected, "{value:e} as f64 became {found:#06x}, not {expected:#06x}");
    }

    fn check_f32(&self, value: f32) {
        let (found, expected) = ((self.narrow_f32)(value), self.reference(f64::from(value)));
        assert_eq!(found, expected, "{value:e} as f32 became {found:#06x}, not {expected:#06x}");
        self.check_f64(f64::from(value));
    }

    /// Every code's value and every midpoint, each with its neighbours in f32 and f64, of both signs.
    fn check_all_boundaries(&self) {
        for code in 0..self.infinity {
            for boundary in [self.value(code), self.midpoint(code), self.value(code + 1)] {
                let narrow = boundary as f32;
                assert!(f64::from(narrow) == boundary || code == self.infinity - 1, "f32 holds {boundary:e}");
                for signed in [narrow, -narrow] {
                    [signed.next_down(), signed, signed.next_up()]
                        .into_iter()
                        .for_each(|value| self.check_f32(value));
                }
                for signed in [boundary, -boundary] {
                    [signed.next_down(), signed, signed.next_up()]
                        .into_iter()
                        .for_each(|value| self.check_f64(value));
                }
            }
        }
    }

    fn check_all_codes_widen(&self, half: fn(u16) -> f32) {
        for code in 0..=u16::MAX {
            let (found, magnitude) = ((self.widen)(code), code & 0x7FFF);
            if magnitude > self.infinity {
                assert!(found.is_nan() && half(code).is_nan(), "{code:#06x} is NaN");
                assert_eq!((self.narrow_f32)(found), self.nan);
                continue;
            }
            assert_eq!(found.to_bits(), half(code).to_bits(), "{code:#06x}");
            if magnitude < self.infinity {
                assert_eq!(f64::from(found.abs()), self.value(magnitude), "{code:#06x}");
            }
            assert_eq!((self.narrow_f32)(found), code, "{code:#06x} comes back");
            assert_eq!((self.narrow_f64)(f64::from(found)), code, "{code:#06x} comes back");
        }
    }

    fn check_extremes(&self) {
        for special in [0.0, f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, f32::INFINITY] {
            [special, -special].into_iter().for_each(|value| self.check_f32(value));
        }
        for special in [f64::MIN_POSITIVE, f64::from_bits(1), f64::MAX, f64::INFINITY] {
            [special, -special].into_iter().for_each(|value| self.check_f64(value));
        }
        let largest = f64::from(f32::MAX);
        for beyond in [largest.next_up(), largest * (1.0 + power_of_two(-25)), largest * 2.0] {
            [beyond, -beyond].into_iter().for_each(|value| self.check_f64(value));
        }
    }

    fn check_nans(&self) {
        for payload in [1, 0x1FFF, 0x2000, 0xFFFF, 0x3F_FFFF, 0x40_0000, 0x7F_FFFF] {
            for sign in [0, 1 << 31] {
                let nan = f32::from_bits(sign | 0x7F80_0000 | payload);
                assert_eq!((self.narrow_f32)(nan), self.nan, "{:#010x}", nan.to_bits());
            }
        }
        for payload in [1, 1 << 28, 1 << 29, 1 << 51, (1 << 52) - 1] {
            for sign in [0, 1 << 63] {
                let nan = f64::from_bits(sign | 0x7FF0_0000_0000_0000 | payload);
                assert_eq!((self.narrow_f64)(nan), self.nan, "{:#018x}", nan.to_bits());
            }
        }
    }
}

#[test]
fn every_code_widens_exactly_and_comes_back() {
    BF16.check_all_codes_widen(|code| bf16::from_bits(code).to_f32());
    F16.check_all_codes_widen(|code| f16::from_bits(code).to_f32());
}

#[test]
fn bf16_is_right_at_every_boundary() {
    BF16.check_all_boundaries();
}

#[test]
fn f16_is_right_at_every_boundary() {
    F16.check_all_boundaries();
}

#[test]
fn extremes_become_zero_or_infinity() {
    BF16.check_extremes();
    F16.check_extremes();
}

#[test]
fn every_nan_becomes_the_canonical_one() {
    BF16.check_nans();
    F16.check_nans();
    assert_eq!(canonical_f32(f32::from_bits(0xFFA0_0001)).to_bits(), F32_NAN);
    assert_eq!(canonical_f64(f64::from_bits(0xFFF4_0000_0000_0001)).to_bits(), F64_NAN);
    assert_eq!(canonical_f32(-0.0).to_bits(), (-0.0_f32).to_bits());
    assert_eq!(canonical_f64(f64::NEG_INFINITY), f64::NEG_INFINITY);
}

/// Bits of f64 whose exponents are as dense as possible where a 16-bit float has values.
fn f64_near_f32() -> impl Strategy<Value = f64> {
    (any::<u64>(), 1023_u64 - 160..1023 + 140)
        .prop_map(|(bits, exponent)| f64::from_bits(bits & !(0x7FF << 52) | exponent << 52))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 50_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_f32_narrows_as_half_does(bits in any::<u32>()) {
        let value = f32::from_bits(bits);
        if !value.is_nan() {
            prop_assert_eq!(f32_to_bf16(value), bf16::from_f32(value).to_bits());
            prop_assert_eq!(f32_to_f16(value), f16::from_f32(value).to_bits());
        }
        BF16.check_f32(value);
        F16.check_f32(value);
    }

    #[test]
    fn any_f64_narrows_in_one_rounding(value in prop_oneof![any::<u64>().prop_map(f64::from_bits), f64_near_f32()]) {
        BF16.check_f64(value);
        F16.check_f64(value);
    }
}
