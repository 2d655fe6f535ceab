//! How a call between nodes is divided: among blocks of a grid, in rounds, and among the ranks.

use super::super::{MixedLayout, MixedMode};
/// Bytes of a mailbox, behind the tag.
pub(super) const MAIL_BYTES: usize = 32 << 10;
/// The tag.
const HEADER: usize = 16;
const MAIL: usize = HEADER + MAIL_BYTES;
/// Bytes of a vector.
const VECTOR: usize = 16;
/// The most nodes, and groups, whose places fit a kernel's arguments.
pub(super) const MAX_NODES: usize = 32;
pub(super) const MAX_GROUPS: usize = 64;
/// Blocks of a grid, at most.
pub(super) const MAX_BLOCKS: usize = 16;
/// A block has as many vectors at least, where there are enough for several.
const LEAST_STEP: usize = 256;

/// What a call does, as far as its division depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) gathers: bool,
    /// Whether elements are moved and not summed.
    pub(super) copies: bool,
    pub(super) mode: MixedMode,
    /// Elements of a vector.
    pub(super) lanes: usize,
}

/// The division of a call, equal on all ranks; see between.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) blocks: usize,
    /// Vectors of a piece.
    pub(super) step: usize,
    pub(super) rounds: usize,
    pub(super) adders: usize,
    pub(super) owners: usize,
    /// Whether one node contributes to a block, so that its sums are results.
    pub(super) is_whole: bool,
    pub(super) hears_results: bool,
}

impl Shape {
    /// For blocks of up to `longest` elements, not 0, and a grid of up to `most_blocks` blocks.
    pub(super) fn new(layout: &MixedLayout, kind: Kind, longest: usize, most_blocks: usize) -> Self {
        let Kind { gathers, copies, mode, lanes } = kind;
        let (local_size, local_tp) = (layout.local_size(), layout.local_tp_size());
        let (local_dp, inter_dp) = (layout.local_dp_size(), layout.inter_dp_size());
        let adders = match (mode, gathers) {
            (MixedMode::Waits, _) => 1,
            (_, true) => local_tp,
            (_, false) => local_size,
        };
        let is_whole = gathers && !layout.use_inter_tp();
        let owners = if mode == MixedMode::Bytes2 && !is_whole { layout.inter_tp_size() } else { 1 };
        // In vectors of a share: what a mailbox has room for.
        let added = match (gathers, adders) {
            (true, _) => 1,
            (false, 1) => inter_dp,
            (false, _) => layout.dp_size(),
        };
        let in_message = if gathers || adders == 1 { 1 } else { local_dp };
        let results = if gathers { inter_dp } else { 1 };
        let sum_bytes = if copies || is_whole { VECTOR } else { lanes * size_of::<f32>() };
        let share = (MAIL_BYTES / VECTOR / added)
            .min(MAIL_BYTES / VECTOR / results)
            .min(owners * (MAIL_BYTES / sum_bytes / in_message));
        let vectors = longest.div_ceil(lanes);
        let blocks = vectors.div_ceil(LEAST_STEP).clamp(1, most_blocks.clamp(1, MAX_BLOCKS));
        let step = vectors.div_ceil(blocks).clamp(1, share * adders);
        let hears_results = match (gathers, adders) {
            (true, 1) => local_dp > 1,
            (true, _) => local_size > 1,
            (false, adders) => adders > 1,
        };
        Self {
            blocks,
            step,
            rounds: vectors.div_ceil(step * blocks),
            adders,
            owners,
            is_whole,
            hears_results,
        }
    }
}

/// Bytes of the region of a node's ranks.
pub(super) fn region_bytes(local_size: usize) -> usize {
    MAX_BLOCKS * (1024 + 4 * local_size * MAIL)
}

/// Bytes of symmetric memory.
pub(super) fn heap_bytes(nodes: usize) -> usize {
    MAX_BLOCKS * (2048 + (4 * nodes + 2 * (nodes + 1)) * MAIL)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each hop sends fits a mailbox, as between.cuh lays it out; and the pieces cover the blocks.
    #[test]
    fn every_message_fits_and_every_vector_is_in_a_piece() {
        for [local_tp, local_dp, inter_tp, inter_dp] in [
            [1, 1, 2, 1],
            [1, 1, 1, 2],
            [2, 1, 2, 1],
            [2, 1, 1, 2],
            [1, 2, 2, 1],
            [2, 2, 2, 2],
            [4, 2, 1, 8],
            [8, 1, 4, 2],
            [1, 8, 1, 8],
            [3, 1, 3, 2],
        ] {
            let layout = MixedLayout::builder(local_tp * local_dp * inter_tp * inter_dp, 0)
                .local_size(local_tp * local_dp)
                .local_tp(local_tp)
                .inter_tp(inter_tp)
                .build()
                .unwrap();
            for &mode in MixedMode::valid_in(&layout).iter().filter(|&&mode| mode != MixedMode::Composed) {
                for (gathers, copies, lanes) in
                    [(true, false, 8), (true, true, 16), (false, false, 8), (false, false, 4)]
                {
                    if copies && layout.use_tp() {
                        continue; // nothing is copied where tensors are shared
                    }
                    for longest in [1, 7, 8, 9, 4096, 100_000, 10_000_000] {
                        let kind = Kind { gathers, copies, mode, lanes };
                        let shape = Shape::new(&layout, kind, longest, 16);
                        let stride = shape.step.div_ceil(shape.adders);
                        let part = stride.div_ceil(shape.owners);
                        let is_shared = shape.adders > 1;
                        let added = if gathers {
                            1
                        } else if is_shared {
                            layout.dp_size()
                        } else {
                            inter_dp
                        };
                        let in_message = if !gathers && is_shared { local_dp } else { 1 };
                        let wide = if shape.is_whole { 16 } else { lanes * 4 };
                        let results = if gathers { inter_dp } else { 1 };
                        for bytes in [
                            added * stride * 16,
                            in_message * part * wide,
                            in_message * part * 16,
                            results * stride * 16,
                        ] {
                            assert!(bytes <= MAIL_BYTES, "{layout:?} {kind:?} {longest}: {bytes}, {shape:?}");
                        }
                        let vectors = longest.div_ceil(lanes);
                        assert!(shape.blocks * shape.step * shape.rounds >= vectors, "{shape:?}");
                        assert!(shape.blocks * shape.step * (shape.rounds - 1) < vectors, "{shape:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn modes_divide_among_the_ranks_that_they_name() {
        let layout = MixedLayout::builder(8, 0).local_size(4).local_tp(2).inter_tp(2).build().unwrap();
        let shape = |gathers, mode| {
            let shape = Shape::new(&layout, Kind { gathers, copies: false, mode, lanes: 8 }, 1000, 16);
            (shape.adders, shape.owners, shape.hears_results)
        };
        use MixedMode::{Bytes1, Bytes2, Waits};
        assert_eq!(
            [Waits, Bytes1, Bytes2].map(|mode| shape(true, mode)),
            [(1, 1, true), (2, 1, true), (2, 2, true)]
        );
        assert_eq!(
            [Waits, Bytes1, Bytes2].map(|mode| shape(false, mode)),
            [(1, 1, false), (4, 1, true), (4, 2, true)]
        );
    }
}
