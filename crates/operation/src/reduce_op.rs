//! The reduction operators.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// How contributions are combined, element by element, in ascending rank order.
///
/// Floating point: [`Min`](Self::Min) and [`Max`](Self::Max) are IEEE 754-2019 `minimum` and `maximum` (a NaN in
/// any contribution gives NaN, and −0 < +0); [`Avg`](Self::Avg) is the sum divided by the number of contributions
/// before the one rounding. Integers: sums and products wrap in i64 and are then truncated to the type;
/// `Avg` divides the i64 sum and truncates towards zero, as NCCL's does. The [bitwise](Self::is_bitwise) operators take
/// integers alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum.
    Sum = 1,
    /// The product.
    Prod = 2,
    /// The least; NaN if any is NaN.
    Min = 3,
    /// The greatest; NaN if any is NaN.
    Max = 4,
    /// The arithmetic mean.
    Avg = 5,
    /// The bits that all have.
    Band = 6,
    /// The bits that any has.
    Bor = 7,
    /// The bits that an odd number of contributions has.
    Bxor = 8,
}

/// A text that names no [`ReduceOp`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown reduction {0:?}: known are sum, prod, min, max, avg (or mean), band, bor, bxor")]
pub struct UnknownReduceOp(String);

impl ReduceOp {
    /// Every operator.
    pub const ALL: [Self; 8] = {
        let [sum, prod, min, max, avg] = Self::ARITHMETIC;
        [sum, prod, min, max, avg, Self::Band, Self::Bor, Self::Bxor]
    };
    /// The operators that every dtype with arithmetic has.
    pub const ARITHMETIC: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// Whether it combines the bits of integers, and not their values.
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::Band | Self::Bor | Self::Bxor)
    }

    /// The lower-case name, as the command line and Python take it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::Band => "band",
            Self::Bor => "bor",
            Self::Bxor => "bxor",
        }
    }

    /// The stable number that stands for the operator in shared memory.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The operator of a [`code`](Self::code).
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownReduceOp;

    fn from_str(text: &str) -> Result<Self, UnknownReduceOp> {
        let lower = text.to_ascii_lowercase();
        Self::ALL
            .into_iter()
            .find(|op| op.name() == lower || (lower == "mean" && *op == Self::Avg))
            .ok_or_else(|| UnknownReduceOp(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_json_say_which_operator_it_is() {
        for op in ReduceOp::ALL {
            assert_eq!(op.name().parse(), Ok(op));
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
            assert_eq!(serde_json::to_string(&op).unwrap(), format!("{:?}", op.name()));
        }
        assert_eq!(("MEAN".parse(), ReduceOp::from_code(0)), (Ok(ReduceOp::Avg), None));
        let text = "median".parse::<ReduceOp>().unwrap_err().to_string();
        assert_eq!(
            text,
            "unknown reduction \"median\": known are sum, prod, min, max, avg (or mean), band, bor, bxor"
        );
    }
}
