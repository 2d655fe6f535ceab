//! Message sizes as a user writes them: `4`, `1K..64M`, `1K,4K,1MiB`, `1K..64M:4`.

use std::fmt;
use std::str::FromStr;

/// The factor between the sizes of a range that names none.
const STEP: u64 = 2;

/// Sizes in bytes, in the order in which they were written and without repeats.
///
/// A size is a number with an optional unit: `K`, `M`, `G`, `T` or `KiB`, `MiB`, `GiB`, `TiB` in powers of
/// 1024, or `B`; case does not matter. `A..B` starts at A and doubles up to B, and reaches B only if
/// doubling does; `A..B:F` multiplies by F instead. Commas join sizes and ranges.
///
/// ```
/// use antiphon_cli::sizes::Sizes;
///
/// let sizes: Sizes = "4,1K..8K,1M..64M:8".parse()?;
/// assert_eq!(sizes.0, [4, 1024, 2048, 4096, 8192, 1 << 20, 8 << 20, 64 << 20]);
/// # Ok::<(), antiphon_cli::sizes::SizesError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

impl FromStr for Sizes {
    type Err = SizesError;

    fn from_str(text: &str) -> Result<Self, SizesError> {
        parse(text).map(Self)
    }
}

/// Why a text names no sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizesError {
    /// Not a number with a unit.
    #[error("{text:?} is not a size: write a whole number and B, K, M, G or T (powers of 1024), such as 64K")]
    NotASize {
        /// The part that was not understood.
        text: String,
    },
    /// No message has zero bytes.
    #[error("{text:?}: a size must be at least 1 byte")]
    Zero {
        /// The part with the zero.
        text: String,
    },
    /// More bytes than 64 bits can count.
    #[error("{text:?} is more than 2^64 - 1 bytes")]
    TooLarge {
        /// The part with the number.
        text: String,
    },
    /// The end lies before the start.
    #[error("{text:?}: the range ends below its start ({first} > {last} bytes)")]
    Backwards {
        /// The range.
        text: String,
        /// Its start in bytes.
        first: u64,
        /// Its end in bytes.
        last: u64,
    },
    /// The factor does not lead from one size to a larger one.
    #[error("{text:?}: the step {factor:?} must be a whole number of at least 2")]
    Step {
        /// The range.
        text: String,
        /// The text behind the colon.
        factor: String,
    },
}

/// Reads sizes in bytes; see [`Sizes`] for what may be written.
pub fn parse(text: &str) -> Result<Vec<u64>, SizesError> {
    let mut sizes = Vec::new();
    for part in text.split(',') {
        for size in parse_part(part.trim())? {
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
    }
    Ok(sizes)
}

fn parse_part(text: &str) -> Result<Vec<u64>, SizesError> {
    let Some((first, rest)) = text.split_once("..") else { return Ok(vec![parse_size(text)?]) };
    let (last, factor) = match rest.split_once(':') {
        Some((last, factor)) => (last, parse_factor(text, factor)?),
        None => (rest, STEP),
    };
    let (first, last) = (parse_size(first)?, parse_size(last)?);
    if first > last {
        return Err(SizesError::Backwards { text: text.into(), first, last });
    }
    let sizes = std::iter::successors(Some(first), |size| size.checked_mul(factor));
    Ok(sizes.take_while(|&size| size <= last).collect())
}

fn parse_factor(range: &str, factor: &str) -> Result<u64, SizesError> {
    let parsed = factor.trim().parse().ok().filter(|&factor| factor >= 2);
    parsed.ok_or_else(|| SizesError::Step { text: range.into(), factor: factor.into() })
}

fn parse_size(text: &str) -> Result<u64, SizesError> {
    let trimmed = text.trim();
    let unit_at = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (digits, unit) = trimmed.split_at(unit_at);
    let Some(shift) = shift(unit.trim_start()).filter(|_| !digits.is_empty()) else {
        return Err(SizesError::NotASize { text: text.into() });
    };
    let too_large = || SizesError::TooLarge { text: text.into() };
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err(SizesError::Zero { text: text.into() }),
        Some(bytes) => Ok(bytes),
        None => Err(too_large()),
    }
}

