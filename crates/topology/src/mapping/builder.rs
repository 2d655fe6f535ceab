//! Defaults and checks of a mapping.

use serde::Deserialize;

use super::Mapping;
use crate::error::{Product, TopologyError};
use crate::split::{nonzero, same, split, split_beside};

/// A mapping in the making; start one with [`Mapping::builder`].
///
/// Sizes are 1 unless set, a machine has 8 ranks, and the sizes for experts and attention follow from the
/// others:
///
/// | left open | becomes |
/// | --- | --- |
/// | cluster | 1 |
/// | expert tensor and expert | `tp_size / moe_cluster_size` and 1 |
/// | one of these two | `tp_size / (the other * moe_cluster_size)` |
/// | attention tensor and context | `tp_size * cp_size` and 1 |
/// | one of these two | `tp_size * cp_size / the other` |
///
/// Deserialises from a map that has any of the constructor's keywords (`world_size`, `rank`, `tp_size`,
/// `moe_ep_size`, ...); `null` leaves a size open, and any other key is an error.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[must_use = "a builder does nothing until `build`"]
pub struct MappingBuilder {
    world_size: usize,
    rank: usize,
    gpus_per_node: usize,
    cp_size: usize,
    tp_size: usize,
    pp_size: usize,
    moe_tp_size: Option<usize>,
    moe_cluster_size: Option<usize>,
    moe_ep_size: Option<usize>,
    attn_tp_size: Option<usize>,
    attn_cp_size: Option<usize>,
    auto_parallel: bool,
    enable_attention_dp: bool,
}

impl Default for MappingBuilder {
    /// A world of one rank.
    fn default() -> Self {
        Self::new(1, 0)
    }
}

impl MappingBuilder {
    pub(super) const fn new(world_size: usize, rank: usize) -> Self {
        Self {
            world_size,
            rank,
            gpus_per_node: 8,
            cp_size: 1,
            tp_size: 1,
            pp_size: 1,
            moe_tp_size: None,
            moe_cluster_size: None,
            moe_ep_size: None,
            attn_tp_size: None,
            attn_cp_size: None,
            auto_parallel: false,
            enable_attention_dp: false,
        }
    }

    /// Sets the number of ranks of one machine (8 unless set).
    pub const fn gpus_per_node(self, gpus_per_node: usize) -> Self {
        Self { gpus_per_node, ..self }
    }

    /// Sets the tensor parallel size.
    pub const fn tp(self, tp_size: usize) -> Self {
        Self { tp_size, ..self }
    }

    /// Sets the context parallel size.
    pub const fn cp(self, cp_size: usize) -> Self {
        Self { cp_size, ..self }
    }

    /// Sets the pipeline parallel size.
    pub const fn pp(self, pp_size: usize) -> Self {
        Self { pp_size, ..self }
    }

    /// Sets the tensor parallel size inside an expert.
    pub const fn moe_tp(self, moe_tp_size: usize) -> Self {
        Self { moe_tp_size: Some(moe_tp_size), ..self }
    }

    /// Sets the number of ranks of a cluster of experts.
    pub const fn moe_cluster(self, moe_cluster_size: usize) -> Self {
        Self { moe_cluster_size: Some(moe_cluster_size), ..self }
    }

    /// Sets the expert parallel size.
    pub const fn moe_ep(self, moe_ep_size: usize) -> Self {
        Self { moe_ep_size: Some(moe_ep_size), ..self }
    }

    /// Sets the tensor parallel size of attention.
    pub const fn attn_tp(self, attn_tp_size: usize) -> Self {
        Self { attn_tp_size: Some(attn_tp_size), ..self }
    }

    /// Sets the context parallel size of attention.
    pub const fn attn_cp(self, attn_cp_size: usize) -> Self {
        Self { attn_cp_size: Some(attn_cp_size), ..self }
    }

    /// Leaves the layout to a planner; tensor, context and pipeline sizes must then be 1.
    pub const fn auto_parallel(self, auto_parallel: bool) -> Self {
        Self { auto_parallel, ..self }
    }

