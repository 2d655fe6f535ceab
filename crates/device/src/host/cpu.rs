//! Cores and vector instructions.

use std::sync::OnceLock;

use rustix::thread::CpuSet;

/// The cores that the calling thread may run on, ascending.
pub fn allowed_cores() -> Vec<u32> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).map(|core| core as u32).collect(),
        // A machine with more cores than the set holds: any answer that is not "oversubscribed" will do.
        Err(_) => (0..std::thread::available_parallelism().map_or(1, |n| n.get() as u32)).collect(),
    }
}

/// Binds the calling thread to one core. Ranks that are timed against each other should not wander.
///
/// # Errors
/// [`DeviceError::System`](crate::DeviceError::System) when the core does not exist or is not allowed.
pub fn bind_to_core(core: u32) -> Result<(), crate::DeviceError> {
    let mut set = CpuSet::new();
    if (core as usize) < CpuSet::MAX_CPU {
        set.set(core as usize);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| {
        crate::DeviceError::system(
            format!("sched_setaffinity to core {core}"),
            e,
            "see `nproc` and taskset -p",
        )
    })
}

/// The widest vector instructions that the reductions can use; ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Simd {
    /// What the compiler's baseline offers (SSE2 on x86-64, NEON on AArch64).
    Baseline,
    /// 256-bit: AVX2 and F16C.
    Avx2,
    /// 512-bit: AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl Simd {
    /// Every level that this machine can run, narrowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Self::Baseline, Self::Avx2, Self::Avx512].into_iter().filter(|level| level.is_available())
    }

    /// The widest level of this machine.
    #[inline]
    pub fn widest() -> Self {
        // Asking for every feature takes as long as reducing a cache line.
        static WIDEST: OnceLock<Simd> = OnceLock::new();
        *WIDEST.get_or_init(|| Self::available().last().unwrap_or(Self::Baseline))
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        let avx2 = || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        match self {
            Self::Baseline => true,
            Self::Avx2 => avx2(),
            Self::Avx512 => {
                avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Self::Baseline
    }
}
