//! The largest calls to slots, and the memory that they take between GPUs.

use antiphon_fabric::gpu::Tenant;

use super::{Sizes, SlotFormat};

/// The lanes of a rank in a tenant's memory: a channel has three slots, and a slot two lanes for a rank.
const LANES_OF_A_RANK: usize = 3 * 2;
/// The bytes of a tenant's memory besides lanes, rounded up.
const BESIDE_LANES: usize = 1 << 20;

/// The largest calls of a [`CudaSlots`](super::cuda::CudaSlots); equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotLimits {
    /// `M`: the most tokens of a rank.
    pub max_tokens: usize,
    /// The most elements of a row.
    pub hidden: usize,
    /// The most experts.
    pub num_experts: usize,
    /// The most experts that a token chooses.
    pub top_k: usize,
}

impl SlotLimits {
    /// Whether a call is as small as these.
    pub(super) fn serves(&self, sizes: &Sizes) -> bool {
        let Self { max_tokens, hidden, num_experts, top_k } = *self;
        sizes.max_tokens <= max_tokens
            && sizes.hidden <= hidden
            && sizes.num_experts <= num_experts
            && sizes.top_k <= top_k
    }

    /// The bytes of each GPU's memory for such calls of `world_size` ranks.
    pub fn bytes(&self, world_size: usize) -> usize {
        let sizes = Sizes {
            world_size,
            max_tokens: self.max_tokens,
            hidden: self.hidden,
            num_experts: self.num_experts,
            top_k: self.top_k,
            tokens: 0,
        };
        let dispatches = [SlotFormat::Bf16, SlotFormat::Fp8].map(|format| dispatch_lane(&sizes, format));
        let lane = dispatches.into_iter().fold(combine_lane(&sizes), usize::max).next_multiple_of(4096);
        (LANES_OF_A_RANK * world_size * lane + BESIDE_LANES).max(Tenant::LEAST_STAGING_BYTES)
    }
}

/// The bytes of a lane for a dispatch: one lane has the choices, another has the rows.
pub(super) fn dispatch_lane(sizes: &Sizes, format: SlotFormat) -> usize {
    let choices = (4 + 2 * sizes.max_tokens * sizes.top_k).next_multiple_of(16);
    let chunks = match format {
        SlotFormat::Bf16 => (sizes.hidden * 2).div_ceil(31 * 16) * 512,
        _ => sizes.hidden.div_ceil(512) * 528,
    };
    choices.max(sizes.max_tokens * chunks)
}

/// The bytes of a lane for a combine, which uses all lanes as one.
pub(super) fn combine_lane(sizes: &Sizes) -> usize {
    (sizes.max_tokens * sizes.top_k * sizes.hidden * 2).div_ceil(2 * sizes.world_size)
}
