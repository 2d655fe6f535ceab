//! The errors of layouts.

use std::fmt;

use thiserror::Error;

/// Named sizes multiplied together, so that an error can show its arithmetic.
///
/// Prints `tp_size 4 × cp_size 2 = 8`, or `world_size is 8` for a single size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product(Vec<(&'static str, usize)>);

impl Product {
    /// The product of these sizes, each with its name.
    pub(crate) fn of(factors: impl Into<Vec<(&'static str, usize)>>) -> Self {
        Self(factors.into())
    }

    /// This product with one more factor on the left.
    pub(crate) fn and(mut self, name: &'static str, size: usize) -> Self {
        self.0.insert(0, (name, size));
        self
    }

    /// The names and sizes, in the order in which they are printed.
    pub fn factors(&self) -> &[(&'static str, usize)] {
        &self.0
    }

    /// The product of the sizes. It saturates far above any world size, so that a comparison with one stays
    /// right.
    pub fn value(&self) -> u128 {
        self.0.iter().fold(1, |product, &(_, size)| product.saturating_mul(size as u128))
    }
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [(name, size)] = self.0[..] {
            return write!(f, "{name} is {size}");
        }
        for (i, (name, size)) in self.0.iter().enumerate() {
            write!(f, "{}{name} {size}", if i == 0 { "" } else { " × " })?;
        }
        write!(f, " = {}", self.value())
    }
}

/// Why a mesh, a [`Mapping`](crate::Mapping) or a [`MixedLayout`](crate::MixedLayout) cannot exist, or cannot
/// answer a question.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A size is zero.
    #[error("{name} must be at least 1, but it is 0")]
    ZeroSize {
        /// The size's name, such as `tp_size`.
        name: &'static str,
    },

    /// Two ways of counting the same ranks differ.
    #[error("{found}, but {expected}")]
    Mismatch {
        /// The sizes that should multiply to `expected`.
        found: Product,
        /// The product that they must have.
        expected: Product,
    },

    /// A size that was left open cannot be filled in, because the rest does not divide evenly.
    #[error("no even split: {whole}, but {divisor}")]
    Indivisible {
        /// The number that is divided.
        whole: Product,
        /// The divisor.
        divisor: Product,
    },

    /// The rank is not in the world.
    #[error("rank {rank} is out of range: world_size is {world_size}")]
    RankOutOfRange {
        /// The rank asked for.
        rank: usize,
        /// Ranks run from 0 to one below this.
        world_size: usize,
    },

    /// A rank that was given contradicts the one that follows from the world rank.
    #[error("{name} is {given}, but world_rank {world_rank} with local_size {local_size} makes it {derived}")]
    RankMismatch {
        /// `local_rank` or `inter_rank`.
        name: &'static str,
        /// The rank that was given.
        given: usize,
        /// The rank that follows.
        derived: usize,
        /// The world rank it follows from.
        world_rank: usize,
        /// The number of ranks of one node.
        local_size: usize,
    },

    /// Attention cannot be context parallel yet.
    #[error("attn_cp_size must be 1, but it is {attn_cp_size} (attn_tp_size is {attn_tp_size})")]
    AttentionContextParallel {
        /// Tensor parallel size of attention.
        attn_tp_size: usize,
        /// Context parallel size of attention.
        attn_cp_size: usize,
    },

    /// Automatic parallelism chooses the sizes itself, so none may be given.
    #[error(
        "auto_parallel needs tp_size, pp_size and cp_size 1, but they are {tp_size}, {pp_size} and {cp_size}"
    )]
    AutoParallel {
        /// Tensor parallel size.
        tp_size: usize,
        /// Pipeline parallel size.
        pp_size: usize,
        /// Context parallel size.
        cp_size: usize,
    },

    /// Expert parallelism does not combine with context parallelism.
    #[error(
        "expert parallelism (moe_ep_size {moe_ep_size}) does not combine with \
         context parallelism (cp_size {cp_size})"
    )]
    ExpertsWithContext {
        /// Expert parallel size.
        moe_ep_size: usize,
        /// Context parallel size.
        cp_size: usize,
    },

    /// Expert parallelism does not combine with expert clusters.
    #[error(
        "expert parallelism (moe_ep_size {moe_ep_size}) does not combine with \
         expert clusters (moe_cluster_size {moe_cluster_size})"
    )]
    ExpertsWithClusters {
        /// Expert parallel size.
        moe_ep_size: usize,
        /// Number of ranks of a cluster.
        moe_cluster_size: usize,
    },

    /// A mesh has an axis without ranks.
    #[error("mesh axis {axis} of {sizes:?} has size 0")]
    EmptyAxis {
        /// The first such axis.
        axis: usize,
        /// The sizes, fastest axis first.
        sizes: Vec<usize>,
    },

    /// A mesh has more ranks than a machine word can count.
    #[error("a mesh of sizes {sizes:?} has more than {} ranks", usize::MAX)]
    MeshTooLarge {
        /// The sizes, fastest axis first.
        sizes: Vec<usize>,
    },
}
