//! The layout of a model over a world.

mod builder;
mod groups;

use std::hash::{Hash, Hasher};
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use builder::MappingBuilder;
pub use groups::GroupKind;

use crate::error::{Product, TopologyError};
use crate::split::divide;

/// How one rank's share of a model follows from its number.
///
/// Tensor parallel ranks are neighbours, then come context parallel ranks, then pipeline stages. The tensor
/// ranks are cut once more for a mixture of experts:
///
/// * `rank = tp_rank + tp_size * (cp_rank + cp_size * pp_rank)`
/// * `tp_rank = moe_ep_rank + moe_ep_size * (moe_cluster_rank + moe_cluster_size * moe_tp_rank)`
///
/// Names, defaults and order of ranks are those of `Mapping` in FlashInfer 0.6.18 (comm/mapping.py). It
/// differs where that one gives an answer that cannot be used:
///
/// * a rank outside the world is refused, always;
/// * expert groups cover every rank when `cp_size > 1`, not only those of the first context rank;
/// * with `auto_parallel` each rank is alone in its groups of every kind, as no layout is chosen yet;
/// * [`ep_experts`](Self::ep_experts) refuses a number of experts that would leave some without an owner.
///
/// Two mappings are equal if the twelve values that are serialised are equal.
///
/// ```
/// use antiphon_topology::Mapping;
///
/// let mapping = Mapping::builder(8, 5).tp(8).moe_ep(4).build()?;
/// assert_eq!((mapping.moe_tp_size(), mapping.moe_tp_rank(), mapping.moe_ep_rank()), (2, 1, 1));
/// assert_eq!(mapping.moe_ep_group(), [4, 5, 6, 7]);
/// assert_eq!(mapping.moe_tp_group(), [1, 5]);
/// assert_eq!(mapping.ep_experts(64)?, 16..32);
/// # Ok::<(), antiphon_topology::TopologyError>(())
/// ```
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(try_from = "MappingBuilder")]
pub struct Mapping {
    world_size: usize,
    rank: usize,
    gpus_per_node: usize,
    cp_size: usize,
    tp_size: usize,
    pp_size: usize,
    moe_tp_size: usize,
    moe_cluster_size: usize,
    moe_ep_size: usize,
    attn_tp_size: usize,
    attn_cp_size: usize,
    auto_parallel: bool,
    #[serde(skip_serializing)]
    enable_attention_dp: bool,
}

impl Mapping {
    /// Starts a mapping of `rank` in a world of `world_size` ranks.
    pub fn builder(world_size: usize, rank: usize) -> MappingBuilder {
        MappingBuilder::new(world_size, rank)
    }

    /// The same mapping as another rank sees it.
    ///
    /// # Errors
    ///
    /// [`TopologyError::RankOutOfRange`] if the world has no such rank.
    pub fn with_rank(self, rank: usize) -> Result<Self, TopologyError> {
        if rank < self.world_size {
            Ok(Self { rank, ..self })
        } else {
            Err(TopologyError::RankOutOfRange { rank, world_size: self.world_size })
        }
    }

    /// Number of ranks.
    pub const fn world_size(&self) -> usize {
        self.world_size
    }

    /// This rank, below [`world_size`](Self::world_size).
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks of one machine.
    pub const fn gpus_per_node(&self) -> usize {
        self.gpus_per_node
    }

    /// Context parallel size: over how many ranks a sequence is spread.
    pub const fn cp_size(&self) -> usize {
        self.cp_size
    }

    /// Tensor parallel size: over how many ranks a layer's weights are spread.
    pub const fn tp_size(&self) -> usize {
        self.tp_size
    }

    /// Pipeline parallel size: over how many stages the layers are spread.
    pub const fn pp_size(&self) -> usize {
        self.pp_size
    }

    /// Tensor parallel size inside an expert.
    pub const fn moe_tp_size(&self) -> usize {
        self.moe_tp_size
    }

    /// Number of ranks of a cluster of experts.
    pub const fn moe_cluster_size(&self) -> usize {
        self.moe_cluster_size
    }

    /// Expert parallel size: over how many ranks the experts are spread.
    pub const fn moe_ep_size(&self) -> usize {
        self.moe_ep_size
    }

    /// Tensor parallel size of attention.
    pub const fn attn_tp_size(&self) -> usize {
        self.attn_tp_size
    }

