use antiphon::{
    collectives::CollectiveError,
    device::cuda::CudaError,
    executor::ExecutorError,
    fabric::FabricError,
    moe::MoeError,
    tensor::{DType, TensorError},
};

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A collective failed or was refused.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Something between the ranks: a lost peer, a timeout, ranks that disagree.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A call of a mixture of experts failed or was refused.
    #[error(transparent)]
    Moe(#[from] MoeError),
    /// The driver, or the compiler of kernels.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A plan could not be loaded or run.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// A view that cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// What was found could not be written.
    #[error("cannot write the results: {0}")]
    Report(#[from] std::io::Error),
    /// A message needs two ranks.
    #[error("send-recv needs at least 2 ranks, there is {ranks}")]
    TooFewRanks {
        /// How many there are.
        ranks: usize,
    },
    /// The kernel beside NCCL's call sums some dtypes alone.
    #[error("combine on GPUs sums f32, f16 and bf16, not {dtype}")]
    NotSummed {
        /// What the tokens are of.
        dtype: DType,
    },
    /// A plan cuts tensors into chunks of whole elements.
    #[error("{bytes} bytes are not {chunks} chunks of whole {dtype} elements")]
    Chunks {
        /// The size of the larger tensor.
        bytes: u64,
        /// Into how many the plan cuts it.
        chunks: u64,
        /// The kind of elements.
        dtype: DType,
    },
}

/// The result of a step of a rank.
pub type Result<T, E = BenchError> = std::result::Result<T, E>;
