//! Why a collective was refused or failed.

use antiphon_device::{ReduceOp, cuda::CudaError};
use antiphon_fabric::FabricError;
use antiphon_operation::{Operation, WrongCall, WrongCount};
use antiphon_tensor::{DType, Device, TensorError};

/// Why a collective was refused or failed. Everything but [`Fabric`](Self::Fabric) and
/// [`SplitsDisagree`](Self::SplitsDisagree) is found before this rank does anything; the communicator stays usable.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// Something between the ranks: a lost peer, a timeout, ranks that disagree.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A tensor that cannot be used: strided, for one.
    #[error("{operation}: {which}: {source}")]
    Tensor {
        /// The operation.
        operation: &'static str,
        /// Which tensor.
        which: &'static str,
        /// What is wrong with it.
        source: TensorError,
    },
    /// Input and output hold different kinds of elements.
    #[error("{operation}: the input is {input}, the output is {output}")]
    DTypes {
        /// The operation.
        operation: &'static str,
        /// The dtype of the input.
        input: DType,
        /// The dtype of the output.
        output: DType,
    },
    /// A tensor has the wrong number of elements.
    #[error("{operation}: the {which} has {actual} elements, expected {expected} ({rule})")]
    Count {
        /// The operation.
        operation: &'static str,
        /// Which tensor.
        which: &'static str,
        /// How many it has.
        actual: usize,
        /// How many it should have.
        expected: usize,
        /// The rule with its numbers.
        rule: String,
    },
    /// An argument is not what the operation needs.
    #[error("{operation}: the {which} must be {expected}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// Which argument.
        which: &'static str,
        /// The requirement, and the actual argument.
        expected: String,
    },
    /// A tensor is in memory that this backend does not serve.
    #[error("{operation}: the {which} is on {device}, these collectives serve {serves}")]
    Device {
        /// The operation.
        operation: &'static str,
        /// Which tensor.
        which: &'static str,
        /// Where it is.
        device: Device,
        /// Where it should be.
        serves: Device,
    },
    /// There is no such arithmetic.
    #[error("{operation}: the dtype {dtype} cannot be reduced")]
    NotNumeric {
        /// The operation.
        operation: &'static str,
        /// The dtype.
        dtype: DType,
    },
    /// The operator combines bits, and the elements are not integers.
    #[error("{operation}: {op} combines the bits of integers, and not of {dtype}")]
    NotBits {
        /// The operation.
        operation: &'static str,
        /// The dtype.
        dtype: DType,
        /// The operator.
        op: ReduceOp,
    },
    /// A rank lacks a tensor: the input of a root that gives, for one.
    #[error("{operation}: rank {rank} must pass an {which}")]
    Missing {
        /// The operation.
        operation: &'static str,
        /// Which tensor is missing.
        which: &'static str,
        /// The rank.
        rank: usize,
    },
    /// Counts are not one per rank.
    #[error("{operation}: {actual} {which} for {world_size} ranks")]
    Counts {
        /// The operation.
        operation: &'static str,
        /// Which list.
        which: &'static str,
        /// How long it is.
        actual: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// The tuning table could not be measured or kept.
    #[error(transparent)]
    Tuning(std::sync::Arc<antiphon_tuning::TuningError>),
    /// What one rank sends is not what another expects.
    #[error("all_to_all_v: rank {from} sends {sent} elements to rank {to}, which expects {expected}")]
    SplitsDisagree {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The number of elements that the sender sends.
        sent: u64,
        /// The number of elements that the receiver expects.
        expected: u64,
    },
}

impl CollectiveError {
    /// The error for an operation whose input and output must not overlap.
    pub(crate) fn not_in_place(operation: Operation) -> Self {
        let expected = "apart from the input: this does not work in place".to_owned();
        Self::Refused { operation: operation.name(), which: "output", expected }
    }
}

impl From<WrongCount> for CollectiveError {
    fn from(WrongCount { operation, which, actual, expected, rule }: WrongCount) -> Self {
        Self::Count { operation: operation.name(), which, actual, expected, rule }
    }
}

impl From<WrongCall> for CollectiveError {
    fn from(wrong: WrongCall) -> Self {
        match wrong {
            WrongCall::Root { .. } => FabricError::InvalidArgument(wrong.to_string()).into(),
            WrongCall::Missing { operation, which, rank } => {
                Self::Missing { operation: operation.name(), which, rank }
            }
            WrongCall::Counts { operation, which, actual, world_size } => {
                Self::Counts { operation: operation.name(), which, actual, world_size }
            }
            WrongCall::Count(wrong) => wrong.into(),
        }
    }
}

impl From<CudaError> for CollectiveError {
    fn from(error: CudaError) -> Self {
        FabricError::from(error).into()
    }
}

/// The result of a collective.
pub type Result<T, E = CollectiveError> = std::result::Result<T, E>;
