//! Filling in sizes that were left open.

use crate::error::{Product, TopologyError};

/// A size by name, with its value if it was given.
pub(crate) type Part = (&'static str, Option<usize>);

/// Splits `whole` into `first` × `second`.
///
/// What is left open follows from the rest; with both open, `first` takes everything and `second` is 1. Each
/// of the layouts has such pairs (tensor and expert, tensor and data, ...), and they all follow this rule.
pub(crate) fn split(whole: Product, first: Part, second: Part) -> Result<(usize, usize), TopologyError> {
    split_beside(whole, first, second, None)
}

/// As [`split`], into `first` × `second` × `fixed`, where `fixed` is already known.
pub(crate) fn split_beside(
    whole: Product,
    first: Part,
    second: Part,
    fixed: Option<(&'static str, usize)>,
) -> Result<(usize, usize), TopologyError> {
    let fixed_part = fixed.map(|(name, size)| (name, Some(size)));
    for (name, size) in [first, second].into_iter().chain(fixed_part) {
        if let Some(size) = size {
            nonzero(name, size)?;
        }
    }
    let rest = Product::of(Vec::from_iter(fixed));
    match (first.1, second.1) {
        (None, None) => Ok((divide(whole, rest)?, 1)),
        (Some(a), None) => Ok((a, divide(whole, rest.and(first.0, a))?)),
        (None, Some(b)) => Ok((divide(whole, rest.and(second.0, b))?, b)),
        (Some(a), Some(b)) => {
            same(rest.and(second.0, b).and(first.0, a), whole)?;
            Ok((a, b))
        }
    }
}

/// Fails unless both products have one value.
pub(crate) fn same(found: Product, expected: Product) -> Result<(), TopologyError> {
    if found.value() == expected.value() { Ok(()) } else { Err(TopologyError::Mismatch { found, expected }) }
}

/// Fails if a size is zero.
pub(crate) fn nonzero(name: &'static str, size: usize) -> Result<(), TopologyError> {
    if size == 0 { Err(TopologyError::ZeroSize { name }) } else { Ok(()) }
}

/// `whole / divisor`, which must be a whole number that fits.
pub(crate) fn divide(whole: Product, divisor: Product) -> Result<usize, TopologyError> {
    let (value, by) = (whole.value(), divisor.value());
    match usize::try_from(value / by) {
        Ok(quotient) if value.is_multiple_of(by) => Ok(quotient),
        _ => Err(TopologyError::Indivisible { whole, divisor }),
    }
}
