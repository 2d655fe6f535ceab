//! The builder of collectives on GPUs.

use antiphon_device::cuda::Context;
use antiphon_fabric::{Communicator, gpu::Tenant};

use super::CudaCollectives;
use crate::error::Result;

/// Makes [`CudaCollectives`]; see [`CudaCollectives::builder`].
///
/// ```no_run
/// # use antiphon_collectives::{CollectiveError, cuda::CudaCollectives};
/// # use antiphon_fabric::Communicator;
/// # fn made(comm: &Communicator, context: &antiphon_device::cuda::Context) -> Result<CudaCollectives, CollectiveError> {
/// CudaCollectives::builder(comm, context).staging_bytes(64 << 20).build()
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use = "nothing is made before `build`"]
pub struct CudaBuilder<'a> {
    comm: &'a Communicator,
    context: &'a Context,
    staging_bytes: usize,
}

impl CudaCollectives {
    /// Collectives between the GPUs of a communicator's ranks that differ from the usual ones.
    pub fn builder<'a>(comm: &'a Communicator, context: &'a Context) -> CudaBuilder<'a> {
        CudaBuilder { comm, context, staging_bytes: CudaBuilder::STAGING_BYTES }
    }

    /// Collectives between the GPUs of a communicator's ranks; what [`builder`](Self::builder) makes by default. All
    /// ranks call it together.
    ///
    /// # Errors
    /// As [`CudaBuilder::build`].
    pub fn new(comm: &Communicator, context: &Context) -> Result<Self> {
        Self::builder(comm, context).build()
    }
}

impl CudaBuilder<'_> {
    /// The default size of the memory for staging; docs/guide/cuda.md says what less memory costs.
    pub const STAGING_BYTES: usize = 340 << 20;
    /// The least memory for staging.
    pub const LEAST_STAGING_BYTES: usize = Tenant::LEAST_STAGING_BYTES;

    /// How many bytes of each GPU's memory serve data that is under way between ranks, at most. Larger messages go through in
    /// pieces, the smaller the less there is. All ranks give the same number. Messages have
    /// [`LEAST_STAGING_BYTES`](Self::LEAST_STAGING_BYTES) of their own.
    pub fn staging_bytes(mut self, bytes: usize) -> Self {
        self.staging_bytes = bytes;
        self
    }

    /// Shares memory between the ranks' GPUs, and loads the first kernels. All ranks call it together.
    ///
    /// # Errors
    /// As [`Tenant::new`], for more than [`MAX_WORLD`](super::MAX_WORLD) ranks and for less staging than
    /// [`LEAST_STAGING_BYTES`](Self::LEAST_STAGING_BYTES) among others; as [`Tenant::load_together`], with what is missing to
    /// compile kernels.
    pub fn build(self) -> Result<CudaCollectives> {
        let Self { comm, context, staging_bytes } = self;
        // A rank that is alone stages nothing.
        let staging_bytes = if comm.world_size() == 1 { Self::LEAST_STAGING_BYTES } else { staging_bytes };
        CudaCollectives::with_staging(comm, context, staging_bytes)
    }
}
