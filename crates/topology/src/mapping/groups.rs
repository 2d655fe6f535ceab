//! The six kinds of groups of a mapping, by kind and by name.

use super::Mapping;
use crate::mesh::{Mesh, Partition};

/// The axes of a mapping's mesh: expert, cluster, tensor inside an expert, context, pipeline, replica.
///
/// The first three make up the tensor ranks. The last one has a size above 1 only with `auto_parallel`, where
/// all other sizes are 1 and so each rank is alone in its groups.
const AXES: usize = 6;

/// The kind of parallelism of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// The tensors of a layer: `tp_size` neighbouring ranks.
    Tp,
    /// A sequence: `cp_size` ranks, `tp_size` apart.
    Cp,
    /// The layers: `pp_size` ranks, `tp_size * cp_size` apart.
    Pp,
    /// The tensors of an expert: `moe_tp_size` ranks, `moe_cluster_size * moe_ep_size` apart.
    MoeTp,
    /// A part of every expert: `moe_cluster_size * moe_ep_size` neighbouring ranks. Without clusters these
    /// are the expert groups.
    MoeCluster,
    /// The experts: `moe_ep_size` neighbouring ranks.
    MoeEp,
}

impl GroupKind {
    /// All kinds.
    pub const ALL: [Self; 6] = [Self::Tp, Self::Cp, Self::Pp, Self::MoeTp, Self::MoeCluster, Self::MoeEp];

    /// The axes of the mesh along which such groups run.
    const fn axes(self) -> [bool; AXES] {
        match self {
            Self::Tp => [true, true, true, false, false, false],
            Self::Cp => [false, false, false, true, false, false],
            Self::Pp => [false, false, false, false, true, false],
            Self::MoeTp => [false, false, true, false, false, false],
            Self::MoeCluster => [true, true, false, false, false, false],
            Self::MoeEp => [true, false, false, false, false, false],
        }
    }
}

/// Groups by kind.
impl Mapping {
    /// How the world falls into groups of one kind.
    pub fn partition(&self, kind: GroupKind) -> Partition<AXES> {
        self.mesh().partition(kind.axes())
    }

    /// All groups of one kind, as lists of ranks.
    pub fn groups(&self, kind: GroupKind) -> Vec<Vec<usize>> {
        self.partition(kind).to_vecs()
    }

    /// The ranks of this rank's own group, ascending.
    pub fn group(&self, kind: GroupKind) -> Vec<usize> {
        self.partition(kind).group_of(self.rank).collect()
    }

    /// The builder has checked that the sizes are at least 1 and multiply to the world size.
    fn mesh(&self) -> Mesh<AXES> {
        let replicas = self.world_size / (self.tp_size * self.cp_size * self.pp_size);
        Mesh::trusted([
            self.moe_ep_size,
            self.moe_cluster_size,
            self.moe_tp_size,
            self.cp_size,
            self.pp_size,
            replicas,
        ])
    }
}

/// Tensor parallelism.
impl Mapping {
    /// Whether weights are spread over several ranks.
    pub const fn has_tp(&self) -> bool {
        self.tp_size > 1
    }

    /// This rank's place in its tensor parallel group.
    pub fn tp_rank(&self) -> usize {
        self.partition(GroupKind::Tp).position_of(self.rank)
    }

    /// This rank's tensor parallel group.
    pub fn tp_group(&self) -> Vec<usize> {
        self.group(GroupKind::Tp)
    }

    /// All tensor parallel groups.
    pub fn tp_groups(&self) -> Vec<Vec<usize>> {
        self.groups(GroupKind::Tp)
    }
}

/// Context parallelism.
impl Mapping {
    /// Whether a sequence is spread over several ranks.
    pub const fn has_cp(&self) -> bool {
        self.cp_size > 1
    }

    /// This rank's place in its context parallel group.
    pub fn cp_rank(&self) -> usize {
        self.partition(GroupKind::Cp).position_of(self.rank)
    }

    /// This rank's context parallel group.
    pub fn cp_group(&self) -> Vec<usize> {
        self.group(GroupKind::Cp)
    }

    /// All context parallel groups.
    pub fn cp_groups(&self) -> Vec<Vec<usize>> {
        self.groups(GroupKind::Cp)
    }
}

/// Pipeline parallelism.
impl Mapping {
    /// Whether there are several pipeline stages.
    pub const fn has_pp(&self) -> bool {
        self.pp_size > 1
    }

    /// This rank's pipeline stage.
    pub fn pp_rank(&self) -> usize {
        self.partition(GroupKind::Pp).position_of(self.rank)
    }

    /// The ranks with this one's place in each pipeline stage.
    pub fn pp_group(&self) -> Vec<usize> {
        self.group(GroupKind::Pp)
    }

    /// All pipeline parallel groups.
    pub fn pp_groups(&self) -> Vec<Vec<usize>> {
        self.groups(GroupKind::Pp)
    }
}

/// Mixture of experts.
impl Mapping {
    /// Whether one expert is spread over several ranks.
    pub const fn has_moe_tp(&self) -> bool {
        self.moe_tp_size > 1
    }

    /// Whether there are clusters of experts.
    pub const fn has_moe_cluster(&self) -> bool {
        self.moe_cluster_size > 1
    }

    /// Whether experts are spread over several ranks.
    pub const fn has_moe_ep(&self) -> bool {
        self.moe_ep_size > 1
    }

    /// The part of its experts that this rank holds.
    pub fn moe_tp_rank(&self) -> usize {
        self.partition(GroupKind::MoeTp).position_of(self.rank)
    }

    /// This rank's place in its cluster. It is 0 without clusters, even where
    /// [`moe_cluster_group`](Self::moe_cluster_group) holds several expert ranks.
    pub fn moe_cluster_rank(&self) -> usize {
        let [_, cluster, ..] = self.mesh().coordinates(self.rank);
        cluster
    }

    /// The experts that this rank holds.
    pub fn moe_ep_rank(&self) -> usize {
        self.partition(GroupKind::MoeEp).position_of(self.rank)
    }

    /// The ranks that together hold this rank's experts.
    pub fn moe_tp_group(&self) -> Vec<usize> {
        self.group(GroupKind::MoeTp)
    }

    /// The ranks of this rank's cluster.
    pub fn moe_cluster_group(&self) -> Vec<usize> {
        self.group(GroupKind::MoeCluster)
    }

    /// The ranks that hold the same part of other experts.
    pub fn moe_ep_group(&self) -> Vec<usize> {
        self.group(GroupKind::MoeEp)
    }

    /// All groups that share an expert.
    pub fn moe_tp_groups(&self) -> Vec<Vec<usize>> {
        self.groups(GroupKind::MoeTp)
    }

    /// All clusters.
    pub fn moe_cluster_groups(&self) -> Vec<Vec<usize>> {
        self.groups(GroupKind::MoeCluster)
    }

    /// All groups over which experts are spread.
    pub fn moe_ep_groups(&self) -> Vec<Vec<usize>> {
        self.groups(GroupKind::MoeEp)
    }
}
