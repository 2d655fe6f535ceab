//! LogFMT, the lossy code of 10 bits in which a combine may send rows.
//!
//! The 128 elements of a *block* share a scale. An element becomes its sign and a code of 9 bits. Code 0 is zero; codes 1 to 511
//! are magnitudes whose logarithms are `step` apart, from the smallest magnitude of the block, or 2⁻³² of the largest if that is
//! more, to the largest. An element becomes the code whose value is nearest. Below code 1 the value that would come next belongs to
//! code 0.
//!
//! A block is coded if its magnitudes are below 1 and differ, and the largest is at least 2⁻⁹³. Other blocks, among them all with a
//! NaN or an infinity, stay bf16, and keep their numbers.
//!
//! # Error
//!
//! Of an element `x` of a coded block, with `least` the value of code 1: if `|x| ≥ least`, what is decoded differs from `x` by at
//! most `|x| · (tanh(step · ln 2 / 2) + 2⁻¹⁶)`, where `step ≤ 32 / 510`, so by less than 2.2 %. Else by at most `least ≤ 2⁻³² · (1
//! + 2⁻¹⁶)` of the largest magnitude. Signs of elements that become zero are lost, which no sum notices.
//!
//! # Differences from DeepEP
//!
//! Logarithms and powers are polynomials in f32 whose operations are rounded one by one, so that a host and a GPU compute the same
//! bits; DeepEP uses the GPU's approximations. Exponents count from that of the largest magnitude, which keeps the digits that a
//! difference of large logarithms would lose. Each block is coded or not by itself; DeepEP codes 512 or 1024 elements if all their
//! blocks can be. DeepEP makes a NaN among magnitudes below 1 a zero, and codes blocks of tiny magnitudes too.
//!
//! `logfmt.cuh` has the same operations in the same order.

use antiphon_tensor::bf16;

/// The elements that share a scale.
pub const BLOCK: usize = 128;

/// The largest code.
const LARGEST: u16 = 511;
/// The bit of a negative element.
const SIGN: u16 = LARGEST + 1;
/// The logarithm of the largest ratio of magnitudes that have codes of their own.
const RANGE: f32 = 32.0;

/// The scale of a coded block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// The exponent field of the largest magnitude; logarithms count from it.
    exponent: u32,
    /// The logarithm of code 1.
    least: f32,
    /// The difference of the logarithms of neighbouring codes.
    step: f32,
}

/// `log2(1 + t)` for `0 ≤ t < 1`, off by at most 2.2e-6; 0 of 0.
fn log2_1p(t: f32) -> f32 {
    let mut sum = -0.026_457_44_f32;
    for term in [0.123_451_464_f32, -0.279_538_12, 0.458_270_8, -0.718_281_9, 1.442_553_2] {
        sum = sum * t + term;
    }
    sum * t
}

/// `2^t` for `0 ≤ t ≤ 1`, off by at most a 3e-6th; 1 of 0.
fn exp2_fraction(t: f32) -> f32 {
    let mut sum = 0.013_426_685_f32;
    for term in [0.052_242_473_f32, 0.241_280_2, 0.693_044_84] {
        sum = sum * t + term;
    }
    sum * t + 1.0
}

/// The bits of a magnitude.
fn magnitude(x: bf16) -> u32 {
    u32::from(x.to_bits()) & 0x7FFF
}

/// The logarithm of a magnitude, from an exponent field on. Of a zero or a subnormal number it is too large, and yet below every code.
fn log2_from(exponent: u32, magnitude: u32) -> f32 {
    let whole = (magnitude >> 7) as i32 - exponent as i32;
    whole as f32 + log2_1p((magnitude & 127) as f32 * (1.0 / 128.0))
}

impl Scale {
    /// The scale of a block; none if it stays bf16.
    pub fn of(block: &[bf16]) -> Option<Self> {
        let magnitudes = || block.iter().map(|&x| magnitude(x));
        let (largest, smallest) = (magnitudes().max()?, magnitudes().min()?);
        let is_served = (34 << 7..127 << 7).contains(&largest);
        if !is_served || smallest == largest {
            return None;
        }
        let exponent = largest >> 7;
        let most = log2_from(exponent, largest);
        let least = log2_from(exponent, smallest).max(most - RANGE);
        Some(Self { exponent, least, step: (most - least) * (1.0 / 510.0) })
    }

    /// The code of an element of the block, with its sign.
    pub fn encode(&self, x: bf16) -> u16 {
        let inverse = 1.0 / self.step;
        // Half-way between two codes in numbers, not in logarithms: log2((1 + 2^step) / 2) is step / 2 + step² · ln 2 / 8, but for 3e-8.
        let rounding = 1.5 - self.step * (std::f32::consts::LN_2 / 8.0);
        let at = (log2_from(self.exponent, magnitude(x)) - self.least) * inverse + rounding;
        let code = at.clamp(0.0, f32::from(LARGEST)) as u16;
        if code != 0 && x.to_bits() >> 15 != 0 { code | SIGN } else { code }
    }

    /// The value of a code.
    pub fn decode(&self, code: u16) -> f32 {
        let number = code & LARGEST;
        if number == 0 {
            return 0.0;
        }
        let log = self.least + f32::from(number - 1) * self.step;
        let whole = log.floor();
        let exponent = whole as i32 + self.exponent as i32 - 127;
        let bits = exp2_fraction(log - whole).to_bits().wrapping_add((exponent as u32) << 23);
        f32::from_bits(bits | u32::from(code & SIGN) << 22)
    }

