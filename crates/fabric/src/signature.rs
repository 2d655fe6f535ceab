//! The description of a rank's call, by which ranks notice that they disagree.

use std::fmt;

use antiphon_operation::{Count, Operation, ReduceOp};
use antiphon_tensor::DType;

/// An operation with everything that must be equal on all ranks. It travels in two words beside the data, and each
/// rank compares its peers' with its own before it touches their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signature {
    /// The operation.
    pub operation: Operation,
    /// To what kind of elements.
    pub dtype: Option<DType>,
    /// With which operator.
    pub reduce: Option<ReduceOp>,
    /// The number of the algorithm, in the operation's row.
    pub algorithm: u8,
    /// What else the operation has ranks agree on, the root for one; the operation's [`Detail`](antiphon_operation::Detail)
    /// says how it reads. 0 where there is nothing.
    pub detail: u32,
    /// How many elements (bytes, where there is no dtype).
    pub count: u64,
}

impl Signature {
    /// The operation with nothing else to agree on.
    pub fn new(operation: Operation) -> Self {
        Self { operation, dtype: None, reduce: None, algorithm: 0, detail: 0, count: 0 }
    }

    /// The two words. Zero stands for "none", and no valid signature is zero, nor all ones in the first word.
    #[inline]
    pub fn to_words(&self) -> [u64; 2] {
        let dtype = self.dtype.map_or(0, |d| u64::from(d.code()) + 1);
        let reduce = self.reduce.map_or(0, |r| u64::from(r.code()));
        let small = [u64::from(self.operation.code()), dtype, reduce, u64::from(self.algorithm)];
        let detail = u64::from(self.detail);
        [small[0] | small[1] << 8 | small[2] << 16 | small[3] << 24 | detail << 32, self.count]
    }