    /// Context parallel size of attention; always 1 for now.
    pub const fn attn_cp_size(&self) -> usize {
        self.attn_cp_size
    }

    /// Whether the layout is left to a planner. Until it decides, each rank is alone in its groups.
    pub const fn auto_parallel(&self) -> bool {
        self.auto_parallel
    }

    /// Whether attention is data parallel, for layers to read.
    ///
    /// The layout does not depend on it, so it takes no part in comparison and is not serialised.
    pub const fn enable_attention_dp(&self) -> bool {
        self.enable_attention_dp
    }

    /// Whether the world needs more than one machine.
    pub const fn is_multi_node(&self) -> bool {
        self.world_size > self.gpus_per_node
    }

    /// This rank's machine.
    pub const fn node_rank(&self) -> usize {
        self.get_node_rank(self.rank)
    }

    /// This rank's place on its machine.
    pub const fn local_rank(&self) -> usize {
        self.get_local_rank(self.rank)
    }

    /// The machine of any rank.
    pub const fn get_node_rank(&self, rank: usize) -> usize {
        rank / self.gpus_per_node
    }

    /// The place of any rank on its machine.
    pub const fn get_local_rank(&self, rank: usize) -> usize {
        rank % self.gpus_per_node
    }

    /// Whether this rank is in the first pipeline stage.
    pub fn is_first_pp_rank(&self) -> bool {
        self.pp_rank() == 0
    }

    /// Whether this rank is in the last pipeline stage.
    pub fn is_last_pp_rank(&self) -> bool {
        self.pp_rank() + 1 == self.pp_size
    }

    /// Whether this rank is in the last pipeline stage but one.
    pub fn is_second_last_pp_rank(&self) -> bool {
        self.pp_rank() + 2 == self.pp_size
    }

    /// The rank with this one's place in the previous pipeline stage; the first stage follows the last.
    pub fn prev_pp_rank(&self) -> usize {
        self.pp_neighbour(self.pp_size - 1)
    }

    /// The rank with this one's place in the next pipeline stage; the last stage precedes the first.
    pub fn next_pp_rank(&self) -> usize {
        self.pp_neighbour(1)
    }

    fn pp_neighbour(&self, stages_ahead: usize) -> usize {
        let stages = self.partition(GroupKind::Pp);
        stages.rank(stages.index_of(self.rank), self.pp_rank() + stages_ahead)
    }

    /// The layers of this rank's pipeline stage, out of `num_layers`.
    ///
    /// Stages differ by at most one layer; the first ones take the extra layers.
    pub fn pp_layers(&self, num_layers: usize) -> Range<usize> {
        let (layers, extra) = (num_layers / self.pp_size, num_layers % self.pp_size);
        let start = |stage: usize| stage * layers + stage.min(extra);
        start(self.pp_rank())..start(self.pp_rank() + 1)
    }

    /// The experts that this rank holds, out of `num_experts`: the same number on every rank.
    ///
    /// # Errors
    ///
    /// [`TopologyError::Indivisible`] if the experts cannot be spread evenly over
    /// [`moe_ep_size`](Self::moe_ep_size) ranks; [`TopologyError::ExpertsWithContext`] under context
    /// parallelism.
    pub fn ep_experts(&self, num_experts: usize) -> Result<Range<usize>, TopologyError> {
        let &Self { moe_ep_size, cp_size, .. } = self;
        if cp_size > 1 {
            return Err(TopologyError::ExpertsWithContext { moe_ep_size, cp_size });
        }
        let experts = Product::of([("num_experts", num_experts)]);
        let per_rank = divide(experts, Product::of([("moe_ep_size", moe_ep_size)]))?;
        let first = self.moe_ep_rank() * per_rank;
        Ok(first..first + per_rank)
    }

    /// The values that make up a mapping's identity.
    const fn identity(&self) -> ([usize; 11], bool) {
        let sizes = [
            self.world_size,
            self.rank,
            self.gpus_per_node,
            self.cp_size,
            self.tp_size,
            self.pp_size,
            self.moe_tp_size,
            self.moe_cluster_size,
            self.moe_ep_size,
            self.attn_tp_size,
            self.attn_cp_size,
        ];
        (sizes, self.auto_parallel)
    }
}

impl PartialEq for Mapping {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Mapping {}

impl Hash for Mapping {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}