    /// The value of code 1.
    pub fn least(&self) -> f32 {
        self.decode(1)
    }

    /// The difference of the binary logarithms of neighbouring codes.
    pub fn step(&self) -> f32 {
        self.step
    }
}

/// What arrives of a row, of whole blocks.
///
/// # Panics
/// If the lengths differ, or are no multiple of [`BLOCK`].
pub fn arrive(row: &[bf16], to: &mut [f32]) {
    assert!(
        row.len() == to.len() && row.len().is_multiple_of(BLOCK),
        "{} and {} elements",
        row.len(),
        to.len()
    );
    for (block, to) in row.chunks_exact(BLOCK).zip(to.chunks_exact_mut(BLOCK)) {
        let scale = Scale::of(block);
        for (to, &x) in to.iter_mut().zip(block) {
            *to = scale.map_or_else(|| x.to_f32(), |scale| scale.decode(scale.encode(x)));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::slots::reference;

    fn arrived(row: &[bf16]) -> Vec<f32> {
        let mut to = vec![0.0; row.len()];
        arrive(row, &mut to);
        to
    }

    /// Compares a block with its definition in f64.
    fn check(block: &[bf16]) {
        let x: Vec<f32> = block.iter().map(|x| x.to_f32()).collect();
        let got = arrived(block);
        let Some((least, step)) = reference::logfmt(&x) else {
            assert!(Scale::of(block).is_none());
            for (got, x) in got.iter().zip(&x) {
                assert!(got.to_bits() == x.to_bits() || got.is_nan() && x.is_nan(), "{got} for {x}");
            }
            return;
        };
        let relative = (step * std::f64::consts::LN_2 / 2.0).tanh() + 2f64.powi(-16);
        assert!(relative < 0.022);
        for (&got, &x) in got.iter().zip(&x) {
            let (got, x) = (f64::from(got), f64::from(x));
            let most = if x.abs() >= least { x.abs() * relative } else { least * (1.0 + 2f64.powi(-16)) };
            assert!((got - x).abs() <= most, "{got} for {x}, with codes from {least} by {step}");
            assert!(got == 0.0 || got.signum() == x.signum(), "{got} for {x}");
        }
    }

    /// A block of these numbers, and zeros.
    fn block_of(numbers: &[f32]) -> Vec<bf16> {
        let mut block = vec![bf16::from_f32(0.0); BLOCK];
        for (to, &x) in block.iter_mut().zip(numbers) {
            *to = bf16::from_f32(x);
        }
        block
    }

    #[test]
    fn special_blocks() {
        let tiny = 2f32.powi(-93);
        for numbers in [
            &[] as &[f32],
            &[0.5],
            &[-0.0, 0.5, -0.5, 0.25],
            &[0.5, f32::NAN],
            &[0.5, f32::INFINITY],
            &[0.5, f32::NEG_INFINITY],
            &[0.5, 1.0],
            &[0.5, 0.998],
            &[0.5, 1e-40, -1e-40, 1e-38],
            &[tiny, -tiny / 2.0, 1e-40],
            &[tiny / 1.01, 1e-39],
            &[0.996, 2f32.powi(-32), 2f32.powi(-33), -2f32.powi(-34)],
        ] {
            check(&block_of(numbers));
        }
        for (first, others) in
            [(0.5f32, 0.5f32), (0.5, 0.502), (0.996, 0.992), (-0.5, 0.5), (tiny, tiny * 1.01)]
        {
            let mut block = vec![bf16::from_f32(others); BLOCK];
            block[0] = bf16::from_f32(first);
            check(&block);
        }
    }

    /// What would be sent of a negative zero is a zero, so that a word of codes is never that of an empty place.
    #[test]
    fn no_code_is_a_negative_zero() {
        let block = block_of(&[0.75, -0.0, -1e-30, -0.5]);
        let scale = Scale::of(&block).unwrap();
        let codes: Vec<u16> = block.iter().map(|&x| scale.encode(x)).collect();
        assert!(codes.iter().all(|&code| code != SIGN && code < 2 * SIGN));
        assert_eq!(codes[..3], [LARGEST, 0, 0]);
    }

    #[test]
    fn the_ends_have_the_first_and_the_last_code() {
        for (least, most) in [(0.5, 0.75), (0.001, 0.9), (0.5, 0.502)] {
            let mut block = vec![bf16::from_f32(least); BLOCK];
            block[7] = bf16::from_f32(-most);
            let scale = Scale::of(&block).unwrap();
            assert_eq!(scale.encode(block[0]), 1);
            assert_eq!(scale.encode(block[7]), LARGEST | SIGN);
        }
    }

    proptest! {
        /// Blocks of every spread: the exponents are in a window below 1.
        #[test]
        fn what_arrives_is_within_the_bound(
            top in 30u16..128,
            spread in 0u16..40,
            bits in prop::collection::vec(any::<u16>(), BLOCK),
        ) {
            let block: Vec<bf16> = bits
                .iter()
                .map(|bits| {
                    let exponent = top.saturating_sub(bits >> 7 & 0xFF).max(top.saturating_sub(spread));
                    bf16::from_bits(bits & 0x807F | exponent << 7)
                })
                .collect();
            check(&block);
        }

        #[test]
        fn what_arrives_of_any_bits_is_within_the_bound(bits in prop::collection::vec(any::<u16>(), BLOCK)) {
            let block: Vec<bf16> = bits.into_iter().map(bf16::from_bits).collect();
            check(&block);
        }
    }
}
