//! What a rank says it is doing, so that ranks that disagree find out.

use std::fmt;

use antiphon_device::ReduceOp;
use antiphon_tensor::DType;

/// The operations that ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
#[allow(missing_docs)] // named after what they are
pub enum Operation {
    Barrier = 1,
    ExchangeObjects,
    Allocate,
    Free,
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    Message,
    FusedAllReduce,
    ExecutePlan,
}

impl Operation {
    const ALL: [Self; 15] = [
        Self::Barrier,
        Self::ExchangeObjects,
        Self::Allocate,
        Self::Free,
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::Message,
        Self::FusedAllReduce,
        Self::ExecutePlan,
    ];

    /// The name that callers know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::ExchangeObjects => "exchange_objects",
            Self::Allocate => "create_shared_buffer",
            Self::Free => "free_shared_buffer",
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Message => "send/recv",
            Self::FusedAllReduce => "all_reduce_fused",
            Self::ExecutePlan => "execute",
        }
    }
}

/// An operation with everything that must be equal on all ranks. It travels in two words beside the data, and each
/// rank compares its peers' with its own before it touches their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signature {
    /// What is done.
    pub operation: Operation,
    /// To what kind of elements.
    pub dtype: Option<DType>,
    /// With which operator.
    pub reduce: Option<ReduceOp>,
    /// By which algorithm, numbered by the operation.
    pub algorithm: u8,
    /// From or to which rank; of a fused operation, how many elements a row has; of a plan, the
    /// beginning of its digest; of an all-reduce on registered memory, a digest of where in it.
    pub root: Option<u32>,
    /// How many elements (bytes, where there is no dtype).
    pub count: u64,
}

impl Signature {
    /// The operation with nothing else to agree on.
    pub fn new(operation: Operation) -> Self {
        Self { operation, dtype: None, reduce: None, algorithm: 0, root: None, count: 0 }
    }

    /// The two words. Zero stands for "none", and no valid signature is zero, nor all ones in the first word.
    #[inline]
    pub fn to_words(&self) -> [u64; 2] {
        let dtype = self.dtype.map_or(0, |d| u64::from(d.code()) + 1);
        let reduce = self.reduce.map_or(0, |r| u64::from(r.code()));
        let root = self.root.map_or(0, |r| u64::from(r) + 1);
        let small = [self.operation as u64, dtype, reduce, u64::from(self.algorithm)];
        [small[0] | small[1] << 8 | small[2] << 16 | small[3] << 24 | root << 32, self.count]
    }

    /// What a peer's words say. They come from memory that a broken process may have scribbled on.
    pub fn from_words([word, count]: [u64; 2]) -> Option<Self> {
        let byte = |shift: u32| (word >> shift) as u8;
        let optional = |code: u8| code.checked_sub(1);
        Some(Self {
            operation: Operation::ALL.into_iter().find(|o| *o as u8 == byte(0))?,
            dtype: optional(byte(8)).and_then(DType::from_code),
            reduce: ReduceOp::from_code(byte(16)),
            algorithm: byte(24),
            root: ((word >> 32) as u32).checked_sub(1),
            count,
        })
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.operation.name())?;
        if self.operation == Operation::Barrier {
            return Ok(());
        }
        match self.dtype {
            Some(dtype) => write!(f, "({} × {dtype}", self.count)?,
            None if self.operation == Operation::Free => write!(f, "(offset {}", self.count)?,
            None => write!(f, "({} bytes", self.count)?,
        }
        if let Some(reduce) = self.reduce {
            write!(f, ", {reduce}")?;
        }
        match (self.operation, self.root) {
            (_, None) => {}
            (Operation::FusedAllReduce, Some(hidden)) => write!(f, ", rows of {hidden}")?,
            (Operation::ExecutePlan, Some(digest)) => write!(f, ", plan {digest:08x}")?,
            (Operation::AllReduce, Some(place)) => write!(f, ", place {place:08x}")?,
            (_, Some(root)) => write!(f, ", root {root}")?,
        }
        match (self.operation, self.algorithm) {
            (_, 0) => {}
            (Operation::AllReduce | Operation::FusedAllReduce, 1) => f.write_str(", one-shot")?,
            (Operation::AllReduce | Operation::FusedAllReduce, 2) => f.write_str(", two-shot")?,
            (Operation::AllReduce, 3) => f.write_str(", one-shot, registered")?,
            (Operation::AllReduce, 4) => f.write_str(", two-shot, registered")?,
            (Operation::FusedAllReduce, 0x10) => f.write_str(", rounded")?,
            (Operation::FusedAllReduce, 0x11) => f.write_str(", one-shot, rounded")?,
            (Operation::FusedAllReduce, 0x12) => f.write_str(", two-shot, rounded")?,
            (Operation::ExecutePlan, 1) => f.write_str(", in place")?,
            (Operation::AllToAll, 1) => f.write_str(", uneven")?,
            (_, other) => write!(f, ", algorithm {other}")?,
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    }

    proptest! {
        #[test]
        fn signatures_survive_the_two_words(
            operation in proptest::sample::select(&Operation::ALL[..]),
            dtype in proptest::option::of(proptest::sample::select(DType::ALL)),
            reduce in proptest::option::of(proptest::sample::select(&ReduceOp::ALL[..])),
            algorithm: u8,
            root in proptest::option::of(0..u32::MAX),
            count: u64,
        ) {
            let signature = Signature { operation, dtype, reduce, algorithm, root, count };
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
