//! The groups of a mixed layout, and its operations.

use super::{AXES, MixedLayout};
use crate::mesh::Partition;

/// A kind of group of a [`MixedLayout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MixedGroup {
    /// All ranks of a node.
    Local,
    /// Ranks at the same place of every node (a rail).
    Inter,
    /// Ranks that share tensors.
    Tp,
    /// Ranks that share nothing but the work.
    Dp,
    /// Ranks of a node that share tensors.
    LocalTp,
    /// Data parallel ranks of a node.
    LocalDp,
    /// Ranks at the same place of the nodes that share tensors.
    InterTp,
    /// Ranks at the same place of the data parallel nodes.
    InterDp,
}

impl MixedGroup {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Local,
        Self::Inter,
        Self::Tp,
        Self::Dp,
        Self::LocalTp,
        Self::LocalDp,
        Self::InterTp,
        Self::InterDp,
    ];

    /// The axes of the mesh along which such groups run.
    const fn axes(self) -> [bool; AXES] {
        match self {
            Self::Local => [true, true, false, false],
            Self::Inter => [false, false, true, true],
            Self::Tp => [true, false, true, false],
            Self::Dp => [false, true, false, true],
            Self::LocalTp => [true, false, false, false],
            Self::LocalDp => [false, true, false, false],
            Self::InterTp => [false, false, true, false],
            Self::InterDp => [false, false, false, true],
        }
    }
}

/// A collective operation on a [`MixedLayout`]; the numbers are those of `MixedCommOp` in FlashInfer 0.6.18
/// (comm/mixed_comm.py).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MixedOp {
    /// Sum over the tensor ranks.
    AllReduce = 0,
    /// Concatenation over the data ranks.
    AllGather = 1,
    /// Sum over the data ranks, of which each keeps its own part.
    ReduceScatter = 2,
    /// Sum over the tensor ranks, then concatenation over the data ranks.
    AllReduceAllGather = 3,
    /// Sum over the data ranks, of which each keeps its own part, then sum over the tensor ranks.
    ReduceScatterAllReduce = 4,
}

impl MixedOp {
    /// All operations, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduceAllGather,
        Self::ReduceScatterAllReduce,
    ];
}

/// Groups.
impl MixedLayout {
    /// How the world falls into groups of one kind.
    pub const fn partition(&self, kind: MixedGroup) -> Partition<AXES> {
        self.mesh.partition(kind.axes())
    }

    /// All groups of one kind, as lists of world ranks.
    pub fn groups(&self, kind: MixedGroup) -> Vec<Vec<usize>> {
        self.partition(kind).to_vecs()
    }

    /// The world ranks of this rank's own group, ascending.
    pub fn group(&self, kind: MixedGroup) -> Vec<usize> {
        self.partition(kind).group_of(self.world_rank).collect()
    }

    /// The ranks of this node.
    pub fn local_group(&self) -> Vec<usize> {
        self.group(MixedGroup::Local)
    }

    /// The ranks at this one's place of every node.
    pub fn inter_group(&self) -> Vec<usize> {
        self.group(MixedGroup::Inter)
    }

    /// The ranks that share tensors with this one.
    pub fn tp_group(&self) -> Vec<usize> {
        self.group(MixedGroup::Tp)
    }

    /// The data parallel ranks of this one.
    pub fn dp_group(&self) -> Vec<usize> {
        self.group(MixedGroup::Dp)
    }

    /// The kinds for which a group of its own is worth creating, in the order in which all ranks create them.
    ///
    /// Any other kind is the world, a single rank, or not communicated in: a node is a group of its own only
    /// among several nodes, and tensor and data groups only if there are both.
    pub fn process_groups(&self) -> Vec<MixedGroup> {
        let local = self.use_inter().then_some(MixedGroup::Local);
        let mixed = if self.use_mixed() { &[MixedGroup::Tp, MixedGroup::Dp][..] } else { &[] };
        local.into_iter().chain(mixed.iter().copied()).collect()
    }

    /// This node's group, if it is one of the [`process_groups`](Self::process_groups).
    pub fn local_comm_group(&self) -> Option<Vec<usize>> {
        self.use_inter().then(|| self.local_group())
    }

    /// This rank's tensor parallel group, if it is one of the [`process_groups`](Self::process_groups).
    pub fn tp_comm_group(&self) -> Option<Vec<usize>> {
        self.use_mixed().then(|| self.tp_group())
    }

    /// This rank's data parallel group, if it is one of the [`process_groups`](Self::process_groups).
    pub fn dp_comm_group(&self) -> Option<Vec<usize>> {
        self.use_mixed().then(|| self.dp_group())
    }
}

/// Operations.
impl MixedLayout {
    /// The operations of this layout.
    ///
    /// Without data parallelism there is nothing to gather, without tensor parallelism nothing to sum; with
    /// both, a sum is always fused with a gather or a scatter. A world of one rank has no operation at all.
    pub fn valid_ops(&self) -> &'static [MixedOp] {
        match (self.use_tp(), self.use_dp()) {
            (true, true) => &[MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce],
            (true, false) => &[MixedOp::AllReduce],
            (false, true) => &[MixedOp::AllGather, MixedOp::ReduceScatter],
            (false, false) => &[],
        }
    }
}
