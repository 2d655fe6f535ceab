//! Where a tensor's memory is.

use std::fmt;

/// The memory a tensor lives in.
///
/// ```
/// use antiphon_tensor::Device;
///
/// assert_eq!(Device::Cuda(3).to_string(), "cuda:3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// Memory that this process's CPU code may read and write.
    Host,
    /// Memory of the CUDA device with this ordinal, as the process numbers its visible devices.
    Cuda(u32),
}

impl Device {
    /// Whether CPU code may touch the memory.
    #[inline]
    pub const fn is_host(self) -> bool {
        matches!(self, Device::Host)
    }

    /// The ordinal of the CUDA device that the memory is on; none for host memory.
    #[inline]
    pub const fn cuda_ordinal(self) -> Option<u32> {
        match self {
            Device::Cuda(ordinal) => Some(ordinal),
            Device::Host => None,
        }
    }
}

impl fmt::Display for Device {
    /// Writes `host` or, for ordinal 0, `cuda:0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Host => f.pad("host"),
            Device::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}
