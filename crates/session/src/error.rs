//! Why a call of a session was refused or failed.

use antiphon_collectives::CollectiveError;
use antiphon_device::cuda::CudaError;
use antiphon_executor::ExecutorError;
use antiphon_fabric::FabricError;
use antiphon_moe::MoeError;

/// Why a call of a session was refused or failed: the session's own reasons, and those of what it runs.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Something between the ranks, or an argument that makes no sense.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// What a collective says.
    #[error(transparent)]
    Collective(Box<CollectiveError>),
    /// What a mixture of experts says.
    #[error(transparent)]
    Moe(Box<MoeError>),
    /// What a plan says.
    #[error(transparent)]
    Plan(Box<ExecutorError>),
    /// The first call of its kind on a GPU, into a stream that is being captured. Nothing has happened.
    #[error(
        "the first {calls} of a communicator on a GPU sets up memory and kernels, and this stream is being captured: make one \
         before the capture, or call Session::prepare for collectives, with the dtypes and operators that the capture will use"
    )]
    Captured {
        /// What the calls are named.
        calls: &'static str,
    },
    /// The session was closed, perhaps while the call was under way.
    #[error("the communicator was closed meanwhile")]
    Closed,
    /// The plan was closed.
    #[error("the plan is closed")]
    PlanClosed,
    /// The collection of plans was closed.
    #[error("the collection is closed")]
    CollectionClosed,
    /// The slots were closed, or their session.
    #[error("the slots or their communicator is closed")]
    SlotsClosed,
}

impl From<CudaError> for SessionError {
    fn from(error: CudaError) -> Self {
        Self::Fabric(error.into())
    }
}

impl From<CollectiveError> for SessionError {
    fn from(error: CollectiveError) -> Self {
        Self::Collective(Box::new(error))
    }
}

impl From<MoeError> for SessionError {
    fn from(error: MoeError) -> Self {
        Self::Moe(Box::new(error))
    }
}

impl From<ExecutorError> for SessionError {
    fn from(error: ExecutorError) -> Self {
        Self::Plan(Box::new(error))
    }
}

/// The result of a call of a session.
pub type Result<T = (), E = SessionError> = std::result::Result<T, E>;
