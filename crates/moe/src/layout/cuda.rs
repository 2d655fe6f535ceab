//! The layout on a GPU; `kernels.cuh` has the kernels.

use antiphon_fabric::gpu::{Family, Source, kernel_call, kernels};

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

kernel_call! {
    /// The choices of tokens, and what is counted of them.
    pub(crate) struct LayoutCall = "layout_call" {
        /// `[tokens, top_k]`.
        pub(crate) ids: *const u8,
        /// `[WORLD]`.
        pub(crate) per_rank: *mut i32,
        /// `[experts]`.
        pub(crate) per_expert: *mut i32,
        /// `[tokens, WORLD]`.
        pub(crate) in_rank: *mut u8,
        pub(crate) tokens: u32,
        pub(crate) top_k: u32,
        pub(crate) experts: u32,
        pub(crate) id_bytes: u32,
    }
}

impl Family for Counting {
    type Kernel = Kernel;
    type Arguments = LayoutCall;
    const NAME: &'static str = "layout.cuh";
    const SOURCES: &'static [Source] =
        &[LayoutCall::SOURCE, Source { name: "layout/kernels.cuh", text: include_str!("kernels.cuh") }];

    fn threads(&self) -> u32 {
        THREADS
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}