    /// The signature in a peer's words. The words come from memory that a broken process may have overwritten.
    pub fn from_words([word, count]: [u64; 2]) -> Option<Self> {
        let byte = |shift: u32| (word >> shift) as u8;
        let optional = |code: u8| code.checked_sub(1);
        Some(Self {
            operation: Operation::from_code(byte(0))?,
            dtype: optional(byte(8)).and_then(DType::from_code),
            reduce: ReduceOp::from_code(byte(16)),
            algorithm: byte(24),
            detail: (word >> 32) as u32,
            count,
        })
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.operation.row();
        f.write_str(row.name)?;
        match (row.count, self.dtype) {
            (Count::Nothing, _) => return Ok(()),
            (Count::Placed, dtype) => {
                let (elements, places) = Count::of_placed(self.count);
                write!(f, "({elements}")?;
                dtype.map_or(Ok(()), |dtype| write!(f, " × {dtype}"))?;
                if places != 0 {
                    write!(f, ", places {places:06x}")?;
                }
            }
            (Count::Size, Some(dtype)) => write!(f, "({} × {dtype}", self.count)?,
            (Count::Size, None) => write!(f, "({} bytes", self.count)?,
            (Count::Offset, _) => write!(f, "(offset {}", self.count)?,
            (Count::BoundedRows, dtype) => {
                write!(f, "(up to {} rows of {}", self.count >> 32, self.count as u32)?;
                if let Some(dtype) = dtype {
                    write!(f, " × {dtype}")?;
                }
            }
            (Count::Rows, dtype) => {
                write!(f, "(rows of {}", self.count as u32)?;
                if let Some(dtype) = dtype {
                    write!(f, " × {dtype}")?;
                }
                if self.count >> 32 != 0 {
                    write!(f, " as call {} routed them", self.count >> 32)?;
                }
            }
        }
        if let Some(reduce) = self.reduce {
            write!(f, ", {reduce}")?;
        }
        if let Some(detail) = row.detail.text(self.detail) {
            write!(f, ", {detail}")?;
        }
        match (row.algorithm(self.algorithm), self.algorithm) {
            (Some(name), _) => write!(f, ", {name}")?,
            (None, 0) => {}
            (None, number) => write!(f, ", algorithm {number}")?,
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon_operation::Detail;
    use proptest::prelude::*;

    #[test]
    fn a_signature_reads_like_the_call() {
        let call = Signature {
            dtype: Some(DType::BF16),
            reduce: Some(ReduceOp::Sum),
            count: 7168,
            ..Signature::new(Operation::AllReduce)
        };
        assert_eq!(call.to_string(), "all_reduce(7168 × bf16, sum)");
        assert_eq!(Signature::new(Operation::Barrier).to_string(), "barrier");
        let two_shot = Signature { algorithm: 2, ..call };
        assert_eq!(two_shot.to_string(), "all_reduce(7168 × bf16, sum, two-shot)");
        let unknown = Signature { algorithm: 9, ..call };
        assert_eq!(unknown.to_string(), "all_reduce(7168 × bf16, sum, algorithm 9)");
        let placed = Signature { algorithm: 3, detail: 0xab, ..call };
        assert_eq!(placed.to_string(), "all_reduce(7168 × bf16, sum, place 000000ab, one-shot, registered)");
        let fused = Signature { operation: Operation::FusedAllReduce, detail: 7168, algorithm: 0x11, ..call };
        assert_eq!(fused.to_string(), "all_reduce_fused(7168 × bf16, sum, rows of 7168, one-shot, rounded)");
        let plan = Signature { operation: Operation::ExecutePlan, reduce: None, detail: 0x1f00_aa31, ..call };
        assert_eq!(plan.to_string(), "execute(7168 × bf16, plan 1f00aa31)");
        let placed = Signature { count: Count::placed(7168, Some(0x00aa_3117)), algorithm: 2, ..plan };
        let expected = "execute(7168 × bf16, places 00aa31, plan 1f00aa31, registered)";
        assert_eq!(placed.to_string(), expected);
        let memory = |operation| Signature { count: 4096, ..Signature::new(operation) }.to_string();
        assert_eq!(memory(Operation::Allocate), "symmetric(4096 bytes)");
        assert_eq!(memory(Operation::Free), "free(offset 4096)");
        let rows =
            Signature { count: Count::rows(7168, 0), detail: Detail::experts(256, 8), reduce: None, ..call };
        let dispatch = Signature { operation: Operation::Dispatch, algorithm: 1, ..rows };
        assert_eq!(dispatch.to_string(), "dispatch(rows of 7168 × bf16, 256 experts, top-8, blocking)");
        let bounded = Signature {
            operation: Operation::DispatchToSlots,
            count: Count::bounded_rows(7168, 128),
            algorithm: 2,
            ..rows
        };
        let expected = "dispatch_to_slots(up to 128 rows of 7168 × bf16, 256 experts, top-8, fp8)";
        assert_eq!(bounded.to_string(), expected);
        let combine = Signature { operation: Operation::Combine, count: Count::rows(7168, 3), ..rows };
        let expected = "combine(rows of 7168 × bf16 as call 3 routed them, 256 experts, top-8)";
        assert_eq!(combine.to_string(), expected);
    }

    #[test]
    fn a_root_reads_like_any_other_rank() {
        let call = Signature { dtype: Some(DType::U8), count: 5, ..Signature::new(Operation::Broadcast) };
        assert_eq!(call.to_string(), "broadcast(5 × u8, root 0)");
        assert_eq!(Signature { detail: 3, ..call }.to_string(), "broadcast(5 × u8, root 3)");
    }

    proptest! {
        #[test]
        fn signatures_survive_the_two_words(
            operation in proptest::sample::select(Operation::ALL),
            dtype in proptest::option::of(proptest::sample::select(DType::ALL)),
            reduce in proptest::option::of(proptest::sample::select(&ReduceOp::ALL[..])),
            algorithm: u8,
            detail: u32,
            count: u64,
        ) {
            let signature = Signature { operation, dtype, reduce, algorithm, detail, count };
            prop_assert_eq!(Signature::from_words(signature.to_words()), Some(signature));
        }

        #[test]
        fn scribbled_words_do_not_panic(word: u64, count: u64) {
            if let Some(signature) = Signature::from_words([word, count]) {
                let _ = signature.to_string();
            }
        }
    }
}
