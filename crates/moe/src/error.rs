//! Why a call was refused or failed.

use antiphon_device::cuda::CudaError;
use antiphon_fabric::FabricError;
use antiphon_tensor::{DType, Device, TensorError};

/// Why a call was refused or failed. Everything but [`Fabric`](Self::Fabric) and [`Instances`](Self::Instances) is found
/// before this rank does anything; the communicator stays usable after all but `Fabric`.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// Something between the ranks: a lost peer, a timeout, ranks that disagree.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A view that cannot be made.
    #[error(transparent)]
    View(#[from] TensorError),
    /// A tensor that cannot be used: strided, for one.
    #[error("{call}: {which}: {source}")]
    Tensor {
        /// The call.
        call: &'static str,
        /// Which tensor.
        which: &'static str,
        /// What is wrong with it.
        source: TensorError,
    },
    /// A tensor is in memory that this backend does not serve.
    #[error("{call}: the {which} is on {device}, this backend serves {serves}")]
    Device {
        /// The call.
        call: &'static str,
        /// Which tensor.
        which: &'static str,
        /// Where it is.
        device: Device,
        /// Where it should be.
        serves: Device,
    },
    /// A tensor has the wrong kind of elements.
    #[error("{call}: the {which} must be {expected}, not {actual}")]
    DType {
        /// The call.
        call: &'static str,
        /// Which tensor.
        which: &'static str,
        /// What its elements are.
        actual: DType,
        /// What they may be.
        expected: String,
    },
    /// A tensor has the wrong shape.
    #[error("{call}: the {which} must be of shape {expected}, not {actual:?}")]
    Shape {
        /// The call.
        call: &'static str,
        /// Which tensor.
        which: &'static str,
        /// Its shape.
        actual: Vec<usize>,
        /// The shape it should have.
        expected: String,
    },
    /// A number that is too large, or does not suit the others.
    #[error("{call}: {problem}")]
    Refused {
        /// The call.
        call: &'static str,
        /// What is wrong, with the numbers.
        problem: String,
    },
    /// A call that waits, in a stream that is being captured.
    #[error("{call}: {problem}")]
    Captured {
        /// The call.
        call: &'static str,
        /// What it would wait for, and what may be captured instead.
        problem: &'static str,
    },
    /// Routes of another instance, or ones along which no rows were dispatched yet.
    #[error("{call}: the routes are {problem}")]
    Routes {
        /// The call.
        call: &'static str,
        /// What is wrong with them.
        problem: &'static str,
    },
    /// The second half of a call of another instance, or one that has been received.
    #[error("{call}: the second half is {problem}")]
    Half {
        /// The call.
        call: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A call while an earlier one has sent and not received.
    #[error("{sent} has sent and not received yet: receive first (call its hook)")]
    Unreceived {
        /// The earlier call.
        sent: &'static str,
    },
    /// The region cannot hold what one step of the call needs.
    #[error(
        "{call}: a row takes {needed} bytes, half a region of {region_bytes} bytes has {half} (raise region_bytes)"
    )]
    Region {
        /// The call.
        call: &'static str,
        /// Bytes of a row with its scales and choices.
        needed: usize,
        /// Bytes of half a region.
        half: usize,
        /// Bytes of a region.
        region_bytes: usize,
    },
    /// Ranks called the same on different instances.
    #[error(
        "{call}: rank {rank} called it on the instance number {number} of the communicator, but rank {peer} on number {theirs}"
    )]
    Instances {
        /// The call.
        call: &'static str,
        /// The first rank.
        rank: usize,
        /// Its instance.
        number: u32,
        /// A rank with another one.
        peer: usize,
        /// That one's.
        theirs: u32,
    },
}

/// The result of a call.
pub type Result<T, E = MoeError> = std::result::Result<T, E>;

impl From<CudaError> for MoeError {
    fn from(error: CudaError) -> Self {
        FabricError::from(error).into()
    }
}

/// A [`MoeError::Refused`].
pub(crate) fn refused(call: &'static str, problem: String) -> MoeError {
    MoeError::Refused { call, problem }
}
