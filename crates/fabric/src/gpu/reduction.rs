//! The dtype and operator for which a reducing program is compiled.

use antiphon_device::cuda::Program;
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use super::Source;

/// Reducing vectors of one type, for a family that has a [`Reduction`]; behind [`SLOTS`](super::SLOTS).
pub const REDUCE: Source = Source { name: "reduce.cuh", text: include_str!("reduce.cuh") };

/// The dtype and the operator for which [`REDUCE`] is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    element: Element,
    op: ReduceOp,
    rounds_each: bool,
}

/// An element type that the kernels reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    F32,
    F16,
    BF16,
}

impl Reduction {
    /// Elements of f32, f16 or bf16; none for other types, nor for operators on bits. A result is rounded once.
    #[inline]
    pub const fn new(dtype: DType, op: ReduceOp) -> Option<Self> {
        if op.is_bitwise() {
            return None;
        }
        let element = match dtype {
            DType::F32 => Element::F32,
            DType::F16 => Element::F16,
            DType::BF16 => Element::BF16,
            _ => return None,
        };
        Some(Self { element, op, rounds_each: false })
    }

    /// Whether a sum is rounded after each rank's element, instead of once.
    #[must_use]
    pub const fn round_each(mut self, rounds_each: bool) -> Self {
        self.rounds_each = rounds_each;
        self
    }

    /// Adds the macros of reduce.cuh.
    pub fn define(self, program: Program) -> Program {
        // The type's name in the prelude, and a word of its canonical NaNs.
        let (element, nan_pair) = match self.element {
            Element::F32 => ("float", "0x7FC00000u"),
            Element::F16 => ("f16", "0x7E007E00u"),
            Element::BF16 => ("bf16", "0x7FC07FC0u"),
        };
        let operator = match self.op {
            ReduceOp::Sum | ReduceOp::Avg => "sum_of",
            ReduceOp::Prod => "prod_of",
            ReduceOp::Min => "min_of",
            ReduceOp::Max => "max_of",
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => unreachable!("refused by `new`"),
        };
        program
            .define("ELEMENT", element)
            .define("NAN_PAIR", nan_pair)
            .define("OPERATOR", operator)
            .define("AVERAGE", u8::from(self.op == ReduceOp::Avg))
            .define("ROUND_EACH", u8::from(self.rounds_each))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_types_are_refused() {
        let reduced = DType::ALL.iter().filter(|&&dtype| Reduction::new(dtype, ReduceOp::Sum).is_some());
        let mut reduced: Vec<_> = reduced.map(ToString::to_string).collect();
        reduced.sort();
        assert_eq!(reduced, ["bf16", "f16", "f32"]);
        assert!(Reduction::new(DType::F32, ReduceOp::Bor).is_none());
    }
}
