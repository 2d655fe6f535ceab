//! What the addresses of a table count from: they are passed to each launch, so that one table serves all tensors.

use antiphon_device::cuda::DevicePointer;
use antiphon_fabric::gpu::MAX_WORLD;

use super::table::Item;

/// What an item's address counts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Base {
    Absolute,
    /// This rank's tensor.
    OfInput,
    OfOutput,
    /// A rank's tensor if it is registered, else where it is staged.
    OfSharedInput,
    OfSharedOutput,
    /// Where a rank stages tensors.
    OfStaging,
}

impl Base {
    /// The place of a rank's among the [`Bases`] of a launch.
    pub(super) fn number(self, rank: usize) -> u32 {
        let first = |kind: usize| 3 + kind * MAX_WORLD;
        let number = match self {
            Self::Absolute => 0,
            Self::OfInput => 1,
            Self::OfOutput => 2,
            Self::OfSharedInput => first(0) + rank,
            Self::OfSharedOutput => first(1) + rank,
            Self::OfStaging => first(2) + rank,
        };
        number as u32
    }
}

/// The addresses of a launch, by [`Base::number`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Bases(pub(super) [u64; 3 + 3 * MAX_WORLD]);

impl Bases {
    /// Those of tensors whose shared ones are where they are on all ranks.
    pub(super) fn new(own: [u64; 2], shared: [[u64; MAX_WORLD]; 2], staging: [u64; MAX_WORLD]) -> Self {
        let mut all = [0; 3 + 3 * MAX_WORLD];
        all[1..3].copy_from_slice(&own);
        all[3..].copy_from_slice([shared[0], shared[1], staging].as_flattened());
        Self(all)
    }

    /// Those that a launch has before anything is known of tensors.
    pub(super) const fn none() -> Self {
        Self([0; 3 + 3 * MAX_WORLD])
    }

    /// Those of the slices that begin `bytes` behind the beginning of each chunk.
    pub(super) fn behind(mut self, bytes: usize) -> Self {
        self.0[1..].iter_mut().for_each(|at| *at = at.wrapping_add(bytes as u64));
        self
    }

    /// The address of an item.
    pub(super) fn address(&self, item: Item) -> DevicePointer {
        DevicePointer(self.0[item.base.number(item.rank) as usize].wrapping_add(item.at))
    }
}