/// The unit as a power of two. `KB` is refused: to some it is 1000 bytes.
fn shift(unit: &str) -> Option<u32> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        "t" | "tib" => Some(40),
        _ => None,
    }
}

/// Shows a number of bytes in the largest unit that it reaches, such as `4 B`, `1 KiB` or `1.5 MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let power = self.0.checked_ilog2().unwrap_or(0) / 10;
        let number = self.0 as f64 / (1u64 << (10 * power)) as f64;
        let unit = UNITS[power as usize];
        if number.fract() == 0.0 { write!(f, "{number} {unit}") } else { write!(f, "{number:.1} {unit}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_forms() {
        assert_eq!(parse("4").unwrap(), [4]);
        assert_eq!(parse("1MiB").unwrap(), [1 << 20]);
        assert_eq!(parse(" 1k , 4 KiB,1M,1g,1T,7B ").unwrap(), [1024, 4096, 1 << 20, 1 << 30, 1 << 40, 7]);
        assert_eq!(parse("4..64").unwrap(), [4, 8, 16, 32, 64]);
        assert_eq!(parse("1K..64M").unwrap().len(), 17);
        assert_eq!(parse("1K..64M:4").unwrap(), (5..=13).map(|power| 1 << (2 * power)).collect::<Vec<u64>>());
        assert_eq!(parse("3..20").unwrap(), [3, 6, 12]);
        assert_eq!(parse("1K..4K,2K,1K").unwrap(), [1024, 2048, 4096]);
        assert_eq!(parse("8..8").unwrap(), [8]);
        assert_eq!(parse("9223372036854775808..18446744073709551615").unwrap(), [1 << 63]);
    }

    #[test]
    fn errors_name_the_text() {
        for (text, named) in [
            ("", r#""" is not a size"#),
            ("1K,,2K", r#""" is not a size"#),
            ("12Q", r#""12Q" is not a size"#),
            ("1KB", r#""1KB" is not a size"#),
            ("-4", r#""-4" is not a size"#),
            ("1.5M", r#""1.5M" is not a size"#),
            ("4..", r#""" is not a size"#),
            ("0..4K", r#""0": a size must be at least 1 byte"#),
            ("64K..4", r#""64K..4": the range ends below its start (65536 > 4 bytes)"#),
            ("4..64:1", r#""4..64:1": the step "1" must"#),
            ("4..64:x", r#""4..64:x": the step "x" must"#),
            ("99999999999T", r#""99999999999T" is more than"#),
            ("99999999999999999999", r#""99999999999999999999" is more than"#),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(named), "{text:?} gave {message}");
        }
    }

    #[test]
    fn bytes_are_shown_in_their_unit() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(
            [shown(0), shown(4), shown(1023), shown(1024), shown(3 << 19), shown(u64::MAX)],
            ["0 B", "4 B", "1023 B", "1 KiB", "1.5 MiB", "16 EiB"]
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9kKmMiBb.:, -]{0,24}") {
            if let Ok(sizes) = parse(&text) {
                prop_assert!(!sizes.is_empty() && !sizes.contains(&0));
            }
        }

        #[test]
        fn a_range_is_geometric(first in 1u64.., span in 0u64.., factor in 2u64..20) {
            let last = first.saturating_add(span);
            let sizes = parse(&format!("{first}..{last}:{factor}")).unwrap();
            prop_assert_eq!(sizes[0], first);
            prop_assert!(sizes.windows(2).all(|pair| pair[1] == pair[0] * factor));
            prop_assert!(sizes.iter().all(|&size| size <= last));
            prop_assert!(sizes.last().unwrap().checked_mul(factor).is_none_or(|next| next > last));
        }

        #[test]
        fn lists_keep_their_order(sizes in prop::collection::vec(1u64.., 1..8)) {
            let text = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            let mut unique = Vec::new();
            for size in sizes {
                if !unique.contains(&size) {
                    unique.push(size);
                }
            }
            prop_assert_eq!(text.parse::<Sizes>().unwrap().0, unique);
        }

        #[test]
        fn units_multiply(number in 1u64..1024, unit in 0usize..5) {
            let name = ["", "K", "m", "GiB", "t"][unit];
            prop_assert_eq!(parse(&format!("{number}{name}")).unwrap(), [number << (10 * unit)]);
        }
    }
}