    /// Notes that attention is data parallel. No check depends on it.
    pub const fn enable_attention_dp(self, enable_attention_dp: bool) -> Self {
        Self { enable_attention_dp, ..self }
    }

    /// Fills in what was left open, and checks that the sizes fit together.
    ///
    /// # Errors
    ///
    /// Any [`TopologyError`] but those of a [`Mesh`](crate::Mesh): a size is 0, the sizes do not multiply to
    /// the world size (or to the tensor size, for experts), the rank is not in the world, or a combination is
    /// not supported.
    pub fn build(self) -> Result<Mapping, TopologyError> {
        self.check_world()?;
        let (moe_tp_size, moe_cluster_size, moe_ep_size) = self.expert_sizes()?;
        let (attn_tp_size, attn_cp_size) = self.attention_sizes()?;
        let mapping = Mapping {
            world_size: self.world_size,
            rank: 0,
            gpus_per_node: self.gpus_per_node,
            cp_size: self.cp_size,
            tp_size: self.tp_size,
            pp_size: self.pp_size,
            moe_tp_size,
            moe_cluster_size,
            moe_ep_size,
            attn_tp_size,
            attn_cp_size,
            auto_parallel: self.auto_parallel,
            enable_attention_dp: self.enable_attention_dp,
        };
        mapping.with_rank(self.rank)
    }

    fn check_world(&self) -> Result<(), TopologyError> {
        let &Self { tp_size, pp_size, cp_size, .. } = self;
        let parallel = [("tp_size", tp_size), ("pp_size", pp_size), ("cp_size", cp_size)];
        let others = [("world_size", self.world_size), ("gpus_per_node", self.gpus_per_node)];
        others.into_iter().chain(parallel).try_for_each(|(name, size)| nonzero(name, size))?;
        if !self.auto_parallel {
            return same(Product::of(parallel), Product::of([("world_size", self.world_size)]));
        }
        match (tp_size, pp_size, cp_size) {
            (1, 1, 1) => Ok(()),
            _ => Err(TopologyError::AutoParallel { tp_size, pp_size, cp_size }),
        }
    }

    /// The sizes inside an expert, of a cluster and over experts.
    fn expert_sizes(&self) -> Result<(usize, usize, usize), TopologyError> {
        let cp_size = self.cp_size;
        let (moe_tp_size, moe_ep_size) = split_beside(
            Product::of([("tp_size", self.tp_size)]),
            ("moe_tp_size", self.moe_tp_size),
            ("moe_ep_size", self.moe_ep_size),
            self.moe_cluster_size.map(|size| ("moe_cluster_size", size)),
        )?;
        let moe_cluster_size = self.moe_cluster_size.unwrap_or(1);
        if moe_ep_size > 1 && cp_size > 1 {
            return Err(TopologyError::ExpertsWithContext { moe_ep_size, cp_size });
        }
        if moe_ep_size > 1 && moe_cluster_size > 1 {
            return Err(TopologyError::ExpertsWithClusters { moe_ep_size, moe_cluster_size });
        }
        Ok((moe_tp_size, moe_cluster_size, moe_ep_size))
    }

    fn attention_sizes(&self) -> Result<(usize, usize), TopologyError> {
        let (attn_tp_size, attn_cp_size) = split(
            Product::of([("tp_size", self.tp_size), ("cp_size", self.cp_size)]),
            ("attn_tp_size", self.attn_tp_size),
            ("attn_cp_size", self.attn_cp_size),
        )?;
        match attn_cp_size {
            1 => Ok((attn_tp_size, attn_cp_size)),
            _ => Err(TopologyError::AttentionContextParallel { attn_tp_size, attn_cp_size }),
        }
    }
}

impl TryFrom<MappingBuilder> for Mapping {
    type Error = TopologyError;

    fn try_from(builder: MappingBuilder) -> Result<Self, TopologyError> {
        builder.build()
    }
}
