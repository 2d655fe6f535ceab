//! What instances are made with.

use crate::slots::SlotLimits;

/// What a [`Moe`](crate::Moe) or a [`CudaMoe`](crate::cuda::CudaMoe) is made with; equal on all ranks.
///
/// ```
/// use antiphon_moe::{MoeConfig, slots::SlotLimits};
///
/// let decoding = SlotLimits { max_tokens: 128, hidden: 7168, num_experts: 256, top_k: 8 };
/// let config = MoeConfig { slots: Some(decoding), ..MoeConfig::for_gpus() };
/// assert_eq!(config.num_sms, 24);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeConfig {
    /// Bytes of the region of each rank through which rows travel: at least two rows with their scales and choices. A larger
    /// one means fewer pieces, which on the host gain nothing once a half is beyond the caches. Between GPUs 0 makes an instance
    /// for calls to slots alone.
    pub region_bytes: usize,
    /// How many multiprocessors a call by token or by expert uses, at most; 0 leaves it to the instance, which takes the fewest that cost
    /// little time for the size of the call ([`Multiprocessors`](crate::Multiprocessors)). The host has none. Ranks may differ.
    pub num_sms: u32,
    /// The largest calls to slots. Between GPUs such calls have memory of their own, of
    /// [`SlotLimits::bytes`]; without this there is none, and such calls are refused. On the host they need no memory, and
    /// without this any are served.
    pub slots: Option<SlotLimits>,
}

impl MoeConfig {
    /// The default of [`num_sms`](Self::num_sms).
    pub const NUM_SMS: u32 = 24;

    /// The default between GPUs: regions of 256 MiB.
    pub fn for_gpus() -> Self {
        Self { region_bytes: 256 << 20, ..Self::default() }
    }
}

/// The default on the host: regions of 8 MiB.
impl Default for MoeConfig {
    fn default() -> Self {
        Self { region_bytes: 8 << 20, num_sms: Self::NUM_SMS, slots: None }
    }
}
