//! How collectives on GPUs are made.

use antiphon_device::cuda::Context;
use antiphon_fabric::{Communicator, FabricError};

use super::{CHANNELS, CudaCollectives, MAX_WORLD, SLOTS, channel_bytes};
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

    /// Collectives between the GPUs of a communicator's ranks; what [`builder`](Self::builder) makes unless told otherwise. All
    /// ranks call it together.
    ///
    /// # Errors
    /// As [`CudaBuilder::build`].
    pub fn new(comm: &Communicator, context: &Context) -> Result<Self> {
        Self::builder(comm, context).build()
    }
}

impl CudaBuilder<'_> {
    /// The memory that is taken for staging unless told otherwise; docs/cuda.md says what less of it costs.
    pub const STAGING_BYTES: usize = 256 << 20;
    /// The least memory for staging.
    pub const LEAST_STAGING_BYTES: usize = 16 << 20;

    /// How many bytes of each GPU's memory serve data that is under way between ranks, at most. Larger messages go through in
    /// pieces, the smaller the less there is. All ranks give the same number.
    pub fn staging_bytes(mut self, bytes: usize) -> Self {
        self.staging_bytes = bytes;
        self
    }

    /// Shares memory between the ranks' GPUs, and loads the first kernels. All ranks call it together.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for one rank, or more than [`MAX_WORLD`], for less staging than
    /// [`LEAST_STAGING_BYTES`](Self::LEAST_STAGING_BYTES), for ranks that want different staging, and for an environment
    /// variable that [`OnFailure`](super::OnFailure) does not know; as [`CudaArena::new`](antiphon_fabric::CudaArena::new);
    /// [`FabricError::Device`] with what is missing to compile kernels.
    pub fn build(self) -> Result<CudaCollectives> {
        let Self { comm, context, staging_bytes } = self;
        let world_size = comm.world_size();
        if !(2..=MAX_WORLD).contains(&world_size) {
            let text = format!("collectives on CUDA work between 2 to {MAX_WORLD} ranks, not {world_size}");
            return Err(FabricError::InvalidArgument(text).into());
        }
        let lane_stride = lane_stride(world_size, staging_bytes).ok_or_else(|| {
            let least = Self::LEAST_STAGING_BYTES;
            FabricError::InvalidArgument(format!(
                "{staging_bytes} bytes for staging, at least {least} are needed"
            ))
        })?;
        CudaCollectives::with_lanes(comm, context, lane_stride)
    }
}

/// Bytes of a lane such that all of them fit so much memory.
fn lane_stride(world_size: usize, staging_bytes: usize) -> Option<usize> {
    let lanes = CHANNELS * SLOTS * 2 * world_size;
    let others = CHANNELS * channel_bytes(world_size, 0);
    let stride = staging_bytes.checked_sub(others)? / lanes / 4096 * 4096;
    // A kernel counts bytes of a channel in 32 bits.
    let most = (u32::MAX as usize / (SLOTS * 2 * world_size)) / 4096 * 4096 - 4096;
    (staging_bytes >= CudaBuilder::LEAST_STAGING_BYTES).then_some(stride.min(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_take_as_much_memory_as_there_is_and_no_more() {
        for world_size in 2..=MAX_WORLD {
            for staging in
                [CudaBuilder::LEAST_STAGING_BYTES, 100_000_000, CudaBuilder::STAGING_BYTES, 1 << 40]
            {
                let stride = lane_stride(world_size, staging).unwrap();
                let taken = CHANNELS * channel_bytes(world_size, stride);
                assert!(
                    stride >= 128 << 10 && stride.is_multiple_of(4096),
                    "{world_size} ranks, {staging}: {stride}"
                );
                assert!(taken <= staging && channel_bytes(world_size, stride) < 1 << 32);
                let next = CHANNELS * channel_bytes(world_size, stride + 4096);
                assert!(
                    next > staging || next / CHANNELS > u32::MAX as usize / 2,
                    "{world_size} ranks, {staging}"
                );
            }
        }
        assert_eq!(lane_stride(2, CudaBuilder::LEAST_STAGING_BYTES - 1), None);
    }
}
