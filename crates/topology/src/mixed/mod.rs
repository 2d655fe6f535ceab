//! The layout of communication where tensor and data parallelism mix.

mod builder;
mod groups;

use serde::{Deserialize, Serialize};

pub use builder::MixedLayoutBuilder;
pub use groups::{MixedGroup, MixedOp};

use crate::mesh::Mesh;

/// The axes of the mesh: tensor and data inside a node, tensor and data between nodes.
const AXES: usize = 4;

/// The tensor parallel and data parallel groups of ranks, inside nodes and between them.
///
/// *Local* counts inside one node, *inter* counts nodes; both are cut into a tensor parallel and a data
/// parallel part. Tensor ranks are neighbours:
///
/// * `world_rank = local_rank + local_size * inter_rank`
/// * `local_rank = local_tp_rank + local_tp_size * local_dp_rank`
/// * `inter_rank = inter_tp_rank + inter_tp_size * inter_dp_rank`
///
/// Over the whole world, `tp_rank = local_tp_rank + local_tp_size * inter_tp_rank`, and the same for data.
/// Names and order of ranks are those of `ParallelInfo` in FlashInfer 0.6.18 (comm/mixed_comm.py).
///
/// ```
/// use antiphon_topology::MixedLayout;
///
/// // Two nodes of four; tensors are shared by pairs on a node and by both nodes.
/// let layout = MixedLayout::builder(8, 6).local_size(4).local_tp(2).build()?;
/// assert_eq!((layout.tp_size(), layout.dp_size()), (4, 2));
/// assert_eq!((layout.tp_rank(), layout.dp_rank()), (2, 1));
/// assert_eq!(layout.tp_group(), [2, 3, 6, 7]);
/// assert_eq!(layout.dp_group(), [4, 6]);
/// # Ok::<(), antiphon_topology::TopologyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "MixedLayoutBuilder", into = "MixedLayoutBuilder")]
pub struct MixedLayout {
    world_rank: usize,
    mesh: Mesh<AXES>,
}

/// Sizes.
impl MixedLayout {
    /// Starts the layout of `world_rank` in a world of `world_size` ranks.
    pub fn builder(world_size: usize, world_rank: usize) -> MixedLayoutBuilder {
        MixedLayoutBuilder::new(world_size, world_rank)
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.mesh.size()
    }

    /// Number of ranks of one node.
    pub fn local_size(&self) -> usize {
        self.local_tp_size() * self.local_dp_size()
    }

    /// Number of nodes.
    pub fn inter_size(&self) -> usize {
        self.inter_tp_size() * self.inter_dp_size()
    }

    /// Tensor parallel size inside a node.
    pub const fn local_tp_size(&self) -> usize {
        self.mesh.sizes()[0]
    }

    /// Data parallel size inside a node.
    pub const fn local_dp_size(&self) -> usize {
        self.mesh.sizes()[1]
    }

    /// Tensor parallel size between nodes.
    pub const fn inter_tp_size(&self) -> usize {
        self.mesh.sizes()[2]
    }

    /// Data parallel size between nodes.
    pub const fn inter_dp_size(&self) -> usize {
        self.mesh.sizes()[3]
    }

    /// Tensor parallel size over the world.
    pub fn tp_size(&self) -> usize {
        self.local_tp_size() * self.inter_tp_size()
    }

    /// Data parallel size over the world.
    pub fn dp_size(&self) -> usize {
        self.local_dp_size() * self.inter_dp_size()
    }
}

/// Ranks.
impl MixedLayout {
    /// This rank in the world.
    pub const fn world_rank(&self) -> usize {
        self.world_rank
    }

    /// This rank's place on its node.
    pub fn local_rank(&self) -> usize {
        self.rank_in(MixedGroup::Local)
    }

    /// This rank's node.
    pub fn inter_rank(&self) -> usize {
        self.rank_in(MixedGroup::Inter)
    }

    /// This rank's place among the tensor parallel ranks of its node.
    pub fn local_tp_rank(&self) -> usize {
        self.rank_in(MixedGroup::LocalTp)
    }

    /// This rank's place among the data parallel ranks of its node.
    pub fn local_dp_rank(&self) -> usize {
        self.rank_in(MixedGroup::LocalDp)
    }

    /// This rank's place among the tensor parallel nodes.
    pub fn inter_tp_rank(&self) -> usize {
        self.rank_in(MixedGroup::InterTp)
    }

    /// This rank's place among the data parallel nodes.
    pub fn inter_dp_rank(&self) -> usize {
        self.rank_in(MixedGroup::InterDp)
    }

    /// This rank's place among the tensor parallel ranks of the world.
    pub fn tp_rank(&self) -> usize {
        self.rank_in(MixedGroup::Tp)
    }

    /// This rank's place among the data parallel ranks of the world.
    pub fn dp_rank(&self) -> usize {
        self.rank_in(MixedGroup::Dp)
    }

    fn rank_in(&self, kind: MixedGroup) -> usize {
        self.partition(kind).position_of(self.world_rank)
    }
}

/// The kinds of parallelism of a layout.
impl MixedLayout {
    /// Whether tensors are shared inside a node.
    pub const fn use_local_tp(&self) -> bool {
        self.local_tp_size() > 1
    }

    /// Whether tensors are shared between nodes.
    pub const fn use_inter_tp(&self) -> bool {
        self.inter_tp_size() > 1
    }

    /// Whether tensors are shared at all.
    pub fn use_tp(&self) -> bool {
        self.tp_size() > 1
    }

    /// Whether there is data parallelism at all.
    pub fn use_dp(&self) -> bool {
        self.dp_size() > 1
    }

    /// Whether there are several nodes.
    pub fn use_inter(&self) -> bool {
        self.inter_size() > 1
    }

    /// Whether there is both tensor and data parallelism.
    pub fn use_mixed(&self) -> bool {
        self.use_tp() && self.use_dp()
    }
}
