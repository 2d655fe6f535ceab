//! The errors of one machine's resources.

use std::sync::Arc;

/// A resource that the machine refused, with the failed call.
///
/// Cloning is cheap: an error is often reported to several waiting callers.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A system call failed.
    #[error("{call} failed: {source} ({hint})")]
    System {
        /// The system call and its main argument.
        call: String,
        /// The operating system's word.
        source: Arc<std::io::Error>,
        /// The usual remedy.
        hint: &'static str,
    },
    /// A file descriptor that was handed over is not the shared memory it should be.
    #[error("the shared memory handed over is {found}, expected {expected}")]
    ForeignMemory {
        /// The actual kind of the descriptor.
        found: String,
        /// The expected kind.
        expected: String,
    },
    /// CUDA is missing, or a call of it failed.
    #[cfg(not(loom))]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
}

impl DeviceError {
    pub(crate) fn system(
        call: impl Into<String>,
        source: impl Into<std::io::Error>,
        hint: &'static str,
    ) -> Self {
        Self::System { call: call.into(), source: Arc::new(source.into()), hint }
    }
}
