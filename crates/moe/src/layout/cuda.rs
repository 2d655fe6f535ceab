//! The layout on a GPU; `kernels.cuh` has the kernels.

use antiphon_device::cuda::KernelArgument;
use antiphon_fabric::gpu::{Family, Source, kernels};

use crate::cuda::THREADS;

kernels! {
    /// The kernels of `kernels.cuh`: the first adds to what the second has cleared.
    pub(crate) enum Kernel {
        Layout = "layout",
        Clear = "clear",
    }
}

/// Counting choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counting;

/// `layout_call` of kernels.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct LayoutCall {
    pub(crate) ids: u64,
    pub(crate) per_rank: u64,
    pub(crate) per_expert: u64,
    pub(crate) in_rank: u64,
    pub(crate) tokens: u32,
    pub(crate) top_k: u32,
    pub(crate) experts: u32,
    pub(crate) id_bytes: u32,
}

// SAFETY: the layout of the kernel's struct: 64-bit words, then those of 32.
unsafe impl KernelArgument for LayoutCall {}

impl Family for Counting {
    type Kernel = Kernel;
    type Arguments = LayoutCall;
    const NAME: &'static str = "layout.cuh";
    const SOURCES: &'static [Source] =
        &[Source { name: "layout/kernels.cuh", text: include_str!("kernels.cuh") }];

    fn threads(&self) -> u32 {
        THREADS
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}
