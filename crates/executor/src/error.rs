//! Why a plan was not loaded, or its execution failed.

use antiphon_collectives::CollectiveError;
use antiphon_device::cuda::CudaError;
use antiphon_fabric::FabricError;
use antiphon_plan::{Place, PlanError};
use antiphon_tensor::{DType, Device, TensorError};

use crate::Waiting;

/// Why a plan was not loaded, or its execution failed. After [`Stuck`](Self::Stuck) and most of
/// [`Fabric`](Self::Fabric) the communicator is unusable; the others leave it as it was.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// Something between the ranks: a lost peer, a timeout, ranks that disagree.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A measurement that failed, or could not be kept.
    #[error(transparent)]
    Tuning(std::sync::Arc<CollectiveError>),
    /// The plan makes no sense, or does not serve tensors of these sizes.
    #[error(transparent)]
    Plan(std::sync::Arc<PlanError>),
    /// The plan is for another number of ranks.
    #[error("plan {plan:?} is for {ranks} ranks, and there are {world_size}")]
    WorldSize {
        /// The plan's name.
        plan: String,
        /// For how many ranks it is.
        ranks: usize,
        /// How many there are.
        world_size: usize,
    },
    /// Ranks load different plans, or the same with different options.
    #[error(
        "ranks load different plans: rank {rank} has {plan:?} ({mine}), rank {peer} another one ({theirs})"
    )]
    PlansDiffer {
        /// This plan's name.
        plan: String,
        /// This rank.
        rank: usize,
        /// A rank that has another plan.
        peer: usize,
        /// The digest of this rank's.
        mine: String,
        /// The digest of the other's.
        theirs: String,
    },
    /// The ranks' buffers are not alike, or too large.
    #[error("plan {plan:?}: {what}")]
    Buffers {
        /// The plan's name.
        plan: String,
        /// What, with the numbers.
        what: String,
    },
    /// A plan for GPUs whose proof is about the memory of a host, where packets say more.
    #[error(
        "plan {plan:?} is proved for the memory of a host: between GPUs it needs a proof with `memory: Memory::Device`, as \
         `antiphon plan verify --memory device` makes it"
    )]
    Proof {
        /// The plan's name.
        plan: String,
    },
    /// A message whose chunks are larger than what the plan is proved for, and cannot be done in parts.
    #[error(
        "plan {plan:?} is proved for chunks of up to {largest_chunk} bytes, those of the message have {chunk}, and no part \
         of them is a multiple of {multiple} bytes"
    )]
    Unproved {
        /// The plan's name.
        plan: String,
        /// Bytes of the largest chunk that is proved.
        largest_chunk: u64,
        /// Bytes of a chunk of the message.
        chunk: u64,
        /// The number of bytes of which each part must be a multiple.
        multiple: u64,
    },
    /// An operation that cannot be carried out on these tensors.
    #[error("{place}: {what}")]
    Operation {
        /// Which operation.
        place: Place,
        /// What, with the numbers.
        what: String,
    },
    /// A tensor that cannot be used: strided, for one.
    #[error("the {which}: {source}")]
    Tensor {
        /// Which tensor.
        which: &'static str,
        /// What is wrong with it.
        source: TensorError,
    },
    /// A tensor that is elsewhere.
    #[error("the {which} is on {device}, and this executor serves {serves}")]
    Device {
        /// Which tensor.
        which: &'static str,
        /// Where it is.
        device: Device,
        /// Where it should be.
        serves: Device,
    },
    /// A tensor that peers reach only if it is registered, and is not.
    #[error(
        "plan {plan:?}: the {which} is not in registered memory: no memory that is registered has the {bytes} bytes at {address:#x}"
    )]
    Unregistered {
        /// The plan's name.
        plan: String,
        /// Which tensor.
        which: &'static str,
        /// Its bytes.
        bytes: usize,
        /// Its address.
        address: usize,
    },
    /// Input and output hold different kinds of elements.
    #[error("the input is {input}, the output is {output}")]
    DTypes {
        /// The dtype of the input.
        input: DType,
        /// The dtype of the output.
        output: DType,
    },
    /// Input and output share some memory, but not as the plan would have it.
    #[error("input and output overlap: use execute_in_place, or tensors that are apart")]
    Overlap,
    /// The plan was loaded on another communicator.
    #[error("plan {plan:?} was loaded on another communicator")]
    OtherCommunicator {
        /// The plan's name.
        plan: String,
    },
    /// An operation waited until the deadline, or for a lost peer.
    #[error("{place}: {waiting}: {reason}")]
    Stuck {
        /// The place of one waiting operation; others may wait too.
        place: Place,
        /// The state that it waited for, and the state that it saw.
        waiting: Waiting,
        /// Why the wait ended: a lost peer, the deadline, an interrupt.
        reason: Box<FabricError>,
    },
    /// A call of a size for which the plan was not prepared. What it needs takes memory, and all ranks together.
    #[error("plan {plan:?} was not prepared for {bytes} bytes of {dtype}: prepare it first, on all ranks")]
    Unprepared {
        /// The plan's name.
        plan: String,
        /// The kind of elements.
        dtype: DType,
        /// Bytes of the message: of the output for an all-gather, else of the input.
        bytes: usize,
    },
    /// A plan with more thread blocks than fit the ranks' GPUs at once, beside those of another call.
    #[error(
        "plan {plan:?} has {blocks} thread blocks, and {fit} of {threads} threads fit a GPU beside another call"
    )]
    Occupancy {
        /// The plan's name.
        plan: String,
        /// The blocks of the rank that has most.
        blocks: usize,
        /// The fewest threads that a block may have.
        threads: u32,
        /// How many such blocks fit.
        fit: usize,
    },
    /// No plan of a collection serves a call.
    #[error("no plan serves {collective} of {bytes} bytes of {dtype} on {world_size} ranks: {known}")]
    NoPlan {
        /// The collective.
        collective: String,
        /// The size of the larger tensor.
        bytes: usize,
        /// The kind of elements.
        dtype: DType,
        /// How many ranks there are.
        world_size: usize,
        /// The plans of the collection.
        known: String,
    },
}

impl From<PlanError> for ExecutorError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error.into())
    }
}

impl From<CollectiveError> for ExecutorError {
    fn from(error: CollectiveError) -> Self {
        match error {
            CollectiveError::Fabric(error) => Self::Fabric(error),
            error => Self::Tuning(error.into()),
        }
    }
}

impl From<CudaError> for ExecutorError {
    fn from(error: CudaError) -> Self {
        Self::Fabric(error.into())
    }
}

/// The result of loading or executing.
pub type Result<T, E = ExecutorError> = std::result::Result<T, E>;
