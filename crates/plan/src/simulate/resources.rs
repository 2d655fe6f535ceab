//! The links of a cluster, and those that a flow takes.

use super::cluster::Cluster;
use super::network::{Network, ResourceId};
use super::result::LinkUse;
use crate::ids::Rank;

/// For each GPU, in this order.
const OUT: u32 = 0;
const IN: u32 = 1;
const DUPLEX: u32 = 2;
const SM: u32 = 3;
const MEMORY: u32 = 4;
const PER_GPU: u32 = 5;

/// The links of a cluster's first GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    ranks: u32,
    gpus_per_node: u32,
    nics_per_node: u32,
}

impl Links {
    pub fn new(cluster: &Cluster, ranks: usize) -> Self {
        let Cluster { gpus_per_node, nics_per_node, .. } = *cluster;
        Links { ranks: ranks as u32, gpus_per_node, nics_per_node }
    }

    pub fn network(&self, cluster: &Cluster) -> Network {
        let link = &cluster.link;
        let gpu =
            [link.direction_gb_s, link.direction_gb_s, link.duplex_gb_s, link.sm_gb_s, cluster.memory_gb_s];
        let nic = cluster.nic.as_ref().map_or(0.0, |nic| nic.gb_s);
        let nics = if cluster.nic.is_some() { self.nodes() * self.nics_per_node } else { 0 };
        let gpus = (0..self.ranks).flat_map(|_| gpu);
        Network::new(gpus.chain((0..2 * nics).map(|_| nic)).collect())
    }

    pub fn same_node(&self, a: Rank, b: Rank) -> bool {
        a.0 / self.gpus_per_node == b.0 / self.gpus_per_node
    }

    pub fn memory(&self, rank: Rank) -> [ResourceId; 1] {
        [gpu(rank, MEMORY)]
    }

    /// Stores of SMs.
    pub fn store(&self, from: Rank, to: Rank) -> [ResourceId; 5] {
        let [a, b, c, d] = self.copy(from, to);
        [a, b, c, d, gpu(from, SM)]
    }

    /// Loads of SMs: the bytes go from the peer to the loading GPU.
    pub fn load(&self, by: Rank, of: Rank) -> [ResourceId; 5] {
        let [a, b, c, d] = self.copy(of, by);
        [a, b, c, d, gpu(by, SM)]
    }

    /// A copy engine's transfer.
    pub fn copy(&self, from: Rank, to: Rank) -> [ResourceId; 4] {
        [gpu(from, OUT), gpu(to, IN), gpu(from, DUPLEX), gpu(to, DUPLEX)]
    }

    /// Through the network cards.
    pub fn nic(&self, from: Rank, to: Rank) -> [ResourceId; 2] {
        [self.card(from), self.card(to) + 1]
    }

    /// What the switch reduces for one member, or replicates for it: each member's bytes once, and its own.
    pub fn switch(&self, by: Rank, members: &[Rank], reduce: bool) -> Vec<ResourceId> {
        let (own, theirs) = if reduce { (IN, OUT) } else { (OUT, IN) };
        let both = [gpu(by, own), gpu(by, DUPLEX), gpu(by, SM)];
        both.into_iter().chain(members.iter().flat_map(|&of| [gpu(of, theirs), gpu(of, DUPLEX)])).collect()
    }

    /// How much each link carried, in the order: GPUs, then network cards.
    pub fn uses(&self, network: &Network, time_ns: f64) -> Vec<LinkUse> {
        let use_of = |name: String, resource| {
            let (bytes, capacity) = (network.carried(resource), network.capacity(resource));
            let busy = if time_ns > 0.0 { bytes / (capacity * time_ns) } else { 0.0 };
            LinkUse { name, bytes: bytes as u64, capacity_gb_s: capacity, busy }
        };
        let kinds = [(OUT, "link out"), (IN, "link in"), (MEMORY, "memory")];
        let gpus = (0..self.ranks).flat_map(|rank| {
            kinds.map(|(kind, what)| use_of(format!("rank {rank} {what}"), gpu(Rank(rank), kind)))
        });
        let cards =
            if network.len() as u32 > self.ranks * PER_GPU { self.nodes() * self.nics_per_node } else { 0 };
        let cards = (0..cards).flat_map(|card| {
            let (node, at) = (card / self.nics_per_node, card % self.nics_per_node);
            let first = self.ranks * PER_GPU + 2 * card;
            [(first, "out"), (first + 1, "in")]
                .map(|(resource, way)| use_of(format!("node {node} card {at} {way}"), resource))
        });
        gpus.chain(cards).collect()
    }

    fn nodes(&self) -> u32 {
        self.ranks.div_ceil(self.gpus_per_node)
    }

    /// A rank's card, outgoing; the incoming side stands behind it.
    fn card(&self, rank: Rank) -> ResourceId {
        let (node, gpu) = (rank.0 / self.gpus_per_node, rank.0 % self.gpus_per_node);
        let at = u64::from(gpu) * u64::from(self.nics_per_node) / u64::from(self.gpus_per_node);
        self.ranks * PER_GPU + 2 * (node * self.nics_per_node + at as u32)
    }
}

fn gpu(rank: Rank, kind: u32) -> ResourceId {
    rank.0 * PER_GPU + kind
}
