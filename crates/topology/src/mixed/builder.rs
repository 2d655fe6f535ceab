//! Defaults and checks of a mixed layout.

use serde::{Deserialize, Serialize};

use super::MixedLayout;
use crate::error::{Product, TopologyError};
use crate::mesh::Mesh;
use crate::split::{nonzero, split};

/// A mixed layout in the making; start one with [`MixedLayout::builder`].
///
/// Everything but the world is optional. Of a pair of sizes that multiply to a third, one that is left open
/// follows from the other; if both are, the first takes everything:
///
/// | pair | multiplies to |
/// | --- | --- |
/// | local, inter | world |
/// | local tensor, local data | local |
/// | inter tensor, inter data | inter |
///
/// Ranks inside a node and of nodes follow from the world rank; where given, they are checked.
///
/// It is also what a [`MixedLayout`] is serialised as: a map of all ten values, by the names of its methods.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use = "a builder does nothing until `build`"]
pub struct MixedLayoutBuilder {
    world_rank: usize,
    world_size: usize,
    #[serde(default)]
    local_rank: Option<usize>,
    #[serde(default)]
    local_size: Option<usize>,
    #[serde(default)]
    inter_rank: Option<usize>,
    #[serde(default)]
    inter_size: Option<usize>,
    #[serde(default)]
    local_tp_size: Option<usize>,
    #[serde(default)]
    local_dp_size: Option<usize>,
    #[serde(default)]
    inter_tp_size: Option<usize>,
    #[serde(default)]
    inter_dp_size: Option<usize>,
}

impl MixedLayoutBuilder {
    pub(super) const fn new(world_size: usize, world_rank: usize) -> Self {
        Self {
            world_rank,
            world_size,
            local_rank: None,
            local_size: None,
            inter_rank: None,
            inter_size: None,
            local_tp_size: None,
            local_dp_size: None,
            inter_tp_size: None,
            inter_dp_size: None,
        }
    }

    /// Sets the number of ranks of one node.
    pub const fn local_size(self, local_size: usize) -> Self {
        Self { local_size: Some(local_size), ..self }
    }

    /// Sets the number of nodes.
    pub const fn inter_size(self, inter_size: usize) -> Self {
        Self { inter_size: Some(inter_size), ..self }
    }

    /// States this rank's place on its node, to be checked.
    pub const fn local_rank(self, local_rank: usize) -> Self {
        Self { local_rank: Some(local_rank), ..self }
    }

    /// States this rank's node, to be checked.
    pub const fn inter_rank(self, inter_rank: usize) -> Self {
        Self { inter_rank: Some(inter_rank), ..self }
    }

    /// Sets the tensor parallel size inside a node.
    pub const fn local_tp(self, local_tp_size: usize) -> Self {
        Self { local_tp_size: Some(local_tp_size), ..self }
    }

    /// Sets the data parallel size inside a node.
    pub const fn local_dp(self, local_dp_size: usize) -> Self {
        Self { local_dp_size: Some(local_dp_size), ..self }
    }

    /// Sets the tensor parallel size between nodes.
    pub const fn inter_tp(self, inter_tp_size: usize) -> Self {
        Self { inter_tp_size: Some(inter_tp_size), ..self }
    }

    /// Sets the data parallel size between nodes.
    pub const fn inter_dp(self, inter_dp_size: usize) -> Self {
        Self { inter_dp_size: Some(inter_dp_size), ..self }
    }

    /// Fills in what was left open, and checks that sizes and ranks fit together.
    ///
    /// # Errors
    ///
    /// * [`TopologyError::ZeroSize`] if a size is 0
    /// * [`TopologyError::Mismatch`] or [`TopologyError::Indivisible`] if a pair does not multiply to its
    ///   whole
    /// * [`TopologyError::RankOutOfRange`] if the world rank is not in the world
    /// * [`TopologyError::RankMismatch`] if another rank that was given does not follow from it
    pub fn build(self) -> Result<MixedLayout, TopologyError> {
        let &Self { world_rank, world_size, .. } = &self;
        nonzero("world_size", world_size)?;
        let (local_size, inter_size) = split(
            Product::of([("world_size", world_size)]),
            ("local_size", self.local_size),
            ("inter_size", self.inter_size),
        )?;
        let (local_tp_size, local_dp_size) = split(
            Product::of([("local_size", local_size)]),
            ("local_tp_size", self.local_tp_size),
            ("local_dp_size", self.local_dp_size),
        )?;
        let (inter_tp_size, inter_dp_size) = split(
            Product::of([("inter_size", inter_size)]),
            ("inter_tp_size", self.inter_tp_size),
            ("inter_dp_size", self.inter_dp_size),
        )?;
        self.check_ranks(local_size)?;
        let mesh = Mesh::trusted([local_tp_size, local_dp_size, inter_tp_size, inter_dp_size]);
        Ok(MixedLayout { world_rank, mesh })
    }

    fn check_ranks(&self, local_size: usize) -> Result<(), TopologyError> {
        let &Self { world_rank, world_size, .. } = self;
        if world_rank >= world_size {
            return Err(TopologyError::RankOutOfRange { rank: world_rank, world_size });
        }
        let ranks = [
            ("local_rank", self.local_rank, world_rank % local_size),
            ("inter_rank", self.inter_rank, world_rank / local_size),
        ];
        for (name, given, derived) in ranks {
            if let Some(given) = given.filter(|&given| given != derived) {
                return Err(TopologyError::RankMismatch { name, given, derived, world_rank, local_size });
            }
        }
        Ok(())
    }
}

impl TryFrom<MixedLayoutBuilder> for MixedLayout {
    type Error = TopologyError;

    fn try_from(builder: MixedLayoutBuilder) -> Result<Self, TopologyError> {
        builder.build()
    }
}

impl From<MixedLayout> for MixedLayoutBuilder {
    fn from(layout: MixedLayout) -> Self {
        Self::new(layout.world_size(), layout.world_rank())
            .local_rank(layout.local_rank())
            .local_size(layout.local_size())
            .inter_rank(layout.inter_rank())
            .inter_size(layout.inter_size())
            .local_tp(layout.local_tp_size())
            .local_dp(layout.local_dp_size())
            .inter_tp(layout.inter_tp_size())
            .inter_dp(layout.inter_dp_size())
    }
}
